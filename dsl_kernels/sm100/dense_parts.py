"""What the roles of SM100's 16-bit decode share (dense_ws.py): sizes, barriers, tensor memory.

Here, too, what umma.py lacks for O in tensor memory: stores of registers.  Section numbers are
those of PTX ISA 9.1.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32
from cutlass.experimental import primitives as prim

from .. import compat
from ..common.barriers import Ring
from ..common.latent16 import LatentValues, latent_format
from ..common.paged_tma import Early, PagedTma
from ..common.q_tiles import QTiles
from ..common.smem import array
from ..common.types import ROW_MAJOR
from ..common.work_list import Call, WorkList
from ..dims import HEAD_DIM_QK
from ..dims import KV_LORA_RANK as D
from ..dims import TOKEN_TILE as TILE
from . import umma

if TYPE_CHECKING:
    from ..smxx.dense_entry import Gmem
    from ..spec import VariantSpec

WARPGROUP = 128
SOFTMAX_WARPS = CORRECTION_WARPS = 4
STAGES, Q_STAGES, S_STAGES = 2, 1, 2
HALVES = 2  # of the channels of V, one instruction each
HALF = D // HALVES
CHUNKS = 9  # of a KV tile, 64 channels each: Q.K begins on the first
EARLY = (0, 1, 2, 3)  # of them: the first half of V, free before the second is
BLOCK = TILE * umma.LINE  # bytes of a chunk, and of P of a tile
STAGE_BYTES = CHUNKS * BLOCK
TOKEN_BYTES = 2 * HEAD_DIM_QK
STEP = 16  # channels, or tokens, of an instruction
Q_IN_TMEM = 384  # channels of Q: what tensor memory has left beside O and S

K_READERS = {"P.V commit": 1}  # P being there means that Q.K and softmax are done with the tile
Q_READERS = {"Q.K commit": 1}


class Barrier(IntEnum):
    """Named barriers; ``SAME_ROWS`` and the next: of the softmax warps that share rows."""

    SAME_ROWS = 1
    CORRECTION = 3


class Columns:
    """Tensor memory: first column of each array."""

    def __init__(self, form: umma.Form):
        self.o = 0
        self.s = self.o + form.share(D)
        self.q = self.s + S_STAGES * form.share(TILE)
        self.end = self.q + Q_IN_TMEM // 2

    @property
    def allocated(self) -> int:
        """A power of two."""
        return 1 << (self.end - 1).bit_length()


class Rings(NamedTuple):
    """Barriers of the roles, beside those of Q and of the KV ring; ``p``, ``corrected`` and ``o``
    have the KV ring's stages, whose release frees theirs."""

    s: Ring
    p: Ring
    corrected: Ring
    o: Ring
    inv: Ring


def rings_of(form: umma.Form) -> Rings:
    """The first lane group's softmax warps finish the rows."""
    finishers = SOFTMAX_WARPS // form.groups
    return Rings(
        Ring("s", S_STAGES, {"Q.K commit": 1}, {"softmax": SOFTMAX_WARPS}),
        Ring("p", STAGES, {"softmax": SOFTMAX_WARPS}),
        Ring("corrected", STAGES, {"correction": CORRECTION_WARPS}),
        Ring("o", STAGES, {"P.V commit": 1}),
        Ring("inv", 1, {"softmax": finishers}, {"correction": CORRECTION_WARPS}),
    )


class Layouts(NamedTuple):
    """Shared-memory layouts of Q and of the KV ring, one plane each."""

    q: tuple
    k: tuple


class Cta(NamedTuple):
    """What every role of a CTA works with."""

    st: Any
    q_pipe: Any
    k_pipe: Any
    gmem: Gmem
    call: Call


class Parts:
    """What the roles are composed of.

    Attributes:
        dtype: of Q, K, V and P.
        form: of the MMAs; ``columns`` of tensor memory; ``rings``.
        work, q_tiles, loads, values: work list, Q, KV tiles, V in the ring.
    """

    def __init__(self, spec: VariantSpec):
        self.dtype, self.form = compat.dtype(spec.dtype), umma.Form(spec.row_tile)
        self.columns, self.rings = Columns(self.form), rings_of(self.form)
        self.work = WorkList(spec.page_size, TILE)
        latent = latent_format(self.dtype)
        self.q_tiles = QTiles(
            latent, self.work, rows=self.form.rows, stages=Q_STAGES, readers=Q_READERS
        )
        self.loads = PagedTma(
            latent, self.work, rows=self.form.rows, stages=STAGES, readers=K_READERS,
            q_stages=Q_STAGES, chunks=CHUNKS, early=Early(EARLY, 1),
        )  # fmt: skip
        self.values = LatentValues(self.dtype, TILE)

    def layouts(self) -> Layouts:
        """K-major tiles in column blocks of 128 bytes, 128-byte swizzle."""
        make, width = helpers.make_smem_layout_b, HEAD_DIM_QK
        return Layouts(
            (make(ROW_MAJOR, (self.form.rows, self.form.rows, width), self.dtype, Q_STAGES),),
            (make(ROW_MAJOR, (TILE, TILE, width), self.dtype, STAGES),),
        )

    @property
    def smem_bytes(self) -> int:
        """Of the KV ring and Q."""
        return (STAGES * TILE + Q_STAGES * self.form.rows) * TOKEN_BYTES

    def tile_fields(self, layouts: Layouts) -> dict:
        """KV ring and Q, at multiples of the 1024-byte swizzle period."""
        return dict(
            kc=array(self.dtype, cute.cosize(layouts.k[0]), 1024),
            qc=array(self.dtype, cute.cosize(layouts.q[0]), 1024),
        )

    @cute.jit
    def items(self, cta: Cta):
        """(first, end) of the CTA's items; every role looks for itself: where all shared one value,
        it would live, and be spilled, through the role that needs most registers."""
        _, part, _ = cute.arch.block_idx()
        return self.work.items_of(cta.gmem.work, part)

    def tmem(self, cta: Cta):
        """The address of the CTA's tensor memory; every role looks for itself."""
        return umma.base_of(cta.st.tmem.data_ptr())


def p_address(st):
    """Byte address of P of the first stage: where the tile's RoPE columns were, which Q.K alone
    reads."""
    return umma.address_of(st.kc.data_ptr()) + (CHUNKS - 1) * BLOCK


@compat.dsl_user_op
def store(address, values, *, loc=None, ip=None) -> None:
    """fp32 ``values`` to as many columns from ``address`` on of this thread's lane (9.7.16.8).

    It comes behind this warp's earlier loads of the columns, and before its later ones.
    """
    vector = cutlass.Vector.from_elements(tuple(values), Float32)
    prim.tcgen05_st(
        "32x32b", prim.make_tmem_ptr(address, Float32, loc=loc, ip=ip), vector, loc=loc, ip=ip
    )


@compat.dsl_user_op
def wait_stores(*, loc=None, ip=None) -> None:
    """All stores of this warp are complete."""
    prim.tcgen05_wait(prim.Tcgen05Wait.STORE, loc=loc, ip=ip)

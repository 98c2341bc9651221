"""Sizes, barriers, tensor memory and products that the roles of SM100's 16-bit decode share.

Two pipelines are made of them, of 64 rows (dense_ws.py) and of 128 (dense_pair.py): a ``Parts``
each says where P and V lie and who has read them.  Stores of registers to O in tensor memory, which
umma.py lacks, are here, too.  Section numbers are those of PTX ISA 9.1.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.experimental import primitives as prim

from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.types import BF16
from ...formats.dims import HEAD_DIM_QK
from ...formats.dims import KV_LORA_RANK as D
from ...load.work_list import Call, WorkList
from .. import umma

if TYPE_CHECKING:
    from ...entry.entries import DenseGmem

WARPGROUP = 128
SOFTMAX_WARPS = CORRECTION_WARPS = 4
S_STAGES = 2
HALVES = 2  # of the channels of V, one instruction each
HALF = D // HALVES
CHUNKS = 9  # of a KV tile, 64 channels each: Q.K begins on the first
STEP = 16  # channels, or tokens, of an instruction
CHUNK_STEPS = HEAD_DIM_QK // STEP // CHUNKS
RUN = CHUNK_STEPS * STEP  # channels of a chunk, and tokens of V that are multiplied in one go
KIND = BF16  # of the instructions; their descriptors say which 16-bit type it is


class Barrier(IntEnum):
    """Named barriers; ``SAME_ROWS`` and the next: of the softmax warps that share rows."""

    SAME_ROWS = 1
    CORRECTION = 3


class Columns:
    """Tensor memory: first column of each array; ``q``: that many channels of Q."""

    def __init__(self, form: umma.Form, tile: int, q: int):
        self.o = 0
        self.s = self.o + form.share(D)
        self.q = self.s + S_STAGES * form.share(tile)
        self.end = self.q + q // 2

    @property
    def allocated(self) -> int:
        """A power of two."""
        return 1 << (self.end - 1).bit_length()


class Rings(NamedTuple):
    """Barriers that the roles hand over by.

    Attributes:
        s, p: scores; P and gamma.
        corrected: O is relative to P's m_ref, V is there and clean.
        inv: 1 / row sums.
    """

    s: Any
    p: Any
    corrected: Any
    inv: Any


def inverses(form: umma.Form) -> Ring:
    """``Rings.inv``: the first lane group's softmax warps finish the rows."""
    finishers = SOFTMAX_WARPS // form.groups
    return Ring("inv", 1, {"softmax": finishers}, {"correction": CORRECTION_WARPS})


class Cta(NamedTuple):
    """State that all roles of a CTA share; ``tiles``: state that only a pipeline's own roles
    use."""

    st: Any
    gmem: DenseGmem
    call: Call
    tiles: Any


class Parts(Protocol):
    """Protocol of a pipeline's components: the members that softmax and correction use.

    Attributes:
        dtype: of Q, K, V and P.
        form: of the MMAs; its rows are a CTA's.
        tile: tokens of a block of P.
        columns: of tensor memory.
        rings: the barriers; ``p`` and ``corrected`` have ``p_stages``.
        work: the work list.
    """

    dtype: Any
    form: umma.Form
    tile: int
    columns: Columns
    rings: Rings
    work: WorkList
    p_stages: int

    def p_address(self, st: Any, stage: Any) -> Any:
        """Byte address of P of a stage: column blocks of 64 tokens, 128-byte swizzle."""

    def prepare_values(
        self, cta: Cta, state: Any, tile: Any, ragged_from: Any, seqlen: Any
    ) -> None:
        """Make V of ``tile`` ready for P.V: wait until it is there, and clear what must not meet a
        P of 0: all V from token ``seqlen`` on, and V that is not finite from token ``ragged_from``
        on.  The correction warps call this once P is full; ``state``: P's, a consumer's."""

    def wait_products(self, st: Any, state: Any) -> None:
        """Wait until P.V of the tile before ``state``'s is complete; P.V of ``state``'s follows.

        With one stage of P, a full P says so as well: the softmax warps waited before they filled
        it."""


@cute.jit
def work_tiles_of(parts: cutlass.Constexpr, cta: Cta):
    """(first, end) of the CTA's work tiles; every role looks for itself: where all shared one
    value, it would live, and be spilled, through the role that needs most registers."""
    _, part, _ = cute.arch.block_idx()
    return parts.work.work_tiles_of(cta.gmem.work, part)


def tmem_of(cta: Cta):
    """The address of the CTA's tensor memory; every role looks for itself."""
    return umma.base_of(cta.st.tmem.data_ptr())


# ------------------------------------------------------------------------------------- products


def multiply_chunk(parts: Parts, s, a, b, *, begins: bool, a_in_tmem: bool) -> None:
    """64 channels of S = Q K^T, by one thread; ``a``, ``b``: operands of the first of them.

    ``begins``: the first chunk of a tile begins a new sum.
    """
    for x in range(CHUNK_STEPS):
        step = a + x * umma.CELLS if a_in_tmem else umma.advance(a, x * umma.K_BYTES)
        parts.form.mma(
            KIND, s, step, umma.advance(b, x * umma.K_BYTES),
            parts.form.instruction(parts.dtype, parts.tile), x > 0 or not begins,
            a_in_tmem=a_in_tmem,
        )  # fmt: skip


def multiply_values(parts: Parts, o, p, v, adds) -> None:
    """64 tokens of O = O + P V, 256 channels, by one thread; ``adds``: whether O has a value."""
    for k in range(RUN // STEP):
        parts.form.mma(
            KIND, o, umma.advance(p, k * umma.K_BYTES), umma.advance(v, k * STEP * umma.LINE),
            parts.form.instruction(parts.dtype, HALF, b_transposed=True), True if k else adds,
        )  # fmt: skip


# ------------------------------------------------------------------------------ tensor memory


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

"""tcgen05 as our kernels use it: descriptors, tensor-memory addresses, issue, commit, fences.

Section numbers are those of PTX ISA 9.1.  Two forms in which a CTA's few rows take all 128 lanes
of tensor memory (9.7.16.10.5): ``.ws`` of one CTA (*Layout E* for M = 64, *G* for M = 32), and a
pair of CTAs with M = 128 (*Layout B*), 64 rows each; and one CTA with M = 128, a row a lane
(*Layout D*).  There are 128 / rows groups of lanes, each with its share of the columns of D.

    D(m, n) = lane m + rows * (n // share), column n % share    share = N / groups

m counts a CTA's own rows.  A in tensor memory stands in every group.  Of a pair each CTA holds its
rows of A and its half of N of B, both at the same places of shared memory, and one thread of CTA 0,
the *leader*, issues for both (9.7.16.5).  Instructions carry the line of the caller
(``dsl_user_op``).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.experimental import primitives as prim

from ..blocks import compat
from ..blocks.types import BF16, F8

LANES = 128  # of tensor memory
K_BYTES = 32  # of an operand's row, consumed by one instruction
CELLS = K_BYTES // 4  # columns of A in tensor memory, likewise
LINE = 128  # bytes of a row of a swizzled column block
_KIND = {F8: prim.Tcgen05MMAKind.F8F6F4, BF16: prim.Tcgen05MMAKind.F16}
_PAIR = prim.CTAGroup.CTA_2
_SWIZZLE = {
    128: prim.Tcgen05SmemSwizzle.SWIZZLE_128B,
    64: prim.Tcgen05SmemSwizzle.SWIZZLE_64B,
}
_COPY = {  # 16 bytes of each row, to every group of lanes
    64: (prim.Tcgen05CpShape.SHAPE_64X128B, prim.Tcgen05CpMulticast.WARPX2_02_13),
    32: (prim.Tcgen05CpShape.SHAPE_32X128B, prim.Tcgen05CpMulticast.WARPX4),
}


@dataclass(frozen=True)
class Form:
    """MMAs of ``rows`` rows a CTA by ``ctas`` CTAs: 128, 64 or 32 of one (``.ws`` where they are
    fewer than lanes), or 64 of two."""

    rows: int
    ctas: int = 1

    @property
    def groups(self) -> int:
        """Groups of lanes."""
        return LANES // self.rows

    def share(self, n: int) -> int:
        """Columns of tensor memory that an accumulator of N = ``n`` takes."""
        return n // self.groups

    def instruction(self, dtype, n: int, *, b_transposed: bool = False):
        """Instruction descriptor of all rows x ``n``: operands of ``dtype``, fp32 accumulator."""
        return prim.Tcgen05InstrDesc.build(
            c_dtype=Float32, a_dtype=dtype, b_dtype=dtype, m_dim=self.rows * self.ctas,
            n_dim=n, b_major=int(b_transposed),
        )  # fmt: skip

    @compat.dsl_user_op
    def copy_rows(self, d, source, *, loc=None, ip=None) -> None:
        """16 bytes of each row to 4 columns at ``d``, in every group of lanes; by one thread, for
        every CTA from its own shared memory.

        ``source``: a K-major descriptor (9.7.16.9).
        """
        shape, multicast = _COPY[self.rows]
        prim.tcgen05_cp(
            shape, prim.make_tmem_ptr(d, Int32, loc=loc, ip=ip), source, multicast=multicast,
            loc=loc, ip=ip, **self._group,
        )  # fmt: skip

    @compat.dsl_user_op
    def mma(
        self, dtype, d, a, b, idesc, accumulate: bool, *, a_in_tmem=False, loc=None, ip=None
    ) -> None:  # fmt: skip
        """D = A.B (+ D), by one thread.  ``d``: address in tensor memory; ``a``: descriptor, or
        such an address; ``b``: descriptor."""
        d = prim.make_tmem_ptr(d, Int32, loc=loc, ip=ip)
        a = prim.make_tmem_ptr(a, Int32, loc=loc, ip=ip) if a_in_tmem else a
        if self.ctas == 1 and self.groups > 1:
            prim.tcgen05_mma_ws(_KIND[dtype], d, a, b, idesc, accumulate, loc=loc, ip=ip)
        else:
            ctas = _PAIR if self.ctas > 1 else prim.CTAGroup.CTA_1
            prim.tcgen05_mma(_KIND[dtype], ctas, d, a, b, idesc, accumulate, loc=loc, ip=ip)

    @compat.dsl_user_op
    def commit(self, barrier, *, loc=None, ip=None) -> None:
        """``barrier`` of every CTA gets an arrival when all that this thread has issued is
        complete."""
        masks = {} if self.ctas == 1 else {"multicast_mask": Int32((1 << self.ctas) - 1)}
        prim.tcgen05_commit(barrier, loc=loc, ip=ip, **masks, **self._group)

    @property
    def _group(self) -> dict:
        return {} if self.ctas == 1 else {"group": _PAIR}

    def allocate(self, hold, count: int) -> None:
        """Allocate ``count`` columns of tensor memory, whose address then stands in shared memory
        at ``hold``.  A whole warp of every CTA calls this."""
        two = {} if self.ctas == 1 else {"is_two_cta": True}
        cute.arch.alloc_tmem(count, hold, **two)
        cute.arch.relinquish_tmem_alloc_permit(**two)

    def free(self, hold, count: int) -> None:
        """Free the ``count`` columns whose address stands at ``hold``.  The warp that allocated
        them calls this, in every CTA, behind a barrier of all users."""
        after_sync()
        two = {} if self.ctas == 1 else {"is_two_cta": True}
        cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, hold), count, **two)


def address_of(pointer):
    """Byte address in shared memory."""
    return Int32(pointer.toint())


# ------------------------------------------------------------------------- descriptors (9.7.16.4)


def k_major(address, pitch: int = LINE):
    """Operand whose rows of ``pitch`` bytes run along K, swizzled by as much; 8 rows an atom.

    This is the first K step; ``advance`` it by ``k_step`` bytes for others.
    """
    return prim.Tcgen05SmemDesc.build(
        address, leading_byte_offset=16, stride_byte_offset=8 * pitch, layout=_SWIZZLE[pitch]
    )


def mn_major(address, block: int):
    """Operand whose rows of 128 bytes run along M or N, one row a k, column blocks ``block`` bytes
    apart: the tile that ``k_major`` reads as K, read as V."""
    return prim.Tcgen05SmemDesc.build(
        address, leading_byte_offset=block, stride_byte_offset=8 * LINE, layout=_SWIZZLE[LINE]
    )


def advance(descriptor, nbytes):
    """``descriptor`` of an operand that lies ``nbytes`` further (a multiple of 16)."""
    return descriptor.advance_start_address(nbytes)


def k_step(k: int, rows: int) -> int:
    """Bytes from the first to the k-th K step of a K-major tile of ``rows`` rows in column blocks
    of 128 bytes."""
    at = k * K_BYTES
    return at // LINE * (rows * LINE) + at % LINE


# ------------------------------------------------------------------------ asynchronous operations


@compat.dsl_user_op
def load(address, count: int, *, loc=None, ip=None):
    """``count`` columns from ``address`` on of this thread's lane, as fp32 values.

    A use of the values waits for them (9.7.16.6.4.5); the columns are read until ``wait_loads``.
    """
    return prim.tcgen05_ld(
        "32x32b", prim.make_tmem_ptr(address, Float32, loc=loc, ip=ip), num=count, loc=loc, ip=ip
    )


@compat.dsl_user_op
def wait_loads(*, loc=None, ip=None) -> None:
    """All loads of this warp are complete: what they read may be overwritten."""
    prim.tcgen05_wait(prim.Tcgen05Wait.LOAD, loc=loc, ip=ip)


# ------------------------------------------------------------------------------- order (9.7.16.6)


@compat.dsl_user_op
def before_sync(*, loc=None, ip=None) -> None:
    """Completed accesses of tensor memory come before the arrival or barrier that follows."""
    prim.tcgen05_fence(prim.Tcgen05Fence.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@compat.dsl_user_op
def after_sync(*, loc=None, ip=None) -> None:
    """Accesses of tensor memory that follow come after the wait or barrier just passed."""
    prim.tcgen05_fence(prim.Tcgen05Fence.AFTER_THREAD_SYNC, loc=loc, ip=ip)


def elected():
    """Return true in the one lane that issues; all lanes of the warp call this."""
    return prim.elect_sync()


# ------------------------------------------------------------------------------------- allocation


def lanes_of(base, wwarp):
    """Address of the 32 lanes that warp ``wwarp`` of a warpgroup may touch (9.7.16.2)."""
    return base + (wwarp << 21)


def base_of(hold):
    """Address that ``allocate`` left, behind a barrier."""
    return Int32(cute.arch.retrieve_tmem_ptr(Float32, 16, hold).toint())

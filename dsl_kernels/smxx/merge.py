"""merge: combine the partial results of split sequences into out and lse.

A *unit* is a quarter of one query row (128 channels, one 8-byte load a lane) of one batch.

Roles        WARPS warps a CTA. The CTAs are dealt to the batches in proportion to their slots, at
             least one each, so one sequence cut into a hundred pieces keeps as many CTAs busy as
             thirty cut into three; the CTAs of a batch share its units evenly.
             up to CHUNK slots: a warp reads all slots of a unit at once; of up to four slots it
             reads two or four units at once.
             more slots: all warps share a unit, each takes a run of consecutive slots, the first
             warp combines their partial sums.
Memory       6 KiB of shared memory for the partial sums (many slots); registers otherwise.
Timeline     wait for decode | exit if no slot is in use | which batch | o and lse of CHUNK slots in
             flight | weights, FMA, next chunk | (exchange, combine) | normalise, store
Bytes moved  per row 1060 read a slot + 1024 (bf16) or 2048 (fp32) written; nothing if unsplit.

    out = sum_i 2^(lse_i - M) o_i / sum_i 2^(lse_i - M)     lse = (M + log2 sum) * lse_factor

o_i is already normalised; it is stored as common/partials.py says, and the factor of its 16-bit
channels goes into the weight: fp32 with denormals, so only what is below 2^-112 loses bits.  The
order of summation depends only on the number of slots: ascending within a run, then ascending over
runs, so results do not depend on timing.  lse_i = -inf (the
split saw no token for the row) weighs 0; if all are, out is 0 and lse is ``empty_lse``.  A NaN
lse_i makes out and lse NaN.  The grid depends on shapes alone: lengths live on the device.

Bound: (CTAS + 1) * slots < 2^32, that is 11.7 million slots; a plan has at most 2^23.  Whatever
``split_begin`` holds, nothing outside of the arguments is read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, Uint32, cute

from .. import compat
from ..common import partials
from ..common.types import F16
from ..dims import KV_LORA_RANK, PARTIAL_ROW
from . import quant

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 8
CHUNK = 8  # slots in flight in one lane
FLIGHT = 8  # loads of a lane that hide the latency, if its units have fewer slots
VEC = 4  # channels of a lane, under one exponent; 8 take 130 registers: one CTA an SM, not three
WORDS = VEC // 2  # that it loads of a slot
PARTS = KV_LORA_RANK // (quant.WARP * VEC)  # units of a row
CTAS = 364  # with 32 batches three on each of 132 SMs: one wave, whether there is work or not


@cute.jit
def merge(
    o_accum: cute.Tensor,  # f16 (slots, rows_pad, PARTIAL_ROW)
    lse_accum: cute.Tensor,  # f32 (slots, rows_pad), log2 domain
    split_begin: cute.Tensor,  # i32 (b + 1,)
    out: cute.Tensor,  # bf16|f32 (b, s_q, h, 512)
    lse: cute.Tensor,  # f32 (b, h, s_q)
    lse_factor: Float32,
    empty_lse: Float32,
    stream: Any,
) -> None:
    """Host half: a CTA a unit, up to CTAS, and one a batch."""
    b, s_q, h, _ = out.shape
    units = b * s_q * h * PARTS
    if units > 0:  # an empty grid is a launch error
        _merge(
            o_accum, lse_accum, split_begin, out, lse, lse_factor, empty_lse,
            compat.fast_divisor(h),
        ).launch(
            grid=(cutlass.min(units, CTAS) + b, 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )  # fmt: skip


class _Partial:
    """Running weighted sum of one lane's VEC channels: maximum, weight sum, channel sums."""

    def __init__(self) -> None:
        self.state = cute.make_rmem_tensor((2 + VEC,), Float32)
        self.state.fill(0.0)
        self.state[0] = -Float32.inf

    def rescale(self, top: Any) -> Any:
        """Raises the maximum to at least ``top``; returns the reference to subtract from lse.

        The reference is finite even if nothing was seen yet, so that -inf - reference is -inf.
        ``fmax`` skips NaN: a NaN lse enters through its weight.
        """
        old = self.state[0]
        new = cute.arch.fmax(old, top)
        reference = _select(new == -Float32.inf, Float32(0.0), new)
        shrink = _exp2(old - reference)
        self.state[0] = new
        for i in range(1, 2 + VEC):
            self.state[i] = self.state[i] * shrink
        return reference

    def add(self, weight: Any, values: list[Any], factor: Any) -> None:
        """Adds ``values`` times ``factor``."""
        self.state[1] = self.state[1] + weight
        scaled = weight * factor
        for i in range(VEC):
            self.state[2 + i] = self.state[2 + i] + scaled * values[i]


def _exp2(x: Any) -> Any:
    return cute.math.exp2(x, fastmath=True)


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return Float32(cutlass.select_(condition, yes, no))


class _Loads:
    """``units`` x ``slots`` loads of VEC channels, and as many exponents and lse, in flight
    together."""

    def __init__(self, units: int, slots: int) -> None:
        self.units, self.slots = units, slots
        self.words = cute.make_rmem_tensor((units, slots, WORDS), Uint32)
        self.exponents = cute.make_rmem_tensor((units, slots), Uint32)
        self.lses = cute.make_rmem_tensor((units, slots), Float32)
        self.words.fill(0)
        self.exponents.fill(partials.LEAST)
        self.lses.fill(-Float32.inf)

    def add_to(self, partial: _Partial, unit: int) -> None:
        """Adds the slots of one unit in ascending order; a slot that was not loaded weighs 0."""
        top = self.lses[unit, 0]
        for j in range(1, self.slots):
            top = cute.arch.fmax(top, self.lses[unit, j])
        reference = partial.rescale(top)
        for j in range(self.slots):
            values = quant.to_f32([self.words[unit, j, i] for i in range(WORDS)], F16)
            factor = partials.factor_from_stored(self.exponents[unit, j])
            partial.add(_exp2(self.lses[unit, j] - reference), values, factor)


@cute.jit
def _issue(
    loads: cutlass.Constexpr,
    unit: cutlass.Constexpr,
    o_accum: cute.Tensor,
    lse_accum: cute.Tensor,
    first: Int32,
    count: Int32,
    at: Any,
) -> None:
    """Loads slots first .. first + count - 1 of one unit, at = (row, channel); ``count`` may be
    larger than what ``loads`` holds."""
    row, channel = at
    words, exponents, lses = loads.words, loads.exponents, loads.lses
    o_at = o_accum.iterator + (Int64(first) * o_accum.stride[0] + row * PARTIAL_ROW)
    lse_at = lse_accum.iterator + (Int64(first) * lse_accum.stride[0] + row)
    for j in cutlass.range_constexpr(loads.slots):
        if j < count:
            o_row = o_at + j * Int64(o_accum.stride[0])
            loaded = compat.load_words(o_row + channel, WORDS, **compat.STRONG)
            exponents[unit, j] = partials.load_exponent(o_row, channel, **compat.STRONG)
            for i in cutlass.range_constexpr(WORDS):
                words[unit, j, i] = loaded[i]
    for j in cutlass.range_constexpr(loads.slots):
        if j < count:
            word = compat.load_words(lse_at + j * Int64(lse_accum.stride[0]), 1, **compat.STRONG)[0]
            lses[unit, j] = word.bitcast(Float32)


@cute.jit
def _finish(
    partial: cutlass.Constexpr,
    out: cute.Tensor,
    lse: cute.Tensor,
    factors: Any,
    where: Any,
    by_h: compat.FastDivisor,
) -> None:
    """Normalises and stores one unit; where = (batch, row, channel)."""
    batch, row, channel = where
    lse_factor, empty_lse = factors
    _, s_q, h, _ = out.shape
    top, total = partial.state[0], partial.state[1]
    empty = total == 0.0  # a NaN total is not empty
    inv = Float32(1.0) / _select(empty, Float32(1.0), total)
    values = [partial.state[2 + i] * inv for i in range(VEC)]
    at = (Int64(batch) * (s_q * h) + row) * KV_LORA_RANK + channel
    compat.store_words(out.iterator + at, quant.pack(values, out.element_type))
    if channel == 0:
        s, head = divmod(row, by_h)
        value = (top + cute.math.log2(total, fastmath=True)) * lse_factor
        lse[batch, head, s] = _select(empty, empty_lse, value)


@cute.kernel
def _merge(
    o_accum: cute.Tensor,
    lse_accum: cute.Tensor,
    split_begin: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    lse_factor: Float32,
    empty_lse: Float32,
    by_h: compat.FastDivisor,
) -> None:
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    smem = cutlass.memory.SmemAllocator()
    sums = smem.allocate_tensor(
        Float32, cute.make_layout((2 + VEC, WARPS, quant.WARP), stride=(WARPS * 32, 32, 1)), 16
    )
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    b = split_begin.shape[0] - 1
    slots = cutlass.min(split_begin[b], o_accum.shape[0])
    if slots > 0:
        ctas = grid - b
        batch = _batch_of(split_begin, block, ctas, slots)
        begin = split_begin[batch]
        end = cutlass.min(split_begin[batch + 1], slots)
        if (begin >= 0) & (end > begin):
            mine = block - batch - _share(begin, ctas, slots)
            team = 1 + _share(end, ctas, slots) - _share(begin, ctas, slots)
            units = out.shape[1] * out.shape[2] * PARTS  # of a batch
            per_cta = (units + (team - 1)) // team
            first = compat.at_most(mine * per_cta, units)  # all of them if the table is damaged
            _merge_units(
                (o_accum, lse_accum, out, lse), sums, (batch, begin, end - begin),
                (first, cutlass.min(first + per_cta, units)), (lse_factor, empty_lse), by_h,
            )  # fmt: skip


@cute.jit
def _share(slot: Int32, ctas: Int32, slots: Int32) -> Int32:
    """CTAs that belong to the slots before ``slot``, rounded down."""
    return Int32(compat.unsigned(slot) * compat.unsigned(ctas) // compat.unsigned(slots))


@cute.jit
def _batch_of(split_begin: cute.Tensor, block: Int32, ctas: Int32, slots: Int32) -> Int32:
    """The batch of CTA ``block``: the last i with i + share(split_begin[i]) <= block.

    Every batch has one CTA, and one more for each share of the slots that ends in it.  No share is
    larger than ``ctas``: with ``left`` cut there, all products fit 32 bits.
    """
    tidx, _, _ = cute.arch.thread_idx()
    found = Int32(0)  # batches after the first that begin at this CTA or before
    b = split_begin.shape[0] - 1
    for i in cutlass.range(1 + tidx % quant.WARP, b, quant.WARP, unroll=4):
        left = cutlass.min(block - i, ctas)  # share(slot) <= left, without the division
        upto = compat.unsigned(split_begin[i]) * compat.unsigned(ctas)
        if left >= 0 and upto < compat.unsigned(left + 1) * compat.unsigned(slots):
            found += 1
    return cute.arch.warp_redux_sync(found, "add")


def _place(unit: Any, lane: Any) -> tuple[Any, Any]:
    """(row, first of the lane's channels) of a unit."""
    return unit // PARTS, unit % PARTS * (quant.WARP * VEC) + lane * VEC


@cute.jit
def _merge_units(
    tensors: Any, sums: cute.Tensor, piece: Any, span: Any, factors: Any, by_h: compat.FastDivisor
) -> None:
    """Merges units span[0] .. span[1] - 1 of one batch; piece = (batch, first slot, slots)."""
    n = piece[2]
    if n <= 2:
        _few_slots(2, tensors, piece, span, factors, by_h)
    elif n <= 4:
        _few_slots(4, tensors, piece, span, factors, by_h)
    elif n <= CHUNK:
        _few_slots(CHUNK, tensors, piece, span, factors, by_h)
    else:
        _many_slots(tensors, sums, piece, span, factors, by_h)


@cute.jit
def _few_slots(
    most: cutlass.Constexpr, tensors: Any, piece: Any, span: Any, factors: Any,
    by_h: compat.FastDivisor,
) -> None:  # fmt: skip
    """Up to ``most`` slots, all in flight at once."""
    o_accum, lse_accum, out, lse = tensors
    batch, begin, n = piece
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    units = max(1, FLIGHT // most)
    for base in cutlass.range(span[0] + warp, span[1], WARPS * units, unroll=1):
        loads = _Loads(units, most)
        for k in cutlass.range_constexpr(units):
            u = base + k * WARPS
            count = n if u < span[1] else 0
            _issue(loads, k, o_accum, lse_accum, begin, count, _place(u, lane))
        for k in cutlass.range_constexpr(units):
            u = base + k * WARPS
            partial = _Partial()
            loads.add_to(partial, k)
            row, channel = _place(u, lane)
            if u < span[1]:
                _finish(partial, out, lse, factors, (batch, row, channel), by_h)


@cute.jit
def _many_slots(
    tensors: Any, sums: cute.Tensor, piece: Any, span: Any, factors: Any, by_h: compat.FastDivisor
) -> None:
    """More slots: the CTA's warps share a unit's slots."""
    o_accum, lse_accum, out, lse = tensors
    batch, begin, n = piece
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    run = (n + (WARPS - 1)) // WARPS
    first, mine = begin + warp * run, cutlass.min(run, n - warp * run)
    for u in cutlass.range(span[0], span[1], unroll=1):
        row, channel = _place(u, lane)
        partial = _Partial()
        for base in cutlass.range(0, mine, CHUNK, unroll=1):
            loads = _Loads(1, CHUNK)
            _issue(loads, 0, o_accum, lse_accum, first + base, mine - base, (row, channel))
            loads.add_to(partial, 0)
        for i in cutlass.range_constexpr(2 + VEC):
            sums[i, warp, lane] = partial.state[i]
        cute.arch.sync_threads()
        if warp == 0:
            total = _combine(sums, lane)
            _finish(total, out, lse, factors, (batch, row, channel), by_h)
        cute.arch.sync_threads()


def _combine(sums: Any, lane: Any) -> _Partial:
    """Adds the warps' partial sums in ascending order of their runs."""
    total = _Partial()
    top = sums[0, 0, lane]
    for w in range(1, WARPS):
        top = cute.arch.fmax(top, sums[0, w, lane])
    reference = total.rescale(top)
    for w in range(WARPS):
        weight = _exp2(sums[0, w, lane] - reference)
        total.state[1] = total.state[1] + weight * sums[1, w, lane]
        for i in range(2, 2 + VEC):
            total.state[i] = total.state[i] + weight * sums[i, w, lane]
    return total


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    f32, i32 = compat.DTYPES["f32"], compat.DTYPES["i32"]
    slots, rows_pad = compat.sym(name="slots"), compat.sym(name="rows_pad")
    b, s_q, h = compat.sym(name="b"), compat.sym(name="s_q"), compat.sym(name="h")
    fakes = {
        "o_accum": compat.contiguous(F16, (slots, rows_pad, PARTIAL_ROW)),
        "lse_accum": compat.contiguous(f32, (slots, rows_pad), align=4),
        "split_begin": compat.vector(i32, compat.sym(name="b_plus_1")),
        "out": compat.contiguous(compat.dtype(spec.out_dtype), (b, s_q, h, KV_LORA_RANK)),
        "lse": compat.contiguous(f32, (b, h, s_q), align=4),
        "lse_factor": Float32(1.0),
        "empty_lse": Float32(float("-inf")),
    }
    return merge, fakes

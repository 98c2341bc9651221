"""merge: combine the partial results of split sequences into out and lse.

A *unit* is the plan's: query rows of one sequence that are split together (common/work_list.py).  A
*quarter* is one of a query row: 128 channels, one 8-byte load a lane.

Roles        WARPS warps a CTA. The CTAs are dealt to the units in proportion to their slots, at
             least one each, so one sequence cut into a hundred pieces keeps as many CTAs busy as
             thirty cut into three; the CTAs of a unit share its quarters evenly.
             up to CHUNK slots: a warp reads all slots of a quarter at once; of up to four slots it
             reads two or four quarters at once.
             up to ALONE: the same, CHUNK after CHUNK.
             more slots: all warps share a quarter, each takes a run of consecutive slots, the first
             warp combines their partial sums.
Memory       6 KiB of shared memory for the partial sums (many slots); registers otherwise.
Timeline     (behind decode: split_begin) | wait | exit if no slot is in use | which unit | o and
             lse of CHUNK slots in flight | weights, FMA, next chunk | (exchange, combine)
             | normalise, store
Bytes moved  per row 1060 read a slot (2052 of fp32 rows) + 1024 (bf16, fp16) or 2048 (fp32)
             written; nothing if unsplit.

    out = sum_i 2^(lse_i - M) o_i / sum_i 2^(lse_i - M)     lse = (M + log2 sum) * lse_factor

o_i is already normalised; it is stored as common/partials.py says, and the factor of its 16-bit
channels goes into the weight: fp32 with denormals, so only what is below 2^-112 loses bits.  The
order of summation depends only on the number of slots: ascending within a run, then ascending over
runs, so results do not depend on timing.  lse_i = -inf (the
split saw no token for the row) weighs 0; if all are, out is 0 and lse is ``empty_lse``.  A NaN
lse_i makes out and lse NaN.  The grid depends on shapes alone: lengths live on the device.

Tables are read in one trip while there are fewer than 2 * WARP units, and before the wait where
merge is launched by decode: a CTA of decode lets merge start behind its own wait only, when the
plan's kernel has ended.

Bound: (CTAS + 1) * slots < 2^32, that is 10.8 million slots; a plan has at most 2^23.  Whatever
``split_begin`` holds, nothing outside of the arguments is read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.memory
from cutlass import Float32, Int32, Int64, Uint32, cute

from .. import compat
from ..common import partials
from ..common.types import F16
from ..dims import KV_LORA_RANK
from . import quant

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 8
CHUNK = 8  # slots in flight in one lane
ALONE = 2 * CHUNK  # slots that a warp reads by itself: an exchange takes longer than a second trip
FLIGHT = 8  # loads of a lane that hide the latency, if its quarters have fewer slots
VEC = 4  # channels of a lane, under one exponent; 8 take 130 registers: one CTA an SM, not three
PARTS = KV_LORA_RANK // (quant.WARP * VEC)  # quarters of a row
CTAS = 396  # three on each of 132 SMs: one wave, whether there is work or not, of up to 198 units


@cute.jit
def merge(
    o_accum: cute.Tensor,  # f16 (slots, unit_rows, PARTIAL_ROW); f32 (.., 512) behind fp16 decode
    lse_accum: cute.Tensor,  # f32 (slots, unit_rows), log2 domain
    split_begin: cute.Tensor,  # i32 (n_units + 1,)
    units: cute.Tensor,  # i32 (n_units, 2) first row, end row; (0, 2): unit i is sequence i
    out: cute.Tensor,  # bf16|f32 (b, s_q, h, 512)
    lse: cute.Tensor,  # f32 (b, h, s_q)
    lse_factor: Float32,
    empty_lse: Float32,
    stream: Any,
) -> None:
    """Host half of the variant of its own."""
    launch(
        False, o_accum, lse_accum, split_begin, units, out, lse, lse_factor, empty_lse, stream
    )  # fmt: skip


@cute.jit
def launch(
    behind_decode: cutlass.Constexpr, o_accum: cute.Tensor, lse_accum: cute.Tensor,
    split_begin: cute.Tensor, units: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
    lse_factor: Float32, empty_lse: Float32, stream: Any,
) -> None:  # fmt: skip
    """A CTA a quarter and one a unit, CTAS in all, but of units no more than half; arguments as of
    ``merge``."""
    b, s_q, h, _ = out.shape
    quarters, n_units = b * s_q * h * PARTS, split_begin.shape[0] - 1
    if quarters > 0:  # an empty grid is a launch error
        by = By(compat.fast_divisor(h), compat.fast_divisor(s_q))
        _merge(
            o_accum, lse_accum, split_begin, units, out, lse, lse_factor, empty_lse, by,
            behind_decode,
        ).launch(
            grid=(cutlass.min(quarters, cutlass.max(CTAS - n_units, CTAS // 2)) + n_units, 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )  # fmt: skip


class By(NamedTuple):
    """Divisors: a row by heads is its token, a token by tokens its place in ``out``."""

    heads: compat.FastDivisor
    tokens: compat.FastDivisor


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

    def add(self, weight: Any, values: list[Any], factor: Any = None) -> None:
        """Adds ``values`` times ``factor``; None is 1."""
        self.state[1] = self.state[1] + weight
        scaled = weight if factor is None else weight * factor
        for i in range(VEC):
            self.state[2 + i] = self.state[2 + i] + scaled * values[i]


def _exp2(x: Any) -> Any:
    return cute.math.exp2(x, fastmath=True)


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return Float32(cutlass.select_(condition, yes, no))


class _Loads:
    """``quarters`` x ``slots`` loads of VEC channels, and as many exponents and lse, in flight
    together.

    Attributes:
        exact: whether the channels are fp32 and without exponents.
        count: words of a load.
    """

    def __init__(self, quarters: int, slots: int, exact: bool) -> None:
        self.quarters, self.slots, self.exact = quarters, slots, exact
        self.count = VEC if exact else VEC // 2
        self.words = cute.make_rmem_tensor((quarters, slots, self.count), Uint32)
        self.exponents = cute.make_rmem_tensor((quarters, slots), Uint32)
        self.lses = cute.make_rmem_tensor((quarters, slots), Float32)
        self.words.fill(0)
        self.exponents.fill(partials.LEAST)
        self.lses.fill(-Float32.inf)

    def add_to(self, partial: _Partial, quarter: int) -> None:
        """Adds the slots of one quarter in ascending order; a slot not loaded weighs 0."""
        top = self.lses[quarter, 0]
        for j in range(1, self.slots):
            top = cute.arch.fmax(top, self.lses[quarter, j])
        reference = partial.rescale(top)
        for j in range(self.slots):
            weight = _exp2(self.lses[quarter, j] - reference)
            words = [self.words[quarter, j, i] for i in range(self.count)]
            if self.exact:
                partial.add(weight, [word.bitcast(Float32) for word in words])
            else:
                factor = partials.factor_from_stored(self.exponents[quarter, j])
                partial.add(weight, quant.to_f32(words, F16), factor)


@cute.jit
def _issue(
    loads: cutlass.Constexpr,
    quarter: cutlass.Constexpr,
    o_accum: cute.Tensor,
    lse_accum: cute.Tensor,
    first: Int32,
    count: Int32,
    at: Any,
) -> None:
    """Loads slots first .. first + count - 1 of one quarter, at = (row of the slots, channel);
    ``count`` may be larger than what ``loads`` holds."""
    row, channel = at
    words, exponents, lses = loads.words, loads.exponents, loads.lses
    o_at = o_accum.iterator + (Int64(first) * o_accum.stride[0] + row * o_accum.shape[2])
    lse_at = lse_accum.iterator + (Int64(first) * lse_accum.stride[0] + row)
    for j in cutlass.range_constexpr(loads.slots):
        if j < count:
            o_row = o_at + j * Int64(o_accum.stride[0])
            loaded = compat.load_words(o_row + channel, loads.count, **compat.STRONG)
            if cutlass.const_expr(not loads.exact):
                exponents[quarter, j] = partials.load_exponent(o_row, channel, **compat.STRONG)
            for i in cutlass.range_constexpr(loads.count):
                words[quarter, j, i] = loaded[i]
    for j in cutlass.range_constexpr(loads.slots):
        if j < count:
            word = compat.load_words(lse_at + j * Int64(lse_accum.stride[0]), 1, **compat.STRONG)[0]
            lses[quarter, j] = word.bitcast(Float32)


@cute.jit
def _finish(
    partial: cutlass.Constexpr,
    out: cute.Tensor,
    lse: cute.Tensor,
    factors: Any,
    where: Any,
    by: By,
) -> None:
    """Normalises and stores one quarter; where = (query row, channel)."""
    row, channel = where
    lse_factor, empty_lse = factors
    top, total = partial.state[0], partial.state[1]
    empty = total == 0.0  # a NaN total is not empty
    inv = Float32(1.0) / _select(empty, Float32(1.0), total)
    values = [partial.state[2 + i] * inv for i in range(VEC)]
    at = Int64(row) * KV_LORA_RANK + channel
    compat.store_words(out.iterator + at, quant.pack(values, out.element_type))
    if channel == 0:
        token, head = divmod(row, by.heads)
        b, s = divmod(token, by.tokens)
        value = (top + cute.math.log2(total, fastmath=True)) * lse_factor
        lse[b, head, s] = _select(empty, empty_lse, value)


@cute.kernel
def _merge(
    o_accum: cute.Tensor,
    lse_accum: cute.Tensor,
    split_begin: cute.Tensor,
    units: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    lse_factor: Float32,
    empty_lse: Float32,
    by: By,
    behind_decode: cutlass.Constexpr,
) -> None:
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    smem = cutlass.memory.SmemAllocator()
    sums = smem.allocate_tensor(
        Float32, cute.make_layout((2 + VEC, WARPS, quant.WARP), stride=(WARPS * 32, 32, 1)), 16
    )
    count = split_begin.shape[0] - 1
    if cutlass.const_expr(behind_decode):
        near, slots = Near.of(split_begin), split_begin[count]
        compat.pdl_wait()
    else:
        compat.pdl_wait()
        near, slots = Near.of(split_begin), split_begin[count]
    compat.pdl_launch_dependents()
    slots = cutlass.min(slots, o_accum.shape[0])
    if slots > 0:
        ctas = grid - count
        unit = _unit_of(split_begin, near, block, ctas, slots)
        begin, end = _entry(near, unit), _entry(near, unit + 1)
        if unit + 1 >= 2 * quant.WARP:
            begin, end = split_begin[unit], split_begin[unit + 1]
        end = cutlass.min(end, slots)
        if (begin >= 0) & (end > begin):
            mine = block - unit - _share(begin, ctas, slots)
            team = 1 + _share(end, ctas, slots) - _share(begin, ctas, slots)
            row, rows = _rows_of(units, out, unit, o_accum.shape[1])
            quarters = rows * PARTS
            per_cta = (quarters + (team - 1)) // team
            first = compat.at_most(mine * per_cta, quarters)  # all if the table is damaged
            _merge_quarters(
                (o_accum, lse_accum, out, lse), sums, (row, begin, end - begin),
                (first, cutlass.min(first + per_cta, quarters)), (lse_factor, empty_lse), by,
            )  # fmt: skip


@cute.jit
def _rows_of(units: cute.Tensor, out: cute.Tensor, unit: Int32, unit_rows: Int32) -> Any:
    """(first query row, rows) of a unit; rows that exist, whatever the table holds."""
    b, s_q, h, _ = out.shape
    everything = b * s_q * h
    first, end = unit * (s_q * h), (unit + 1) * (s_q * h)
    if units.shape[0] > 0:
        first, end = units[unit, 0], units[unit, 1]
    first, end = compat.at_most(first, everything), compat.at_most(end, everything)
    return first, cutlass.min(cutlass.max(end - first, 0), unit_rows)


@cute.jit
def _share(slot: Int32, ctas: Int32, slots: Int32) -> Int32:
    """CTAs that belong to the slots before ``slot``, rounded down."""
    return Int32(compat.unsigned(slot) * compat.unsigned(ctas) // compat.unsigned(slots))


class Near(NamedTuple):
    """The first entries of ``split_begin``, two a lane: one trip to memory instead of three."""

    low: Any  # entry lane
    high: Any  # entry WARP + lane

    @classmethod
    def of(cls, split_begin: cute.Tensor) -> Near:
        """Loads them."""
        tidx, _, _ = cute.arch.thread_idx()
        last = split_begin.shape[0] - 1
        places = [tidx % quant.WARP + quant.WARP * x for x in range(2)]
        return cls(*(split_begin[cutlass.min(i, last)] for i in places))


def _entry(near: Near, i: Any) -> Any:
    """Entry ``i``, the same in all lanes; some other one if i is not below 2 * WARP."""
    low, high = (cute.arch.shuffle_sync(value, i % quant.WARP) for value in near)
    return Int32(cutlass.select_(i < quant.WARP, low, high))


@cute.jit
def _unit_of(
    split_begin: cute.Tensor, near: Near, block: Int32, ctas: Int32, slots: Int32
) -> Int32:
    """The unit of CTA ``block``: the last i with i + share(split_begin[i]) <= block.

    Every unit has one CTA, and one more for each share of the slots that ends in it.  No share is
    larger than ``ctas``: with ``left`` cut there, all products fit 32 bits.
    """
    tidx, _, _ = cute.arch.thread_idx()
    found = Int32(0)  # units after the first that begin at this CTA or before
    count = split_begin.shape[0] - 1
    for x in cutlass.range_constexpr(2):
        i = tidx % quant.WARP + quant.WARP * x
        if (i > 0) & (i < count) & _begins(i, near[x], block, ctas, slots):
            found += 1
    for i in cutlass.range(tidx % quant.WARP + 2 * quant.WARP, count, quant.WARP, unroll=4):
        if _begins(i, split_begin[i], block, ctas, slots):
            found += 1
    return cute.arch.warp_redux_sync(found, "add")


def _begins(unit: Any, slot: Any, block: Any, ctas: Any, slots: Any) -> Any:
    """Whether unit + share(slot) <= block, without the division."""
    left = cutlass.min(block - unit, ctas)
    upto = compat.unsigned(slot) * compat.unsigned(ctas)
    return (left >= 0) & (upto < compat.unsigned(left + 1) * compat.unsigned(slots))


def _place(quarter: Any, lane: Any) -> tuple[Any, Any]:
    """(row of its unit, first of the lane's channels) of a quarter."""
    return quarter // PARTS, quarter % PARTS * (quant.WARP * VEC) + lane * VEC


@cute.jit
def _merge_quarters(
    tensors: Any, sums: cute.Tensor, piece: Any, span: Any, factors: Any, by: By
) -> None:
    """Merges quarters span[0] .. span[1] - 1 of one unit; piece = (its first query row, first slot,
    slots)."""
    n = piece[2]
    if n <= 2:
        _few_slots(2, tensors, piece, span, factors, by)
    elif n <= 4:
        _few_slots(4, tensors, piece, span, factors, by)
    elif n <= CHUNK:
        _few_slots(CHUNK, tensors, piece, span, factors, by)
    elif n <= ALONE:  # whatever the CTA's share is: the order of sums is a matter of n alone
        _more_slots(tensors, piece, span, factors, by)
    else:
        _many_slots(tensors, sums, piece, span, factors, by)


@cute.jit
def _few_slots(
    most: cutlass.Constexpr, tensors: Any, piece: Any, span: Any, factors: Any, by: By
) -> None:
    """Up to ``most`` slots, all in flight at once."""
    o_accum, lse_accum, out, lse = tensors
    first_row, begin, n = piece
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    together = max(1, FLIGHT // most)
    for base in cutlass.range(span[0] + warp, span[1], WARPS * together, unroll=1):
        loads = _Loads(together, most, partials.is_exact(o_accum))
        for k in cutlass.range_constexpr(together):
            u = base + k * WARPS
            count = n if u < span[1] else 0
            _issue(loads, k, o_accum, lse_accum, begin, count, _place(u, lane))
        for k in cutlass.range_constexpr(together):
            u = base + k * WARPS
            partial = _Partial()
            loads.add_to(partial, k)
            row, channel = _place(u, lane)
            if u < span[1]:
                _finish(partial, out, lse, factors, (first_row + row, channel), by)


@cute.jit
def _add_slots(
    partial: cutlass.Constexpr,
    o_accum: cute.Tensor,
    lse_accum: cute.Tensor,
    first: Int32,
    count: Int32,
    at: Any,
) -> None:
    """Adds ``count`` slots of one quarter, CHUNK of them in flight; ``at`` as of ``_issue``."""
    for base in cutlass.range(0, count, CHUNK, unroll=1):
        loads = _Loads(1, CHUNK, partials.is_exact(o_accum))
        _issue(loads, 0, o_accum, lse_accum, first + base, count - base, at)
        loads.add_to(partial, 0)


@cute.jit
def _more_slots(tensors: Any, piece: Any, span: Any, factors: Any, by: By) -> None:
    """Up to ALONE slots, CHUNK of them in flight."""
    o_accum, lse_accum, out, lse = tensors
    first_row, begin, n = piece
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    for u in cutlass.range(span[0] + warp, span[1], WARPS, unroll=1):
        row, channel = _place(u, lane)
        partial = _Partial()
        _add_slots(partial, o_accum, lse_accum, begin, n, (row, channel))
        _finish(partial, out, lse, factors, (first_row + row, channel), by)


@cute.jit
def _many_slots(
    tensors: Any, sums: cute.Tensor, piece: Any, span: Any, factors: Any, by: By
) -> None:
    """More slots: the CTA's warps share a quarter's slots."""
    o_accum, lse_accum, out, lse = tensors
    first_row, begin, n = piece
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    run = (n + (WARPS - 1)) // WARPS
    first, mine = begin + warp * run, cutlass.min(run, n - warp * run)
    for u in cutlass.range(span[0], span[1], unroll=1):
        row, channel = _place(u, lane)
        partial = _Partial()
        _add_slots(partial, o_accum, lse_accum, first, mine, (row, channel))
        for i in cutlass.range_constexpr(2 + VEC):
            sums[i, warp, lane] = partial.state[i]
        cute.arch.sync_threads()
        if warp == 0:
            total = _combine(sums, lane)
            _finish(total, out, lse, factors, (first_row + row, channel), by)
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
    slots, unit_rows = compat.sym(name="slots"), compat.sym(name="unit_rows")
    b, s_q, h = compat.sym(name="b"), compat.sym(name="s_q"), compat.sym(name="h")
    fakes = {
        "o_accum": partials.fake(slots, unit_rows),
        "lse_accum": compat.contiguous(f32, (slots, unit_rows), align=4),
        "split_begin": compat.vector(i32, compat.sym(name="n_units_plus_1")),
        "units": compat.units_fake(i32),
        "out": compat.contiguous(compat.dtype(spec.out_dtype), (b, s_q, h, KV_LORA_RANK)),
        "lse": compat.contiguous(f32, (b, h, s_q), align=4),
        "lse_factor": Float32(1.0),
        "empty_lse": Float32(float("-inf")),
    }
    return merge, fakes

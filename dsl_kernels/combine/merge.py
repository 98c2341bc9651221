"""merge: combine the partial results of split sequences into out and lse.

A *unit* is the plan's: query rows of one sequence that are split together (load/work_list.py).  A
*strip* is what a warp merges of a query row at a time: one or two 16-byte loads a lane and split, a
run of 256 channels each (of fp32 rows 128).  A whole row where registers hold its splits: what it
costs beside its channels (lse, weights, addresses) is most of the instructions, of which a row of
two splits takes 220 this way and 720 a quarter of a row at a time.

Roles        WARPS warps a CTA. The CTAs are dealt to the units in proportion to their splits, at
             least one each, so one sequence cut into a hundred pieces keeps as many CTAs busy as
             thirty cut into three; the CTAs of a unit share its strips evenly.
             up to ALONE splits: a warp reads all splits of a strip at once; of up to two splits it
             reads two strips at once, of more than CHUNK strips of half as many channels.
             more splits: all warps share a strip, each takes a run of consecutive splits, CHUNK
             after CHUNK; the first warp combines their partial sums.
Memory       10 KiB of shared memory for the partial sums (many splits); registers otherwise.
Timeline     (behind decode: split_begin, which unit, do tables from outside cover it) | wait |
             (else: split_begin, which unit) | exit if it has no splits | o and lse of all splits in
             flight | weights, FMA | (many splits: next chunk, exchange, combine) | normalise, store
Bytes moved  per row 1060 read a split (2052 of fp32 rows) + 1024 (bf16, fp16) or 2048 (fp32)
             written; nothing if unsplit.

    out = sum_i 2^(lse_i - M) o_i / sum_i 2^(lse_i - M)     lse = (M + log2 sum) * lse_factor

o_i is already normalised; it is stored as combine/partials.py says, and the factor of its 16-bit
channels goes into the weight: fp32 with denormals, so only what is below 2^-112 loses bits.  The
order of summation depends only on the number of splits: ascending within a run, then ascending over
runs, so results do not depend on timing.  lse_i = -inf (the
split saw no token for the row) weighs 0; if all are, out is 0 and lse is ``empty_lse``.  A NaN
lse_i makes out and lse NaN.  The grid depends on shapes alone: lengths live on the device.

Mostly nothing to merge, behind sparse decode: the host does not know whether a list is cut, so
merge is launched behind each call that has lengths, and the next decode's CTAs, which need all
registers of an SM, begin when merge's have left.  There at most CTAS are launched, one wave, which
take the CTAs that units are dealt in turn; only those that write something wait for decode, and
CTA 0, so that merge ends behind it: who waits for merge has both.

Tables are read in one trip while there are fewer than 2 * WARP units, and before the wait where
merge is launched by decode: a CTA of decode lets merge start behind its own wait only, when the
plan's kernel has ended.  Behind decode merge lets the next kernel start at once, so that the next
one's CTAs take the SMs that decode leaves; it waits, as merge does, for the end of the one before.

Behind a decode whose tables are not a plan's, a CTA asks first whether they cover its unit, and one
of the unit's writes NaN where they do not (coverage.py).

Bound: (CTAS + 1) * splits < 2^32, that is 10.8 million splits; a plan has at most 2^23.  Whatever
``split_begin`` holds, nothing outside of the arguments is read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ..blocks import compat, quant
from ..blocks.types import F16
from ..formats.dims import EXPONENT_CHANNELS, KV_LORA_RANK
from . import coverage, merge_piece, partials
from .epilogue import of_sink

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 8
CHUNK = 8  # splits that are added by their common maximum
ALONE = 2 * CHUNK  # splits that a warp reads by itself: an exchange takes longer
LOAD = 4  # words of a lane's load
ROW_CTAS = 4  # at most; they matter where a few rows have very many splits
CTAS = 264  # two on each of 132 SMs: one wave, whether there is work or not, of up to 132 units


@cute.jit
def merge(
    o_accum: cute.Tensor,  # f16 (splits, unit_rows, PARTIAL_ROW); f32 (.., 512) behind fp16 decode
    lse_accum: cute.Tensor,  # f32 (splits, unit_rows), log2 domain
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
        None, o_accum, lse_accum, split_begin, units, out, lse, lse_factor, empty_lse, stream
    )  # fmt: skip


@cute.jit
def launch(
    decode: Any, o_accum: cute.Tensor, lse_accum: cute.Tensor,
    split_begin: cute.Tensor, units: cute.Tensor, out: cute.Tensor, lse: cute.Tensor,
    lse_factor: Float32, empty_lse: Float32, stream: Any, one_wave: cutlass.Constexpr = False,
) -> None:  # fmt: skip
    """Launch one CTA a unit, and ROW_CTAS a row but at most max(CTAS - units, CTAS / 2).

    Args:
        decode: the ``Decode`` that it is launched behind; None: it is a variant of its own.
        one_wave: at most CTAS CTAs are launched.  Only those that write, and CTA 0, wait for
            ``decode`` ("Mostly nothing to merge" above).
        others: as of ``merge``.
    """
    b, s_q, h, _ = out.shape
    useful, n_units = b * s_q * h * ROW_CTAS, split_begin.shape[0] - 1
    if useful > 0:  # an empty grid is a launch error
        by = By(compat.fast_divisor(h), compat.fast_divisor(s_q))
        grid = cutlass.min(useful, cutlass.max(CTAS - n_units, CTAS // 2)) + n_units
        dealt = None
        if cutlass.const_expr(one_wave):
            dealt = Int32(grid)
            grid = cutlass.min(grid, CTAS)
        _merge(
            o_accum, lse_accum, split_begin, units, out, lse, lse_factor, empty_lse, by, decode,
            dealt,
        ).launch(
            grid=(grid, 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )  # fmt: skip


class Decode(NamedTuple):
    """Inputs that merge takes from the decode in front of it.

    Attributes:
        listed: its work list, where that may be from outside (coverage.py); else None.
        sink: ``epilogue.Results.sink``.
    """

    listed: Any
    sink: Any = None


class By(NamedTuple):
    """Divisors: a row by heads is its token, a token by tokens its place in ``out``."""

    heads: compat.FastDivisor
    tokens: compat.FastDivisor


@dataclass(frozen=True)
class Form:
    """Number and width of the loads that a warp has in flight.

    Attributes:
        exact: whether partial rows are fp32 and without exponents.
        splits: of a strip, at most.
        runs: of a strip.
        together: strips.
        words: of a lane's load.
    """

    exact: bool
    splits: int
    runs: int = 1
    together: int = 1
    words: int = LOAD

    @property
    def channels(self) -> int:
        """Channels of a lane's load, all under one exponent; rows of fp32 have no exponents."""
        return self.words if self.exact else 2 * self.words

    @property
    def run(self) -> int:
        """Channels of a warp's load."""
        return quant.WARP * self.channels

    @property
    def strips(self) -> int:
        """Strips of a query row."""
        return KV_LORA_RANK // (self.runs * self.run)

    def place(self, strip: Any, lane: Any) -> tuple[Any, Any]:
        """(row of its unit, the lane's first channel) of a strip."""
        row = strip >> (self.strips.bit_length() - 1)
        part = strip & (self.strips - 1)
        return row, part * (self.runs * self.run) + lane * self.channels


def forms(exact: bool) -> tuple[Form, ...]:
    """Forms for up to ALONE splits, for few splits first; each loads at most 32 words a lane."""
    return (
        Form(exact, 2, runs=2, together=2),
        Form(exact, 4, runs=2),
        Form(exact, 6),
        Form(exact, CHUNK),
        Form(exact, ALONE, words=LOAD // 2),
    )


class _Partial:
    """Running weighted sum of a lane's channels: maximum, weight sum, channel sums."""

    def __init__(self, form: Form) -> None:
        self.form, self.count = form, form.runs * form.channels
        self.state = cute.make_rmem_tensor((2 + self.count,), Float32)
        self.state.fill(0.0)
        self.state[0] = -Float32.inf

    def rescale(self, top: Any, empty: bool = False) -> Any:
        """Raises the maximum to at least ``top``; returns the reference to subtract from lse.

        The reference is finite even if nothing was seen yet, so that -inf - reference is -inf.
        ``fmax`` skips NaN: a NaN lse enters through its weight.

        Args:
            empty: nothing was added so far.
        """
        old = self.state[0]
        new = cute.arch.fmax(old, top)
        reference = _select(new == -Float32.inf, Float32(0.0), new)
        self.state[0] = new
        if not empty:
            shrink = _exp2(old - reference)
            for i in range(1, 2 + self.count):
                self.state[i] = self.state[i] * shrink
        return reference

    def add(self, weight: Any, runs: list[list[Any]], factors: list[Any] | None = None) -> None:
        """Adds a split: the channels of each run, times its factor; None: all 1."""
        self.state[1] = self.state[1] + weight
        for r, values in enumerate(runs):
            scaled = weight if factors is None else weight * factors[r]
            for i, value in enumerate(values):
                at = 2 + r * self.form.channels + i
                self.state[at] = self.state[at] + scaled * value


def _exp2(x: Any) -> Any:
    return cute.math.exp2(x, fastmath=True)


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return Float32(cutlass.select_(condition, yes, no))


class _Loads:
    """The channels of ``form.together`` strips, their exponents and lse, in flight together."""

    def __init__(self, form: Form) -> None:
        self.form = form
        strips, splits, runs = form.together, form.splits, form.runs
        self.words = cute.make_rmem_tensor((strips, splits, runs, form.words), Uint32)
        self.exponents = cute.make_rmem_tensor((strips, splits, runs), Uint32)
        self.lses = cute.make_rmem_tensor((strips, splits), Float32)
        self.words.fill(0)
        self.exponents.fill(partials.LEAST)
        self.lses.fill(-Float32.inf)

    def add_to(self, partial: _Partial, strip: int, empty: bool = False) -> None:
        """Adds the splits of one strip in ascending order; a split not loaded weighs 0.

        Args:
            empty: nothing was added to ``partial`` so far.
        """
        splits = range(self.form.splits)
        for first in splits[::CHUNK]:
            chunk = splits[first : first + CHUNK]
            top = self.lses[strip, first]
            for j in chunk[1:]:
                top = cute.arch.fmax(top, self.lses[strip, j])
            reference = partial.rescale(top, empty=empty and first == 0)
            for j in chunk:
                self._add(partial, strip, j, _exp2(self.lses[strip, j] - reference))

    def _add(self, partial: _Partial, strip: int, j: int, weight: Any) -> None:
        runs, words = range(self.form.runs), range(self.form.words)
        loaded = [[self.words[strip, j, r, i] for i in words] for r in runs]
        if self.form.exact:
            partial.add(weight, [[word.bitcast(Float32) for word in run] for run in loaded])
        else:
            factors = [partials.factor_from_stored(self.exponents[strip, j, r]) for r in runs]
            partial.add(weight, [quant.to_f32(run, F16) for run in loaded], factors)


@cute.jit
def _issue(
    loads: cutlass.Constexpr,
    strip: cutlass.Constexpr,
    o_accum: cute.Tensor,
    lse_accum: cute.Tensor,
    first: Int32,
    count: Int32,
    at: Any,
) -> None:
    """Loads splits first .. first + count - 1 of one strip, at = (row of the splits, channel);
    ``count`` may be larger than what ``loads`` holds."""
    row, channel = at
    form, words, exponents, lses = loads.form, loads.words, loads.exponents, loads.lses
    row_at = o_accum.iterator + (Int64(first) * o_accum.stride[0] + Int64(row) * o_accum.shape[2])
    o_at, byte_at = row_at + channel, partials.exponents_at(row_at, channel)
    lse_at = lse_accum.iterator + (Int64(first) * lse_accum.stride[0] + row)
    for j in cutlass.range_constexpr(form.splits):
        if j < count:
            for r in cutlass.range_constexpr(form.runs):
                loaded = compat.load_words(o_at + r * form.run, form.words, **compat.STRONG)
                if cutlass.const_expr(not form.exact):
                    byte = byte_at + r * (form.run // EXPONENT_CHANNELS)
                    exponents[strip, j, r] = partials.load_exponent(byte, **compat.STRONG)
                for i in cutlass.range_constexpr(form.words):
                    words[strip, j, r, i] = loaded[i]
        o_at = o_at + Int64(o_accum.stride[0])  # a pointer for each split would be 16 registers
        byte_at = byte_at + Int64(o_accum.stride[0]) * 2
    for j in cutlass.range_constexpr(form.splits):
        if j < count:
            word = compat.load_words(lse_at, 1, **compat.STRONG)[0]
            lses[strip, j] = word.bitcast(Float32)
        lse_at = lse_at + Int64(lse_accum.stride[0])


@cute.jit
def _finish(
    partial: cutlass.Constexpr,
    out: cute.Tensor,
    lse: cute.Tensor,
    factors: Any,
    where: Any,
    by: By,
) -> None:
    """Normalises and stores one strip; where = (query row, channel)."""
    row, channel = where
    lse_factor, empty_lse, sink = factors
    form, top, total = partial.form, partial.state[0], partial.state[1]
    empty = total == 0.0  # a NaN total is not empty
    inv = Float32(1.0) / _select(empty, Float32(1.0), total)
    if cutlass.const_expr(sink is not None):  # noqa: SIM102 (only this is at compile time)
        if sink.shape[0] > 0:
            value = top + cute.math.log2(total, fastmath=True)
            kept = of_sink(sink, divmod(row, by.heads)[1], value)
            inv = inv * _select(empty, Float32(1.0), kept)
    first = out.iterator + (Int64(row) * KV_LORA_RANK + channel)
    for r in cutlass.range_constexpr(form.runs):
        at = 2 + r * form.channels
        values = [partial.state[at + i] * inv for i in range(form.channels)]
        words = quant.pack(values, out.element_type)
        for i in cutlass.range_constexpr(0, len(words), LOAD):
            ahead = r * form.run + i * 32 // out.element_type.width
            compat.store_words(first + ahead, words[i : i + LOAD])
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
    decode: Any,
    dealt: Any,
) -> None:
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    most = 2 + Form(partials.is_exact(o_accum), CHUNK).channels
    sums = smem.allocate_tensor(
        Float32, cute.make_layout((most, WARPS, quant.WARP), stride=(WARPS * 32, 32, 1)), 16
    )
    counts = None
    if cutlass.const_expr(decode is not None and decode.listed is not None):
        counts = smem.allocate_tensor(Int32, cute.make_layout((coverage.COUNTS, WARPS)), 16)
    if cutlass.const_expr(decode is None):
        compat.pdl_wait()
    compat.pdl_launch_dependents()
    tensors = (o_accum, lse_accum, split_begin, units, out, lse)
    factors = (lse_factor, empty_lse, None if decode is None else decode.sink)
    if cutlass.const_expr(dealt is None):
        _turn(tensors, factors, (sums, counts), by, decode, (block, None), None)
    else:
        grid, _, _ = cute.arch.grid_dim()
        end = Int32(dealt)
        if _nothing_to_do(split_begin, decode):
            end = Int32(cutlass.min(dealt, grid))
        for turn in cutlass.range(block, end, grid, unroll=1):
            _turn(tensors, factors, (sums, counts), by, decode, (turn, dealt), block == 0)


@cute.jit
def _nothing_to_do(split_begin: cute.Tensor, decode: Any) -> Boolean:
    """True if no unit has splits and no coverage check is wanted."""
    nothing = Boolean(split_begin[split_begin.shape[0] - 1] <= 0)
    if cutlass.const_expr(decode.listed is not None):
        nothing = nothing & (decode.listed.wanted == 0)
    return nothing


@cute.jit
def _turn(
    tensors: Any, factors: Any, shared: Any, by: By, decode: Any, which: Any, waits: Any
) -> None:
    """Merges one logical CTA's share of a unit.

    If the unit is not covered, the first of its logical CTAs writes NaN instead.

    Args:
        which: (number of the logical CTA, how many there are; None: the grid).
        waits: whether it waits for decode even if it writes nothing; None: it always does.
    """
    o_accum, lse_accum, split_begin, units, out, lse = tensors
    sums, counts = shared
    turn, dealt = which
    count = split_begin.shape[0] - 1
    own = None if dealt is None else which
    piece = merge_piece.piece_of(split_begin, o_accum.shape[0], own)
    unit, mine, begin, n = piece.unit, piece.mine, piece.begin, piece.n
    sound, covered = Boolean(True), Boolean(True)
    asked = cutlass.const_expr(decode is not None and decode.listed is not None)
    if cutlass.const_expr(asked):  # noqa: SIM102 (only this is at compile time)
        if decode.listed.wanted != 0:
            if cutlass.const_expr(waits is not None):
                cute.arch.sync_threads()  # all have read the counts of the turn before
            writes_nan = (mine == 0) | (turn < count)  # if it is not covered
            if writes_nan | _has_strips(o_accum, units, out, piece):
                sound, covered = coverage.covers(
                    decode.listed, split_begin, o_accum.shape[0], unit, counts, WARPS * quant.WARP
                )
            if not sound:
                unit, mine = merge_piece.unit_by_number(turn, count)
    if cutlass.const_expr(decode is not None):
        if cutlass.const_expr(waits is None):
            compat.pdl_wait()
        elif waits | (n > 0) | (not covered):
            compat.pdl_wait()  # returns at once from a CTA's second turn on
    if covered:
        if n > 0:
            row, rows = merge_piece.rows_of(units, out, unit, o_accum.shape[1])
            _merge_unit(
                (o_accum, lse_accum, out, lse), sums, (row, begin, n), (mine, piece.team, rows),
                factors, by,
            )  # fmt: skip
    elif mine == 0:
        row, rows = merge_piece.rows_of(units, out, unit, o_accum.shape[1])
        coverage.no_result(out, lse, row, rows, WARPS * quant.WARP)


@cute.jit
def _merge_unit(
    tensors: Any, sums: cute.Tensor, piece: Any, share: Any, factors: Any, by: By
) -> None:
    """A CTA's share of one unit: share = (its number, CTAs of the unit, the unit's rows); piece =
    (its first query row, first split, splits)."""
    n, few = piece[2], forms(partials.is_exact(tensors[0]))
    for i in cutlass.range_constexpr(len(few)):  # whatever the share: n alone decides on the order
        most = few[i - 1].splits if i else 0
        if (n > most) & (n <= few[i].splits):
            _few_splits(few[i], tensors, piece, share, factors, by)
    if n > ALONE:
        _many_splits(Form(few[0].exact, CHUNK), tensors, sums, piece, share, factors, by)


@cute.jit
def _span(form: cutlass.Constexpr, share: Any) -> Any:
    """(first, end) of the CTA's strips of a unit; all if the table is damaged."""
    mine, team, rows = share
    strips = rows * form.strips
    each = (strips + (team - 1)) // team
    first = compat.at_most(mine * each, strips)
    return first, cutlass.min(first + each, strips)


@cute.jit
def _has_strips(o_accum: cute.Tensor, units: cute.Tensor, out: cute.Tensor, piece: Any) -> Boolean:
    """True if the CTA has strips of its unit to merge."""
    exact, n = cutlass.const_expr(partials.is_exact(o_accum)), piece.n
    few = cutlass.const_expr(forms(exact))
    _, rows = merge_piece.rows_of(units, out, piece.unit, o_accum.shape[1])
    share = (piece.mine, piece.team, rows)
    has = Boolean(False)
    for i in cutlass.range_constexpr(len(few)):
        if (n > (few[i - 1].splits if i else 0)) & (n <= few[i].splits):
            has = _span_is_not_empty(few[i], share)
    if n > ALONE:
        has = _span_is_not_empty(Form(exact, CHUNK), share)
    return has


def _span_is_not_empty(form: Form, share: Any) -> Any:
    first, end = _span(form, share)
    return Boolean(first < end)


@cute.jit
def _few_splits(
    form: cutlass.Constexpr, tensors: Any, piece: Any, share: Any, factors: Any, by: By
) -> None:
    """Up to ``form.splits`` splits, all in flight at once."""
    o_accum, lse_accum, out, lse = tensors
    first_row, begin, n = piece
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    first, end = _span(form, share)
    for base in cutlass.range(first + warp, end, WARPS * form.together, unroll=1):
        loads = _Loads(form)
        for k in cutlass.range_constexpr(form.together):
            u = base + k * WARPS
            count = n if u < end else 0
            _issue(loads, k, o_accum, lse_accum, begin, count, form.place(u, lane))
        for k in cutlass.range_constexpr(form.together):
            u = base + k * WARPS
            partial = _Partial(form)
            loads.add_to(partial, k, empty=True)
            row, channel = form.place(u, lane)
            if u < end:
                _finish(partial, out, lse, factors, (first_row + row, channel), by)


@cute.jit
def _many_splits(
    form: cutlass.Constexpr, tensors: Any, sums: cute.Tensor, piece: Any, share: Any, factors: Any,
    by: By,
) -> None:  # fmt: skip
    """More splits: the CTA's warps share a strip's splits."""
    o_accum, lse_accum, out, lse = tensors
    first_row, begin, n = piece
    tidx, _, _ = cute.arch.thread_idx()
    lane, warp = tidx % quant.WARP, tidx // quant.WARP
    run = (n + (WARPS - 1)) // WARPS
    first, mine = begin + warp * run, cutlass.min(run, n - warp * run)
    strip, end = _span(form, share)
    for u in cutlass.range(strip, end, unroll=1):
        row, channel = form.place(u, lane)
        partial = _Partial(form)
        for base in cutlass.range(0, mine, CHUNK, unroll=1):
            loads = _Loads(form)
            _issue(loads, 0, o_accum, lse_accum, first + base, mine - base, (row, channel))
            loads.add_to(partial, 0)
        for i in cutlass.range_constexpr(2 + partial.count):
            sums[i, warp, lane] = partial.state[i]
        cute.arch.sync_threads()
        if warp == 0:
            total = _combine(form, sums, lane)
            _finish(total, out, lse, factors, (first_row + row, channel), by)
        cute.arch.sync_threads()


def _combine(form: Form, sums: Any, lane: Any) -> _Partial:
    """Adds the warps' partial sums in ascending order of their runs."""
    total = _Partial(form)
    top = sums[0, 0, lane]
    for w in range(1, WARPS):
        top = cute.arch.fmax(top, sums[0, w, lane])
    reference = total.rescale(top)
    for w in range(WARPS):
        weight = _exp2(sums[0, w, lane] - reference)
        total.state[1] = total.state[1] + weight * sums[1, w, lane]
        for i in range(2, 2 + total.count):
            total.state[i] = total.state[i] + weight * sums[i, w, lane]
    return total


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    f32, i32 = compat.DTYPES["f32"], compat.DTYPES["i32"]
    splits, unit_rows = compat.sym(name="slots"), compat.sym(name="unit_rows")
    b, s_q, h = compat.sym(name="b"), compat.sym(name="s_q"), compat.sym(name="h")
    fakes = {
        "o_accum": partials.fake(splits, unit_rows),
        "lse_accum": compat.contiguous(f32, (splits, unit_rows), align=4),
        "split_begin": compat.vector(i32, compat.sym(name="n_units_plus_1")),
        "units": compat.units_fake(i32),
        "out": compat.contiguous(compat.dtype(spec.out_dtype), (b, s_q, h, KV_LORA_RANK)),
        "lse": compat.contiguous(f32, (b, h, s_q), align=4),
        "lse_factor": Float32(1.0),
        "empty_lse": Float32(float("-inf")),
    }
    return merge, fakes

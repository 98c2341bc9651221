"""Stores of finished query rows: to ``out`` and ``lse``, or to a split of partial results."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..blocks import compat
from ..blocks.packing import pack
from ..formats.dims import KV_LORA_RANK as D
from ..formats.dims import PARTIAL_ROW
from ..load.work_list import LOG2E
from . import partials


class Results(NamedTuple):
    """Tensors that a decode kernel writes, and the sinks that scale them."""

    out: cute.Tensor  # (b, s_q, h, 512)
    lse: cute.Tensor  # (b, h, s_q)
    o_accum: cute.Tensor  # (splits, unit_rows, PARTIAL_ROW) fp16 or (.., 512) fp32, see partials.py
    lse_accum: cute.Tensor  # (splits, unit_rows)
    sink: Any = None  # (h,) fp32: a logit a head that joins the softmax sum without a V; (0,): none

    @property
    def tight(self) -> bool:
        """True if a split has a unit's rows only, any number of them, and no padding: in sparse
        decode, the only op with sinks.  If false, units are whole row tiles."""
        return self.sink is not None


@cute.jit
def of_sink(sink, head, value):
    """Factor 1 / (1 + exp(sink - lse)) that the sink of ``head`` leaves to a row's values.
    ``value``: LSE, in log2 units, of a row that saw a token."""
    return 1.0 / (1.0 + cute.math.exp2(sink[head] * LOG2E - value, fastmath=True))


@cute.jit
def finish_row(
    results, call, split, rows, row, row_sum, m_ref, log2_in: cutlass.Constexpr = None
):  # fmt: skip
    """Write the LSE of the CTA's row ``row``: a final one to ``lse``, a split's (in log2 units) to
    ``lse_accum``.

    Args:
        rows: the CTA's rows of the work tile (``work_list.Rows``).
        log2_in: ``log2_in(row_sum, m_ref)``, log2 of row_sum 2^m_ref; None: the sum of the m_ref
            and of the fast logarithm.

    Returns the factor of the row's values: 1/row_sum, times ``of_sink`` if the row is final and has
    a sink; 0 if the row saw no token.  LSE and factor are NaN if the work tile does not stand
    (``rows.stands`` is 0): its query tokens may be another request's by now.
    """
    empty, kept = row_sum == 0.0, Float32(1.0)
    if const_expr(log2_in is None):
        value = cute.math.log2(row_sum, fastmath=True) + m_ref
    else:
        value = log2_in(row_sum, m_ref)
    if const_expr(rows.stands is not None):
        value = Float32(cutlass.select_(rows.stands != 0, value, Float32(math.nan)))
        empty = empty & (rows.stands != 0)
    if split < 0:
        at = rows.first + row
        if compat.unsigned(at) < compat.unsigned(rows.end):
            token, head = divmod(at, call.by_heads)
            b, s = divmod(token, call.by_tokens)
            final = value * call.lse_factor
            results.lse[b, head, s] = call.empty_lse if empty else final
            if const_expr(results.sink is not None):  # noqa: SIM102 (only this is at compile time)
                if results.sink.shape[0] > 0:
                    kept = of_sink(results.sink, head, value)
    elif split < results.o_accum.shape[0]:
        partial = -Float32.inf if empty else value
        if const_expr(results.tight):
            if rows.of_split + row < results.lse_accum.shape[1]:
                results.lse_accum[split, rows.of_split + row] = partial
        else:
            results.lse_accum[split, rows.of_split + row] = partial
    inverse = 1.0 / row_sum
    if const_expr(results.sink is not None):
        inverse = inverse * kept
    if const_expr(rows.stands is not None):
        inverse = Float32(cutlass.select_(rows.stands != 0, inverse, Float32(math.nan)))
    return Float32(0.0) if empty else inverse


class Shared(NamedTuple):
    """Lanes that share the exponents of a thread's channels in a split's partial row (partials.py).

    Attributes:
        lane_bits: lanes that differ from this one in these bits of their numbers alone hold the
            other channels of the row; together, whole groups of 16.
        channel, groups: this lane writes the exponents of so many groups from this channel on.
        writes: whether it writes any.
    """

    lane_bits: tuple[int, ...]
    channel: Any
    groups: int
    writes: Any = True


class Held(NamedTuple):
    """Values of one row of the CTA that a thread holds.

    Attributes:
        row: how far from the thread's first row; an int.
        runs: channel -> fp32 values of neighbouring channels from there on; the channel is a
            distance, too, an int; n values lie at a multiple of n, a power of two.
    """

    row: int
    runs: dict[int, Any]


class Woven(NamedTuple):
    """Four lanes that hold neighbouring pairs of channels, and swap them to store 16 bytes each.

    A warp's store of pairs touches as many lines as it has rows and carries 16 bytes for each; so
    many stores are what the end of a work tile would take its time for.

    Attributes:
        bits: of their lane numbers, in which they differ.
        lane: which of the four this one is: its pairs are channel 2 * lane, and the next, of 8.
        step: channels from a run of a thread to the next, which have 2 channels each.
    """

    bits: tuple[int, int]
    lane: Any
    step: int

    def count(self, dtype: Any) -> int:
        """Lanes whose pairs are 16 bytes."""
        return 16 * 8 // dtype.width // 2

    def offset(self, dtype: Any) -> Any:
        """Channels from the first lane's first run to where this lane's stores begin."""
        n = self.count(dtype)
        return self.lane % n * self.step + self.lane // n * (2 * n)

    def swap(self, runs: list[Any], dtype: Any) -> list[Any]:
        """The words that this lane stores of a group; all lanes of a warp call this."""
        words = [pack([run[0], run[1]], dtype) for run in runs]
        for r in range(self.count(dtype).bit_length() - 1):
            upper = (self.lane >> r) % 2 == 1
            for i in range(len(words)):
                if not i >> r & 1:
                    k = i + (1 << r)
                    words[i], words[k] = self._traded(words[i], words[k], upper, self.bits[r])
        return [word for run in words for word in run]

    @staticmethod
    def _traded(
        low: list[Any], high: list[Any], upper: Any, bit: int
    ) -> tuple[list[Any], list[Any]]:
        """Two runs' words after the lower lane gave its ``high`` for the upper one's ``low``."""
        kept = ([], [])
        for a, b in zip(low, high, strict=True):
            got = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, a, b), bit)
            kept[0].append(cutlass.select_(upper, got, a))
            kept[1].append(cutlass.select_(upper, b, got))
        return kept


@cute.jit
def write_rows(results, split, rows, at, held, shared, woven=None):
    """Store a thread's normalised channels of its rows, to ``out`` or to a split of ``o_accum``.

    With ``shared.lane_bits`` all lanes of a warp call this, each with its rows.  Whatever is known
    at compile time is a distance from the thread's first row and channel: then addresses are
    immediates of the stores, of which there are so many that else their arithmetic takes longer.
    All exponents come before the first store: each is a chain of shuffles, and branches between
    them would let every row wait for its own.

    Args:
        rows: as in ``finish_row``.
        at: (row of the CTA, channel) of the thread's first; of the first lane's of those woven.
        held: a ``Held`` for each row.
        shared: a ``Shared``.
        woven: a ``Woven``; None: a thread stores what it holds.
    """
    row, _ = at
    first = rows.first + row
    left = rows.end - first if compat.unsigned(first) < compat.unsigned(rows.end) else Int32(0)
    if split < 0:
        target = target_of(results.out, Int64(first) * D, at, held, woven)
        for one in held:
            if cutlass.const_expr(woven is not None):
                store_woven(target, one.row * D, one.runs, one.row < left, woven)
            elif one.row < left:
                for c, values in one.runs.items():
                    store_run(target, one.row * D + c, values)
    elif cutlass.const_expr(partials.is_exact(results.o_accum)):
        t = results.o_accum
        left = left if split < t.shape[0] else Int32(0)
        place = Int64(split) * t.stride[0] + (rows.of_split + row) * D
        if cutlass.const_expr(woven is not None):  # pairs as they are: swaps of 8 bytes spill
            at = (row, at[1] + 2 * woven.lane)
        target = target_of(t, place, at, held, None)
        for one in held:
            if one.row < left:
                for c, values in one.runs.items():
                    store_run(target, one.row * D + c, values)
    else:
        exponents = [
            partials.exponent_of(
                [run[i] for run in one.runs.values() for i in range(cute.size(run))],
                shared.lane_bits,
            )
            for one in held
        ]
        t = results.o_accum
        left = left if split < t.shape[0] else Int32(0)
        place = Int64(split) * t.stride[0] + (rows.of_split + row) * PARTIAL_ROW
        bytes_at = partials.exponents_at(t.iterator + place, shared.channel)
        target = target_of(t, place, at, held, woven)
        for x in cutlass.range_constexpr(len(held)):
            one = held[x]
            runs = {c: partials.stored(run, exponents[x]) for c, run in one.runs.items()}
            if cutlass.const_expr(woven is not None):
                store_woven(target, one.row * PARTIAL_ROW, runs, one.row < left, woven)
            elif one.row < left:
                for c, values in runs.items():
                    store_run(target, one.row * PARTIAL_ROW + c, values)
            if (one.row < left) & shared.writes:
                partials.store_exponents(
                    bytes_at + 2 * PARTIAL_ROW * one.row, exponents[x], shared.groups
                )


def target_of(tensor, place, at, held, woven):
    """Pointer to the first value that this lane stores; ``place``: elements from the start of
    ``tensor`` to the thread's first row."""
    _, channel = at
    if woven is not None:
        return tensor.iterator + (place + channel + woven.offset(tensor.element_type))
    n = min(cute.size(run) for run in held[0].runs.values())
    return tensor.iterator + cute.assume(place + channel, divby=n)


@cute.jit
def store_woven(target, offset, runs, wanted, woven):
    """Runs of a row, swapped in groups of 16 bytes, to ``offset`` and their channels from there on
    where ``wanted``.  A store follows its shuffles at once: for more words there are no registers
    beside the values, and to hide shuffles behind each other gains nothing."""
    pairs, n = list(runs.items()), woven.count(target.dtype)
    for i in cutlass.range_constexpr(0, len(pairs), n):
        words = woven.swap([run for _, run in pairs[i : i + n]], target.dtype)
        if wanted:
            compat.store_words(target + (offset + pairs[i][0]), words)


def store_run(target, offset: int, values):
    """Neighbouring fp32 values, converted to the element type of the pointer ``target``; 16 bytes a
    store at most.

    ``offset``: of the first from there; it lies at a multiple of their number.
    """
    dtype = target.dtype
    n = min(cute.size(values), 16 * 8 // dtype.width)
    for first in range(0, cute.size(values), n):
        part = cute.make_rmem_tensor((n,), dtype)
        source = cute.make_tensor(values.iterator + first, cute.make_layout(n))
        part.store(source.load().to(dtype))
        place = (target + (offset + first)).align(n * dtype.width // 8)
        cute.autovec_copy(part, cute.make_tensor(place, cute.make_layout(n)))

"""merge_states: combine attention results over disjoint sets of tokens into out and lse.

A *part* is one such result: rows of 512 channels (latents), or of 256 or 128 (heads of dense
prefill), each normalised, and their LSE.  ``merge``
finishes the splits of a decode by its plan; parts come from anywhere: other ranks (context
parallelism), a shared prefix (cascades), chunks.

Roles        one warp owns a query row, all parts of it; WARPS warps a CTA, which share nothing.
             Rows of 128 channels of 16 bits are 16 loads of 16 bytes: half a warp owns one.
             mode ``pair``: two tensors; ``list``: up to MOST of them, of which the first n count;
             ``stack``: one tensor of n parts.
Memory       registers only: FLIGHT 16-byte loads a lane, and its 16 (8, 4) sums; no shared memory.
Timeline     wait for the previous grid | lse and channels of up to FLIGHT loads in flight |
             weights, FMA, next parts | normalise, store
Bytes moved  per row of 512 and part 1028 (bf16) or 2052 (fp32) read; 1028 or 2052 a row written.

    m = max_i lse_i    w_i = b^(lse_i - m)    out = sum_i w_i o_i / sum_i w_i
    lse = m + log_b sum_i w_i                 with b = e or 2: 2 = b^lse_factor

LSE are never converted to another base as a whole: one part that is not empty comes out with the
bits it came with.  A part whose lse_i is infinite, of either sign, has seen no token: its weight is
0 and its channels, which may be NaN, do not count.  A row that is empty in all parts has out 0 and
the lse of part 0.  A NaN lse_i makes out and lse NaN.  Parts are added in their order, so results
do not depend on timing.

In place: ``out`` may be the memory of a part with the same strides, ``lse`` that of a part's lse.
A lane writes the channels that it has read, and a row's lse is written behind a barrier of the one
warp that reads it; no load may be one of read-only memory (``ld.global.nc``).

Bound: b * s_q * h < 2^31 rows, of which ``out`` alone would be 2 TB.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..blocks import compat, quant

if TYPE_CHECKING:
    from ..spec import VariantSpec

WARPS = 4
MOST = 8  # tensors of mode ``list``
FLIGHT = 8  # 16-byte loads of a lane that are issued before the first is used


@cute.jit
def merge_pair(
    o_0: cute.Tensor,  # in_dtype (b, s_q, h, d_v)
    o_1: cute.Tensor,
    lse_0: cute.Tensor,  # f32 (b, h, s_q)
    lse_1: cute.Tensor,
    out: cute.Tensor,  # out_dtype (b, s_q, h, d_v)
    lse: cute.Tensor,  # f32 (b, h, s_q)
    lse_factor: Float32,
    stream: Any,
) -> None:
    """Host half for two tensors."""
    _launch((o_0, o_1), (lse_0, lse_1), (out, lse), None, lse_factor, stream)


@cute.jit
def merge_list(
    o_0: cute.Tensor,  # in_dtype (b, s_q, h, d_v)
    o_1: cute.Tensor,
    o_2: cute.Tensor,
    o_3: cute.Tensor,
    o_4: cute.Tensor,
    o_5: cute.Tensor,
    o_6: cute.Tensor,
    o_7: cute.Tensor,
    lse_0: cute.Tensor,  # f32 (b, h, s_q)
    lse_1: cute.Tensor,
    lse_2: cute.Tensor,
    lse_3: cute.Tensor,
    lse_4: cute.Tensor,
    lse_5: cute.Tensor,
    lse_6: cute.Tensor,
    lse_7: cute.Tensor,
    out: cute.Tensor,  # out_dtype (b, s_q, h, d_v)
    lse: cute.Tensor,  # f32 (b, h, s_q)
    parts: Int32,  # how many of the tensors count; the others are not read
    lse_factor: Float32,
    stream: Any,
) -> None:
    """Host half for up to MOST tensors."""
    outs = (o_0, o_1, o_2, o_3, o_4, o_5, o_6, o_7)
    lses = (lse_0, lse_1, lse_2, lse_3, lse_4, lse_5, lse_6, lse_7)
    _launch(outs, lses, (out, lse), parts, lse_factor, stream)


@cute.jit
def merge_stack(
    o: cute.Tensor,  # in_dtype (n, b, s_q, h, d_v)
    lses: cute.Tensor,  # f32 (n, b, h, s_q)
    out: cute.Tensor,  # out_dtype (b, s_q, h, d_v)
    lse: cute.Tensor,  # f32 (b, h, s_q)
    lse_factor: Float32,
    stream: Any,
) -> None:
    """Host half for one tensor of n parts."""
    _launch((o,), (lses,), (out, lse), o.shape[0], lse_factor, stream)


@cute.jit
def _launch(
    outs: Any, lses: Any, results: Any, parts: Any, lse_factor: Float32, stream: Any
) -> None:
    """One warp a row; results = (out, lse); ``parts`` of the tensors count, None: all."""
    b, s_q, h, d_v = results[0].shape
    rows = b * s_q * h
    block_rows = WARPS * Share(d_v, outs[0].element_type).warp_rows
    if rows > 0:  # an empty grid is a launch error
        by = (compat.fast_divisor(h), compat.fast_divisor(s_q))
        factors = (Float32(1.0) / lse_factor, lse_factor)
        _merge_states(outs, lses, results, parts, factors, by).launch(
            grid=((rows + (block_rows - 1)) // block_rows, 1, 1),
            block=(WARPS * quant.WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )


class Share:
    """Distribution of a row of ``d_v`` channels of ``dt`` over lanes.

    Attributes:
        lanes: that own a row: a warp, or half of one where that takes the row in 16-byte loads.
        chunks: 16-byte loads of a lane.
        channels: of a lane.
    """

    def __init__(self, d_v: int, dt: Any) -> None:
        self.lanes = min(quant.WARP, d_v // quant.lane_channels(dt))
        self.chunks = d_v // (self.lanes * quant.lane_channels(dt))
        self.channels = d_v // self.lanes

    @property
    def warp_rows(self) -> int:
        return quant.WARP // self.lanes


class Sum:
    """Running weighted sum of a lane's channels: maximum, weight sum, channel sums."""

    def __init__(self, factors: tuple[Any, Any], count: int) -> None:
        self.to_log2, self.to_base = factors
        self.count = count
        self.top = cute.make_rmem_tensor((1,), Float32)
        self.sum = cute.make_rmem_tensor((1,), Float32)
        self.channels = cute.make_rmem_tensor((count,), Float32)
        self.top.fill(-Float32.inf)
        self.sum.fill(0.0)
        self.channels.fill(0.0)

    def weight(self, difference: Any) -> Any:
        return cute.math.exp2(difference * self.to_log2, fastmath=True)

    def finish(self) -> tuple[Any, Any, list[Any]]:
        """(True if the row is empty, its lse, which counts only if it is not, its channels)."""
        total = self.sum[0]
        empty = total == 0.0  # a NaN total is not empty
        inverse = Float32(1.0) / _select(empty, Float32(1.0), total)
        lse = self.top[0] + cute.math.log2(total, fastmath=True) * self.to_base
        return empty, lse, [self.channels[i] * inverse for i in range(self.count)]


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return Float32(cutlass.select_(condition, yes, no))


class Loads:
    """A lane's channels, and the lse, of a row in ``parts`` parts, in flight together."""

    def __init__(self, parts: int, dt: Any, chunks: int) -> None:
        self.parts, self.dt, self.chunks = parts, dt, chunks
        self.words = cute.make_rmem_tensor((parts, chunks, 4), Uint32)
        self.lses = cute.make_rmem_tensor((parts,), Float32)
        self.words.fill(0)
        self.lses.fill(-Float32.inf)

    def add_to(self, total: Sum) -> None:
        """Adds the parts in ascending order; what is empty or was not loaded weighs 0.

        The reference is finite even if nothing was seen yet, so that -inf - reference is -inf.
        ``fmax`` skips NaN: a NaN lse enters through its weight.
        """
        logs = [self.lses[j] for j in range(self.parts)]
        empty = [cute.arch.fmax(x, -x) == Float32.inf for x in logs]
        logs = [_select(e, -Float32.inf, x) for e, x in zip(empty, logs)]
        new = total.top[0]
        for x in logs:
            new = cute.arch.fmax(new, x)
        reference = _select(new == -Float32.inf, Float32(0.0), new)
        shrink = total.weight(total.top[0] - reference)
        total.top[0] = new
        total.sum[0] = total.sum[0] * shrink
        for i in range(total.count):
            total.channels[i] = total.channels[i] * shrink
        for j, x in enumerate(logs):
            weight = total.weight(x - reference)
            total.sum[0] = total.sum[0] + weight
            for i, value in enumerate(self.channels(j, empty[j])):
                total.channels[i] = total.channels[i] + weight * value

    def channels(self, part: int, empty: Any) -> list[Any]:
        """fp32 values of one part; 0 if it is empty, whatever was loaded."""
        words = [
            Uint32(cutlass.select_(empty, Uint32(0), self.words[part, k, i]))
            for k in range(self.chunks)
            for i in range(4)
        ]
        return quant.to_f32(words, self.dt)


def _at(tensor: Any, coord: tuple[Any, ...]) -> Any:
    """Pointer to an element, whatever the strides; its offset has 64 bits."""
    terms = (Int64(x) * stride for x, stride in zip(coord, tensor.stride))
    return tensor.iterator + sum(terms, Int64(0))


def _in_part(tensors: Any, part: Any, coord: tuple[Any, ...]) -> Any:
    """Pointer to an element of a part; tensors = one for each part, or (one of all parts,)."""
    if len(tensors) == 1:
        return _at(tensors[0], (part, *coord))
    return _at(tensors[part], coord)


def load_part(words: Any, logs: Any, part: int, ptrs: tuple[Any, Any], d_v: int) -> None:
    """Issues the loads of one part of a row; ptrs = (the lane's channels, the lse)."""
    _, chunks, _ = words.shape
    for k in range(chunks):
        ptr = ptrs[0] + k * (d_v // chunks)
        for i, word in enumerate(compat.load_words(ptr, 4, **compat.STRONG)):
            words[part, k, i] = word
    logs[part] = _load_lse(ptrs[1])


def _load_lse(ptr: Any) -> Any:
    return compat.load_words(ptr, 1, **compat.STRONG)[0].bitcast(Float32)


@cute.jit
def _issue(
    loads: cutlass.Constexpr, outs: Any, lses: Any, first: Any, count: Any, row: Any, lane: Int32
) -> None:
    """Loads the row's parts ``first`` .. ``first + count - 1``, as far as ``loads`` holds them.

    count = None: as many as it holds.  row = (batch, s, head).
    """
    batch, s, head = row
    words, logs, d_v = loads.words, loads.lses, outs[0].shape[-1]
    channel = lane * quant.lane_channels(loads.dt)
    for j in cutlass.range_constexpr(loads.parts):
        o_at = _in_part(outs, first + j, (*row, channel))
        ptrs = (o_at, _in_part(lses, first + j, (batch, head, s)))
        if cutlass.const_expr(count is None) or j < count:
            load_part(words, logs, j, ptrs, d_v)


@cute.kernel
def _merge_states(outs: Any, lses: Any, results: Any, parts: Any, factors: Any, by: Any) -> None:
    tidx, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    out, lse = results
    b, s_q, h, d_v = out.shape
    dt = outs[0].element_type
    share = Share(d_v, dt)
    half = cutlass.const_expr(share.warp_rows > 1)  # lanes of a warp have different rows
    lane = tidx % share.lanes
    first_row = (block * WARPS + tidx // quant.WARP) * share.warp_rows  # of the warp
    index, there = first_row, True
    if half:
        index = first_row + tidx % quant.WARP // share.lanes
        there = index < b * s_q * h
        index = cutlass.min(index, b * s_q * h - 1)
    chunk = FLIGHT // share.chunks
    compat.pdl_wait()
    compat.pdl_launch_dependents()
    if first_row < b * s_q * h:
        token, head = divmod(index, by[0])
        batch, s = divmod(token, by[1])
        row = (batch, s, head)
        total = Sum(factors, share.channels)
        if cutlass.const_expr(len(outs) == 1):
            for first in cutlass.range(0, parts, chunk, unroll=1):
                loads = Loads(chunk, dt, share.chunks)
                left = _if_there(there, parts - first)
                _issue(loads, outs, lses, first, left, row, lane)
                loads.add_to(total)
        elif cutlass.const_expr(parts is None):
            loads = Loads(len(outs), dt, share.chunks)
            count = _if_there(there, len(outs)) if half else None
            _issue(loads, outs, lses, 0, count, row, lane)
            loads.add_to(total)
        else:
            for first in cutlass.range_constexpr(0, len(outs), chunk):
                if first < parts:
                    loads = Loads(chunk, dt, share.chunks)
                    left = _if_there(there, parts - first)
                    _issue(loads, outs, lses, first, left, row, lane)
                    loads.add_to(total)
        empty, value, channels = total.finish()
        if there:
            _store(out, channels, row, lane, dt)
        cute.arch.sync_warp()  # every lane has read the lse, which may be overwritten here
        if there & (lane == 0):
            if empty:
                value = _load_lse(_in_part(lses, 0, (batch, head, s)))
            compat.store_words(_at(lse, (batch, head, s)), [value.bitcast(Uint32)])


def _if_there(there: Any, count: Any) -> Any:
    """Parts to load: none for lanes whose row does not exist."""
    return count if there is True else Int32(cutlass.select_(there, Int32(count), Int32(0)))


def _store(out: Any, channels: list[Any], row: Any, lane: Any, dt: Any) -> None:
    """Stores a lane's channels of one row, which were loaded as elements of ``dt``."""
    vec, wide = quant.lane_channels(dt), quant.lane_channels(out.element_type)
    share = Share(out.shape[-1], dt)
    at = _at(out, (*row, lane * vec))
    for k in range(share.chunks):
        for i in range(0, vec, wide):
            values = channels[k * vec + i : k * vec + min(i + wide, vec)]
            ptr = at + (k * share.lanes * vec + i)
            compat.store_words(ptr, quant.pack(values, out.element_type))


def build(spec: VariantSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(callable, fake arguments by name) of one variant; see ``registry``."""
    dt, f32 = compat.dtype(spec.in_dtype), compat.DTYPES["f32"]
    b, s_q, h = compat.sym(name="b"), compat.sym(name="s_q"), compat.sym(name="h")
    row, log = (b, s_q, h, spec.d_v), (b, h, s_q)

    def logs(shape: tuple[Any, ...]) -> Any:
        return compat.strided(f32, shape, tuple(compat.sym64() for _ in shape), align=4)

    results = {"out": compat.rows(compat.dtype(spec.out_dtype), row), "lse": logs(log)}
    factor = {"lse_factor": Float32(1.0)}
    if spec.mode == "stack":
        n = compat.sym(name="n")
        stacked = {"o": compat.rows(dt, (n, *row)), "lses": logs((n, *log))}
        return merge_stack, {**stacked, **results, **factor}
    count = MOST if spec.mode == "list" else 2
    outs = {f"o_{i}": compat.rows(dt, row) for i in range(count)}
    lses = {f"lse_{i}": logs(log) for i in range(count)}
    if spec.mode == "pair":
        return merge_pair, {**outs, **lses, **results, **factor}
    return merge_list, {**outs, **lses, **results, "parts": Int32(1), **factor}

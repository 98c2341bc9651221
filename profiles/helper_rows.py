"""The helper kernels' rows: append, quantise (both also behind RoPE), fetch, merge, plan, beside a
copy of as many bytes.

``torch_copy`` moves half the bytes of the operation from one tensor to another, so that bytes read
plus bytes written are equal; it says what rate is attainable at that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from profiles import check as checks
from profiles.check import Check
from profiles.pools import Latents, Pool, RowsPool, SnapPool
from profiles.roofline import CONTENT_DIM, HEAD_DIM_QK, ROPE_DIM
from profiles.shapes import HelperShape
from profiles.timing import Call, TimingConfig, buffer_count
from snapmla.testing.reference import merge_states_reference
from snapmla.testing.rope import rms_norm_rows, rotate_rows
from snapmla.testing.rounding import quantize_rows

PAGE = 64
# The truth repeats the kernels' arithmetic, so only a wrong rounding shows: a step of e4m3 in one
# element of a thousand.
GATE_EXACT = 1e-3
CHECKED_TOKENS = 8192
CHECKED_BATCH = 64  # sequences of a merge
RAGGED = (37, 5)  # of packed chunks: first token, and how far lengths are from their mean
MAX_POSITION = 163840  # of DeepSeek-V3's rotary embedding


@dataclass
class Helper:
    """One contender of a helper row: its calls (one per buffer) and the check of a call."""

    name: str
    calls: Sequence[Call]
    check: Callable[[], Check]
    peer: bool


def build(shape: HelperShape, config: TimingConfig, device: torch.device) -> list[Helper]:
    """Our kernel and, where bytes are what it is about, the copy beside it."""
    ours = {
        "append_kv": _append,
        "rope_append_kv": _append,
        "quantize_q": _quantize,
        "rope_quantize_q": _quantize,
        "fetch_dequant": _fetch,
        "merge_states": _merge,
        "plan_decode": _plan,
    }[shape.op]
    if shape.op == "plan_decode":
        return [ours(shape, 2, device)]
    buffers = buffer_count(shape.bytes, config)
    return [ours(shape, buffers, device), _copy(shape.bytes, buffers, device)]


def _copy(nbytes: float, buffers: int, device: torch.device) -> Helper:
    half = int(nbytes / 2) // 16 * 16
    source = torch.randint(0, 255, (buffers, half), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def call(i: int) -> Call:
        return lambda: target[i].copy_(source[i])

    def check() -> Check:
        target.zero_()
        call(0)()
        wrong = int((target[0] != source[0]).sum())
        return Check(wrong == 0, wrong / half)

    return Helper("torch_copy", [call(i) for i in range(buffers)], check, peer=True)


def _compare(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Check:
    error = max(checks.relative_l2(got, want) for got, want in pairs)
    broken = not all(bool(torch.isfinite(got.double()).all()) for got, _ in pairs)
    ok = error <= GATE_EXACT and not broken
    return Check(ok, error, text="" if ok else f"error {error:.2e} > {GATE_EXACT:.0e}")


@dataclass(frozen=True)
class _Rotation:
    """Random positions, one set a buffer, in a table that they share; the weight of a norm."""

    positions: Sequence[torch.Tensor]
    table: torch.Tensor
    weight: torch.Tensor | None

    @classmethod
    def of(cls, shape: HelperShape, tokens: int, buffers: int, device: torch.device) -> _Rotation:
        rng = torch.Generator(device=device).manual_seed(10)
        frequency = 10000.0 ** -(torch.arange(ROPE_DIM // 2, device=device) * 2 / ROPE_DIM)
        angle = torch.arange(MAX_POSITION, device=device)[:, None] * frequency
        positions = [
            torch.randint(0, MAX_POSITION, (tokens,), generator=rng, device=device)
            for _ in range(buffers)
        ]
        weight = None
        if shape.mode == "norm":
            weight = 1 + 0.2 * torch.randn(CONTENT_DIM, generator=rng, device=device)
            weight = weight.bfloat16()
        return cls(positions, torch.cat([angle.cos(), angle.sin()], -1), weight)

    def steps(self, x: torch.Tensor, i: int) -> torch.Tensor:
        """Rows of buffer i, (tokens, ..., 576), as separate kernels leave them."""
        content, rope = x[..., :CONTENT_DIM], x[..., CONTENT_DIM:]
        if self.weight is not None:
            content = rms_norm_rows(content, self.weight)
        return torch.cat([content, rotate_rows(rope, self.positions[i], self.table)], -1)


def _pool(shape: HelperShape, tokens: int, device: torch.device) -> tuple[Pool, Any]:
    """Pages for so many tokens, and the cache over them."""
    import snapmla

    if shape.rows:
        rows = RowsPool(tokens, device)
        return rows, snapmla.PagedKVCache.from_tensors(rows.cache)
    pool = SnapPool(tokens, device)
    return pool, pool.cache


def _append(shape: HelperShape, buffers: int, device: torch.device) -> Helper:
    import snapmla

    n = shape.tokens
    how = _Rotation.of(shape, n, buffers, device) if shape.op.startswith("rope") else None
    per_buffer = -(-n // PAGE) * PAGE
    pool, cache = _pool(shape, per_buffer * buffers, device)
    latents = Latents(seed=7)
    x = [latents.chunk(i, n, device) for i in range(buffers)]
    rng = torch.Generator(device=device).manual_seed(3)
    slots = [
        torch.randperm(per_buffer, generator=rng, device=device)[:n] + i * per_buffer
        for i in range(buffers)
    ]
    if how is None:
        slots = [slot.int() for slot in slots]

    def call(i: int) -> Call:
        content, rope, slot = x[i][:, :CONTENT_DIM], x[i][:, CONTENT_DIM:], slots[i]
        if how is None:
            return lambda: snapmla.append_kv(cache, content, rope, slot)
        return lambda: snapmla.rope_append_kv(
            cache, content, rope, slot, how.positions[i], how.table, norm_weight=how.weight
        )

    def check() -> Check:
        for part in cache.named_tensors.values():
            whole = part.view(torch.uint8) if part.element_size() == 1 else part
            whole.fill_(0x7F if part.element_size() == 1 else float("nan"))
        pairs = []
        for i in (0, buffers - 1):
            call(i)()
            steps = x[i] if how is None else how.steps(x[i], i)
            want = steps.double() if shape.rows else _stored(steps, slots=slots[i])
            pairs.append((pool.load(slots[i].long()), want))
        return _compare(pairs)

    return Helper("snapmla", [call(i) for i in range(buffers)], check, peer=False)


def _quantize(shape: HelperShape, buffers: int, device: torch.device) -> Helper:
    import snapmla

    b, s_q, h = shape.batch, shape.s_q, shape.num_heads
    how = _Rotation.of(shape, b * s_q, buffers, device) if shape.op.startswith("rope") else None
    latents = Latents(seed=8)
    x = [latents.chunk(i, b * s_q * h, device).view(b, s_q, h, -1) for i in range(buffers)]
    out = [
        snapmla.quantize_q(y[..., :CONTENT_DIM], y[..., CONTENT_DIM:], granularity=shape.mode)
        for y in x
    ]

    def call(i: int) -> Call:
        content, rope = x[i][..., :CONTENT_DIM], x[i][..., CONTENT_DIM:]
        if how is None:
            return lambda: snapmla.quantize_q(content, rope, granularity=shape.mode, out=out[i])
        return lambda: snapmla.rope_quantize_q(
            content, rope, how.positions[i], how.table, granularity=shape.mode, out=out[i]
        )

    def check() -> Check:
        pairs = []
        for i in (0, buffers - 1):
            out[i].nope_u8.fill_(0x7F)
            out[i].scale.fill_(float("nan"))
            call(i)()
            got = torch.cat([out[i].nope.double(), out[i].rope.double()], -1)
            got = got * out[i].row_scale.double()[..., None]
            steps = x[i] if how is None else how.steps(x[i].flatten(0, 1), i).view_as(x[i])
            pairs.append((got, _stored(steps, shared=int(shape.mode == "token"))))
        return _compare(pairs)

    return Helper("snapmla", [call(i) for i in range(buffers)], check, peer=False)


def _stored(x: torch.Tensor, shared: int = 0, slots: torch.Tensor | None = None) -> torch.Tensor:
    """What quantisation leaves of rows (..., 576), in float64."""
    content, rope, scale = quantize_rows(
        x[..., :CONTENT_DIM], x[..., CONTENT_DIM:], shared=shared, slots=slots
    )
    factor = scale.double()[(...,) + (None,) * (1 + shared)]
    return torch.cat([content.double(), rope.double()], -1) * factor


def _fetch(shape: HelperShape, buffers: int, device: torch.device) -> Helper:
    import snapmla

    n, b = shape.tokens, shape.batch
    mode = shape.mode.removesuffix("_bf16")
    each, ragged = n // b, mode == "ragged"
    start, uneven = RAGGED if ragged else (0, 0)
    # one request longer, the next shorter by as much
    counts = [each + (uneven if i % 2 else -uneven) * (i < b // 2 * 2) for i in range(b)]
    pages = -(-(start + each + uneven) // PAGE) * b
    pool, cache = _pool(shape, pages * PAGE * buffers, device)
    latents = Latents(seed=9)
    for i in range(buffers):
        pool.store(i * pages * PAGE, latents.chunk(i, pages * PAGE, device))
    rng = torch.Generator(device=device).manual_seed(4)
    order = [
        torch.randperm(pages, generator=rng, device=device) + i * pages for i in range(buffers)
    ]
    tables = [o.int().view(b, -1) for o in order]
    lengths = torch.tensor(counts, dtype=torch.int32, device=device)
    begins = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    starts = torch.full_like(lengths, start)
    within = torch.arange(PAGE, device=device)
    slots = [(o[:, None] * PAGE + within).view(b, -1) for o in order]
    ids = [
        torch.cat([row[start : start + count] for row, count in zip(s, counts, strict=True)])
        for s in slots
    ]
    indices = [i.int() for i in ids]
    extents = (b, each) if mode == "pages" else (n,)
    out = [
        torch.empty(*extents, HEAD_DIM_QK, dtype=torch.bfloat16, device=device)
        for _ in range(buffers)
    ]

    def call(i: int) -> Call:
        pair = (out[i][..., :CONTENT_DIM], out[i][..., CONTENT_DIM:])
        if mode == "pages":
            return lambda: snapmla.fetch_dequant(cache, tables[i], lengths, out=pair)
        if ragged:
            return lambda: snapmla.fetch_dequant(
                cache, tables[i], cu_seqlens=begins, seq_starts=starts, out=pair
            )
        return lambda: snapmla.fetch_dequant(cache, indices[i], out=pair)

    def check() -> Check:
        pairs = []
        for i in (0, buffers - 1):
            out[i].fill_(float("nan"))
            call(i)()
            got = out[i].view(-1, CONTENT_DIM + ROPE_DIM)
            for part in (slice(0, CHECKED_TOKENS), slice(max(0, n - CHECKED_TOKENS), n)):
                want = pool.load(ids[i][part]).float().bfloat16()
                pairs.append((got[part], want))
        return _compare(pairs)

    return Helper("snapmla", [call(i) for i in range(buffers)], check, peer=False)


def _merge(shape: HelperShape, buffers: int, device: torch.device) -> Helper:
    import snapmla

    n, rows = shape.tokens, (shape.batch, shape.s_q, shape.num_heads)
    dtype = torch.float32 if shape.mode.endswith("_f32") else torch.bfloat16
    rng = torch.Generator(device=device).manual_seed(6)

    def normal(*extents: int) -> torch.Tensor:
        return torch.randn(extents, generator=rng, device=device, dtype=dtype)

    outs = [normal(n, *rows, CONTENT_DIM) for _ in range(buffers)]
    lses = [normal(n, rows[0], rows[2], rows[1]).float() for _ in range(buffers)]
    out = [torch.empty_like(x[0]) for x in outs]
    lse = [torch.empty_like(x[0]) for x in lses]
    stacked = shape.mode.startswith("stack")

    def call(i: int) -> Call:
        parts = (outs[i], lses[i]) if stacked else (list(outs[i]), list(lses[i]))
        return lambda: snapmla.merge_states(*parts, out=out[i], lse=lse[i])

    def check() -> Check:
        pairs = []
        for i in (0, buffers - 1):
            out[i].fill_(float("nan"))
            lse[i].fill_(float("nan"))
            call(i)()
            for part in (slice(0, CHECKED_BATCH), slice(-CHECKED_BATCH, None)):
                want, want_lse = merge_states_reference(outs[i][:, part], lses[i][:, part])
                pairs += [(out[i][part], want.to(dtype)), (lse[i][part], want_lse)]
        return _compare(pairs)

    return Helper("snapmla", [call(i) for i in range(buffers)], check, peer=False)


def _plan(shape: HelperShape, buffers: int, device: torch.device) -> Helper:
    import snapmla

    rng = torch.Generator().manual_seed(5)
    lengths = [
        torch.randint(1, 65536, (shape.batch,), generator=rng, dtype=torch.int32).to(device)
        for _ in range(buffers)
    ]
    plan: Any = snapmla.plan_decode(
        lengths[0], shape.num_heads, shape.s_q, page_size=PAGE, max_pages=65536 // PAGE
    )

    def call(i: int) -> Call:
        return lambda: plan.update_(lengths[i])

    def check() -> Check:
        call(0)()
        items, begin = plan.work_items.cpu(), plan.part_begin.cpu()
        used = items[: int(begin[-1])]
        tiles = torch.zeros(shape.batch, dtype=torch.int64)
        tiles.index_add_(0, used[:, 0].long(), (used[:, 2] - used[:, 1]).long())
        want = -(-lengths[0].cpu().long() // 64)
        ok = bool((tiles == want).all())
        return Check(ok, 0.0 if ok else 1.0, text="" if ok else "work items miss or repeat tiles")

    return Helper("snapmla", [call(i) for i in range(buffers)], check, peer=False)

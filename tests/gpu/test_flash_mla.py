"""FlashMLA's names on a real GPU: engines' call patterns in graphs whose lengths change.

Each result by FlashMLA's gates to float64.  Tokens behind a sequence's end are NaN, also those that
an earlier replay could see.  Engines run under ``inference_mode``, and so do these tests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles.peer_libraries import FlashMlaBf16
from snapmla.compat import flash_mla
from tests.support.bits import same_bits
from tests.support.dense_steps import SCALE, DenseStep

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LENGTHS = (0, 1, 63, 64, 65, 4097)
SHORTER = ((0, 1, 3, 64, 40, 4000), (0, 0, 2, 1, 33, 130))
SHAPES = [(16, 1, 1), (16, 2, 1), (128, 1, 1), (128, 2, 1), (8, 1, 2)]  # heads, s_q, KV heads
MOST = 9  # sequences of the static buffers
Results = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _as_engines_do() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make(
    heads: int, s_q: int, kv_heads: int = 1, lengths: tuple[int, ...] = LENGTHS,
    dtype: torch.dtype = torch.bfloat16,
) -> DenseStep:  # fmt: skip
    return DenseStep.make(lengths, heads, s_q, dtype=dtype, kv_heads=kv_heads, device=DEVICE)


def results(step: DenseStep) -> Results:
    """``out`` and ``lse`` of a step, full of NaN."""
    b, s_q, heads, _ = step.q.shape
    out = step.q.new_full((b, s_q, heads, 512), math.nan)
    return {"out": out, "lse": out.new_full((b, heads, s_q), math.nan).float()}


def decode(step: DenseStep, metadata: Any, splits: Any = None, **options: Any) -> Any:
    kv = step.cache.kv
    assert kv is not None
    return flash_mla.flash_mla_with_kvcache(
        step.q, kv, step.block_table, step.cache_seqlens, 512, metadata, splits, causal=True,
        **options,
    )  # fmt: skip


def assert_right(step: DenseStep, out: torch.Tensor, lse: torch.Tensor) -> None:
    empty = step.cache_seqlens == 0
    assert (out[empty] == 0).all() and torch.isposinf(lse[empty]).all()
    step.assert_right(out, torch.where(torch.isposinf(lse), -math.inf, lse))


def shorten(step: DenseStep, lengths: tuple[int, ...]) -> None:
    """Cuts sequences, and poisons what they lose."""
    size, kv = step.cache.page_size, step.cache.kv
    assert kv is not None
    for i, (n, before) in enumerate(zip(lengths, step.cache_seqlens.tolist(), strict=True)):
        token = torch.arange(n, before, device=DEVICE)
        kv[step.block_table[i, token // size].long(), token % size] = math.nan
    step.cache_seqlens.copy_(torch.tensor(lengths))


def pair(step: DenseStep, lengths: torch.Tensor | None = None) -> tuple[Any, Any]:
    _, s_q, heads, _ = step.q.shape
    kv_heads = step.cache.num_kv_heads
    seqlens = step.cache_seqlens if lengths is None else lengths
    return flash_mla.get_mla_metadata_tensors(seqlens, s_q * heads // kv_heads, kv_heads)


# ---------------------------------------------------------------- patterns: (body, between replays)

Pattern = tuple[Callable[..., Any], Callable[[], None]]


def vllm_object(step: DenseStep) -> Pattern:
    """A fresh object a step, planned by the first layer inside the graph."""

    def body(**given: Any) -> None:
        metadata, _ = flash_mla.get_mla_metadata()
        decode(step, metadata)  # a layer before
        decode(step, metadata, **given)

    return body, lambda: None


def vllm_batch_invariant(step: DenseStep) -> Pattern:
    """One part by hand, whose end is in blocks of blocks."""
    b, width = step.block_table.shape
    metadata = flash_mla.FlashMLASchedMeta()
    one = torch.tensor([[0, 0, b - 1, width // 64, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    metadata.tile_scheduler_metadata = one
    metadata.num_splits = one.new_zeros(b + 1)
    return lambda **given: decode(step, metadata, **given), lambda: None


def sglang(step: DenseStep) -> Pattern:
    """Static buffers of the largest batch, which each step fills and slices."""
    b = len(step.cache_seqlens)
    static, splits = pair(step, step.cache_seqlens.new_ones(MOST))

    def renew() -> None:
        made, counts = pair(step)
        static.copy_(made)
        splits[: b + 1].copy_(counts)

    renew()
    return lambda **given: decode(step, static, splits[: b + 1], **given), renew


def stale(step: DenseStep) -> Pattern:
    """Records that were made once, when all sequences were short, and never again."""
    records, splits = pair(step, step.cache_seqlens.new_ones(MOST))
    return lambda **given: decode(step, records, splits, **given), lambda: None


def captured_metadata(step: DenseStep) -> Pattern:
    """``get_mla_metadata`` with arguments inside the graph."""

    def body(**given: Any) -> None:
        decode(step, *pair(step), **given)

    return body, lambda: None


def random(step: DenseStep) -> Pattern:
    """Any words, others at each replay."""
    buffer = torch.empty((132, 8), dtype=torch.int32, device=DEVICE)

    def renew() -> None:
        buffer.random_(-(2**31), 2**31 - 1)
        buffer[::2, 0] = torch.randint(0, 7, (66,), device=DEVICE)
        buffer[::2, 1] = torch.randint(0, 70, (66,), device=DEVICE)
        buffer[:100] = buffer[buffer[:100, 0].sort().indices]

    renew()
    return lambda **given: decode(step, buffer, **given), renew


PATTERNS = [vllm_object, vllm_batch_invariant, sglang, stale, captured_metadata, random]


@pytest.mark.parametrize(("heads", "s_q", "kv_heads"), SHAPES, ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda f: f.__name__)
def test_patterns(
    pattern: Callable[[DenseStep], Pattern], heads: int, s_q: int, kv_heads: int
) -> None:
    """Eager, then captured; every replay for other lengths gives what an eager call gives; fp16
    where there are two query tokens."""
    step = make(heads, s_q, kv_heads, dtype=torch.float16 if s_q == 2 else torch.bfloat16)
    body, renew = pattern(step)
    given, eager = results(step), results(step)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body(**given)  # loads the kernels
    torch.cuda.current_stream().wait_stream(stream)
    assert_right(step, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body(**given)
    for lengths in (LENGTHS, *SHORTER):
        shorten(step, lengths)
        renew()
        for value in (*given.values(), *eager.values()):
            value.fill_(math.nan)
        graph.replay()
        assert_right(step, **given)
        body(**eager)
        assert same_bits(given["out"], eager["out"]) and same_bits(given["lse"], eager["lse"])


EVERY = [(h, s_q) for h in (8, 16, 64, 128) for s_q in (1, 2)]


@pytest.mark.parametrize(("heads", "s_q"), EVERY, ids=str)
def test_records_that_do_not_fit(heads: int, s_q: int) -> None:
    """Made for every other number of rows, for other batches and lengths, slices: always right."""
    step = make(heads, s_q)

    def made(lengths: tuple[int, ...] = LENGTHS, rows: int = heads * s_q) -> torch.Tensor:
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        table, _ = flash_mla.get_mla_metadata_tensors(seqlens, rows, 1)
        assert isinstance(table, torch.Tensor)
        return table

    tables = [made(rows=h * s) for h, s in EVERY]
    tables += [made(LENGTHS[:-1]), made((*LENGTHS, 700)), made()[:3], made(SHORTER[1])]
    for table in tables:
        given = results(step)
        decode(step, table, **given)
        assert_right(step, **given)


@pytest.mark.parametrize("heads", [16, 128])
def test_one_part_is_batch_invariant(heads: int) -> None:
    """A request has the same bits alone and in a batch."""
    step = make(heads, 1)
    one = torch.zeros((1, 8), dtype=torch.int32, device=DEVICE)
    out, lse = decode(step, one)
    for i in range(len(LENGTHS)):
        at = slice(i, i + 1)
        alone = DenseStep(
            step.cache, step.q[at].clone(), step.block_table[at], step.cache_seqlens[at].clone()
        )
        got = decode(alone, one)
        assert same_bits(got[0], out[at]) and same_bits(got[1], lse[at])


def test_streams_share_an_object() -> None:
    """Side by side, each with a workspace of its own."""
    step = make(16, 1)
    metadata, _ = flash_mla.get_mla_metadata()
    want = decode(step, metadata)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(decode(step, metadata))
    torch.cuda.synchronize()
    assert all(same_bits(a, b) for pair_ in got for a, b in zip(pair_, want, strict=True))
    assert len({plan.o_accum.data_ptr() for plan in metadata._plans.values()}) == 4


@pytest.mark.parametrize("kind", ["object", "tensors"])
def test_no_synchronisation_and_no_allocation(kind: str) -> None:
    """Of a layer behind the first, with results given."""
    step = make(16, 2)
    metadata, splits = flash_mla.get_mla_metadata() if kind == "object" else pair(step)
    given = results(step)
    decode(step, metadata, splits, **given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        decode(step, metadata, splits, **given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert_right(step, **given)


@pytest.mark.parametrize(("heads", "s_q"), [(16, 1), (128, 2)])
def test_beside_flashmla(heads: int, s_q: int) -> None:
    """Its library's results, and ours over the records that it made."""
    folder = os.environ.get("SNAPMLA_PEERS")
    peer = FlashMlaBf16("flashmla_bf16", Path(folder) if folder else None)
    reason = peer.unavailable()
    if reason is not None:
        pytest.skip(reason)
    peer.load()
    step = make(heads, s_q, lengths=(1, 63, 64, 65, 700, 4097))
    kv = step.cache.kv
    theirs, their_lse, records, splits = torch.ops._flashmla_C.dense_decode_fwd(
        step.q, kv, 512, step.cache_seqlens, step.block_table, SCALE, True, None, None, None
    )
    assert records.shape[1] == 8 and records.dtype == torch.int32
    for metadata in ((records, splits), pair(step)):
        out, lse = decode(step, *metadata)
        assert_right(step, out, lse)
        torch.testing.assert_close(out.float(), theirs.float(), atol=2e-3, rtol=2.5e-2)
        torch.testing.assert_close(lse, their_lse, atol=2e-5, rtol=2.5e-4)
    assert pair(step)[0].shape == records.shape

"""``decode`` over a 16-bit cache on a real GPU, eager and in graphs whose lengths change.

Lengths at the edges of tiles and none, one head to all of them, every count of query tokens that an
engine has, KV heads, pages, ragged queries; each result by FlashMLA's gates to float64.  Tokens
behind a sequence's end are NaN, also those that an earlier replay could see.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import snapmla
from tests.support.bits import same_bits
from tests.support.dense_steps import SCALE, DenseStep, results

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LENGTHS = (0, 1, 63, 64, 65, 4097)
SHORTER = ((0, 1, 3, 64, 40, 4000), (0, 0, 2, 1, 33, 130))
HEADS, TOKENS = (1, 3, 8, 16, 20, 40, 96, 128), (1, 2, 4, 7, 33)
PAGES = (16, 32, 64, 128, 192)
DTYPES = (torch.bfloat16, torch.float16)


def shorten(step: DenseStep, lengths: tuple[int, ...]) -> None:
    """Cuts sequences, and poisons what they lose."""
    size, kv = step.cache.page_size, step.cache.kv
    assert kv is not None
    for i, (n, before) in enumerate(zip(lengths, step.cache_seqlens.tolist(), strict=True)):
        token = torch.arange(n, before, device=DEVICE)
        kv[step.block_table[i, token // size].long(), token % size] = float("nan")
    step.cache_seqlens.copy_(torch.tensor(lengths))


@pytest.mark.parametrize("s_q", TOKENS)
@pytest.mark.parametrize("heads", HEADS)
def test_grid(heads: int, s_q: int) -> None:
    """Every page size and dtype; KV heads rotate."""
    index = HEADS.index(heads) * len(TOKENS) + TOKENS.index(s_q)
    kv_heads = [n for n in (1, 2, 3, 8) if heads % n == 0]
    for turn, page_size in enumerate(PAGES):
        dtype, own = DTYPES[(index + turn) % 2], kv_heads[(index + turn) % len(kv_heads)]
        step = DenseStep.make(LENGTHS, heads, s_q, page_size, dtype, own, device=DEVICE)
        out, lse = step.decode(step.plan())
        assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()
        step.assert_right(out, lse)
        again = step.decode(step.plan())
        assert same_bits(again[0], out) and same_bits(again[1], lse)
    out, lse = step.decode(step.plan(causal=False), causal=False)
    step.assert_right(out, lse, causal=False)


@pytest.mark.parametrize("heads", HEADS)
def test_many_query_tokens(heads: int) -> None:
    """128 of them, more than a short sequence has tokens; pages, dtypes and KV heads rotate."""
    index = HEADS.index(heads)
    kv_heads = [n for n in (1, 2, 3, 8) if heads % n == 0]
    step = DenseStep.make(
        (0, 1, 65, 4097), heads, 128, PAGES[index % len(PAGES)], DTYPES[index // 2 % 2],
        kv_heads[-1 - index % len(kv_heads)], device=DEVICE,
    )  # fmt: skip
    out, lse = step.decode(step.plan())
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()
    assert (out[1, :-1] == 0).all() and torch.isneginf(lse[1, :, :-1]).all()
    step.assert_right(out, lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "s_q", "kv_heads"), [(8, 2, 2), (40, 1, 1), (128, 2, 1)])
def test_nan_and_infinity(heads: int, s_q: int, kv_heads: int, dtype: torch.dtype) -> None:
    """In the elements of out and LSE where the reference has them, and nowhere else."""
    step = DenseStep.make(
        (5, 70, 130, 64, 3, 4100, 65), heads, s_q, 64, dtype, kv_heads, device=DEVICE
    )
    kv, table = step.cache.kv, step.block_table.long()
    assert kv is not None
    kv[table[0, 0], 2, 0, 7] = float("nan")
    kv[table[1, 1], 5, -1, 575] = float("nan")  # of the last token, which the last query sees
    kv[table[2, 0], 9, 0, 3] = float("inf")
    kv[table[5, 40], 1, 0, 40] = float("-inf")
    step.q[3, 0, 1, 100] = float("nan")
    step.q[4, -1, 0, 5] = float("inf")
    out, lse = step.decode(step.plan())
    errors = step.errors(out, lse)
    assert errors.outside == 0, str(errors)
    some = torch.isnan(lse).flatten(1)
    assert some[:6].any(1).all() and not some[6].any() and not some[3].all()


def captured(
    step: DenseStep, plan: snapmla.DecodePlan, given: dict[str, Any]
) -> torch.cuda.CUDAGraph:
    """A step that plans anew and decodes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan.update_(step.cache_seqlens, step.begin)
        step.decode(plan, **given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.update_(step.cache_seqlens, step.begin)
        step.decode(plan, **given)
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "s_q", "page_size", "kv_heads"),
    [(16, 1, 64, 1), (128, 2, 64, 1), (8, 1, 16, 2), (96, 4, 32, 3), (8, 2, 192, 8)],
)
def test_graphs(heads: int, s_q: int, page_size: int, kv_heads: int, dtype: torch.dtype) -> None:
    """A replay gives what an eager call gives, for lengths that are others each time."""
    step = DenseStep.make(LENGTHS, heads, s_q, page_size, dtype, kv_heads, device=DEVICE)
    plan, given = step.plan(), results(step, float("nan"))
    graph = captured(step, plan, given)
    for lengths in (LENGTHS, *SHORTER):
        shorten(step, lengths)
        for value in given.values():
            value.fill_(float("nan"))
        graph.replay()
        step.assert_right(**given)
        eager = step.decode(step.plan())
        assert same_bits(eager[0], given["out"]) and same_bits(eager[1], given["lse"])


RAGGED = ((0, 1, 0, 5, 2, 9), (3, 0, 33, 1, 64, 2), (0, 0, 128, 0, 0, 1))


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("tokens", RAGGED, ids=str)
def test_ragged_queries(tokens: tuple[int, ...], heads: int, kv_heads: int) -> None:
    """Also in a graph, and as ``row_seqlens`` says; rows of no sequence stay as they are; pages and
    dtypes rotate."""
    index = RAGGED.index(tokens)
    step = DenseStep.make(
        LENGTHS, heads, page_size=PAGES[(index + heads // 16) % len(PAGES)],
        dtype=DTYPES[index % 2], kv_heads=kv_heads, tokens=tokens, device=DEVICE,
    )  # fmt: skip
    used, given = sum(tokens), results(step, float("nan"))
    seen = torch.randint(-5, 4200, step.q.shape[:1], dtype=torch.int32, device=DEVICE)
    for rule in ({}, {"row_seqlens": seen}):
        for row_blocks in ("in_step", "balanced"):
            given["out"].fill_(7.0), given["lse"].fill_(7.0)
            step.decode(step.plan(row_blocks=row_blocks, **rule), **given)
            assert (given["out"][used:] == 7).all() and (given["lse"][:, used:] == 7).all()
            step.assert_right(**given, **rule)
    graph = captured(step, step.plan(), given)
    shorten(step, SHORTER[0])
    given["out"].fill_(7.0), given["lse"].fill_(7.0)
    graph.replay()
    assert (given["out"][used:] == 7).all() and (given["lse"][:, used:] == 7).all()
    step.assert_right(**given)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 1), (128, 1), (40, 2)])
def test_fixed_splits_are_each_requests_own(heads: int, kv_heads: int) -> None:
    """The same bits alone and in a batch."""
    step = DenseStep.make(LENGTHS, heads, 2, kv_heads=kv_heads, device=DEVICE)
    out, lse = step.decode(step.plan(fixed_split_tokens=256))
    step.assert_right(out, lse)
    for i in range(len(LENGTHS)):
        at = slice(i, i + 1)
        one = DenseStep(
            step.cache, step.q[at].clone(), step.block_table[at], step.cache_seqlens[at].clone()
        )
        alone = one.decode(one.plan(fixed_split_tokens=256))
        assert same_bits(alone[0], out[at]) and same_bits(alone[1], lse[at])


def test_no_synchronisation() -> None:
    """Neither planning nor decoding waits for the device, KV heads and large pages included."""
    for kv_heads, page_size in ((1, 64), (4, 64), (2, 192)):
        step = DenseStep.make(LENGTHS, 16, 2, page_size, kv_heads=kv_heads, device=DEVICE)
        plan = step.plan()
        step.decode(plan)
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan.update_(step.cache_seqlens)
            out, lse = step.decode(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        step.assert_right(out, lse)


def test_operators() -> None:
    """Compiled with KV heads: the operator's bits are the eager call's."""
    step = DenseStep.make(LENGTHS, 16, 2, kv_heads=2, device=DEVICE)
    plan = step.plan()

    def body(q: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = snapmla.decode(
            q, step.cache, step.block_table, lengths, softmax_scale=SCALE, plan=plan
        )
        return out * 1, lse

    torch._dynamo.reset()
    got = torch.compile(body, fullgraph=True, backend="aot_eager")(step.q, step.cache_seqlens)
    for a, b in zip(got, step.decode(plan), strict=True):
        assert same_bits(a, b)

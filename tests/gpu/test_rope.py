"""``rope_append_kv`` and ``rope_quantize_q`` on a real GPU: torch's bits at 4096 tokens, and time.

    python -m pytest -s tests/gpu/test_rope.py -m gpu

prints the times; variants may come from elsewhere, no compiler is needed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

import snapmla
from snapmla import reference
from snapmla.cache import layouts
from tests.support.bits import assert_same
from tests.support.rotation import DIAGONAL, EPS, Rotation, rotation
from tests.support.rows import joint, latents

pytestmark = pytest.mark.gpu
TOKENS, PAGE, HEADS = 4096, 64, 128
SLOWER = 1.4  # than append_kv, at most, with everything in L2; the benchmark says more
CALLS, ROUNDS = 20, 15
CASES = [(is_neox, table) for is_neox in (False, True) for table in (torch.float32, torch.bfloat16)]
cases = pytest.mark.parametrize(("is_neox", "table"), CASES)


def on_gpu(is_neox: bool, table: torch.dtype, norm: bool, n: int = TOKENS) -> Rotation:
    made = rotation(n, torch.bfloat16, table=table, index=torch.int64, is_neox=is_neox, norm=norm)
    weight = None if made.weight is None else made.weight.cuda()
    return Rotation(made.positions.cuda(), made.cos_sin_cache.cuda(), is_neox, weight)


@pytest.mark.parametrize("norm", [False, True])
@cases
@pytest.mark.parametrize("layout", list(layouts.LAYOUTS))
def test_append(layout: str, is_neox: bool, table: torch.dtype, norm: bool) -> None:
    how = on_gpu(is_neox, table, norm)
    c, r = (x.cuda() for x in joint(*latents((TOKENS,), torch.bfloat16)))
    r[:2] = DIAGONAL
    pages = TOKENS // PAGE + 1
    slots = torch.randperm(pages * PAGE, device="cuda")[:TOKENS]
    slots[5::11] = -1
    pools = [snapmla.PagedKVCache.allocate(pages, PAGE, at) for at in (layout, "split")]
    for pool in pools:
        pool.content_u8.fill_(0x7F)
        pool.rope.fill_(torch.nan)
        pool.scale.fill_(torch.nan)
    got, want = pools
    snapmla.rope_append_kv(
        got, c, r, slots, how.positions, how.cos_sin_cache, is_neox=is_neox,
        norm_weight=how.weight, norm_eps=EPS,
    )  # fmt: skip
    steps = how.steps(c, r)
    snapmla.append_kv(want, *steps, slots)
    rows = slots[slots >= 0]
    content, rope, scale = reference.quantize_rows(*(x[slots >= 0] for x in steps), slots=rows)
    good = ~scale.isnan()
    assert_same(want.content_u8.view(-1, 512)[rows][good], content.view(torch.uint8)[good])
    assert_same(want.rope.view(-1, 64)[rows], rope)
    assert_same(want.scale.view(-1)[rows], scale)
    for part in ("content_u8", "rope", "scale"):
        assert_same(getattr(got, part).contiguous(), getattr(want, part))
    assert 0 < scale.isnan().sum() < TOKENS // 8


@cases
@pytest.mark.parametrize("tokens", [1, 32])
def test_quantize(tokens: int, is_neox: bool, table: torch.dtype) -> None:
    how = on_gpu(is_neox, table, False, n=tokens)
    c, r = (x.cuda() for x in joint(*latents((tokens, 1, HEADS), torch.bfloat16)))
    r[:2] = DIAGONAL
    got = snapmla.rope_quantize_q(c, r, how.positions, how.cos_sin_cache, is_neox=is_neox)
    _, turned = how.steps(c.flatten(0, 1), r.flatten(0, 1))
    want = snapmla.quantize_q(c, turned.view_as(r))
    for part in ("nope_u8", "rope", "scale"):
        assert_same(getattr(got, part), getattr(want, part))


def microseconds(call: Callable[[], None]) -> float:
    """Median over rounds of one call's time inside a graph of ``CALLS``."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times)


@pytest.mark.parametrize("norm", [False, True])
def test_time(norm: bool) -> None:
    """Beside ``append_kv`` of the same tokens; DeepSeek's style with an fp32 table."""
    how = on_gpu(False, torch.float32, norm)
    c, r = (x.cuda() for x in joint(*latents((TOKENS,), torch.bfloat16)))
    slots = torch.randperm(TOKENS, device="cuda")
    cache = snapmla.PagedKVCache.allocate(TOKENS // PAGE, PAGE)
    positions = torch.arange(TOKENS, device="cuda") % len(how.cos_sin_cache)
    plain = microseconds(lambda: snapmla.append_kv(cache, c, r, slots))
    fused = microseconds(
        lambda: snapmla.rope_append_kv(
            cache, c, r, slots, positions, how.cos_sin_cache, norm_weight=how.weight
        )
    )
    print(
        f"\n{TOKENS} tokens, norm {norm}: append_kv {plain:.2f} us, rope_append_kv {fused:.2f} us"
    )
    assert fused <= SLOWER * plain

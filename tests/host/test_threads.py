"""Python threads that share a stream share workspaces: what each computes stays its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import snapmla
from snapmla.compat import flash_mla_fp8

SCALE, HEADS, PAGE, WIDTH = 192**-0.5, 16, 64, 2
Step = Callable[[], torch.Tensor]


def owner(seed: int, device: str) -> tuple[snapmla.PagedKVCache, torch.Tensor, torch.Tensor, list]:
    """One model's cache, block table, lengths and (nope, RoPE) query: sequences worth splitting."""
    generator = torch.Generator().manual_seed(seed)
    cache = snapmla.PagedKVCache.allocate(2 * WIDTH, PAGE, device="cpu")
    cache.content_u8.copy_(torch.randint(0, 0x70, cache.content.shape, generator=generator))
    cache.rope.copy_(torch.randn(cache.rope.shape, generator=generator))
    cache.scale.copy_(torch.rand(cache.scale.shape, generator=generator) / 100)
    cache = snapmla.PagedKVCache.from_tensors(
        cache.content.to(device), cache.rope.to(device), cache.scale.to(device)
    )
    table = torch.arange(2 * WIDTH, dtype=torch.int32, device=device).view(2, WIDTH)
    lengths = torch.tensor([WIDTH * PAGE, 65 + seed], dtype=torch.int32, device=device)
    q = torch.randn(2, 1, HEADS, 576, generator=generator).bfloat16().to(device)
    return cache, table, lengths, [q[..., :512], q[..., 512:]]


def with_plans(device: str) -> list[Step]:
    """Two decodes by two plans over one workspace."""
    steps: list[Step] = []
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None
    for seed in range(2):
        cache, table, lengths, q = owner(seed, device)
        plan = snapmla.plan_decode(
            lengths, HEADS, 1, page_size=PAGE, max_pages=WIDTH,
            num_parts=3 if device == "cpu" else None,
        )  # fmt: skip
        workspace = workspace or (plan.o_accum, plan.lse_accum)
        named = {"softmax_scale": SCALE, "plan": plan.with_workspace(*workspace)}
        arguments = (snapmla.quantize_q(*q), cache, table, lengths)
        steps.append(lambda a=arguments, named=named: snapmla.decode(*a, **named)[0])
    return steps


def with_pairs(device: str) -> list[Step]:
    """Two decodes by the names of SnapMLA's host code, over the stream's kept workspace."""
    steps: list[Step] = []
    for seed in range(2):
        cache, table, lengths, q = owner(seed, device)
        pair = flash_mla_fp8.get_mla_metadata(lengths, HEADS, 1)
        q8, scale, rope = flash_mla_fp8.quantize_ckv_per_token_head(torch.cat(q, -1), 512)
        arguments = (
            q8, rope, cache.content.unsqueeze(2), cache.rope.unsqueeze(2), scale,
            cache.scale[..., None, None], table, lengths, 512, *pair, SCALE, True,
        )  # fmt: skip
        steps.append(lambda a=arguments: flash_mla_fp8.flash_mla_ckv_fp8_per_token(*a)[0])
    return steps


gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    ("make", "device"),
    [
        (with_plans, "cpu"),  # the software GPU runs one call at a time
        pytest.param(with_plans, "cuda", marks=gpu),
        pytest.param(with_pairs, "cuda", marks=gpu),
    ],
)
def test_two_threads_on_one_stream(make: Callable[[str], list[Step]], device: str) -> None:
    steps = make(device)
    expected = [step() for step in steps]
    assert not torch.equal(*expected)
    wrong = torch.zeros(2, dtype=torch.int64, device=device)
    start = threading.Barrier(2)

    def hammer(which: int) -> None:
        start.wait()
        for _ in range(2000 if device == "cuda" else 1):
            wrong[which] += (steps[which]() != expected[which]).any()

    threads = [threading.Thread(target=hammer, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong.tolist() == [0, 0]

"""Index logits on a real GPU: right beside the tensor core's model and fp64, the same bits however
query tokens are called, under graphs.

Variants are compiled where they are first asked for; ``build/variants`` of a machine with the
compiler serves one without.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.index_cache import PAGE
from dsl_kernels.spec import VariantSpec
from snapmla.indexer.append_index_k import append_index_k
from snapmla.indexer.index_logits import index_logits, pages
from snapmla.runtime import variants
from snapmla.testing import index_reference as reference
from snapmla.testing.workloads import append_index_k as append_work
from snapmla.testing.workloads import index_logits as work

pytestmark = pytest.mark.gpu
LENGTHS = (4097, 0, 1, 63, 64, 65, 1000, 20000)
UNITS = [(64, 1), (64, 2), (64, 4), (32, 1), (32, 2), (32, 4), (32, 8)]


def sample(heads: int, lengths: Any, tokens: Any, **options: Any) -> dict[str, Any]:
    """A call on the device, whose pool of pages is the memory that the call reads, gaps too."""
    torch.manual_seed(0)
    given = work.sample_call(heads, lengths, tokens, **options)
    cache = given["cache"]
    memory = torch.full((len(cache), cache.stride(0)), work.POISON, dtype=torch.uint8)
    memory[:, : cache.shape[1]] = cache
    given["cache"] = memory.cuda()[:, : cache.shape[1]]
    return {k: v.cuda() if isinstance(v, Tensor) and k != "cache" else v for k, v in given.items()}


def call(given: dict[str, Any], unit_rows: int) -> Tensor:
    """The public call."""
    heads, b = given["q"].shape[1], len(given["cache_seqlens"])
    even = not len(given["cu_seqlens_q"])
    outer = (b, given["s_q"]) if even else (len(given["q"]),)
    return index_logits(
        given["q"].view(torch.float8_e4m3fn).view(*outer, heads, 128),
        given["w"].view(*outer, heads), given["cache"], given["block_table"],
        given["cache_seqlens"], cu_seqlens_q=None if even else given["cu_seqlens_q"],
        out=given["out"], unit_rows=unit_rows,
    )  # fmt: skip


def judge(given: dict[str, Any], unit_rows: int) -> None:
    """Beside the model, and beside fp64 at what Hopper's FP8 chain costs; Blackwell's is held to
    fp64 by the workload's judge."""
    spec = VariantSpec(
        op="index_logits", arch=variants.arch_of(given["q"].device), heads=given["q"].shape[1],
        unit_rows=unit_rows,
    )  # fmt: skip
    before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
    made = work.made(spec, before, "call")
    found = call(given, unit_rows)
    before["out"].copy_(found)
    result = work.judge(spec, [made])
    assert result.passed, result.summary
    if spec.arch != "sm_90a":
        return
    wants = reference.scores(before, reference.EXACT)
    errors = []
    for row, want, most in zip(found, wants, reference.magnitudes(before), strict=True):
        if len(want.values):
            error = (row[: len(want.values)].double() - want.values).abs()
            assert bool((error <= 1.2e-3 * most).all())
            errors.append(error / want.size)
    # what Hopper's chain cuts off, whoever uses it: with 32 heads a few sums of ReLUs are so small
    # that it is more of them (3 of 25,290 here, 4.3e-4 at worst, by the model of the tensor core)
    above = torch.cat(errors) > 3e-4
    assert int(above.sum()) <= (above.numel() // 2000 if spec.heads == 32 else 0)


@pytest.mark.parametrize(("heads", "unit"), UNITS)
@pytest.mark.parametrize("s_q", [1, 2, 3, 4, 8])
def test_drafts(heads: int, unit: int, s_q: int) -> None:
    judge(sample(heads, LENGTHS, s_q, gap=16 * s_q, power_of_two=s_q % 2 == 0), unit)


@pytest.mark.parametrize(("heads", "unit"), UNITS)
def test_prompts(heads: int, unit: int) -> None:
    judge(sample(heads, (700, 130, 64, 3000), (700, 1, 0, 257)), unit)


def test_many_sequences() -> None:
    """More than a warp counts at once."""
    judge(sample(64, [(37 * i) % 700 for i in range(300)], 1), 1)


@pytest.mark.parametrize("heads", [64, 32])
def test_the_same_bits(heads: int) -> None:
    """In prompts, as drafts, alone, in other batches, 20 times over."""
    given = sample(heads, (1030, 300), (9, 6))
    choices = [unit for h, unit in UNITS if h == heads]
    first = call(given, choices[-1]).clone()
    for unit, _ in itertools.product(choices, range(20)):
        given["out"].fill_(work.UNTOUCHED)
        assert torch.equal(call(given, unit), first)
    for r, (sequence, seen) in enumerate(reference.rows_of({**given, "s_q": 0})):
        single = {
            **given, "q": given["q"][r : r + 1], "w": given["w"][r : r + 1], "s_q": 1,
            "block_table": given["block_table"][sequence : sequence + 1],
            "cache_seqlens": torch.tensor([seen], dtype=torch.int32, device="cuda"),
            "cu_seqlens_q": given["cu_seqlens_q"][:0],
            "out": torch.full_like(first[:1], work.UNTOUCHED),
        }  # fmt: skip
        assert torch.equal(call(single, choices[0])[0], first[r]), r


def test_graph_follows_lengths() -> None:
    """Captured once, replayed with other lengths and tables."""
    given = sample(64, (500, 900, 64), 2)
    call(given, 2)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(given, 2)
    for lengths in ((0, 0, 0), (499, 2, 64), (500, 900, 64)):
        given["cache_seqlens"].copy_(torch.tensor(lengths))
        given["out"].fill_(work.UNTOUCHED)
        graph.replay()
        replayed = given["out"].clone()
        given["out"].fill_(work.UNTOUCHED)
        assert torch.equal(call(given, 2), replayed)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("scale", ["free", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_append(dtype: torch.dtype, scale: str, hadamard: bool) -> None:
    """Bit for bit, into pages apart."""
    torch.manual_seed(0)
    k = (torch.randn(500, 128) * torch.logspace(-3, 3, 500)[:, None]).to(dtype)
    slots = torch.randperm(20 * PAGE)[:500]
    slots[3], slots[7] = -1, 20 * PAGE
    cache = torch.full((20, 8448 + 192), 3, dtype=torch.uint8, device="cuda")[:, :8448]
    spec = VariantSpec(op="append_index_k", index_dtype="i64", hadamard=int(hadamard))
    given = {
        "cache": cache.cpu(), "k": k, "slot_mapping": slots, "power_of_two": scale == "ue8m0",
    }  # fmt: skip
    want = append_work.truth(spec, given)["cache"]
    append_index_k(cache, k.cuda(), slots.cuda(), scale=scale, hadamard=hadamard)
    assert torch.equal(pages(cache).cpu(), want)

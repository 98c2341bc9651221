"""``snapmla.dsa`` on a real GPU: a step's choice beside its parts and a stable sort, the same bits
in any batch and over repeats, graphs; names of others; keys read back.

Variants are compiled where they are first asked for; ``build/variants`` of a machine with the
compiler serves one without.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.compat import deep_gemm, vllm
from snapmla.dsa import fetch_index_k, index_logits, index_topk, index_topk_workspace
from snapmla.indexer.index_logits import pages
from snapmla.testing import topk_reference
from snapmla.testing.index_tables import rows_tables
from snapmla.testing.workloads import fetch_index_k as fetch_work
from snapmla.testing.workloads import index_rows as rows_work
from snapmla.testing.workloads.index_logits import sample_call
from tests.support.rows import kernel

pytestmark = pytest.mark.gpu
E4M3, K = torch.float8_e4m3fn, 2048
LENGTHS = (5000, 0, 70, 2048, 20001, 2049)
TOKENS: list[Any] = [1, 2, 4, (300, 1, 0, 5, 700, 2)]


def arguments(tokens: Sequence[int] | int, heads: int = 64) -> dict[str, Any]:
    """A step on the device over pages apart; what lengths do not cover is NaN."""
    torch.manual_seed(0)
    made = sample_call(heads, LENGTHS, tokens, gap=64)
    cache = made["cache"]
    memory = torch.full((len(cache), cache.stride(0)), 0x7F, dtype=torch.uint8)
    memory[:, : cache.shape[1]] = cache
    q, w = made["q"].view(E4M3).cuda(), made["w"].cuda()
    if isinstance(tokens, int):
        outer = len(LENGTHS), tokens
        q, w = q.view(*outer, heads, 128), w.view(*outer, heads)
    given = {name: made[name].cuda() for name in ("block_table", "cache_seqlens")}
    given["block_table"] = given["block_table"].clamp(max=len(cache) + 5)
    begins = None if isinstance(tokens, int) else made["cu_seqlens_q"].cuda()
    return {
        "q": q, "w": w, "cache": memory.cuda()[:, : cache.shape[1]], **given, "k": K,
        "cu_seqlens_q": begins,
    }  # fmt: skip


def rows_of(given: dict[str, Any], rows: int) -> tuple[Tensor, Tensor]:
    begins, table = given["cu_seqlens_q"], given["block_table"].cpu()
    s_q = 0 if begins is not None else given["q"].shape[1]
    begins = None if begins is None else begins.cpu()
    lengths = given["cache_seqlens"].cpu()
    return rows_tables(lengths, begins, table, 64 * table.shape[1], rows, s_q)


def same(made: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for mine, right in zip(made, want, strict=True):
        assert torch.equal(mine.cpu(), right.cpu())


@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize("tokens", TOKENS, ids=str)
def test_what_is_chosen(tokens: Any, heads: int) -> None:
    """A stable sort of the scores of ``index_logits``, slots and positions; 20 times the same."""
    given = arguments(tokens, heads)
    logits = index_logits(**{name: x for name, x in given.items() if name != "k"})
    lengths, tables = rows_of(given, len(logits))
    for slots in (True, False):
        table = tables if slots else None
        want = topk_reference.select_topk_reference(logits.cpu(), lengths, K, block_table=table)
        for _ in range(20):
            same(index_topk(**given, slots=slots), want)


def test_the_same_alone_and_in_a_batch() -> None:
    given = arguments((9, 0, 3, 1, 6, 2))
    together, begins = index_topk(**given), given["cu_seqlens_q"].tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(begins)):
        if begin == end:
            continue
        alone = {
            "q": given["q"][begin:end][None], "w": given["w"][begin:end][None],
            "cache": given["cache"], "block_table": given["block_table"][i : i + 1],
            "cache_seqlens": given["cache_seqlens"][i : i + 1], "k": K,
        }  # fmt: skip
        same(index_topk(**alone), (together[0][begin:end], together[1][begin:end]))


@pytest.mark.parametrize("tokens", TOKENS, ids=str)
def test_graph_follows_lengths(tokens: Any) -> None:
    """Captured once over a workspace of garbage, replayed with other lengths, zeros among them."""
    given = arguments(tokens)
    rows, columns = len(given["w"].flatten(0, -2)), 64 * given["block_table"].shape[1]
    size = index_topk_workspace(rows, columns)
    results = {
        "out": torch.empty(rows, K, dtype=torch.int32, device="cuda"),
        "counts": torch.empty(rows, dtype=torch.int32, device="cuda"),
        "workspace": torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda"),
    }  # fmt: skip
    index_topk(**given, **results)  # loads the kernels
    before = torch.cuda.memory_allocated()
    index_topk(**given, **results)
    assert torch.cuda.memory_allocated() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        index_topk(**given, **results)
    for lengths in ((0,) * 6, (5000, 0, 1, 2047, 9999, 64), LENGTHS):
        given["cache_seqlens"].copy_(torch.tensor(lengths))
        for value in results.values():
            value.fill_(0x7F)
        graph.replay()
        replayed = results["out"].clone(), results["counts"].clone()
        same(replayed, index_topk(**given))


@pytest.mark.parametrize("next_n", [1, 2, 5])
def test_deep_gemms_names(next_n: int) -> None:
    """Decode, and the same tokens as a prompt over keys that lie side by side: the same bits as
    ``index_logits``."""
    given = arguments(next_n)
    width = given["block_table"].shape[1]
    cache = given["cache"]
    shaped = cache.as_strided((len(cache), 64, 1, 132), (cache.stride(0), 132, 132, 1))
    lens = given["cache_seqlens"][:, None].repeat(1, next_n)
    meta = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132)
    w = given["w"].view(-1, 64)
    found = deep_gemm.fp8_paged_mqa_logits(
        given["q"], shaped, w, lens, given["block_table"], meta, 64 * width
    )
    logits = index_logits(**{name: x for name, x in given.items() if name != "k"})
    lengths, _ = rows_of(given, len(logits))
    for mine, want, n in zip(found, logits, lengths.tolist()):
        assert torch.equal(mine[:n], want[:n])
    begins = torch.nn.functional.pad(given["cache_seqlens"].cumsum(0), (1, 0)).int()
    total = int(begins[-1])
    keys, scales = fetch_index_k(cache, given["block_table"], cu_seqlens=begins, total=total)
    starts = begins[:-1].repeat_interleave(next_n)
    ends = starts + lengths.cuda()
    flat = given["q"].view(-1, 64, 128)
    side = deep_gemm.fp8_mqa_logits(flat, (keys, scales), w, starts, ends)
    for mine, want, start, n in zip(side, logits, starts.tolist(), lengths.tolist()):
        assert torch.equal(mine[start : start + n], want[:n])
        assert int((mine > -torch.inf).sum()) == n


def test_vllms_top_k() -> None:
    """Of decode and prompts, beside a stable sort."""
    logits = topk_reference.scores("zeros", 8, 20000, 2).cuda()
    lengths = torch.tensor([20000, 1, 4100, 2049]).int().cuda()
    seen = (lengths[:, None] + torch.tensor([-1, 0]).int().cuda()).view(-1)
    want, _ = topk_reference.select_topk_reference(logits.cpu(), seen.cpu(), K)
    out = torch.empty(8, K, dtype=torch.int32, device="cuda")
    vllm.top_k_per_row_decode(logits, 2, lengths, out, 8, 20000, 1, K)
    assert torch.equal(out.cpu(), want)
    starts = torch.arange(8).int().cuda() * 3
    vllm.top_k_per_row_prefill(logits, starts, starts + seen, out, 8, 20000, 1, K)
    given = logits.cpu(), seen.cpu(), K
    want, _ = topk_reference.select_topk_reference(*given, row_starts=starts.cpu())
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("mode", ["indices", "ragged"])
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "f16", "f32"])
def test_keys_read_back(dtype: str, mode: str) -> None:
    """Bit for bit, every small call of the workload."""
    spec = VariantSpec(op="fetch_index_k", key_dtype=dtype, mode=mode)
    run = kernel("cuda", op="fetch_index_k", key_dtype=dtype, mode=mode)
    for call in fetch_work.WORKLOAD.small(spec):
        there = {name: on_device(x) for name, x in call.arguments.items()}
        run(*there.values())
        for name, want in call.want.items():
            got = there[name].cpu()
            assert torch.equal(got.nan_to_num(), want.nan_to_num()), name


def test_rows_of_a_step() -> None:
    """Entry for entry, every small call of the workload."""
    spec, run = VariantSpec(op="index_rows"), kernel("cuda", op="index_rows")
    for call in rows_work.WORKLOAD.small(spec):
        there = {name: on_device(x) for name, x in call.arguments.items()}
        run(*there.values())
        for name, want in call.want.items():
            assert torch.equal(there[name].cpu(), want), (call.note, name)


def on_device(value: Any) -> Any:
    """A tensor on the device with the strides that it has."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return made.copy_(value)


def test_pages_are_those_of_engines() -> None:
    """(pages, 64, 132) of a pool with room between pages."""
    pool = torch.zeros(3, 8640, dtype=torch.uint8, device="cuda")
    view = pool.as_strided((3, 64, 132), (8640, 132, 1))
    keys = torch.randn(4, 128, device="cuda").bfloat16()
    slots = torch.tensor([0, 63, 64, 191], device="cuda")
    vllm.indexer_k_quant_and_cache(keys, view, slots, 128, "ue8m0")
    dst = torch.zeros(4, 128, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(4, 4, dtype=torch.uint8, device="cuda")
    table = torch.tensor([[0], [0], [1], [2]], dtype=torch.int32, device="cuda")
    stored, factors = fetch_index_k(view, slots)
    begins = torch.tensor([0, 1, 2, 3, 4], dtype=torch.int32, device="cuda")
    vllm.cp_gather_indexer_k_quant_cache(view, dst, scales, table, begins)
    first = torch.tensor([0, 0, 2], device="cuda")  # tokens 0 of pages 0, 0, 1
    assert torch.equal(dst[:3], stored.view(torch.uint8)[first])
    assert torch.equal(scales[:3].view(torch.float32).view(-1), factors[first])
    assert pages(view).shape == (3, 8448)

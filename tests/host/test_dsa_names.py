"""DeepGEMM's and vLLM's names over the indexer's kernels: results, and what is refused."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from snapmla.compat import deep_gemm as dg
from snapmla.compat import vllm
from snapmla.indexer import shapes
from snapmla.indexer.index_logits import pages
from snapmla.testing import index_reference as reference
from snapmla.testing import topk_reference
from snapmla.testing.workloads.index_logits import SLACK, sample_call
from tests.support.needs import needs_kernels

E4M3, I32 = torch.float8_e4m3fn, torch.int32
scoring: Any = importlib.import_module("snapmla.indexer.index_logits")  # a function has its name


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k by a variant of few threads, scores by few CTAs."""
    monkeypatch.setattr(shapes, "choose", lambda *_: shapes.TopkShape(64, 8, 2))
    monkeypatch.setattr(scoring, "sm_count", lambda _: 3)
    monkeypatch.setattr(scoring, "unit_of", lambda _: 2)  # a variant that other tests take, too


def paged(lengths: tuple[int, ...], next_n: int, heads: int = 64) -> dict[str, Any]:
    """DeepGEMM's arguments; a full block table, pages apart, NaN behind what sequences have."""
    torch.manual_seed(0)
    made = sample_call(heads, lengths, next_n, gap=64)
    width = max(1, *(-(-n // 64) for n in lengths))
    cache = made["cache"]
    shaped = cache.as_strided((len(cache), 64, 1, 132), (cache.stride(0), 132, 132, 1))
    return {
        "q": made["q"].view(E4M3).view(len(lengths), next_n, heads, 128), "kv_cache": shaped,
        "weights": made["w"], "context_lens": made["cache_seqlens"][:, None].repeat(1, next_n),
        "block_table": made["block_table"][:, :width].contiguous(), "schedule_meta": None,
        "max_context_len": 64 * width,
    }  # fmt: skip


def truth(given: dict[str, Any], seen: list[int]) -> list[reference.Scores]:
    """Of each query token, as if it were a sequence's only one that sees so many tokens."""
    b, next_n, heads, _ = given["q"].shape
    rows = b * next_n
    call = {
        "q": given["q"].view(torch.uint8).view(rows, heads, 128), "w": given["weights"],
        "cache": pages(given["kv_cache"]), "s_q": 1,
        "block_table": given["block_table"].repeat_interleave(next_n, 0),
        "cache_seqlens": torch.tensor(seen), "cu_seqlens_q": torch.empty(0),
        "out": torch.empty(rows, given["max_context_len"]),
    }  # fmt: skip
    return reference.scores(call)


def right(found: Tensor, want: list[reference.Scores]) -> None:
    for row, scores in zip(found, want, strict=True):
        mine = row[: len(scores.values)]
        assert bool(((mine - scores.values).abs() <= SLACK * scores.size).all())


# ---------------------------------------------------------------------------- DeepGEMM


@needs_kernels
@pytest.mark.parametrize("next_n", [pytest.param(1, marks=pytest.mark.whole_matrix), 3])
def test_paged_logits(next_n: int) -> None:
    """Every query token is given all of its sequence's tokens, the table's last among them."""
    given = paged((128, 0, 70), next_n)
    # of lengths (b, next_n) the last column counts
    given["context_lens"][:, :-1] = torch.tensor([[1], [0], [50]], dtype=I32)
    meta = dg.get_paged_mqa_logits_metadata(given["context_lens"], 64, 7)
    assert meta.shape == (8, 2) and meta.dtype == I32
    found = dg.fp8_paged_mqa_logits(**given | {"schedule_meta": meta})
    assert found.shape == (3 * next_n, 128) and found.stride(0) * 4 % 1024 == 0
    right(found, truth(given, [n for n in (128, 0, 70) for _ in range(next_n)]))
    newer = dg.fp8_fp4_paged_mqa_logits((given.pop("q"), None), **given)
    for row, n in zip(range(0, 3 * next_n, next_n), (128, 0, 70)):
        assert torch.equal(found[row : row + next_n, :n], newer[row : row + next_n, :n])


@needs_kernels
def test_paged_logits_of_older_versions() -> None:
    """Lengths (b,): a query token sees those before it; what it does not see is cleaned."""
    given = paged((128, 0, 70), 2)
    given |= {"context_lens": given["context_lens"][:, 0].contiguous(), "clean_logits": True}
    found, seen = dg.fp8_paged_mqa_logits(**given), [127, 128, 0, 0, 69, 70]
    right(found, truth(given, seen))
    assert [int((row > -math.inf).sum()) for row in found] == seen


@needs_kernels
@pytest.mark.parametrize("heads", [64, pytest.param(32, marks=pytest.mark.whole_matrix)])
def test_prompt_logits(heads: int) -> None:
    """Two prompts' query tokens over keys that lie side by side, with an end in mid-page; cleaned
    and not."""
    torch.manual_seed(0)
    m, n = 11, 150
    q = torch.randn(m, heads, 128).to(E4M3)
    keys, scales = reference.quantize_keys(torch.randn(n, 128), power_of_two=False)
    w = torch.randn(m, 2 * heads)[:, :heads]
    starts = torch.tensor([0] * 7 + [90] * 4, dtype=I32)
    ends = torch.tensor([84, 85, 86, 87, 88, 89, 90, 91, 92, 93, 150], dtype=I32)
    found = dg.fp8_mqa_logits(q, (keys, scales), w, starts, ends)
    assert found.shape == (m, n) and found.stride(0) * 4 % 1024 == 0
    padded = torch.full((3, 8448), 0x7F, dtype=torch.uint8)
    stored, factors = reference.pages_of(padded)
    stored.view(torch.uint8).view(-1, 128)[:n] = keys.view(torch.uint8)
    factors.view(-1)[:n] = scales
    reference.fill_pages(padded, stored, factors)
    call = {
        "q": q.view(torch.uint8), "w": w, "cache": padded, "s_q": 1,
        "block_table": torch.arange(3).expand(m, -1), "cache_seqlens": ends,
        "cu_seqlens_q": torch.empty(0), "out": torch.empty(m, 192),
    }  # fmt: skip
    want = reference.scores(call)
    for row, scores, begin, end in zip(found, want, starts.tolist(), ends.tolist(), strict=True):
        error = (row[begin:end] - scores.values[begin:]).abs()
        assert bool((error <= SLACK * scores.size[begin:]).all())
        assert bool((row[:begin] == -math.inf).all() and (row[end:] == -math.inf).all())
    raw = dg.fp8_fp4_mqa_logits((q, None), (keys, scales), w, starts, ends, clean_logits=False)
    for i, (begin, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        assert torch.equal(raw[i, begin:end], found[i, begin:end])
    none = dg.fp8_mqa_logits(q[:0], (keys, scales), w[:0], starts[:0], ends[:0])
    assert none.shape == (0, n)
    assert dg.fp8_mqa_logits(q, (keys[:0], scales[:0]), w, starts, ends).shape == (m, 0)


# ---------------------------------------------------------------------------- vLLM


@needs_kernels
def test_top_k_of_decode() -> None:
    """Drafts by lengths of sequences, and by those of rows; parts of larger buffers."""
    logits = topk_reference.scores("zeros", 8, 304, 2)
    lengths = torch.tensor([300, 1, 41]).int()
    seen = torch.tensor([[299, 300], [0, 1], [40, 41]]).int()
    want, _ = topk_reference.select_topk_reference(logits[:6], seen.view(-1), 20)
    for told in (lengths, seen):
        out = torch.full((9, 33), -7).int()
        vllm.top_k_per_row_decode(logits, 2, told, out, 6, 304, 1, 20)
        assert torch.equal(out[:6, :20], want)
        assert bool((out[6:] == -7).all() and (out[:, 20:] == -7).all())
    out = torch.full((3, 20), -7).int()
    vllm.top_k_per_row_decode(logits, 1, lengths, out, 3, 304, 1, 20)
    alone, _ = topk_reference.select_topk_reference(logits[:3], lengths, 20)
    assert torch.equal(out, alone)
    out = torch.full((6, 20), -7).int()
    vllm.persistent_topk(logits[:6], seen, out, None, 20, 304)
    assert torch.equal(out, want)


@needs_kernels
def test_top_k_of_prompts() -> None:
    logits = topk_reference.scores("normal", 5, 304, 2)
    starts = torch.tensor([0, 7, 100, 50, 3]).int()
    ends = torch.tensor([300, 9, 304, 40, 3]).int()
    out = torch.full((5, 20), -7).int()
    vllm.top_k_per_row_prefill(logits, starts, ends, out, 5, 304, 1, 20)
    rows = topk_reference.select_topk_reference(logits, ends - starts, 20, row_starts=starts)
    assert torch.equal(out, rows[0])


@needs_kernels
@pytest.mark.parametrize("fmt", ["ue8m0", ""])
def test_keys_into_pages_and_back(fmt: str) -> None:
    """Padded slots; packed keys of two sequences, as bytes or as numbers."""
    torch.manual_seed(0)
    k = torch.randn(70, 128).bfloat16()
    cache = torch.full((4, 64, 132), 0x7F, dtype=torch.uint8)
    slots = torch.cat([torch.arange(128, 192), torch.arange(6), torch.tensor([-1, -1])])
    vllm.indexer_k_quant_and_cache(k, cache, slots, 128, fmt)
    keys, scales = reference.quantize_keys(k.float(), power_of_two=fmt == "ue8m0")
    table, begins = torch.tensor([[2, 0], [0, 9]]).int(), torch.tensor([0, 67, 70]).int()
    order = [*range(64), 64, 65, 66, 64, 65, 66]
    for dst, factors in (
        (torch.zeros(72, 128, dtype=torch.uint8), torch.zeros(72, 4, dtype=torch.uint8)),
        (torch.zeros(72, 128, dtype=torch.uint8).view(E4M3), torch.zeros(72, 1)),
    ):
        vllm.cp_gather_indexer_k_quant_cache(cache, dst, factors, table, begins)
        assert torch.equal(dst.view(torch.uint8)[:70], keys.view(torch.uint8)[order])
        assert torch.equal(factors.view(torch.float32).view(-1)[:70], scales[order])
        assert not dst.view(torch.uint8)[70:].any() and not factors[70:].any()


# ---------------------------------------------------------------------------- signatures

SIGNATURES = {
    dg.fp8_paged_mqa_logits: "q kv_cache weights context_lens block_table schedule_meta "
    "max_context_len clean_logits=False indices=None",
    dg.fp8_mqa_logits: "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits=True "
    "max_seqlen_k=0",
    dg.get_paged_mqa_logits_metadata: "context_lens block_kv num_sms indices=None",
    dg.fp8_fp4_mqa_logits: "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits=True "
    "max_seqlen_k=0 logits_dtype=torch.float32",
    dg.fp8_fp4_paged_mqa_logits: "q kv_cache weights context_lens block_table schedule_meta "
    "max_context_len clean_logits=False logits_dtype=torch.float32 indices=None",
    vllm.top_k_per_row_decode: "logits next_n seq_lens raw_topk_indices num_rows stride0 "
    "stride1 topk_tokens",
    vllm.top_k_per_row_prefill: "logits cu_seqlen_ks cu_seqlen_ke raw_topk_indices num_rows "
    "stride0 stride1 topk_tokens",
    vllm.persistent_topk: "logits lengths output workspace k max_seq_len",
    vllm.indexer_k_quant_and_cache: "k kv_cache slot_mapping quant_block_size kv_cache_dtype",
    vllm.cp_gather_indexer_k_quant_cache: "kv_cache dst_k dst_scale block_table cu_seq_lens",
}


def test_signatures() -> None:
    """Arguments by position, name and default."""
    for function, text in SIGNATURES.items():
        found = inspect.signature(function).parameters.values()
        assert [str(p).split(":")[0] + (f"={p.default}" if p.default is not p.empty else "")
                for p in found] == text.split()  # fmt: skip
    named = {f.__name__ for f in SIGNATURES}
    assert named == {*dg.__all__, *vllm.__all__}


# ---------------------------------------------------------------------------- what is wrong

Wrong = list[tuple[str, Callable[[Any], Any], str]]
PAGED: Wrong = [
    ("q", lambda q: q.half(), "q: expected dtype float8_e4m3fn, got float16"),
    ("q", lambda q: q[..., :64], "q: expected shape (b, next_n, h, 128)"),
    ("kv_cache", lambda c: c[:, :32], "kv_cache: expected shape (pages, 64, 1, 132)"),
    ("kv_cache", lambda c: c.float(), "kv_cache: expected dtype uint8, got float32"),
    ("weights", lambda w: w.bfloat16(), "weights: expected dtype float32, got bfloat16"),
    ("weights", lambda w: w[:3], "weights: expected shape (4, 32), got (3, 32)"),
    ("context_lens", lambda n: n.long(), "context_lens: expected dtype int32, got int64"),
    ("context_lens", lambda n: n[:, :1], "context_lens: expected shape (2, 2), got (2, 1)"),
    ("block_table", lambda t: t[:1], "block_table: expected shape (2, width)"),
    ("max_context_len", lambda _: 0, "max_context_len: expected 1 to"),
    ("clean_logits", lambda _: True, "clean_logits: expected False beside lengths (b, next_n)"),
    ("indices", lambda _: torch.zeros(2), "indices: expected None, got a tensor (ragged drafts"),
]
PROMPT: Wrong = [
    ("q", lambda q: q[:, :16], "weights: expected shape (3, 16), got (3, 32)"),
    ("kv", lambda kv: kv[0], "kv: expected a pair: keys and their scales, got Tensor"),
    ("kv", lambda kv: (kv[0][:, :64], kv[1]), "kv[0]: expected shape (n, 128)"),
    ("kv", lambda kv: (kv[0], kv[1][:5]), "kv[1]: expected shape (70,)"),
    ("weights", lambda _: None, "weights: expected a torch.Tensor, got NoneType"),
    ("cu_seq_len_k_start", lambda s: s[:2], "cu_seq_len_k_start: expected shape (3,)"),
    ("cu_seq_len_k_end", lambda s: s.long(), "cu_seq_len_k_end: expected dtype int32"),
    ("max_seqlen_k", lambda _: 64, "max_seqlen_k: expected one of 0, got 64 (columns are those"),
    ("clean_logits", lambda _: "no", "clean_logits: expected True or False"),
]


def refused(function: Any, given: dict[str, Any], wrong: Wrong) -> None:
    for name, change, text in wrong:
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}"):
            function(**given | {name: change(given.get(name))})


def test_what_deep_gemms_names_refuse() -> None:
    refused(dg.fp8_paged_mqa_logits, paged((70, 3), 2, heads=32), PAGED)
    keys = torch.zeros(70, 128).to(E4M3), torch.ones(70)
    given = {
        "q": torch.zeros(3, 32, 128).to(E4M3), "kv": keys,
        "weights": torch.ones(3, 32), "cu_seq_len_k_start": torch.zeros(3, dtype=I32),
        "cu_seq_len_k_end": torch.zeros(3, dtype=I32),
    }  # fmt: skip
    refused(dg.fp8_mqa_logits, given, PROMPT)
    newer = given | {"q": (given["q"], None)}
    changes: Wrong = [
        ("q", lambda q: q[0], "q: expected a pair: queries, and their FP4 scales or None"),
        ("q", lambda q: q * 1 if q[1] else (q[0], torch.ones(3)), "q: expected None in the place"),
        ("logits_dtype", lambda _: torch.bfloat16, "logits_dtype: expected float32, got"),
    ]
    refused(dg.fp8_fp4_mqa_logits, newer, changes)
    lens = torch.zeros(2, 1, dtype=I32)
    with pytest.raises(ValueError, match="^block_kv: expected one of 64, got 32"):
        dg.get_paged_mqa_logits_metadata(lens, 32, 132)
    with pytest.raises(ValueError, match="^num_sms: expected 1 or more"):
        dg.get_paged_mqa_logits_metadata(lens, 64, 0)


def test_what_vllms_names_refuse() -> None:
    decode = {
        "logits": torch.zeros(4, 64), "next_n": 2, "seq_lens": torch.zeros(2, dtype=I32),
        "raw_topk_indices": torch.zeros(4, 8, dtype=I32), "num_rows": 4, "stride0": 64,
        "stride1": 1, "topk_tokens": 8,
    }  # fmt: skip
    common: Wrong = [
        ("logits", lambda x: x.half(), "logits: expected dtype float32, got float16"),
        ("num_rows", lambda _: 5, "num_rows: expected 0 to 4, got 5"),
        ("stride0", lambda _: 32, "stride0: expected 64, that of logits, got 32"),
        ("stride1", lambda _: 2, "stride1: expected 1, that of logits, got 2"),
        ("topk_tokens", lambda _: 9, "raw_topk_indices: expected (4, 9) or more, got (4, 8)"),
        ("raw_topk_indices", lambda x: x[:3], "raw_topk_indices: expected (4, 8) or more"),
        ("raw_topk_indices", lambda x: x.long(), "raw_topk_indices: expected dtype int32"),
    ]
    own: Wrong = [
        ("next_n", lambda _: 3, "next_n: expected a divisor of the 4 rows, got 3"),
        ("seq_lens", lambda x: x[:1], "seq_lens: expected shape (2,), got (1,)"),
        ("seq_lens", lambda x: x[:, None], "seq_lens: expected shape (2, 2), got (2, 1)"),
    ]
    refused(vllm.top_k_per_row_decode, decode, common + own)
    bounds = {name: torch.zeros(4, dtype=I32) for name in ("cu_seqlen_ks", "cu_seqlen_ke")}
    rest = {n: x for n, x in decode.items() if n not in ("next_n", "seq_lens")}
    short: Wrong = [("cu_seqlen_ke", lambda x: x[:3], "cu_seqlen_ke: expected 4 entries or more")]
    refused(vllm.top_k_per_row_prefill, {**rest, **bounds}, common + short)
    key = {
        "k": torch.zeros(3, 128).bfloat16(), "kv_cache": torch.zeros(2, 64, 132).byte(),
        "slot_mapping": torch.arange(3), "quant_block_size": 128, "kv_cache_dtype": "ue8m0",
    }  # fmt: skip
    wrong: Wrong = [
        ("quant_block_size", lambda _: 64, "quant_block_size: expected one of 128, got 64"),
        ("kv_cache", lambda c: c[:, :16], "kv_cache: expected shape (pages, 64, 132)"),
        ("slot_mapping", lambda s: s[:2], "slot_mapping: expected shape (3,)"),
    ]
    refused(vllm.indexer_k_quant_and_cache, key, wrong)
    gather = {
        "kv_cache": key["kv_cache"], "dst_k": torch.zeros(3, 128).byte(),
        "dst_scale": torch.zeros(3, 4).byte(), "block_table": torch.zeros(1, 2, dtype=I32),
        "cu_seq_lens": torch.zeros(2, dtype=I32),
    }  # fmt: skip
    wrong = [
        ("dst_k", lambda k: k.half(), "dst_k: expected dtype float8_e4m3fn or uint8"),
        ("dst_scale", lambda s: s[:2], "dst_scale: expected shape (3, 4)"),
        ("block_table", lambda t: t[0], "block_table: expected shape (b, width)"),
        ("cu_seq_lens", lambda c: c[:1], "cu_seq_lens: expected shape (2,)"),
    ]
    refused(vllm.cp_gather_indexer_k_quant_cache, gather, wrong)

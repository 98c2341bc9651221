"""The PyTorch of ``docs/api.md`` computes what the kernels compute, and what fp64 says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla
from snapmla import dsa
from snapmla.testing import index_reference, metrics, selfcheck
from tests.docs.test_docs import api, render
from tests.support.needs import needs_compiler

P, HEADS, SCALE = 64, 16, 192**-0.5
WIDTH = 2  # pages of a sequence
# float32 beside fp64: sums of 576 products, and of the tokens
FLOAT32 = 1e-5


def of_the_page(entry: str) -> dict[str, Callable[..., Any]]:
    """The functions that the page shows under a heading, run from its text."""
    text = render.API.read_text().split(f"\n### {entry}\n")[1].split("\n### ")[0]
    found = re.search(r"\*In PyTorch\*.*?```python\n(.*?)```", text, flags=re.S)
    assert found is not None, f"{entry}: the page shows no PyTorch"
    names: dict[str, Any] = {}
    exec(
        "from __future__ import annotations\nimport torch\nfrom torch import einsum\n" + found[1],
        names,
    )
    return names


def test_the_page_has_all_of_them() -> None:
    for (module, name), functions in api.EQUIVALENTS.items():
        assert any((e.module, e.name) == (module, name) for e in api.entries())
        shown = of_the_page(name)
        assert all(function.__name__ in shown for function in functions)
        for function in functions:
            lines = re.search(
                rf"def {function.__name__}\b.*?\n    return [^\n]*", render.API.read_text(), re.S
            )
            assert lines is not None and len(lines[0].splitlines()) <= 18


def a_cache(lengths: list[int]) -> tuple[snapmla.PagedKVCache, Tensor, Tensor]:
    """(cache, block table, lengths); what no sequence has is NaN, entries behind an end rubbish."""
    cache = snapmla.PagedKVCache.allocate(4, P, device="cpu")
    for part in cache.named_tensors.values():
        part.view(torch.uint8).fill_(0xFF)  # a NaN of each dtype
    table = torch.tensor([[3, 1], [2, 1 << 30]], dtype=torch.int32)
    slots = torch.cat([
        table[i, torch.arange(n) // P] * P + torch.arange(n) % P for i, n in enumerate(lengths)
    ])  # fmt: skip
    x = torch.randn(len(slots), 576).bfloat16()
    snapmla.append_kv(cache, x[:, :512], x[:, 512:], slots)
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def a_query(s_q: int) -> snapmla.QuantizedQuery:
    q = torch.randn(2, s_q, HEADS, 576).bfloat16()
    return snapmla.quantize_q(q[..., :512], q[..., 512:])


@needs_compiler
def test_decode() -> None:
    """Lengths beyond a page, and one with fewer tokens than queries, whose first row sees none."""
    torch.manual_seed(3)
    cache, table, lens = a_cache([70, 1])
    query = a_query(2)
    out, lse = of_the_page("decode")["decode"](query, cache, table, lens, SCALE)
    assert (out[1, 0] == 0).all() and (lse[1, :, 0] == -torch.inf).all()
    errors = selfcheck.decode_errors(out, lse, query, cache, table, lens, SCALE)
    assert errors.error < FLOAT32 and errors.lse_error < FLOAT32
    plan = snapmla.plan_decode(lens, HEADS, 2, page_size=P, max_pages=WIDTH)
    own, own_lse = snapmla.decode(query, cache, table, lens, softmax_scale=SCALE, plan=plan)
    agree(
        own,
        own_lse,
        out,
        lse,
        selfcheck.decode_errors(own, own_lse, query, cache, table, lens, SCALE),
    )


def agree(own: Tensor, own_lse: Tensor, out: Tensor, lse: Tensor, errors: Any) -> None:
    """The kernel is as near to the page's PyTorch as its rounding allows to fp64."""
    assert errors.right, str(errors)
    assert metrics.relative_l2(own, out) < errors.allowed + FLOAT32
    seen = lse.isfinite()
    assert torch.equal(seen, own_lse.isfinite())
    assert (own_lse - lse)[seen].abs().max() < errors.lse_allowed + FLOAT32


@needs_compiler
def test_sparse_decode() -> None:
    """No tokens at any place, one named twice, entries behind ``topk_length``."""
    torch.manual_seed(4)
    cache, table, _ = a_cache([70, 3])
    query = a_query(1)
    indices = torch.full((2, 1, P), -1, dtype=torch.int32)
    indices[0, 0, 1:21] = table[0, 0] * P + torch.randperm(P, dtype=torch.int32)[:20]
    indices[0, 0, 21:24] = torch.tensor([4 * P, (1 << 31) - 1, int(indices[0, 0, 1])])
    indices[0, 0, 24:] = indices[0, 0, 2]
    indices[1, 0, :3] = table[1, 0] * P + torch.arange(3, dtype=torch.int32)
    counts = torch.tensor([24, 2], dtype=torch.int32)
    out, lse = of_the_page("decode")["sparse_decode"](query, cache, indices, counts, SCALE)
    plan = snapmla.plan_sparse_decode(HEADS, 1, topk=P, topk_length=counts)
    own, own_lse = snapmla.decode(
        query, cache, indices=indices, topk_length=counts, softmax_scale=SCALE, plan=plan
    )
    # the tokens in a row, as a sequence of dense decode: the reference of both
    named = [indices[0, 0, [*range(1, 21), 23]], indices[1, 0, :2]]
    lined, line_table, line_lens = a_cache([21, 2])
    for part, source in zip(
        lined.named_tensors.values(), cache.named_tensors.values(), strict=True
    ):
        for i, slots in enumerate(named):
            page = line_table[i, 0]
            part[page, : len(slots)] = source.flatten(0, 1)[slots.long()]
    errors = selfcheck.decode_errors(out, lse, query, lined, line_table, line_lens, SCALE)
    assert errors.error < FLOAT32 and errors.lse_error < FLOAT32
    errors = selfcheck.decode_errors(own, own_lse, query, lined, line_table, line_lens, SCALE)
    agree(own, own_lse, out, lse, errors)


@needs_compiler
def test_scores() -> None:
    """Of two query tokens a sequence; what lies behind the lengths is NaN."""
    torch.manual_seed(5)
    cache = torch.full((4, 64, 132), 0xFF, dtype=torch.uint8)
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    lens = torch.tensor([70, 1], dtype=torch.int32)
    pages = cache.view(4, -1)
    for page, count in ((3, 64), (1, 6), (2, 1)):
        keys = torch.randn(count, 128).to(torch.float8_e4m3fn)
        pages[page, : 128 * count] = keys.view(torch.uint8).flatten()
        pages[page, 8192 : 8192 + 4 * count] = torch.rand(count).view(torch.uint8)
    q = torch.randn(2, 2, 64, 128).to(torch.float8_e4m3fn)
    w = torch.rand(2, 2, 64)
    found = of_the_page("index_logits")["scores"](q, w, cache, table, lens)
    own = dsa.index_logits(q, w, cache, table, lens, unit_rows=2)
    given = {
        "q": q.flatten(0, 1), "w": w.flatten(0, 1), "cache": pages, "block_table": table,
        "cache_seqlens": lens, "cu_seqlens_q": torch.tensor([0, 2, 4]), "out": own,
    }  # fmt: skip
    model, exact = index_reference.scores(given), index_reference.scores(given, "exact")
    for row, seen in enumerate((69, 70, 0, 1)):
        assert (found[row, seen:] == -torch.inf).all()
        rounding = FLOAT32 * exact[row].size
        assert ((found[row, :seen] - exact[row].values).abs() <= rounding).all()
        cuts = (model[row].values - exact[row].values).abs()  # the FP8 tensor core's
        assert ((own[row, :seen] - found[row, :seen]).abs() <= cuts + 2 * rounding).all()


@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3)])
def test_the_picture_of_a_causal_mask(queries: int, keys: int) -> None:
    """The two triangles of ``mha_prefill``, by its rule."""
    text = render.API.read_text().split("\n### mha_prefill\n")[1].split("\n### ")[0]
    picture = re.search(r"```text\n(.*?)```", text, flags=re.S)
    assert picture is not None
    lines = [re.sub(r"out.*", "", line).ljust(24) for line in picture[1].splitlines()]
    first = [line[:12].split() for line in lines]
    second = [line[12:].split() for line in lines]
    shown = [row for row in (first if queries == 3 else second) if row]
    assert shown == [
        [str(int(key <= row + keys - queries)) for key in range(keys)] for row in range(queries)
    ]

"""The reference of decode over a 16-bit cache against torch's softmax, and where NaN may go."""

from __future__ import annotations

import math

import pytest
import torch

from snapmla.testing import dense_reference, selfcheck
from snapmla.testing.dense_reference import dense_decode_reference, logit_magnitudes

SCALE = 576**-0.5
LENGTHS = (37, 0, 64, 5)


def by_softmax(
    q: torch.Tensor, rows: torch.Tensor, seen: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of query tokens (s_q, g, 576) over (n, 576), where token s sees seen[s]."""
    outs, lses = [], []
    for row, n in zip(q.double(), seen, strict=True):
        logits = row @ rows[:n].double().T * SCALE
        outs.append(logits.softmax(-1) @ rows[:n, :512].double())
        lses.append(logits.logsumexp(-1))
    return torch.stack(outs), torch.stack(lses, 1)


@pytest.mark.parametrize("chunk", [16, 16384])
@pytest.mark.parametrize("rule", ["causal", "all", "rows", "ragged"])
@pytest.mark.parametrize("heads", [1, 3])
def test_equals_softmax(heads: int, rule: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_reference, "CHUNK", chunk)
    torch.manual_seed(heads)
    cache, table, seqlens = selfcheck.filled_rows(LENGTHS, 16, torch.bfloat16, heads)
    assert cache.kv is not None
    begins = torch.tensor([0, 1, 1, 4, 9]) if rule == "ragged" else torch.arange(0, 11, 2)[:5]
    q = torch.randn(int(begins[-1]), 2 * heads, 576).bfloat16()
    given: dict = {"causal": rule != "all", "lse_base": "2", "empty_lse": "+inf"}
    limits = torch.tensor([[3, 70], [4, 4], [0, 64], [5, 1]]) if rule == "rows" else None
    if rule == "ragged":
        given["cu_seqlens_q"] = begins
    given["row_seqlens"] = limits
    shaped = q if rule == "ragged" else q.unflatten(0, (4, 2))
    out, lse = dense_decode_reference(shaped, cache.kv, table, seqlens, SCALE, **given)
    of = torch.rand(lse.shape) < 0.5
    del given["lse_base"], given["empty_lse"]
    sizes = logit_magnitudes(shaped, cache.kv, table, seqlens, -SCALE, of, **given)
    if rule != "ragged":
        out, (lse, sizes, of) = (
            out.flatten(0, 1), (x.permute(1, 0, 2).flatten(1) for x in (lse, sizes, of))
        )  # fmt: skip
    for i, length in enumerate(LENGTHS):
        own = slice(int(begins[i]), int(begins[i + 1]))
        s_q = own.stop - own.start
        seen = [max(length - (s_q - 1 - s) * (rule != "all"), 0) for s in range(s_q)]
        if limits is not None:
            seen = [min(n, length) for n in limits[i].tolist()]
        at = selfcheck.places(table[i], length, 16)
        for j in range(heads):
            own_heads = slice(2 * j, 2 * j + 2)
            if s_q == 0:
                continue
            want, want_lse = by_softmax(q[own, own_heads], cache.kv[(*at, j)], seen)
            products = q[own, own_heads].double().abs() @ cache.kv[(*at, j)].double().abs().T
            for s, n in enumerate(seen):
                asked, size = (x[own_heads, own][:, s] for x in (of, sizes))
                largest = products[s, :, :n].amax(1) * SCALE if n else torch.zeros(2)
                torch.testing.assert_close(size, torch.where(asked, largest, 0.0).double())
                got = out[own][s, own_heads], lse[own_heads, own][:, s]
                if n == 0:
                    assert (got[0] == 0).all() and (got[1] == math.inf).all()
                    continue
                torch.testing.assert_close(got[0], want[s], rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(got[1] * math.log(2), want_lse[:, s], rtol=1e-12, atol=0)


def test_nan_goes_where_it_is_seen() -> None:
    """A NaN token reaches the rows that see it; an infinite logit makes NaN, as in a softmax."""
    torch.manual_seed(0)
    cache, table, seqlens = selfcheck.filled_rows((20,), 16, torch.float16)
    assert cache.kv is not None
    q = torch.randn(1, 3, 2, 576).half()
    q[..., 7] = 0.0
    clean, clean_lse = dense_decode_reference(q, cache.kv, table, seqlens, SCALE)
    page, offset = selfcheck.places(table[0], 20, 16)
    cache.kv[page[18], offset[18], 0, 100] = math.nan
    out, lse = dense_decode_reference(q, cache.kv, table, seqlens, SCALE)
    assert torch.equal(out[0, 0], clean[0, 0]) and lse[0, :, 0].isfinite().all()
    assert out[0, 1:].isnan().all() and lse[0, :, 1:].isnan().all()
    sizes = logit_magnitudes(q, cache.kv, table, seqlens, SCALE, torch.isfinite(clean_lse))
    assert (sizes[0, :, 0] > 0).all() and sizes[0, :, 1:].isnan().all()
    cache.kv[page[18], offset[18], 0, 100] = 0.0
    cache.kv[page[3], offset[3], 0, 7] = math.inf
    q[..., 7] = 1.0
    out, lse = dense_decode_reference(q, cache.kv, table, seqlens, SCALE)
    assert out.isnan().all() and lse.isnan().all()  # an infinite logit: inf - inf


def test_heads_must_go_together() -> None:
    cache, table, seqlens = selfcheck.filled_rows((5,), 16, torch.float16, 3)
    assert cache.kv is not None
    with pytest.raises(ValueError, match="q: expected a multiple of 3 heads, got 4"):
        dense_decode_reference(torch.zeros(1, 1, 4, 576), cache.kv, table, seqlens, 1.0)

"""vLLM's top-k names on a real GPU over rows of any width, as its own tests have them: no multiple
of 16 bytes apart, and cut out of wider ones."""

from __future__ import annotations

import pytest
import torch

from snapmla.compat import vllm
from snapmla.testing import topk_reference

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor
K = 2048
WIDTHS = (2050, 16390, 34893)
ROWS = (1, 8, 130)  # few rows and many take other variants


def problem(rows: int, width: int, gap: int) -> tuple[Tensor, Tensor]:
    """Scores, ``gap`` columns of NaN behind each row, and lengths from none to all columns."""
    lengths = torch.linspace(0, width, rows + 1).int()[1:]
    found = topk_reference.scores("normal", rows, width + gap, width)
    found[:, width:] = torch.nan
    return found[:, :width], lengths


def on_device(logits: Tensor) -> Tensor:
    """The same strides there: a copy would be contiguous."""
    rows, width = logits.shape
    whole = torch.as_strided(logits, (rows, logits.stride(0)), logits.stride())
    return whole.cuda()[:, :width]


@pytest.mark.parametrize("gap", [0, 1, 6])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_any_width(width: int, gap: int) -> None:
    """Every name against a stable sort, entry for entry."""
    for rows in ROWS:
        host, lengths = problem(rows, width, gap)
        want, _ = topk_reference.select_topk_reference(host.contiguous(), lengths, K)
        logits, seen = on_device(host), lengths.cuda()
        assert logits.stride() == (width + gap, 1)
        last = rows, logits.stride(0), logits.stride(1), K
        results = [torch.full((rows, K), -7, dtype=torch.int32, device="cuda") for _ in range(3)]
        vllm.persistent_topk(logits, seen, results[0], None, K, width)
        vllm.top_k_per_row_decode(logits, 1, seen, results[1], *last)
        vllm.top_k_per_row_prefill(logits, torch.zeros_like(seen), seen, results[2], *last)
        for name, result in zip(("persistent", "decode", "prefill"), results, strict=True):
            assert torch.equal(result.cpu(), want), (name, rows)


@pytest.mark.parametrize("width", WIDTHS)
def test_prompts_begin_anywhere(width: int) -> None:
    """Columns ks to ke of each row, ks of every remainder by four."""
    rows = 9
    host, _ = problem(rows, width, 0)
    starts = torch.arange(rows).int()
    ends = torch.full((rows,), width, dtype=torch.int32)
    want, _ = topk_reference.select_topk_reference(host, ends - starts, K, row_starts=starts)
    out = torch.full((rows, K), -7, dtype=torch.int32, device="cuda")
    vllm.top_k_per_row_prefill(host.cuda(), starts.cuda(), ends.cuda(), out, rows, width, 1, K)
    assert torch.equal(out.cpu(), want)

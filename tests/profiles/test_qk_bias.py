"""``profiles.qk_bias``: its committed tables are the page's and the docs'; its weights."""

from __future__ import annotations

import json

import pytest
import torch

from profiles import qk_bias
from snapmla.testing import aligned
from tests.support import ROOT

RESULTS = ROOT / "profiles" / "results"


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads((RESULTS / "qk-bias.json").read_text("utf-8"))


def test_the_page_is_the_tables(report: dict) -> None:
    assert (RESULTS / "qk-bias.md").read_text("utf-8") == qk_bias.page(report)


def test_the_docs_show_the_tables(report: dict) -> None:
    text = (ROOT / "docs" / "numerics.md").read_text("utf-8")
    shown = qk_bias.pair_lines(report["pairs"]) + qk_bias.spread_lines(report["spreads"])
    for line in shown + qk_bias.pattern_lines(report["patterns"]):
        assert line in text, f"docs/numerics.md lacks: {line}"


def test_what_the_docs_claim(report: dict) -> None:
    """6e-4 of two terms of P up to a standard deviation of 1; beyond, and where a query equals a
    key, the bias, of which P's terms take nothing.  Exact logits have none of it."""
    for row in report["spreads"]:
        assert (row["two"] < 6.5e-4) == (row["deviation"] <= 1), row
        low, high = row["lse_bound"]
        errors = row["lse_error"]
        assert low <= errors["standard"] == errors["two"] <= high
        assert row["high"] <= 3e-4 and abs(errors["high"]) <= 2e-4 + 2e-5 * row["largest"]
    for row in report["pairs"]:
        assert 0.7e-3 * row["logit"] < row["two"] < 1.0e-3 * row["logit"]
        assert row["high"] <= 1e-3 and abs(row["lse_error"]["high"]) <= 2e-5
    for row in report["merged"]:
        bias = row["bias"]["two"][0] - row["bias"]["two"][1]
        assert row["two"] == pytest.approx(-bias / 2, rel=0.1)
        assert row["high"] <= 1e-3 and max(map(abs, row["bias"]["high"])) <= 2e-5
    for row in report["patterns"]:
        assert row["share"][1] <= 1 and row["bound"] <= row["bias"][2]


def test_first_weight_is_a_weight() -> None:
    step = aligned.two_of_one_logit(5.0)
    content, _, scale = (x.double() for x in step.tokens)
    out = (torch.tensor([0.3, 0.7]).double() @ (content * scale[:, None])).expand(1, 1, 16, 512)
    assert qk_bias.first_weight(step, out) == pytest.approx(0.3, abs=1e-6)

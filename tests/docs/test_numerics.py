"""docs/numerics.md says of Q·K's bias what was found (qk-bias in profiles/results)."""

from __future__ import annotations

import json

import pytest

from tests.support import ROOT

FOUND = ROOT / "profiles" / "results" / "qk-bias.json"
MERGED = "## Two ranks"  # of these the page has a plot


def test_the_page_has_the_tables() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text("utf-8")
    tables = FOUND.with_suffix(".md").read_text("utf-8").partition(MERGED)[0]
    rows = [line for line in tables.splitlines() if line.startswith("|")]
    assert len(rows) == 3 * 2 + 5 + 5 + 4
    assert not [row for row in rows if row not in text]


def test_what_the_page_claims() -> None:
    """6e-4 of two terms of P up to a standard deviation of 1; beyond, and where a query equals a
    key, the bias, of which P's terms take nothing.  Exact logits have none of it."""
    report = json.loads(FOUND.read_text("utf-8"))
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

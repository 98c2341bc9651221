"""docs/performance.md is short, and its tables are what the committed results say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.docs.test_docs import anchors, headings, load, render
from tests.support import ROOT

sys.path.insert(0, str(ROOT / "docs"))
speeds = load(ROOT / "docs" / "speeds.py")
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
BOOK = (ROOT / "docs" / "lab-book.md").read_text("utf-8")
EACH = [row for rows in speeds.AREAS.values() for row in rows]
RESULT = """# Some table

- gpu NVIDIA H100 80GB HBM3, driver 1

| what | us |
|---|---|
| a | 3 |

| shape | A | error | B | ratio | C µs | ratio (gate) |
|---|---|---|---|---|---|---|
| 1 x 2 | 1 | 2 | 3 | 2.00 | 4 | 8.00 (1.0) |
| 1 x 3 | 1 | 2 | 3 | 4.0 met | 4 | – |
| 7 x 3 | 1 | 2 | 3 | 0.5 | 4 | 0.25 |
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with one page, in place of the committed ones."""
    monkeypatch.setattr(speeds, "RESULTS", tmp_path)
    (tmp_path / "some.md").write_text(RESULT)
    return tmp_path


def test_it_is_short() -> None:
    """At most 150 lines, one table an area, and a link to the lab book."""
    assert len(PAGE.splitlines()) <= 150
    places = [PAGE.index(f"<!-- begin speed of {area} -->") for area in speeds.AREAS]
    assert places == sorted(places) and PAGE.count("<!-- begin") == len(places)
    outside = re.sub(r"<!-- begin.*?<!-- end -->", "", PAGE, flags=re.S)
    assert not re.search(r"^\|", outside, re.M), "a table that no result writes"
    assert "(lab-book.md)" in PAGE and "(performance.md)" in BOOK


def test_no_ratio_is_typed_by_hand() -> None:
    outside = re.sub(r"<!-- begin.*?<!-- end -->|```.*?```", "", PAGE, flags=re.S)
    assert not re.findall(r"\b\d+\.\d+\b", re.sub(r"\]\([^)]*\)", "]", outside))


@pytest.mark.parametrize("row", EACH, ids=[f"{r.page}: {r.what}, {r.how}" for r in EACH])
def test_a_row_is_of_its_result(row: object) -> None:
    """The least ratio is no more than the mean, which is no more than the most."""
    line = row.line()  # type: ignore[attr-defined]
    mean, least, most = (float(x.strip(" *")) for x in line.split("|")[5:8])
    assert line in PAGE and 0 < least <= mean <= most < 10


def test_every_shape_of_top_k_is_in_one_of_two_rows() -> None:
    path = speeds.RESULTS / "dsa_cost.md"
    every, short, long = (
        speeds.cells("vLLM", rows=rows)(path) for rows in ("", speeds.SHORT, speeds.LONG)
    )
    assert sorted(every) == sorted(short + long) and short and long


def test_means_are_those_of_the_tables() -> None:
    """Of rows that a page of ``profiles.bench`` sums up itself."""
    said = r"^snapmla against both FlashMLA: .* geomean ([\d.]+)x, worst ([\d.]+)x"
    for name in ("h200-table", "h100-table"):
        found = re.search(said, (speeds.RESULTS / f"{name}.md").read_text(), re.M)
        assert found is not None
        (row,) = (r for r in EACH if r.page == name)
        assert row.line().split(" | ")[4:6] == [f"**{found[1]}**", found[2]]


def test_ratios_are_found_by_column(folder: Path) -> None:
    path = folder / "some.md"
    assert speeds.cells("ratio")(path) == [2.0, 4.0, 0.5]
    assert speeds.cells(behind=["C µs"])(path) == [8.0, 0.25]
    assert speeds.cells(behind=["B", "C µs"])(path) == [2.0, 4.0, 0.25]
    assert speeds.cells("ratio", rows=r"^1 x .* \| 3 ")(path) == [2.0, 4.0]
    row = speeds.Row("calls", "them", speeds.TURN, "some", speeds.cells("ratio"))
    link = "H100, [some](../profiles/results/some.md)"
    assert row.line() == f"| calls | them | in turn | 3 | **1.59** | 0.50 | 4.00 | {link} |"


def test_a_table_without_the_column_is_named(folder: Path) -> None:
    for ratios in (
        speeds.cells("none"), speeds.cells("ratio", rows="nothing"), speeds.said(r"(\d)x faster"),
        speeds.divided("a", "b"), speeds.pairs("µs", "ours", "theirs"),
    ):  # fmt: skip
        row = speeds.Row("calls", "them", speeds.TURN, "some", ratios)
        with pytest.raises(speeds.Unread, match=r"some\.md: no ratio for 'calls'"):
            row.line()


def test_contenders_of_a_shape_are_paired(folder: Path) -> None:
    """By the cells in front of ``who``; a shape that only one has does not count."""
    (folder / "some.md").write_text(
        "| form | n | who | µs |\n|---|---|---|---|\n"
        "| a | 1 | ours | 2.0 |\n| a | 1 | them | 3.0 |\n"
        "| a | 2 | ours | 2.0 |\n| b | 1 | them | 9.0 |\n"
    )
    assert speeds.pairs("µs", "ours", "them")(folder / "some.md") == [1.5]


def test_rows_that_failed_do_not_count(folder: Path) -> None:
    """And the peer is the fastest of the shape."""
    rows = [
        {"shape": shape, "backend": backend, "us": us, "status": "ok", "check_ok": good}
        for shape, backend, us, good in (
            ("a", "snapmla", 2.0, True), ("a", "x", 8.0, True), ("a", "y", 3.0, True),
            ("b", "snapmla", 2.0, False), ("b", "x", 8.0, True),
            ("c", "snapmla", 2.0, True), ("c", "x", 1.0, False), ("c", "y", 5.0, True),
        )
    ]  # fmt: skip
    (folder / "some.json").write_text(json.dumps({"rows": rows}))
    path = folder / "some.md"
    assert speeds.timed("us", "snapmla", "x", "y")(path) == [1.5, 2.5]
    assert speeds.timed("us", "snapmla", "x", shapes="^a$")(path) == [4.0]
    assert speeds.timed("alone_us", "snapmla", "x")(path) == []


def test_render_writes_the_page() -> None:
    """With the tables of another set of results the page is another one."""
    assert ROOT / "docs" / "performance.md" in render.FILLED
    assert render.filled(PAGE) == PAGE
    assert render.filled(PAGE.replace("| **1.", "| **2.")) == PAGE


def test_contents_of_the_lab_book_are_whole() -> None:
    """Every heading is in the list at the top, once and in order."""
    contents, _, rest = BOOK.partition("\n## ")
    listed = re.findall(r"^ *\* \[.+\]\(#([^)]+)\)$", contents, flags=re.M)
    assert listed == [anchor for _, anchor in headings("## " + rest)]


def test_results_link_to_headings_that_exist() -> None:
    """From ``profiles/results`` into ``docs``; the other way round is test_docs.py's."""
    links = [
        (path.name, page, anchor)
        for path in sorted((ROOT / "profiles" / "results").rglob("*.md"))
        for page, anchor in re.findall(r"\]\([./]+/docs/([\w.-]+\.md)#([^)]+)\)", path.read_text())
    ]
    assert ("README.md", "lab-book.md", "power") in links
    found = {page: anchors(ROOT / "docs" / page) for _, page, _ in links}
    assert not [link for link in links if link[2] not in found[link[1]]]

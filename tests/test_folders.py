"""Folders of ``dsl_kernels`` import one way, by the table below.

What stands at the top (``spec``, ``registry``, ``arguments``) and ``families`` describe variants to
hosts: no kernel imports them, so a new axis or op compiles nothing anew.  Imports under
``if TYPE_CHECKING:`` do not count.
"""

from __future__ import annotations

import graphlib

import pytest

from tests.test_floors import ROOT, Import, imports

PACKAGE, TOP = "dsl_kernels", "the top"
# Folder -> folders that it may import: a new arrow is a decision, made here.
ARROWS: dict[str, frozenset[str]] = {
    folder: frozenset(may.split())
    for folder, may in {
        "formats": "",
        "families": "formats",
        "blocks": "formats",
        "load": "formats blocks",
        "schedule": "formats blocks",
        "cache": "formats blocks",
        "indexer": "formats blocks cache",
        "combine": "formats blocks load schedule",
        "entry": "formats blocks load combine",
        "sm90": "formats blocks load schedule combine entry",
        "sm90/fp8": "formats blocks load combine entry sm90",
        "sm90/bytes16": "formats blocks load combine entry sm90 sm90/fp8",
        "sm90/b16": "formats blocks load combine entry sm90",
        "sm90/mha": "formats blocks load schedule combine sm90",
        "sm90/indexer": "formats blocks indexer sm90",
        "sm100": "blocks",
        "sm100/fp8": "formats blocks load combine entry sm100",
        "sm100/b16": "formats blocks load combine entry sm90 sm100 sm100/fp8",
        "sm100/mha": "formats blocks schedule combine sm90 sm90/mha sm100 sm100/b16",
        "sm100/indexer": "formats blocks indexer sm100",
    }.items()
}
DESCRIBED = frozenset({"formats", "families", "blocks"})  # what the top may import


def folder_of(module: str) -> str:
    """Folder of a module of the package, ``TOP`` if it is in none."""
    path = (ROOT / module.replace(".", "/")).with_suffix(".py")
    parts = module.split(".")[1:] if not path.exists() else module.split(".")[1:-1]
    return "/".join(parts) or TOP


@pytest.fixture(scope="module")
def arrows() -> dict[tuple[str, str], list[Import]]:
    """Imports from one folder of the package to another."""
    found: dict[tuple[str, str], list[Import]] = {}
    for each in imports(ROOT, (PACKAGE,)):
        ends = folder_of(each.source), folder_of(each.target)
        if ends[0] != ends[1]:
            found.setdefault(ends, []).append(each)
    return found


def test_every_folder_is_in_the_table() -> None:
    there = {
        str(path.parent.relative_to(ROOT / PACKAGE))
        for path in (ROOT / PACKAGE).rglob("*.py")
        if path.parent != ROOT / PACKAGE
    }
    assert there == set(ARROWS)


def test_imports_keep_to_the_table(arrows: dict[tuple[str, str], list[Import]]) -> None:
    assert len(arrows) > 60, "the graph is not drawn"
    wrong = [
        str(each)
        for (source, target), found in arrows.items()
        if target not in (DESCRIBED if source == TOP else ARROWS[source])
        for each in found
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_each_arrow_of_the_table_is_used(arrows: dict[tuple[str, str], list[Import]]) -> None:
    assert {(a, b) for a, may in ARROWS.items() for b in may} == {x for x in arrows if x[0] != TOP}


def test_the_table_has_no_circle() -> None:
    graphlib.TopologicalSorter(ARROWS).prepare()

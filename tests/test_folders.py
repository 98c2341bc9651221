"""Folders of ``dsl_kernels`` and of ``snapmla`` import one way, by the two tables below.

What stands at the top of ``dsl_kernels`` (``spec``, ``registry``, ``arguments``) and ``families``
describe variants to hosts: no kernel imports them, so a new axis or op compiles nothing anew.  At
the top of ``snapmla`` are the public paths; ``api`` and ``errors`` are files there that folders
may import.  Imports under ``if TYPE_CHECKING:`` do not count.
"""

from __future__ import annotations

import graphlib
import importlib
from collections.abc import Callable

import pytest

from tests.test_floors import ROOT, Import, imports

PACKAGE, TOP = "dsl_kernels", "top"
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


HOST = "snapmla"
# What users import from; the code is in folders.
PUBLIC_PATHS = frozenset({
    "snapmla.flash_mla", "snapmla.flash_mla_fp8", "snapmla.layouts", "snapmla.dsa",
    "snapmla.dsa.deep_gemm_names", "snapmla.dsa.vllm_names", "snapmla.mha.flash_attention_names",
})  # fmt: skip
LOW = frozenset({"errors", "_version"})  # files at the top that every folder may import
HOST_ARROWS: dict[str, frozenset[str]] = {
    folder: frozenset(may.split())
    for folder, may in {
        "checks": "",
        "runtime": "checks",
        "call": "checks runtime",
        "cache": "checks runtime call",
        "rank": "checks runtime cache",
        "dense": "checks runtime call cache rank",
        "mha": "checks runtime call",
        "indexer": "checks runtime call cache",
        "sparse": "checks runtime call cache rank dense mha",
        "api": "checks call cache dense sparse",
        "compat": "checks runtime call cache rank dense mha indexer sparse api",
        "torch_ops": "checks runtime call cache rank dense mha indexer sparse compat",
        "parallel": "checks runtime call cache dense api",
        "testing": "checks runtime cache rank dense indexer sparse api top",
        "tools": "runtime cache testing top",
        "integrations": (
            "checks runtime call cache rank dense mha indexer sparse api compat tools top"
        ),
    }.items()
}


def folder_of(module: str) -> str:
    """Folder of a module of the package, ``TOP`` if it is in none."""
    path = (ROOT / module.replace(".", "/")).with_suffix(".py")
    parts = module.split(".")[1:] if not path.exists() else module.split(".")[1:-1]
    return "/".join(parts) or TOP


def host_folder_of(module: str) -> str:
    """Folder of a module of the host package; ``TOP`` of public paths, ``api`` by its own name."""
    parts = module.split(".")[1:]
    if parts and (parts[0] == "api" or parts[0] in LOW):
        return parts[0]
    in_folder = (ROOT / HOST / parts[0]).is_dir() if parts else False
    return TOP if not in_folder or module in PUBLIC_PATHS else parts[0]


def drawn(package: str, folder: Callable[[str], str]) -> dict[tuple[str, str], list[Import]]:
    """Imports from one folder of a package to another."""
    found: dict[tuple[str, str], list[Import]] = {}
    for each in imports(ROOT, (package,)):
        ends = folder(each.source), folder(each.target)
        if ends[0] != ends[1]:
            found.setdefault(ends, []).append(each)
    return found


@pytest.fixture(scope="module")
def arrows() -> dict[tuple[str, str], list[Import]]:
    return drawn(PACKAGE, folder_of)


@pytest.fixture(scope="module")
def host_arrows() -> dict[tuple[str, str], list[Import]]:
    return {
        ends: found for ends, found in drawn(HOST, host_folder_of).items() if ends[1] not in LOW
    }


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


def test_every_folder_of_the_host_is_in_its_table() -> None:
    there = {path.parent.name for path in (ROOT / HOST).glob("*/__init__.py")}
    assert there == {*HOST_ARROWS, "dsa"} - {"api"}


def test_imports_of_the_host_keep_to_its_table(
    host_arrows: dict[tuple[str, str], list[Import]],
) -> None:
    assert len(host_arrows) > 60, "the graph is not drawn"
    wrong = [
        str(each)
        for (source, target), found in host_arrows.items()
        if source != TOP and target not in HOST_ARROWS[source]
        for each in found
    ]
    assert not wrong, "\n" + "\n".join(wrong)
    used = {ends for ends in host_arrows if ends[0] != TOP}
    assert used == {(a, b) for a, may in HOST_ARROWS.items() for b in may}


def test_the_table_of_the_host_has_no_circle() -> None:
    graphlib.TopologicalSorter({a: may - {"top"} for a, may in HOST_ARROWS.items()}).prepare()


@pytest.mark.parametrize("path", sorted(PUBLIC_PATHS))
def test_a_public_path_gives_what_the_folder_has(path: str) -> None:
    public = importlib.import_module(path)
    for name in public.__all__:
        assert getattr(public, name).__module__.startswith("snapmla.")

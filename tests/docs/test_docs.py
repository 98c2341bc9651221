"""Docs are true: generated pages are fresh, code blocks run, links lead somewhere, names are told.

A public name is one in ``__all__`` of a module that ``docs/render.py`` lists.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from codegen import toolchain
from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec
from tests.support import ROOT
from tests.support.needs import needs_compiler

PAGES = sorted(
    path for folder in (".", "docs", "examples") for path in (ROOT / folder).glob("*.md")
)
# pages whose Python blocks run, up to a heading if there are sketches after it
RUNNABLE = {
    "integration.md": "", "formats.md": "", "software-gpu.md": "## How it works", "dsa.md": "",
}  # fmt: skip
RARELY = ("dsa.md",)  # whose example runs every day
DTYPES = re.compile(
    r"float8_e4m3fn|bfloat16|float16|float32|uint8|int32|int64|same dtype|floating point"
)
SHAPE = re.compile(r"\((?:[^()]*,[^()]*)\)|same shapes?|same b\b|likewise")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


render = load(ROOT / "docs" / "render.py")
api = sys.modules["api_page"]
figures = load(ROOT / "docs" / "figures.py")
ENTRIES = list(api.entries())


def is_tensor(annotation: Any) -> bool:
    return "Tensor" in api.annotation(annotation)


def described(doc: Any, section: str) -> dict[str, str]:
    """Text of every name of a section, however its entries share lines."""
    found: dict[str, str] = {}
    for names, text in doc.items(section):
        for name in re.split(r",\s*", names):
            found[name.strip(" `")] = text
    return found


# ---------------------------------------------------------------- generated pages


def test_generated_pages_are_fresh() -> None:
    names = [str(path.relative_to(ROOT)) for path in render.stale()]
    assert not names, f"stale: {', '.join(names)}; run `python docs/render.py`"


def test_check_names_a_stale_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = tmp_path / "api.md"
    copy.write_text(render.API.read_text().replace("float32", "float64", 1))
    monkeypatch.setattr(render, "API", copy)
    assert copy in render.stale()


@pytest.mark.parametrize("name", ["split", "paged", "row640"])
def test_pictures_tell_the_bytes(name: str) -> None:
    """Fields of a picture do not overlap, and together are 644 bytes a token."""
    text = render.picture(name, 64)
    covered = 0
    for line in text.splitlines():
        if re.fullmatch(r"[\d ]+", line):
            offsets = [int(x) for x in line.split()]
            assert offsets == sorted(offsets) and offsets[0] == 0
            covered += offsets[-1] * (64 if offsets[-1] == 640 else 1)
    assert covered == 644 * 64


# ---------------------------------------------------------------- docstrings


@pytest.mark.parametrize("entry", ENTRIES, ids=[e.path for e in ENTRIES])
def test_public_name_is_documented(entry: Any) -> None:
    if entry.kind == "value":
        return
    doc = api.parse(entry.value.__doc__)
    assert doc.prose and not doc.prose.startswith(f"{entry.name}("), "no docstring"
    if entry.kind == "exception":
        return
    assert "Source" in doc.sections, "say where it comes from: paper section, format, or our own"
    assert "Raises" in doc.sections, "say which errors it raises"
    if entry.kind == "function":
        check_parameters(entry.value, doc)
        assert "Returns" in doc.sections or "in place" in doc.prose
        return
    fields = {
        name: api.annotation(kind)
        for name, kind in inspect.get_annotations(entry.value).items()
        if not name.startswith("_")
    }
    text = described(doc, "Attributes")
    for name, kind in fields.items():
        assert name in text, f"attribute {name} is not described"
        if is_tensor(kind) and name not in ("content_u8", "nope_u8"):
            assert SHAPE.search(text[name]), f"attribute {name}: no shape in {text[name]!r}"
    for name, member in entry.members():
        check_member(name, member)


def check_parameters(function: Any, doc: Any) -> None:
    """Every parameter is described; tensors with shape and dtype."""
    text = described(doc, "Args")
    for p in api.parameters(function):
        assert p.name in text, f"argument {p.name} is not described"
        if is_tensor(p.annotation) and p.name not in ("tile_scheduler_metadata", "num_splits"):
            whole = text[p.name]
            assert SHAPE.search(whole), f"argument {p.name}: no shape in {whole!r}"
            assert DTYPES.search(whole), f"argument {p.name}: no dtype in {whole!r}"


def check_member(name: str, member: Any) -> None:
    function = api.underlying(member)
    if isinstance(member, property) or hasattr(member, "attrname"):
        assert function.__doc__ or len(inspect.getsource(function).splitlines()) <= 4, name
        return
    doc = api.parse(function.__doc__)
    assert doc.prose, f"method {name} has no docstring"
    text = described(doc, "Args")
    for p in api.parameters(function):
        assert p.name in text or p.name in doc.prose, f"{name}: {p.name} is not described"


def test_the_docstring_check_can_fail() -> None:
    def bare(cache_seqlens: Any) -> None:
        """Does something.

        Args:
            cache_seqlens: lengths.
        """

    bare.__annotations__["cache_seqlens"] = "torch.Tensor"
    with pytest.raises(AssertionError, match="no shape"):
        check_parameters(bare, api.parse(bare.__doc__))

    def missing(b: int) -> None:
        """Does something."""

    with pytest.raises(AssertionError, match="b is not described"):
        check_parameters(missing, api.parse(missing.__doc__))


def test_every_public_name_is_on_the_page() -> None:
    page = render.API.read_text()
    for entry in ENTRIES:
        assert re.search(rf"^### `?{entry.name}`?$", page, re.M)
    for name in ("snapmla", "snapmla.flash_mla", "snapmla.flash_mla_fp8"):
        assert sorted(api.MODULES[name]) == sorted(importlib.import_module(name).__all__)


def test_contents_of_the_api_page_are_whole() -> None:
    """Each heading of modules, names and methods once, in order, under the anchor that it has."""
    page = render.API.read_text()
    contents, _, rest = page.partition("\n## snapmla\n")
    links = re.findall(r"\[([^]]+)\]\(#([^)]+)\)", contents)
    found = headings("## snapmla\n" + rest)
    assert [anchor for _, anchor in links] == [anchor for _, anchor in found]
    for (text, _), (title, _) in zip(links, found, strict=True):
        assert title.endswith(text)
    titles = {title.strip("`") for title, _ in found}
    for entry in ENTRIES:
        assert entry.name in titles
        for name, member in entry.members() if entry.kind == "class" else ():
            value = isinstance(member, property) or hasattr(member, "attrname")
            if not value and name not in api.INTERNALS.get(entry.name, ()):
                assert f"{entry.name}.{name}" in titles


def test_contents_number_headings_that_come_again() -> None:
    lines = ["## a.b", "### c", "```", "## no heading", "```", "## d", "### c"]
    assert api.contents(lines, {"d.c": "Second."})[-1] == "  - [c](#c-1): Second."
    assert len(api.contents(lines, {})) == 4


def test_internals_stand_last() -> None:
    """What a caller leaves alone is below a heading that says so, and nowhere else."""
    page = render.API.read_text()
    classes = {e.name: e for e in ENTRIES if e.kind == "class"}
    assert api.INTERNALS.keys() <= classes.keys()
    for owner, names in api.INTERNALS.items():
        section = re.split(r"^##?#? ", page.split(f"\n### {owner}\n")[1], flags=re.M)[0]
        front, _, last = section.partition(f"\n#### {owner}: internals\n")
        assert "####" not in last
        for name in names:
            item = rf"^(- `([\w, ]+, )?{name}[`,(]|#### {owner}\.{name}$)"
            assert re.search(item, last, re.M), f"{owner}.{name} is not among the internals"
            assert not re.search(item, front, re.M), f"{owner}.{name} is among what callers use"
    plan = page.split("\n### DecodePlan\n")[1].split("\n#### DecodePlan: internals\n")[0]
    assert "tracers" not in plan and "as kernels take them" not in plan


def test_indented_blocks_are_code_or_pictures() -> None:
    assert api._paragraphs("    x = 1")[0] == "```python"
    assert api._paragraphs("    1 1 0\n    1 1 1")[0] == "```text"


def test_the_api_page_has_no_private_names() -> None:
    page = render.API.read_text()
    assert not re.search(r"^(- `|#+ `?(\w+\.)?)_(?!_version__)", page, re.M)


# ---------------------------------------------------------------- pages


def code_blocks(path: Path, end: str = "") -> list[str]:
    """Python blocks of a page, or of what stands before ``end``."""
    text = path.read_text()
    assert end in text, f"{path.name} has no {end}"
    return re.findall(r"```python\n(.*?)```", text.split(end)[0] if end else text, flags=re.S)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.whole_matrix if name in RARELY else ())
        for name in sorted(RUNNABLE)
    ],
)
@needs_compiler
def test_code_blocks_run(name: str) -> None:
    """In order, in one process, on the software GPU; CUDA parts guard themselves."""
    source = "\n".join(code_blocks(ROOT / "docs" / name, RUNNABLE[name]))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment.pop("SNAPMLA_VARIANT_DIR", None)  # pages name build/variants
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]


@needs_compiler
def test_code_of_the_faq_runs() -> None:
    """Here, as its one block needs no process of its own; it asserts what it promises."""
    (block,) = code_blocks(ROOT / "docs" / "faq.md")
    exec(compile(block, "faq.md", "exec"), {})


@pytest.mark.parametrize("path", PAGES, ids=[p.name for p in PAGES])
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=[p.name for p in PAGES])
def test_named_files_and_targets_exist(path: Path) -> None:
    """`snapmla/x.py`-like paths, `make x` targets and `python -m x` modules that pages name."""
    text = path.read_text()
    for name in re.findall(
        r"`((?:snapmla|codegen|softgpu|dsl_kernels|profiles|tests|docs|examples)/[\w/.]+)`", text
    ):
        assert (ROOT / name).exists(), f"{path.name} names {name}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)", text) + re.findall(r"^make ([a-z]+)", text, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), f"{path.name} names make {target}"
    for module in re.findall(r"python -m ([a-z_]+(?:\.[a-z_0-9]+)*)", text):
        if module.split(".")[0] in ("snapmla", "codegen", "softgpu", "profiles"):
            found = ROOT / module.replace(".", "/")
            assert found.is_dir() or found.with_suffix(".py").is_file(), f"{path.name}: {module}"


def headings(text: str) -> list[tuple[str, str]]:
    """(title, what it is called in links) of a page's headings."""
    found: list[tuple[str, str]] = []
    taken: dict[str, int] = {}
    for title in re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M):
        name = re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        taken[name] = taken.get(name, -1) + 1
        found.append((title, f"{name}-{taken[name]}" if taken[name] else name))
    return found


def anchors(path: Path) -> set[str]:
    """What headings of a page are called in links."""
    return {anchor for _, anchor in headings(path.read_text())}


@pytest.mark.parametrize("path", PAGES, ids=[p.name for p in PAGES])
def test_links_into_pages_find_their_heading(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*\.md)?#([^)]+)\)", path.read_text()):
        page = path.parent / target if target else path
        assert anchor in anchors(page), f"{path.name} links to {target}#{anchor}"


def test_faq_is_short() -> None:
    """150 lines, prose and code of at most 120 characters a line, all questions in the list."""
    page = ROOT / "docs" / "faq.md"
    lines = page.read_text().splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]
    titles = [title for title, _ in headings(page.read_text())][1:]
    listed = re.findall(r"^(\d+\.) \[(.+)\]\(#", page.read_text(), flags=re.M)
    assert [f"{number} {text}" for number, text in listed] == titles and len(titles) == 10
    assert "(docs/faq.md)" in (ROOT / "README.md").read_text()


def newest_section(changelog: str) -> str:
    return re.split(r"^## ", changelog, flags=re.M)[1]


def lists_of(section: str) -> tuple[list[str], list[str]]:
    """Lines of the highlights, which stand before the first ``###``, and the entries behind it."""
    head, *parts = re.split(r"^### .*\n", section, flags=re.M)
    _, _, highlights = head.partition("Highlights:\n")
    lines = [line for line in highlights.splitlines() if line.strip()]
    items = (re.split(r"^\* ", part, flags=re.M) for part in parts)
    return lines, [entry for _, *entries in items for entry in entries]


def words_of(entry: str) -> int:
    """Words between white space; an address of a link is none."""
    return len(re.sub(r"\]\([^)]*\)", "]", entry).split())


def test_entries_of_the_changelog_are_short() -> None:
    """Of its newest section: five lines of highlights at most, 25 words an entry."""
    section = newest_section((ROOT / "CHANGELOG.md").read_text())
    highlights, entries = lists_of(section)
    assert len(highlights) <= 5
    starts = len(re.findall(r"^\*", section, flags=re.M))
    assert len(entries) == starts - sum(line.startswith("*") for line in highlights)
    assert not [entry for entry in entries if words_of(entry) > 25]


def test_a_long_entry_is_found() -> None:
    text = "## 2 (new)\n\nHighlights:\n\n* a\n  b\n\n### Added\n\n* one [two\n  three](x y)\n"
    text += "* `a b` c\n\n### Fixed\n\n* d\n\n## 1\n\n### Added\n\n* old\n"
    highlights, entries = lists_of(newest_section(text))
    assert highlights == ["* a", "  b"]
    assert [words_of(entry) for entry in entries] == [3, 3, 1]


def test_tables_of_the_lab_book_have_a_legend() -> None:
    """In the paragraph before or behind each; shorthand is explained before it is used."""
    page = (ROOT / "docs" / "lab-book.md").read_text()
    head = page.split("\n### Where the time goes")[0]
    for word in ("lab book", "24 / 104 / 192", "*Chain A*", "(109.5 without it)", "*tile*"):
        assert word in head
    blocks = [block for block in re.split(r"\n\n+", page) if block.strip()]
    tables = [i for i, block in enumerate(blocks) if block.startswith("|")]
    assert len(tables) >= 12
    for i in tables:
        near = (blocks[i - 1], blocks[i + 1])
        assert any(block.startswith("*Legend*") for block in near), blocks[i].splitlines()[0]


def test_recorded_variants_are_counted() -> None:
    """software-gpu.md says how many decode variants the H200's record holds, and their rows."""
    with np.load(ROOT / "tests" / "data" / "softgpu_h200.npz") as record:
        sizes = {name: record[name].size for name in record.files if "decode_" in name}
    rows: dict[str, int] = {"lse": 0, "other": 0}
    variants: dict[str, set[str]] = {"decode": set(), "dense_decode": set()}
    for name, size in sizes.items():
        case, _, what = name.partition("/")
        op = case.rpartition("decode_")[0] + "decode"
        if op in variants and what != "inputs" and not what.startswith("raw"):
            variants[op].add(case.rpartition(".")[0])
            rows["lse" if "lse" in what else "other"] += size
    fp8, dense = (len(found) for found in variants.values())
    page = (ROOT / "docs" / "software-gpu.md").read_text()
    assert f"decode: all {fp8 + dense} variants, {fp8} of FP8 and {dense} of 16-bit caches" in page
    assert f"{rows['other']:,} rows, partial ones too, and {rows['lse']:,} LSEs" in page


def test_bundle_page_has_the_readmes_example() -> None:
    """Which runs as written (test_readme.py)."""
    template = ROOT / "codegen" / "templates" / "bundle.md.j2"
    assert code_blocks(template) == code_blocks(ROOT / "README.md")[:1]


def test_versions_that_ran_are_on_record() -> None:
    """Driver, CUDA, torch and Python of each row stand in the record that it links to."""
    page = ROOT / "docs" / "integration.md"
    table = page.read_text().split("### What ran")[1].split("<!-- begin")[0]
    rows = re.findall(r"^\| (.+) \|$", table, flags=re.M)[1:]
    assert len(rows) >= 4
    for card, driver, cuda, torch, python, _, record in (row.split("|") for row in rows):
        if card.strip().startswith("none"):
            pinned = (ROOT / record.strip(" `")).read_text()
            assert f"torch=={torch.split(',')[0].strip()}" in pinned
            continue
        found = re.search(r"\]\((.+)\)", record)
        assert found is not None, f"{card}: no record"
        head = "\n".join((page.parent / found[1]).read_text().splitlines()[:14])
        for cell in (card, driver, cuda, torch, python):
            words = rf"(?<![\d.]){re.escape(cell.strip())}"
            assert re.search(words, head), f"{found[1]} does not say {cell.strip()}"


# ---------------------------------------------------------------- the picture of a tile

needs_kernels = pytest.mark.skipif(not toolchain.have_compiler(), reason="budgets need the DSL")


@needs_kernels
def test_picture_of_a_tile_is_fresh() -> None:
    assert figures.TARGET.read_text("utf-8") == figures.tile(), "stale: run `make docs`"
    assert "(tile.svg)" in (ROOT / "docs" / "architecture.md").read_text()


@needs_kernels
def test_picture_tells_the_budget() -> None:
    """Every barrier with copies and arrivals, registers, the bytes that the kernel's head sums."""
    words = [e.text or "" for e in ElementTree.fromstring(figures.tile()).iter() if e.text]
    declared = registry.budget(figures.SPEC)
    assert declared is not None
    for barrier in declared.barriers:
        at = words.index(barrier.name, words.index(f"mbarriers: {figures.MBARRIERS}"))
        assert words[at + 1] == f"{barrier.copies} × {barrier.count}"
        assert all(role in words[at + 2] for role in barrier.arrivals)
    text = "\n".join(words)
    for group in declared.groups:
        assert f"{group.registers} registers a thread" in text
    head = (ROOT / "dsl_kernels/sm90/fp8/transposed.py").read_text()
    sizes = re.search(r"Q (\d+) \| K ring (\d+) x \((\d+) content \+ (\d+) RoPE \+ (\d+)", head)
    assert sizes is not None
    for size in sizes.groups():
        assert f"{int(size):,}" in text


@needs_kernels
def test_picture_follows_the_spec() -> None:
    """Another number of stages is another picture; an op without a budget has none."""
    fewer = figures.tile(figures.SPEC.replace(stages=3))
    assert fewer != figures.tile() and "K ring  3 ×" in fewer
    with pytest.raises(ValueError, match="declares no budget"):
        figures.tile(VariantSpec(op="merge"))


def test_environment_table_is_whole() -> None:
    from snapmla.runtime import env

    page = (ROOT / "docs" / "integration.md").read_text()
    for variable in env.TABLE:
        assert f"`{variable.name}`" in page

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

import pytest

from codegen import toolchain

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
RUNNABLE = {"integration.md", "formats.md"}
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
ENTRIES = list(render.entries())


def is_tensor(annotation: Any) -> bool:
    return "Tensor" in render.annotation(annotation)


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
    doc = render.parse(entry.value.__doc__)
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
        name: render.annotation(kind)
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
    for p in render.parameters(function):
        assert p.name in text, f"argument {p.name} is not described"
        if is_tensor(p.annotation) and p.name not in ("tile_scheduler_metadata", "num_splits"):
            whole = text[p.name]
            assert SHAPE.search(whole), f"argument {p.name}: no shape in {whole!r}"
            assert DTYPES.search(whole), f"argument {p.name}: no dtype in {whole!r}"


def check_member(name: str, member: Any) -> None:
    function = render.underlying(member)
    if isinstance(member, property) or hasattr(member, "attrname"):
        assert function.__doc__ or len(inspect.getsource(function).splitlines()) <= 4, name
        return
    doc = render.parse(function.__doc__)
    assert doc.prose, f"method {name} has no docstring"
    text = described(doc, "Args")
    for p in render.parameters(function):
        assert p.name in text or p.name in doc.prose, f"{name}: {p.name} is not described"


def test_the_docstring_check_can_fail() -> None:
    def bare(cache_seqlens: Any) -> None:
        """Does something.

        Args:
            cache_seqlens: lengths.
        """

    bare.__annotations__["cache_seqlens"] = "torch.Tensor"
    with pytest.raises(AssertionError, match="no shape"):
        check_parameters(bare, render.parse(bare.__doc__))

    def missing(b: int) -> None:
        """Does something."""

    with pytest.raises(AssertionError, match="b is not described"):
        check_parameters(missing, render.parse(missing.__doc__))


def test_every_public_name_is_on_the_page() -> None:
    page = render.API.read_text()
    for entry in ENTRIES:
        assert f"### {entry.name}\n" in page


# ---------------------------------------------------------------- pages


def code_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.S)


@pytest.mark.parametrize("name", sorted(RUNNABLE))
@pytest.mark.skipif(not toolchain.have_compiler(), reason="needs nvidia-cutlass-dsl")
def test_code_blocks_run(name: str) -> None:
    """In order, in one process, on the software GPU; CUDA parts guard themselves."""
    source = "\n".join(code_blocks(ROOT / "docs" / name))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]


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
        r"`((?:snapmla|codegen|softgpu|dsl_kernels|profiles|tests|docs)/[\w/.]+)`", text
    ):
        assert (ROOT / name).exists(), f"{path.name} names {name}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)", text) + re.findall(r"^make ([a-z]+)", text, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), f"{path.name} names make {target}"
    for module in re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)*)", text):
        if module.split(".")[0] in ("snapmla", "codegen", "softgpu", "profiles"):
            found = ROOT / module.replace(".", "/")
            assert found.is_dir() or found.with_suffix(".py").is_file(), f"{path.name}: {module}"


def test_environment_table_is_whole() -> None:
    from snapmla import env

    page = (ROOT / "docs" / "integration.md").read_text()
    for variable in env.TABLE:
        assert f"`{variable.name}`" in page

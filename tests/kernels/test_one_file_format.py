"""A format of bytes costs one file, ``tests/support/scales_in_front.py``, which the product
does not know.

Registered, it is appended to, fetched, converted, planned for and attended to, on the software GPU
under the hazard check, and gives NoPE's bits on the same values.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import snapmla
from codegen import closure, compile, matrix
from dsl_kernels.formats.registered import FORMATS
from snapmla.runtime import variants
from softgpu import Options, using
from tests.support import ROOT
from tests.support.needs import needs_compiler
from tests.support.scales_in_front import FORMAT

pytestmark = needs_compiler
BUILD = """
import sys, pathlib
from codegen import compile
from dsl_kernels.spec import VariantSpec
from tests.support import scales_in_front
scales_in_front.register()
for name in sys.argv[2:]:
    compile.build(VariantSpec.from_name(name), pathlib.Path(sys.argv[1]), linked=False)
"""
KIND = f"kv{FORMAT.name}_sm90a"
HELPERS = (f"append_kv_xbf16_ii32_{KIND}", f"fetch_dequant_xbf16_pages_{KIND}")
NOPE, PAGE, LENGTHS = "fp8_nope", 64, (130, 66)
WIDTH = max(LENGTHS)
CHECKED = Options(hazards="raise", seed=5)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, FORMAT.name, FORMAT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("front")


@pytest.fixture(autouse=True)
def own_variants(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the format are looked for in a folder of the test's own, behind it in the usual
    ones; what is loaded is forgotten."""
    usual = variants.env.variant_dirs()
    monkeypatch.setattr(variants.env, "variant_dirs", lambda: [*usual, folder])


@pytest.fixture(scope="module")
def build(folder: Path) -> Callable[..., None]:
    """Compiles variants of the format, in a process that knows it."""

    def missing(*names: str) -> None:
        wanted = [name for name in names if not (folder / f"{name}.json").exists()]
        command = [sys.executable, "-c", BUILD, str(folder), *wanted]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)

    return missing


# ---------------------------------------------------------------------------- what it costs


def test_it_is_one_short_file_that_nobody_names() -> None:
    source = (ROOT / "tests/support/scales_in_front.py").read_text()
    assert len(source.splitlines()) <= 40
    packages = ("dsl_kernels", "codegen", "softgpu", "snapmla")
    product = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    assert len(product) > 300
    words = (FORMAT.name, "scales_in_front")
    assert not [p for p in product if any(word in p.read_text() for word in words)]


def keys() -> dict[str, str]:
    """Keys of variants that read or write a cache, by name."""
    specs = [spec for spec in matrix.points("sm_90a") if spec.format is not None]
    return {spec.name: compile.draft(spec).key for spec in specs}


def test_registering_it_changes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = keys()
    monkeypatch.delitem(FORMATS, FORMAT.name)
    assert keys() == grown and not any(FORMAT.name in name for name in grown)


def test_a_file_beside_the_others_changes_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the kernels' package with one more record in its folder has the same keys; one with
    V4's record edited has not for V4."""
    before = keys()
    copy = tmp_path / "dsl_kernels"
    shutil.copytree(ROOT / "dsl_kernels", copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(closure, "ROOT", copy)
    shutil.copy(ROOT / "tests/support/scales_in_front.py", copy / "formats" / "front.py")
    assert keys() == before
    edited = copy / "formats" / "v4.py"
    edited.write_text(edited.read_text() + "\n")
    changed = {name for name, key in keys().items() if key != before[name]}
    assert changed and all("v4" in name for name in changed)


# ---------------------------------------------------------------------------- what it does


class Filled:
    """A cache with ``LENGTHS`` tokens of two sequences, in pages of no order.

    Attributes:
        cache, table, seqlens: as ``decode`` takes them.
        slots: int64 (tokens,) of all tokens.
    """

    def __init__(self, fmt: str) -> None:
        torch.manual_seed(7)
        self.fmt, self.seqlens = fmt, torch.tensor(LENGTHS).int()
        self.table = torch.randperm(8)[:6].view(2, 3).int()
        at = [torch.arange(n) for n in LENGTHS]
        lists = [pages[x // PAGE] * PAGE + x % PAGE for pages, x in zip(self.table, at)]
        self.slots = torch.cat(lists).long()
        self.indices = torch.full((2, 1, WIDTH), -1).int()
        for row, own in zip(self.indices, lists):
            row[0, : len(own)] = own
        latents = torch.randn(sum(LENGTHS), 512)
        latents[3], latents[5, 128:256], latents[9] = 0.0, 0.0, latents[9] * 1e-3
        self.cache = snapmla.PagedKVCache.allocate(8, PAGE, device="cpu", dtype=fmt)
        self.cache.kv.fill_(0x5B)
        snapmla.append_kv(self.cache, latents.bfloat16(), None, self.slots.int())

    def fields(self) -> list[Tensor]:
        """Content and scales of the tokens, as bytes."""
        page, offset = self.slots // PAGE, self.slots % PAGE
        views = (self.cache.content, self.cache.scale)
        return [view[page, offset].contiguous().view(torch.uint8) for view in views]

    def converted(self, fmt: str) -> list[Tensor]:
        """Content and scales of the tokens in another format."""
        other = Filled.__new__(Filled)
        other.slots = self.slots
        other.cache = snapmla.PagedKVCache.allocate(8, PAGE, device="cpu", dtype=fmt)
        pages = self.table.flatten().unique()
        snapmla.convert_cache(self.cache, other.cache, pages)
        return other.fields()

    def by_list(self, rows: int) -> tuple[Tensor, Tensor]:
        """Sparse decode of ``rows`` query heads, in pieces of a tile."""
        plan = snapmla.plan_sparse_decode(
            rows, 1, topk=WIDTH, topk_length=self.seqlens, fixed_split_tokens=PAGE,
            cache_dtype=self.fmt, row_tile=rows,
        )  # fmt: skip
        return snapmla.decode(
            queries(rows), self.cache, indices=self.indices, plan=plan, softmax_scale=0.1
        )

    def by_table(self, rows: int) -> tuple[Tensor, Tensor]:
        """Dense decode of the same."""
        plan = snapmla.plan_decode(
            self.seqlens, rows, 1, page_size=PAGE, max_pages=3, fixed_split_tokens=PAGE,
            cache_dtype=self.fmt, row_tile=rows,
        )  # fmt: skip
        return snapmla.decode(
            queries(rows), self.cache, self.table, self.seqlens, plan=plan, softmax_scale=0.1
        )


def queries(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(2, 1, rows, 512, generator=generator).bfloat16()


def assert_equal(found: object, wanted: object) -> None:
    for one, other in zip(found, wanted, strict=True):  # type: ignore[call-overload]
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.whole_matrix
def test_its_tokens_are_nopes(build: Callable[..., None]) -> None:
    """Appended, fetched, converted and attended to by lists of 16 heads."""
    build(*HELPERS, f"sparse_decode_mix16_r16_obf16_{KIND}")
    with using(CHECKED):
        nope, own = Filled(NOPE), Filled(FORMAT.name)
        assert_equal(own.fields(), nope.fields())
        raw = own.cache.kv[own.slots // PAGE, own.slots % PAGE, 0]
        assert torch.equal(raw[:, :16], nope.fields()[1])
        assert torch.equal(raw[:, 16:528], nope.fields()[0])
        read = [snapmla.fetch_dequant(x.cache, x.table, x.seqlens)[0] for x in (own, nope)]
        assert torch.equal(*read) and read[0].any()
        assert_equal(own.converted(NOPE), nope.fields())
        assert_equal(nope.converted(FORMAT.name), nope.fields())
        assert_equal(own.converted("fp8"), nope.converted("fp8"))
        assert_equal(own.by_list(16), nope.by_list(16))


@pytest.mark.whole_matrix
@pytest.mark.parametrize("rows", [16, 64])
def test_attention_by_list_and_by_table(rows: int, build: Callable[..., None]) -> None:
    ops = ("sparse_decode", "record_decode")
    build(*HELPERS, *(f"{op}_mix16_r{rows}_obf16_{KIND}" for op in ops))
    with using(CHECKED):
        nope, own = Filled(NOPE), Filled(FORMAT.name)
        lists = nope.by_list(rows)
        assert lists[0].any() and lists[0].isfinite().all()
        assert_equal(own.by_list(rows), lists)
        assert_equal(own.by_table(rows), nope.by_table(rows))

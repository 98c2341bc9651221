"""Cost of a new system: a BF16 pipeline of 120 lines, composed of what is shared.

``support/sum_pipeline.py`` is no part of the product.  Declared here, it is built for both archs
and run on the software GPU; what exists does not notice.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

import softgpu
from codegen import closure, compile, matrix
from dsl_kernels.families import ARCHS, FAMILIES
from dsl_kernels.spec import VariantSpec
from snapmla.testing import partials, selfcheck
from tests.support import ROOT
from tests.support.needs import needs_compiler
from tests.support.sum_family import FAMILY

BUILD = """
import sys, pathlib
from codegen import compile
from dsl_kernels.families import FAMILIES
from dsl_kernels.spec import VariantSpec
from tests.support.sum_family import FAMILY
FAMILIES["sum_rows"] = FAMILY
compile.build(VariantSpec.from_name(sys.argv[1]), pathlib.Path(sys.argv[2]), linked=False)
"""
PAGE, TILE = 16, 64


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "sum_rows", FAMILY)


def test_it_is_short_and_stands_on_what_is_shared() -> None:
    source = (ROOT / "tests/support/sum_pipeline.py").read_text()
    assert len(source.splitlines()) <= 120
    files = closure.sources(VariantSpec(op="sum_rows"))[1]
    assert "dsl_kernels/load/paged_tma.py" in files
    foreign = [
        f for f in files if re.search(r"fp8|sm90|sm100|wgmma|schedule|cache/|indexer|families", f)
    ]
    assert not foreign


@needs_compiler
def test_declaring_it_changes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = lambda: {s.name: compile.draft(s).key for s in matrix.points("sm_90a")}
    grown = keys()
    monkeypatch.delitem(FAMILIES, "sum_rows")
    assert keys() == grown and not any(name.startswith("sum") for name in grown)


@needs_compiler
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("heads", "s_q"), [pytest.param(3, 2, marks=pytest.mark.whole_matrix), (5, 3)]
)
def test_it_adds_up(
    arch: str, heads: int, s_q: int, built: dict[str, softgpu.LoadedKernel]
) -> None:
    kernel = built[arch]
    lengths = [100, 300, 0, 64]
    # sequence 1 in two slots, of two CTAs; sequence 2 has no tokens
    items = [(0, 0, 2, -1), (1, 0, 3, 0), (1, 3, 5, 1), (2, 0, 0, -1), (3, 0, 1, -1)]
    own = heads * s_q
    items = [(*item, item[0] * own, (item[0] + 1) * own, 2**31 - 1, 0) for item in items]
    cache, table = pool(lengths)
    rows = -(-heads * s_q // 8) * 8
    out, lse = torch.full((4, s_q, heads, 512), 7.0), torch.full((4, heads, s_q), 7.0)
    o_accum, lse_accum = torch.full((2, rows, 528), 7.0).half(), torch.full((2, rows), 7.0)
    ints = lambda x: torch.tensor(x, dtype=torch.int32)
    kernel(
        cache, table, ints(lengths), ints([0, 2, 5]), ints([]), ints(items), out, lse, o_accum,
        lse_accum, 1,
    )  # fmt: skip
    # whole numbers of at most 11 bits, so exact in fp16
    out[1] = partials.decode(o_accum)[:, : heads * s_q].sum(0).view(s_q, heads, 512)
    assert torch.equal(out, expected(cache, table, lengths, heads, s_q))
    assert torch.equal(lse[[0, 2, 3]], torch.zeros(3, heads, s_q)) and not lse_accum[:, :6].any()


def pool(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages in random order, small whole numbers in them, NaN behind the ends of sequences."""
    generator = torch.Generator().manual_seed(1)
    width = -(-max(lengths) // PAGE)
    table = torch.randperm(len(lengths) * width, generator=generator).view(len(lengths), width)
    cache = torch.full((table.numel(), PAGE, 576), torch.nan)
    for row, length in zip(table, lengths):
        tokens = torch.randint(-4, 5, (length, 576), generator=generator).float()
        pages, at = row[torch.arange(length) // PAGE], torch.arange(length) % PAGE
        cache[pages, at] = tokens
    return cache.bfloat16(), table.int()


def expected(cache: torch.Tensor, table: torch.Tensor, lengths: list[int], heads: int, s_q: int):
    """Sums of what each row sees: whole numbers, so exact in any order."""
    out = torch.zeros(len(lengths), s_q, heads, 512)
    for b, length in enumerate(lengths):
        tokens = cache[table[b].long()].flatten(0, 1)[:length, :512].float()
        for s in range(s_q):
            out[b, s] = tokens[: max(length - (s_q - 1 - s), 0)].sum(0)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, softgpu.LoadedKernel]:
    """The pipeline of both archs, hazards on; a process has one target, hence two."""
    folder = tmp_path_factory.mktemp("sum")
    FAMILIES["sum_rows"] = FAMILY
    try:
        specs = {arch: VariantSpec(op="sum_rows", arch=arch, page_size=PAGE) for arch in ARCHS}
        command = [sys.executable, "-c", BUILD]
        path = {**os.environ, "PYTHONPATH": str(ROOT)}
        jobs = [subprocess.Popen([*command, s.name, str(folder)], env=path) for s in specs.values()]
        assert [job.wait() for job in jobs] == [0, 0]
        kernels = {arch: selfcheck.load(spec, folder) for arch, spec in specs.items()}
    finally:
        del FAMILIES["sum_rows"]
    for kernel in kernels.values():
        kernel.options = softgpu.Options(hazards="raise")
    return kernels

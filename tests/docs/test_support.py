"""The README's support matrix is fresh, and says what the dispatcher and the tables say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
from codegen import matrix as mx
from dsl_kernels.families import ARCHS
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from profiles.prove_asked import ASKED_BLACKWELL
from tests.docs.test_docs import render
from tests.support import ROOT

support = render.support
CARDS = {"sm_90a": "H200", "sm_100a": "B200"}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
DENSE, SPARSE = support.OPERATIONS[:2]
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    found = re.search(rf"<!-- begin {name} -->\n(.*?)\n<!-- end -->", README, flags=re.S)
    assert found is not None, f"the README has no block {name}"
    return found[1]


@pytest.mark.parametrize("name", ["support", "formats"])
def test_the_readme_has_it(name: str) -> None:
    assert block(name) == render.blocks()[name], "stale: run `python docs/render.py`"
    assert README.index(f"begin {name} ") < README.index("## API")


def test_it_is_on_the_first_screen() -> None:
    before = README[: README.index("<!-- begin support -->")]
    assert len(before.splitlines()) < 20 and "laptop" in before


def chosen(name: str, arch: str, topk: int | None) -> str | None:
    """The variant that the dispatcher takes of a format, None if it has none."""
    dtype = DTYPES.get(name, name)
    found = snapmla.explain(16, 1, cache_dtype=dtype, topk=topk, card=CARDS[arch]).chosen
    return None if found is None else found.variant


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("operation", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_cells_are_the_dispatchers(operation: Any, arch: str) -> None:
    """Whether a call is served, and by a kernel of the default matrix."""
    default = {spec.name for spec in mx.points(arch)}
    (kernels,) = operation.kernels
    for name in FORMATS:
        if operation is SPARSE and name in DTYPES:
            continue  # no ranking: one kernel (test_rows_of_16_bits)
        variant = chosen(name, arch, 2048 if operation is SPARSE else None)
        said = support.cell(kernels[name], arch)
        told = support.SHIPPED if variant in default else support.ON_DEMAND
        told = told if variant is not None else support.NONE
        assert said == told, f"{name} on {arch}: {variant}"


def test_rows_of_16_bits() -> None:
    """Of the two only BF16 has sparse decode."""
    assert not SPARSE.kernels[0].keys() & {"f16"}
    with pytest.raises(ValueError, match="cache_dtype"):
        snapmla.plan_sparse_decode(16, 1, topk=64, batch=2, device="cpu", cache_dtype=torch.float16)
    plan = snapmla.plan_sparse_decode(
        16, 1, topk=64, batch=2, device="cpu", cache_dtype=torch.bfloat16
    )
    assert isinstance(plan, snapmla.SparseRowsPlan)
    assert support.cell(SPARSE.kernels[0]["bf16"], "sm_90a") == support.SHIPPED


def test_every_format_and_kind_has_its_row() -> None:
    for operation in (DENSE, support.OPERATIONS[-1]):
        named = {name for row in support.rows(operation) for name in re.findall(r"`(\w+)`", row[1])}
        assert named == set(FORMATS)
    assert set(support.OWNERS) == set(FORMATS)
    kinds = {
        kernels[name][0]
        for operation in support.OPERATIONS
        for kernels in operation.kernels
        for name in kernels
    }
    assert kinds >= {op for op, family in support.FAMILIES.items() if family.formats}


def test_tables_tell_formats_and_card() -> None:
    """A table counts for what it names: a format by name or, where all rows are of it, its head."""
    heads = {
        "h200-table": "snapmla", "h100-table": "snapmla", "dense-table": "cache=bf16",
        "sparse-cost-h200": "native", "sparse-cost-h100": "native", "sparse_v4_cost": "V4's",
        "sparse_rows_cost": "BF16 rows", "sparse_prefill_cost": "sparse_prefill",
        "sparse_prefill_cost-h100": "sparse_prefill", "sparse_prefill_cache_cost": "FP8 cache",
        "sparse_prefill_cache_cost-h100": "FP8 cache", "mha_cost": "Dense prefill",
        "index_cost": "Index logits", "index_cost-h100": "Index logits",
    }  # fmt: skip
    for operation in support.OPERATIONS:
        for stem, formats in operation.tables.items():
            text = (support.RESULTS / f"{stem}.md").read_text()
            assert re.search(r"^- gpu NVIDIA \w+", text, re.M), stem
            for name in formats:
                assert heads.get(stem, f" {name} ") in text, f"{stem} has nothing of {name}"


def test_a_card_is_said_by_its_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without tables nothing was measured; a new one brings its card."""
    monkeypatch.setattr(support, "RESULTS", tmp_path)
    assert support.cards(DENSE, "fp8") == support.NONE
    (tmp_path / "records_cost.md").write_text("# x\n\n- gpu NVIDIA B200, driver 1\n")
    assert support.cards(DENSE, "fp8_v4") == "B200"
    assert support.cards(DENSE, "fp8") == support.NONE


def test_what_is_built_on_demand_is_in_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point less in the default matrix is a kernel less in wheels."""
    points = [spec for spec in mx.points("sm_90a") if "fp8_v4" not in spec.name]
    kernel = SPARSE.kernels[0]["fp8_v4"]
    assert support.cell(kernel, "sm_90a") == support.SHIPPED
    monkeypatch.setattr(mx, "points", lambda _arch: iter(points))
    assert support.cell(kernel, "sm_90a") == support.ON_DEMAND


def test_what_ran_where_names_every_operation() -> None:
    """Of SM100: what is built by default, on request, and not at all."""
    text = (ROOT / "docs/software-gpu.md").read_text("utf-8")
    table = text.partition("## What ran where\n")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if "`sm_100a`" in row]
    named = [set(re.findall(r"`(\w+)`", row)) & set(support.FAMILIES) for row in rows]
    built = {spec.op for spec in mx.points("sm_100a")}
    asked = {VariantSpec.from_name(name).op for name in ASKED_BLACKWELL}
    assert named == [built, asked, set(support.FAMILIES) - built - asked]

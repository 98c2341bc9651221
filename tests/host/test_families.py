"""What hosts know of an op is its family's: one of another kind needs no other file."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from codegen import __main__ as commands
from codegen import bundle, matrix, wheels
from dsl_kernels import registry
from dsl_kernels.families import DECODE, FAMILIES, FORMATS, HELPER, MHA, PREFILL, Axis, Family
from dsl_kernels.spec import VariantSpec
from profiles import ncu
from snapmla import rank
from snapmla.errors import VariantError
from snapmla.runtime import dump, variants, watch
from snapmla.testing import selfcheck, workloads
from snapmla.testing.workloads import call
from snapmla.testing.workloads.exact import Case, Recorded, Runner
from snapmla.tools import info, repro
from tests.support.families import with_family

HERE = "tests.host.test_families"
SWEEP = Family(
    "sweep",
    (Axis("form", "", ("wide", "narrow")), Axis("dtype", "d", ("bf16", "f16"), "bf16")),
    module=lambda _arch, _values: HERE,
    points=lambda _arch: iter([{"form": "wide"}, {"form": "narrow", "dtype": "f16"}]),
    kind="sweeping",
    result_axis="dtype",
    counted_by=("form",),
    shown=("rows", "missing"),
    results=("swept", "missing"),
    workload=f"{HERE}:WORKLOAD",
    reference=f"{HERE}:against_nothing",
    relies_on="families/sweep.py",
)


def small(spec: VariantSpec) -> Iterator[call.Call]:
    """One row of ones, to be summed; a narrow variant is told to leave out the last."""
    given = {"rows": torch.ones(1, 3 if spec.form == "wide" else 2), "swept": torch.zeros(1)}
    yield call.Call(given, {"sum": "swept"}, {"swept": torch.tensor([3.0])})


def recorded(case: Case, run: Runner) -> Recorded:
    raise NotImplementedError(case.variant)


def sized(spec: VariantSpec, sizes: call.Sizes, device: str, seed: int) -> dict[str, Any]:
    rows = torch.full((sizes.batch, sizes.tokens), float(seed), device=device)
    return {"rows": rows, "swept": rows[:, 0]}


WORKLOAD = call.Workload(small, call.bit_for_bit, recorded, sized)


def against_nothing(spec: VariantSpec, call: dump.Dump) -> tuple[str, bool]:
    return f"{spec.form}: {call.op}", False


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[VariantSpec]:
    """The default matrix of a family of an invented kind."""
    monkeypatch.setitem(FAMILIES, SWEEP.op, SWEEP)
    return [spec for spec in matrix.points("sm_90a") if spec.op == SWEEP.op]


def test_log_words(specs: list[VariantSpec]) -> None:
    line = watch.line(specs[0], {"rows": torch.zeros(2, 3), "swept": torch.zeros(5)})
    assert line == "sweep_wide_dbf16_sm90a on cpu: rows (2, 3)"


def test_dumps(specs: list[VariantSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A call that goes wrong is a file with its results; it is repeated and compared."""
    monkeypatch.setenv("SNAPMLA_DUMP", str(tmp_path))
    monkeypatch.setenv("SNAPMLA_DUMP_WHEN", "all")

    def kernel(rows: torch.Tensor, swept: torch.Tensor) -> None:
        swept.copy_(rows.sum(1))

    names = ("rows", "swept")
    watch.watched(kernel, specs[0], names)(torch.ones(2, 3), torch.zeros(2))
    (path,) = tmp_path.glob("*.pt")
    assert {name: t.tolist() for name, t in dump.read(path).results.items()} == {"swept": [3, 3]}
    monkeypatch.setattr(variants, "find_or_build", lambda spec, need_library: spec)
    monkeypatch.setattr(variants, "load", lambda artifact, device: kernel)
    monkeypatch.setattr(variants, "argument_names", lambda spec: names)
    _, outcome = repro.repeat(path, "cpu")
    assert list(outcome.results) == ["swept"] and outcome.compared and not outcome.differs
    assert (outcome.reference, outcome.right) == ("wide: sweep", False)


def test_self_check(specs: list[VariantSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workload is all that self-check and ncu know of it."""

    def kernel(swept: torch.Tensor, rows: torch.Tensor) -> None:
        swept.copy_(rows.sum(1))

    kernel.names = SimpleNamespace(arguments=("swept", "rows"))  # type: ignore[attr-defined]
    monkeypatch.setattr(selfcheck, "load", lambda spec, directory: kernel)
    found = [selfcheck.check(spec, Path("there")) for spec in specs]
    wrong = "1 of 1 values of sum differ"
    assert found == [selfcheck.Result(True, "sum bit for bit"), selfcheck.Result(False, wrong)]
    assert ncu.arguments(specs[0], ncu.Sizes(4, 5, 1), "cpu", 1)["rows"].shape == (4, 5)
    with_family(monkeypatch, "sweep", workload="")
    with pytest.raises(ValueError, match=r"'sweep' has no workload: .*/workloads/sweep\.py"):
        selfcheck.check(specs[0], Path("there"))


def test_counts_results_and_releases(specs: list[VariantSpec]) -> None:
    assert [info.family(spec) for spec in specs] == ["sweep wide", "sweep narrow"]
    assert [spec.result_dtype for spec in specs] == ["bf16", "f16"]
    artifact = variants.Artifact.__new__(variants.Artifact)
    for name, value in (("name", specs[0].name), ("directory", Path("old"))):
        object.__setattr__(artifact, name, value)
    variants._expect_sources(artifact, {"sources": ["dsl_kernels/families/sweep.py"]})
    with pytest.raises(VariantError, match=r"made without families/sweep\.py"):
        variants._expect_sources(artifact, {"sources": ["dsl_kernels/combine/merge.py"]})


def test_a_wheel_of_its_kind(
    specs: list[VariantSpec], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its variants alone make it; a name of its own lets it lie beside others."""
    assert matrix.kinds() == (HELPER, DECODE, MHA, PREFILL, "sweeping")
    assert matrix.default_specs("sm_90a", kind="sweeping", ask_kernels=False) == specs
    others = matrix.default_specs("sm_90a", kind=HELPER, ask_kernels=False)
    assert others and all(spec.family.helper for spec in others)

    def build(tree: Path, out_dir: Path) -> Path:  # the backend's part takes seconds
        text = (tree / "pyproject.toml").read_text()
        (out_dir / f"{tree.name}.toml").write_text(text)
        return out_dir / f"{tree.name}.toml"

    record = dataclasses.make_dataclass("R", ["name", "spec", "flavour", "host_cpu"])
    records = [record(spec.name, spec.fields(), "cu13", "x86-64-v2") for spec in specs]
    monkeypatch.setattr(bundle, "collect", lambda given, folder, *_: records)
    monkeypatch.setattr(bundle, "copy_variants", lambda folder, *_: folder.mkdir(parents=True))
    monkeypatch.setattr(wheels, "glibc_of", lambda libraries: (2, 28))
    monkeypatch.setattr(wheels, "build", build)
    monkeypatch.setattr(wheels, "check_setuptools", lambda: None)
    monkeypatch.setattr(registry, "feasible", lambda spec: None)
    monkeypatch.setattr(wheels, "_host", _empty)
    found = wheels.make(specs, Path("none"), tmp_path, "sweeping")
    text = found.kernels.read_text()
    assert 'name = "snapmla-kernels-sm90-cu13-sweeping"' in text and "+full" in text
    assert 'sm90_cu13_sweeping = "snapmla_kernels_sm90_cu13_sweeping"' in text
    assert (found.variants, found.total) == (2, 2)
    assert wheels.name_of("sm_100a", "cu12") == "snapmla-kernels-sm100-cu12"


def _empty(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "pyproject.toml").write_text("")
    return root


def test_what_families_name_is_there() -> None:
    for family in FAMILIES.values():
        assert not family.reference or callable(registry.named(family.reference)), family.op
        assert all(family.axis(axis) is not None for axis in family.counted_by)
        assert set(family.formats) <= set(FORMATS)
        assert bool(family.formats) == (family.kind == DECODE)


@pytest.mark.parametrize("op", FAMILIES)
def test_every_op_has_a_workload(op: str) -> None:
    """In the file of its name, with everything that each user of workloads calls."""
    work, decodes = workloads.of(op), FAMILIES[op].kind == DECODE
    assert work is importlib.import_module(f"snapmla.testing.workloads.{op}").WORKLOAD
    assert all(map(callable, (work.small, work.judge, work.recorded, work.sized)))
    assert callable(work.job) is decodes, "decodes alone run behind the planning kernel"
    if work.bench:
        assert all(map(callable, (work.public, work.moved)))
    axes = {axis.name: axis.values for axis in FAMILIES[op].axes}
    for modes in work.bench.values():
        for values in modes.values():
            assert all(value in axes[name] for name, value in values.items())


def test_what_is_no_op_has_no_workload() -> None:
    with pytest.raises(ValueError, match=r"op: expected one of plan_decode, .*, got 'swoop'"):
        workloads.of("swoop")


def test_every_format_is_decoded_by_one_op() -> None:
    """The dispatcher picks by format; two ops that read one would be a guess.  Those that are named
    are read where ``record_decode`` declares it."""
    read = list(rank.DENSE_FORMATS)
    unnamed = [name for name, fmt in FORMATS.items() if not fmt.named]
    assert sorted(read) == sorted([*unnamed, *FAMILIES["record_decode"].formats])
    for name in read:
        assert name in rank.op_of(name).family.formats
        assert rank.op_of(name).token_bytes == FORMATS[name].token_bytes


@pytest.mark.parametrize("command", ["precompile", "wheels"])
def test_a_kind_that_is_none(command: str) -> None:
    done = CliRunner().invoke(commands.app, [command, "--kind", "deocde"])
    assert done.exit_code == 1
    said = "--kind (make's KIND=): expected one of helper, decode, mha, prefill, got 'deocde'"
    assert said in done.output

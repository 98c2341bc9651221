"""Old and new in one run: another checkout as a contender, its comparison, the record of tests."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import snapmla
from codegen import artifacts
from profiles import bench, checkouts, compare, contenders, test_record
from tests.support import ROOT
from tests.support.needs import needs_compiler

SHAPE = "b2_L100_h4_q1"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A copy of the host packages with the variants that are built here."""
    folder = tmp_path / "other"
    for package in checkouts.PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    (folder / "build").mkdir()
    (folder / "build" / "variants").symlink_to(artifacts.default_dir(), target_is_directory=True)
    (folder / "commit").write_text("0123abc\n")
    return folder


def test_another_checkout_has_modules_of_its_own(other: Path) -> None:
    """Each side sees its own package, and what it imports later is its own too."""
    edited = other / "snapmla" / "_version.py"
    edited.write_text(edited.read_text() + '\n__version__ = "of the other"\n')
    checkout = checkouts.Checkout(other)
    before = dict(os.environ)
    with checkout.active() as package:
        from snapmla.dense import plan_text

        assert Path(plan_text.__file__).is_relative_to(other)
        assert package.__version__ == "of the other"
        assert sys.modules["snapmla"] is package is not snapmla
        assert os.environ["SNAPMLA_VARIANT_DIR"] == str(other / "build" / "variants")
    assert sys.modules["snapmla"] is snapmla and snapmla.__version__ != "of the other"
    assert dict(os.environ) == before and str(other) not in sys.path
    with checkout.active() as again:
        assert again is package  # imported once
    assert checkout.commit == "0123abc"
    q = torch.ops.snapmla.quantize_q  # still ours, and registered once
    assert q.default._schema.name == "snapmla::quantize_q"


def test_others_register_as_ever(other: Path) -> None:
    """torch brings in parts of itself late, which define operators; those must be there."""
    with checkouts.Checkout(other).active():
        library = torch.library.Library("test_checkouts", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")
    assert torch.ops.test_checkouts.twice(torch.ones(1)).item() == 2


def test_a_checkout_that_is_none_is_explained(tmp_path: Path, other: Path) -> None:
    assert "no snapmla package" in str(checkouts.Checkout(tmp_path).unavailable())
    (other / "build" / "variants").unlink()
    assert "no build/variants" in str(checkouts.Checkout(other).unavailable())
    (other / "snapmla" / "__init__.py").unlink()
    with pytest.raises(ImportError), checkouts.Checkout(other).active():
        pass
    assert sys.modules["snapmla"] is snapmla
    for name in ("snapmla@", "snapmlax@y", "flashmla_bf16@y"):
        with pytest.raises(ValueError, match=r"snapmla\[@DIR\]"):
            contenders.make(name, None)


@needs_compiler
@pytest.mark.whole_matrix
def test_others_and_ours_in_one_run(other: Path, tmp_path: Path) -> None:
    """A contender's rows come from its own package: break one and only its rows are wrong."""
    broken = tmp_path / "broken"
    shutil.copytree(other, broken, symlinks=True)
    text = (broken / "snapmla" / "attention.py").read_text()
    scaled = re.sub(r"numbers = \((.*softmax_scale\S*),", r"numbers = (\1 * 1.5,", text)
    assert scaled.count("* 1.5") == 2  # of a call that is checked, and of one that is known
    (broken / "snapmla" / "attention.py").write_text(scaled)
    backends = f"snapmla,snapmla@{other},snapmla@{broken}"
    command = ["--shape", SHAPE, "--backends", backends, "--device", "cpu"]
    done = CliRunner().invoke(bench.app, [*command, "--out", str(tmp_path / "out")])
    (report,) = [json.loads(p.read_text()) for p in (tmp_path / "out").glob("*.json")]
    assert [row["status"] for row in report["rows"]] == ["ok", "ok", "wrong"], report["rows"]
    assert all(row["kernel"].endswith("commit 0123abc") for row in report["rows"][1:])
    assert done.exit_code == 1
    page, _ = compare.page([report] * 3, f"snapmla@{other}", "snapmla", 1e9)
    assert SHAPE in page and "0 of 1 rows slower" in page


def _report(times: dict[str, tuple[float, float]], **changes: Any) -> dict[str, Any]:
    rows = [
        {"shape": shape, "backend": name, "us": us, "status": "ok", "op": "decode", **changes}
        for shape, both in times.items()
        for name, us in zip(("old", "new"), both)
    ]
    return {"rows": rows, "command": "c", "commit": "abc", "machine": {"gpu": "H200"}}


def test_slower_is_a_matter_of_the_median() -> None:
    runs = [
        _report({"a": (10.0, 10.1), "b": (10.0, 10.3)}),
        _report({"a": (20.0, 22.0), "b": (20.0, 20.5)}),  # one bad run of a does not count
        _report({"a": (30.0, 30.0), "b": (30.0, 30.0)}),
    ]
    text, slower = compare.page(runs, "old", "new", 0.02)
    assert slower == ["b"]
    assert "| a | 1.010 | 1.100 | 1.000 | 1.010 |" in text
    assert "| b | 1.030 | 1.025 | 1.000 | 1.025 slower |" in text
    assert "1 of 2 rows slower by more than 2%" in text


def test_what_the_old_one_refuses_is_named() -> None:
    """Rows that it takes no arguments for; one that crashed, or was refused once only, is none."""
    no = {"shape": "b", "backend": "old", "op": "decode", "status": "failed"}
    yes = {"shape": "b", "backend": "new", "op": "decode", "status": "ok", "us": 3.0}
    helper = {"shape": "h", "backend": "new", "op": "append_kv", "status": "ok", "us": 1.0}

    def run(note: str) -> dict[str, Any]:
        report = _report({"a": (10.0, 9.0)})
        report["rows"] += [no | {"note": note}, yes, helper]
        return report

    refusal, crash = "ValueError: s_q: expected 1 to 8", "RuntimeError: CUDA error"
    text, slower = compare.page([run(refusal)] * 3, "old", "new", 0.02)
    assert not slower and "0 of 1 rows" in text and "Not taken by the old one: b." in text
    for notes in ([crash] * 2, [refusal, crash]):
        with pytest.raises(ValueError, match="b, old: failed"):
            compare.ratios([run(note) for note in notes], "old", "new")
    with pytest.raises(ValueError, match="b, new: failed"):
        refusing = run(refusal)
        refusing["rows"][-2] = yes | {"status": "failed"}
        compare.ratios([refusing], "old", "new")


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ([_report({"a": (1.0, 1.0)}), _report({"b": (1.0, 1.0)})], "not in every run: a, b"),
        ([_report({"a": (1.0, 1.0)}, status="wrong", note="off")], "a, old: wrong: off"),
        ([_report({})], "old and new not both in any row"),
    ],
    ids=["rows missing", "a wrong row", "nothing"],
)
def test_runs_that_cannot_be_compared_are_refused(runs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare.ratios(runs, "old", "new")


def test_packed_checkouts_unpack_to_backends(other: Path, tmp_path: Path) -> None:
    """``gpu_run.sh pack NAME=DIR`` holds host packages, libraries, records and the commit."""
    (other / "build" / "variants").unlink()
    variants = other / "build" / "variants"
    variants.mkdir()
    for name in ("merge_obf16_sm90a.so", "merge_obf16_sm90a.json", "merge_obf16_sm90a.ptx"):
        (variants / name).write_text("{}")
    repo = tmp_path / "repo"
    for part in ("profiles", "build/variants"):
        (repo / part).mkdir(parents=True)
    shutil.copy(ROOT / "profiles" / "gpu_run.sh", repo / "profiles")
    (repo / "build" / "variants" / "merge_obf16_sm90a.so").write_text("x")
    command = ["bash", "profiles/gpu_run.sh", "pack", f"base={other}"]
    subprocess.run(command, cwd=repo, check=True, capture_output=True)
    packed = repo / "build" / "carry" / "checkouts" / "base.tar.xz"
    listed = subprocess.run(["tar", "-tf", packed], capture_output=True, text=True, check=True)
    names = set(listed.stdout.split())
    assert {"commit", "snapmla/dense/decode.py", "build/variants/merge_obf16_sm90a.so"} <= names
    assert "build/variants/merge_obf16_sm90a.json" in names
    assert not [n for n in names if n.endswith(".ptx") or "__pycache__" in n]


JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" time="12.5">
<testcase classname="tests.gpu.test_a" name="test_one[x]" time="1"/>
<testcase classname="tests.gpu.test_a" name="test_two" time="1"/>
<testcase classname="tests.gpu.test_b" name="test_three" time="1">
<skipped type="pytest.skip" message="needs two GPUs">where</skipped></testcase>
{bad}</testsuite></testsuites>"""
BAD = """<testcase classname="tests.gpu.test_b" name="test_four" time="1">
<failure message="assert 1 == 2&#10;more">trace</failure></testcase>"""


@pytest.mark.parametrize("bad", ["", BAD], ids=["all right", "one failed"])
def test_the_record_of_gpu_tests(tmp_path: Path, bad: str) -> None:
    (tmp_path / "tests.xml").write_text(JUNIT.format(bad=bad))
    tally = test_record.read(tmp_path / "tests.xml")
    machine = {"gpu": "NVIDIA H200", "gpus": 2, "driver": "580"}
    text = test_record.page(test_record.Run(["tests:tests/gpu"], "abc", "now", machine, tally))
    assert f"2 passed, {1 if bad else 0} failed, 1 skipped in 12 s" in text
    assert "| tests/gpu/test_a.py | 2 |" in text and "commit abc" in text
    assert "Skipped, needs two GPUs:" in text and "`tests/gpu/test_b::test_three`" in text
    assert ("`tests/gpu/test_b::test_four`: assert 1 == 2" in text) == bool(bad)
    assert test_record.file_name(machine) == "gpu-tests-h200-x2.md"
    assert test_record.file_name({"gpu": "NVIDIA H100 80GB HBM3", "gpus": 1}) == "gpu-tests-h100.md"


def test_the_record_of_gpu_tests_run_in_parts(tmp_path: Path) -> None:
    names = ("gpu-tests-h200.json", "gpu-tests-h200-x2.json")
    for k, (name, bad) in enumerate(zip(names, (BAD, ""), strict=True)):
        (tmp_path / "tests.xml").write_text(JUNIT.format(bad=bad).replace("test_a", f"test_a{k}"))
        tally = test_record.read(tmp_path / "tests.xml")
        run = test_record.Run([f"tests:{k}"], "abc", str(k), {"gpu": "NVIDIA H200"}, tally)
        (tmp_path / name).write_text(json.dumps(dataclasses.asdict(run)))
    runs = [test_record.Run.load(tmp_path / name) for name in names]
    text = test_record.page(test_record.joined(runs))
    assert "4 passed, 1 failed, 2 skipped in 25 s" in text and "commit abc, 1" in text
    assert "gpu_run.sh tests:0` and `bash profiles/gpu_run.sh tests:1`" in text
    assert "| tests/gpu/test_a0.py | 2 |" in text and "| tests/gpu/test_a1.py | 2 |" in text
    with pytest.raises(ValueError, match="more than one run has tests/gpu/test_a0"):
        test_record.joined([runs[0], runs[0]])
    for change in ({"commit": "def"}, {"machine": {"gpu": "NVIDIA H100"}}):
        with pytest.raises(ValueError, match="runs o"):
            test_record.joined([runs[0], dataclasses.replace(runs[1], **change)])


@pytest.mark.parametrize("text", ["", "<a", "<testsuites/>"], ids=["empty", "cut", "no test"])
def test_a_record_of_nothing_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tests.xml").write_text(text)
    with pytest.raises(ValueError, match=r"tests\.xml"):
        test_record.read(tmp_path / "tests.xml")

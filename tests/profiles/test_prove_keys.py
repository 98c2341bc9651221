"""An outcome of ``make prove`` counts as long as what is executed is the same, and no longer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from codegen import artifacts, digests
from codegen.artifacts import Record
from dsl_kernels.spec import VariantSpec
from profiles import prove, prove_book, prove_keys
from profiles.prove import Book, Outcome, Step
from snapmla.runtime import variants
from snapmla.testing import workloads
from snapmla.testing.workloads.call import Call
from tests.support.needs import needs_compiler, needs_kernels

MERGE, PLAN = (VariantSpec.from_name(f"{n}_sm90a") for n in ("merge_obf16", "append_kv_xbf16_ii32"))
KERNEL = prove.ROOT / "dsl_kernels/combine/merge.py"
HOST = prove.ROOT / "snapmla/dense/merge.py"
WORKLOAD = prove.ROOT / "snapmla/testing/workloads/merge.py"


def few_steps() -> list[Step]:
    """A step of each kind that objects are for, of two variants, and of each that reads more."""
    prove_keys.forget()
    both = [MERGE, PLAN]
    found = [prove._variant(spec) for spec in both]
    found += [prove._schedules(spec, 1) for spec in both] + [prove._mutants(spec) for spec in both]
    replay = prove_keys.step("replay", "x", ("x",), reads=("softgpu",), specs=())
    return [*found, prove._build([MERGE]), prove._tests("tests/docs/test_readme.py", both), replay]


Edit = Callable[[Path, Callable[[bytes], bytes]], None]


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch) -> Edit:
    """Edits a source, as far as keys see it."""

    def edited(path: Path, change: Callable[[bytes], bytes]) -> None:
        real = prove_keys.contents
        assert change(path.read_bytes()) != path.read_bytes()

        def contents(each: Path) -> bytes:
            return change(real(each)) if each == path else real(each)

        monkeypatch.setattr(prove_keys, "contents", contents)

    return edited


def said(text: bytes) -> bytes:
    """The source with more in its docstring, and a comment."""
    return text.replace(b'"""', b'"""Says more: ', 1) + b"\n# a comment\n"


def more(text: bytes) -> bytes:
    """The source with more that runs."""
    return text + b"\nX = 1\n"


def void(before: list[Step]) -> set[str]:
    return {b.name for b, a in zip(before, few_steps(), strict=True) if a.key != b.key}


@needs_compiler
def test_an_edit_voids_what_reads_it(edit: Edit) -> None:
    """A docstring and an explanation are read by nothing that runs, a kernel by its steps."""
    before = few_steps()
    for path in (KERNEL, HOST, WORKLOAD, prove.ROOT / "softgpu/machine.py"):
        edit(path, said)
    edit(prove.ROOT / prove_keys.EXPLANATIONS, more)
    assert void(before) == set()
    edit(KERNEL, more)
    assert void(before) == {
        f"variant:{MERGE.name}", f"schedules:{MERGE.name}", f"mutants:{MERGE.name}",
        "build:merge_*_sm90a", "tests:docs/test_readme.py",
    }  # fmt: skip
    edit(WORKLOAD, more)
    assert void(before) == {s.name for s in before} - {"replay:x"}, "the host's, and the kernel's"


@needs_compiler
def test_a_role_changes_verdicts_alone(edit: Edit) -> None:
    """Survivors are judged by it when the record is read."""
    before = few_steps()
    edit(prove.ROOT / prove_keys.ROLES, more)
    assert not void(before) & {f"schedules:{MERGE.name}", f"mutants:{MERGE.name}"}


@needs_compiler
def test_the_command_line_is_no_part_of_a_key() -> None:
    """Seeds and counts are."""
    first, other = prove._schedules(MERGE, 1), prove._schedules(MERGE, 2)
    assert first.key != other.key
    told = (*first.commands[-1], "--explained", "fence")
    again = prove._on_objects("schedules", MERGE, told, "1 schedules")
    assert again.commands != first.commands and again.key == first.key


# ---------------------------------------------------------------------------- carry


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The two variants, built from the sources as they are."""
    folder = tmp_path_factory.mktemp("variants")
    for spec in (MERGE, PLAN):
        at = variants.find_or_build(spec, need_library=False).directory
        for file in at.glob(f"{spec.name}.*"):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def proven(build: Path) -> list[Outcome]:
    """Outcomes of steps that passed on other sources, with what they executed."""
    found = []
    for step in few_steps():
        ran = prove_keys.executed(step, build, prove_keys.launches(step, build))
        found.append(Outcome(step.name, "of other sources", True, "c", 1.0, "", "", ran))
    return found


def kept(proven: list[Outcome], tmp_path: Path, *folders: Path) -> tuple[set[str], dict[str, str]]:
    """Names of the steps that stand after ``carry``, and why others do not."""
    book, steps = Book(tmp_path / "book"), few_steps()
    for outcome in proven:
        book.write(outcome)
    assert not any(book.outcome(step) for step in steps), "they are of other sources"
    _, left = prove.carried(steps, book, *folders)
    return {step.name for step in steps if book.outcome(step)}, left


def rebuilt(build: Path, folder: Path, change: Callable[[str], str]) -> Path:
    """A build whose merge has another PTX, as its record says."""
    shutil.copytree(build, folder)
    ptx, record = folder / f"{MERGE.name}.ptx", Record.read(folder / f"{MERGE.name}.json")
    text = change(ptx.read_text())
    assert text != ptx.read_text() and record is not None
    ptx.write_text(text)
    artifacts.finish(folder, record)
    return folder


@needs_kernels
def test_a_renamed_file_voids_nothing(proven: list[Outcome], build: Path, tmp_path: Path) -> None:
    """Its PTX names another file and has other lines; what it executes is the same."""

    def moved(text: str) -> str:
        text = text.replace("combine/merge.py", "combine/of_splits.py")
        return text.replace(".loc\t1 3", ".loc\t1 4").replace("kernel_cutlass_", "kernel_moved_")

    # the name of a kernel is the object's, too, where softgpu looks for it
    def file(text: str) -> str:
        return moved(text).replace("kernel_moved_", "kernel_cutlass_")

    assert digests.stripped(moved(ptx := (build / f"{MERGE.name}.ptx").read_text())) == (
        digests.stripped(ptx)
    )
    new = rebuilt(build, tmp_path / "new", file)
    assert kept(proven, tmp_path, new, build) == ({o.name for o in proven}, {})


@needs_kernels
def test_a_changed_instruction_voids_its_steps(
    proven: list[Outcome], build: Path, tmp_path: Path
) -> None:
    new = rebuilt(build, tmp_path / "new", lambda text: text.replace(", 31;", ", 15;", 1))
    stand, left = kept(proven, tmp_path, new)
    lost = {o.name for o in proven} - stand
    assert lost == set(left) == {
        f"variant:{MERGE.name}", f"schedules:{MERGE.name}", f"mutants:{MERGE.name}",
        "build:merge_*_sm90a", "tests:docs/test_readme.py",
    }  # fmt: skip
    assert set(left.values()) == {"other PTX"}
    # and an outcome of another build is not believed of the right one
    assert not kept(proven, tmp_path / "old", build, new)[0] & lost


@needs_kernels
def test_a_changed_launch_voids_its_steps(
    proven: list[Outcome], build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of the workload's: schedules and mutants of that variant run anew, no others."""
    real = workloads.of

    def small(spec: VariantSpec) -> Iterator[Call]:
        for call in real(MERGE.op).small(spec):
            call.arguments["split_begin"][-1] -= 1
            yield call

    def of(op: str) -> workloads.Workload:
        return real(op)._replace(small=small) if op == MERGE.op else real(op)

    monkeypatch.setattr(workloads, "of", of)
    stand, left = kept(proven, tmp_path, build)
    assert left == dict.fromkeys(
        (f"schedules:{MERGE.name}", f"mutants:{MERGE.name}"), "other launches"
    )
    assert stand == {o.name for o in proven} - set(left)


@needs_kernels
def test_what_was_not_built_is_not_kept(proven: list[Outcome], build: Path, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    stand, left = kept(proven, tmp_path, tmp_path / "none")
    assert stand == {"replay:x"} and set(left.values()) == {"not built from these sources"}
    bare = [dataclasses.replace(o, executed={}) for o in proven]
    assert kept(bare, tmp_path / "bare", build)[0] == set()


# ---------------------------------------------------------------------------- survivors


def survivor(tried: int = prove_book.STUDIED, role: str = "producer") -> dict[str, object]:
    return {"instruction": "fence", "roles": [role], "tried": tried, "source": "x.py:1"}


def test_survivors_are_judged_when_they_are_read(tmp_path: Path) -> None:
    """An explanation that comes or goes runs nothing, unless it spared schedules."""
    book = Book(tmp_path)
    outcome = Outcome("mutants:x", "1", True, "c", 1.0, "1 of 2", "", {}, [survivor()])
    book.write(outcome)
    for explained, passed in ((("fence @ producer",), True), ((), False), (("wait",), False)):
        step = Step("mutants", "x", (), "1", explained=explained)
        found = book.outcome(step)
        assert found is not None and found.passed == passed
        assert ("x.py:1" in found.message) != passed
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["passed"], "it is not rewritten"
    book.write(dataclasses.replace(outcome, survivors=[survivor(tried=3)]))
    assert book.outcome(Step("mutants", "x", (), "1", explained=("fence",))) is not None
    assert book.outcome(Step("mutants", "x", (), "1")) is None

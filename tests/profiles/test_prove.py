"""The runner of ``make prove``, on small real commands; its steps against the matrix."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from codegen import matrix
from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec
from profiles import prove
from profiles.prove import Book, Outcome, Step
from snapmla import rank
from snapmla.rank import calls, costs, verdicts
from snapmla.runtime import variants
from snapmla.testing import explanations, selfcheck
from tests.support.needs import needs_compiler, needs_kernels


def says(text: str, what: str = "a", key: str = "1") -> Step:
    return Step("small", what, (("-c", f"print({text!r})"),), key)


def counting(file: Path, what: str = "a", key: str = "1") -> Step:
    """A step that leaves a line in ``file`` whenever it runs."""
    return Step("small", what, (("-c", f"open({str(file)!r}, 'a').write('ran\\n')"),), key)


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for(file: Path, runner: subprocess.Popen[str]) -> None:
    """Until a step has written ``file``; fails if the runner ends before."""
    while not (file.exists() and file.read_text()):
        assert runner.poll() is None, "the runner has ended"
        time.sleep(0.02)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "book")


@pytest.fixture(scope="module")
def every_step() -> list[Step]:
    """The steps on the sources as they are, made once: that takes seconds."""
    return prove.steps()


# ------------------------------------------------------------------------------- the runner


def test_what_passed_does_not_run_again(book: Book, tmp_path: Path) -> None:
    file = tmp_path / "ran"
    steps = [counting(file, "a"), counting(file, "b")]
    assert [o.name for o in prove.run(steps, book, "c0ffee")] == ["small:a", "small:b"]
    assert prove.run(steps, book, "later") == [] and lines(file) == 2
    assert book.outcome(steps[0]).commit == "c0ffee", "where it ran, not where one looked"


def test_what_reads_other_sources_runs_again(book: Book, tmp_path: Path) -> None:
    file = tmp_path / "ran"
    prove.run([counting(file)], book, "one")
    edited = counting(file, key="2")
    assert book.outcome(edited) is None and book.last(edited).commit == "one"
    prove.run([edited], book, "two")
    assert lines(file) == 2 and book.outcome(edited).commit == "two"


def test_a_failed_step_is_told_and_runs_again_after_the_new_ones(
    book: Book, tmp_path: Path
) -> None:
    wrong = Step("small", "wrong", (("-c", "print('what went wrong'); raise SystemExit(3)"),), "1")
    steps = [wrong, says("fine")]
    assert [o.passed for o in prove.run(steps, book, "x")] == [False, True]
    (failed,) = book.failed(steps)
    assert "exit code 3" in failed.message and failed.message.endswith("what went wrong")
    assert [s.name for s in book.pending([*steps, says("new", "new")])] == [
        "small:new", "small:wrong",
    ]  # fmt: skip


def test_later_commands_of_a_step_wait_for_the_first(book: Book, tmp_path: Path) -> None:
    file = tmp_path / "ran"
    stop = ("-c", "raise SystemExit('no')")
    step = Step("small", "two", (stop, *counting(file).commands), "1")
    (outcome,) = prove.run([step], book, "x")
    assert not outcome.passed and "no" in outcome.message and lines(file) == 0


def test_the_last_line_is_kept(book: Book) -> None:
    (outcome,) = prove.run([says("much\n===== 3 passed in 1 s =====")], book, "x")
    assert outcome.message == "3 passed in 1 s"


def test_what_a_command_tells_is_kept(book: Book) -> None:
    """Its launches, and mutants that survived: those do not fail a step before they are judged."""
    survivor = {"instruction": "fence", "roles": [], "tried": 10, "source": "x.py:1"}
    told = json.dumps({"launches": "7", "survivors": [survivor]})
    code = f"import sys; open(sys.argv[2], 'w').write({told!r}); print('1 of 2'); sys.exit(1)"
    step = Step("mutants", "x", (("-c", code),), "1", recorded=True, explained=("fence",))
    (outcome,) = prove.run([step], book, "x")
    assert outcome.passed and outcome.message == "1 of 2" and outcome.survivors == [survivor]
    assert outcome.executed["launches"] == "7" and book.outcome(step) == outcome
    assert [o.name for o in book.failed([dataclasses.replace(step, explained=())])] == ["mutants:x"]


def test_processor_time_of_children_is_counted(book: Book) -> None:
    burn = (
        "import subprocess, sys, time\n"
        "code = 'import time\\nwhile time.process_time() < 0.4: pass'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)"
    )
    steps = [Step("small", "burns", (("-c", burn),), "1"), says("nothing", "idle")]
    burns, idle = prove.run(steps, book, "x")
    assert burns.cpu_seconds >= 0.4 > idle.cpu_seconds


def test_no_step_begins_after_the_limit(book: Book) -> None:
    steps = [says("x", str(i)) for i in range(5)]
    now = iter([0.0, 1.0, 9.9, 10.0])  # at the start, then before each step
    ran = prove.run(steps, book, "x", limit=10, clock=lambda: next(now))
    assert [o.name for o in ran] == ["small:0", "small:1"]
    assert [s.what for s in book.pending(steps)] == ["2", "3", "4"]
    assert len(prove.run(steps, book, "x")) == 3


def test_killed_in_the_middle_it_goes_on(book: Book, tmp_path: Path) -> None:
    """SIGKILL to runner and step alike: what was finished counts, what was not runs again."""
    file, began = tmp_path / "ran", tmp_path / "began"
    hang = f"import time; open({str(began)!r}, 'w').write('x'); time.sleep(600)"
    code = (
        "from pathlib import Path; from profiles import prove\n"
        f"first = prove.Step('small', 'first', {counting(file).commands!r}, '1')\n"
        f"second = prove.Step('small', 'second', (('-c', {hang!r}),), '1')\n"
        f"prove.run([first, second], prove.Book(Path({str(book.folder)!r})), 'x')"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=prove.ROOT, text=True, start_new_session=True
    )
    try:
        wait_for(began, runner)
    finally:
        os.killpg(runner.pid, signal.SIGKILL)
        runner.wait()
    steps = [counting(file, "first"), counting(file, "second")]
    assert book.outcome(steps[0]).passed and book.outcome(steps[1]) is None
    assert [o.name for o in prove.run(steps, book, "x")] == ["small:second"]
    assert lines(file) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_running(book: Book, tmp_path: Path, number: int) -> None:
    """To the runner alone, as ``timeout`` sends it: the step ends with it, and does not count."""
    began = tmp_path / "began"
    hang = f"import os, time; open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        "from pathlib import Path; from profiles import prove\n"
        f"hang = prove.Step('small', 'hang', (('-c', {hang!r}),), '1')\n"
        "prove.steps, prove.checkout = lambda: [hang], lambda: 'x'\n"
        f"prove.STATE = Path({str(book.folder)!r})\n"
        f"prove.RECORD = Path({str(tmp_path)!r}) / 'prove.md'\n"
        "prove.app([])"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code], cwd=prove.ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    wait_for(began, runner)
    runner.send_signal(number)
    said, _ = runner.communicate(timeout=60)
    assert runner.returncode == 130 and "interrupted" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)
    assert "0 of 1 steps passed" in (tmp_path / "prove.md").read_text()


def test_outcomes_that_cannot_be_read_are_none(book: Book) -> None:
    step = says("x")
    for text in ("", "[]", '{"name": "small:a"}'):
        book.folder.mkdir(exist_ok=True)
        book._path(step.name).write_text(text)
        assert book.outcome(step) is None
    assert book.pending([step]) == [step]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40])
def test_slices_part_all_steps(count: int) -> None:
    steps = [says("x", str(i)) for i in range(30)]
    found = [s for k in range(count) for s in prove.part(steps, f"{k + 1}/{count}")]
    assert len(found) == len(steps) and set(found) == set(steps)


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/0", "a/b", "1/2/3", "-1/2"])
def test_what_is_no_slice(text: str) -> None:
    with pytest.raises(ValueError, match=r"^--slice: expected k/n with k from 1 to n.*got"):
        prove.part([], text)


# ------------------------------------------------------------------------------- the record


def test_the_record_tells_what_ran_where_and_what_did_not(book: Book, tmp_path: Path) -> None:
    wrong = Step("small", "wrong", (("-c", "raise SystemExit('went wrong')"),), "1")
    steps = [says("5 of 5 killed", "a"), wrong, says("x", "edited"), says("x", "never")]
    prove.run(steps[:3], book, "aaaaaaaaaaaa1")
    assert prove._short("aaaaaaaaaaaa1-dirty") == "aaaaaaaaaaaa-dirty"
    steps[2] = says("x", "edited", key="2")
    to = tmp_path / "prove.md"
    prove.write_record(steps, book, "bbbbbbbbbbbb2", to)
    page, data = to.read_text(), json.loads(to.with_suffix(".json").read_text())
    assert "At commit bbbbbbbbbbbb2: 1 of 4 steps passed, 1 failed, 2 have not run" in page
    assert "| small |  | 4 | 1 | 1 | 2 | 0.0 | aaaaaaaaaaaa |" in page
    assert "## Failed: small:wrong\n\n```\npython -c raise" in page and "went wrong" in page
    assert page.endswith("## Not run on these sources\n\n- small: `edited`, `never`\n")
    states = {row["name"]: row["state"] for row in data["steps"]}
    assert states == {
        "small:a": "passed", "small:wrong": "failed", "small:edited": "not run",
        "small:never": "not run",
    }  # fmt: skip
    by_name = {row["name"]: row for row in data["steps"]}
    assert by_name["small:edited"]["commit"] == "aaaaaaaaaaaa1"
    again = Book(tmp_path / "empty", to.with_suffix(".json"))
    for step in steps:
        assert again.last(step) == book.last(step), "a fresh checkout reads the record"
        assert again.outcome(step) == book.outcome(step)
    assert by_name["small:a"]["cpu_seconds"] > 0 and by_name["small:a"]["commit"][-1] == "1"


@needs_compiler
@pytest.mark.parametrize(
    ("steps", "code", "words"),
    [
        ([says("fine")], 0, "1 of 1 steps passed, 0 failed, 0 left to run"),
        (
            [says("fine"), Step("small", "b", (("-c", "raise SystemExit('oh')"),), "1")],
            1,
            "FAILED small:b",
        ),
    ],
)
def test_the_command(
    book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    steps: list[Step], code: int, words: str,
) -> None:  # fmt: skip
    """Exit code 1 if any step failed, also when there was no time to run it again."""
    monkeypatch.setattr(prove, "steps", lambda: steps)
    monkeypatch.setattr(prove, "STATE", book.folder)
    monkeypatch.setattr(prove, "RECORD", tmp_path / "prove.md")
    result = CliRunner().invoke(prove.app, [])
    assert result.exit_code == code and words in result.output, result.output
    again = CliRunner().invoke(prove.app, ["--limit", "0"])
    assert again.exit_code == code, again.output
    assert (tmp_path / "prove.md").read_text().startswith("# What `make prove` ran")
    listed = CliRunner().invoke(prove.app, ["--list"])
    assert "passed   small:a" in listed.output


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "words"), [(["--slice", "9/2"], "--slice: expected"), (["--only", "x"], "--only")]
)
def test_the_command_refuses(
    every_step: list[Step], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.setattr(prove, "steps", lambda: every_step)
    result = CliRunner().invoke(prove.app, arguments)
    assert result.exit_code == 2 and words in result.output


# --------------------------------------------------------------------------------- its steps


@needs_compiler
def test_steps_are_the_whole_matrix(every_step: list[Step]) -> None:
    every = [s for arch in ("sm_90a", "sm_100a") for s in matrix.default_specs(arch)]
    hopper = matrix.default_specs("sm_90a")
    sample = {s.name for s in matrix.sample(hopper, thorough=True)}
    # of kernels of one source for both architectures one variant an op is studied on SM100, too
    blackwell = matrix.default_specs("sm_100a")
    own = [s for s in blackwell if "sm100" in str(registry.module_name(s))]
    sample |= {s.name for s in matrix.sample(own, thorough=True)}
    twins = {s.name for s in prove.twins(blackwell)} - set(prove.TWINS)
    shared = {s.op for s in blackwell} - {s.op for s in own} - set(prove.STAND_INS)
    assert sorted(VariantSpec.from_name(name).op for name in twins) == sorted(shared)
    asked = {VariantSpec.from_name(name).op for name in prove.ASKED}
    assert set(prove.STAND_INS) <= asked
    sample = {name for name in sample if VariantSpec.from_name(name).op not in prove.STAND_INS}
    steps = every_step
    assert max(Counter(s.name for s in steps).values()) == 1
    assert {s.kind for s in steps} == set(prove.KINDS)
    by_kind = {kind: {s.what for s in steps if s.kind == kind} for kind in prove.KINDS}
    # what is built when it is asked for is studied beside the matrix
    waiting = set(prove.ASKED_BLACKWELL)
    few = set(prove.ASKED_FEW)  # under few schedules, and as they are: their twins are mutated
    assert not {*prove.ASKED, *waiting, *few} & {s.name for s in every}
    assert set(prove.BESIDE) <= {s.name for s in every}
    for kind in ("schedules", "mutants"):
        more = {*prove.ASKED, *prove.BESIDE, *waiting, *twins, *prove.TWINS}
        if kind == "schedules":
            more = (more - sample) | few
        assert more <= by_kind[kind]
        by_kind[kind] -= more
    assert by_kind["variant"] == {s.name for s in every}
    decodes = {s.name for s in own}
    assert by_kind["schedules"] == sample | decodes and by_kind["mutants"] <= sample
    seeds = {s.what: int(s.commands[-1][-1]) for s in steps if s.kind == "schedules"}
    assert {name for name, n in seeds.items() if n == prove.FEW} == (decodes - sample) | few
    assert set(seeds.values()) == {prove.FEW, prove.SCHEDULES}
    studied = {VariantSpec.from_name(name) for name in by_kind["mutants"]}

    def kernel(spec: VariantSpec) -> tuple[object, ...]:
        rows = (v for axis, v in spec.values if axis in ("pipeline", "row_tile"))
        return (spec.arch, spec.op, *rows)

    alone = [s for s in every if s.arch == "sm_90a" or s in own]
    kernels = {kernel(s) for s in alone if s.op not in prove.STAND_INS}
    assert set(map(kernel, studied)) == kernels
    assert len(studied) == len(kernels)
    for step in steps:
        assert step.commands, "nothing would pass"
        assert all(c[0] == "-m" or (prove.ROOT / c[0]).is_file() for c in step.commands)


@needs_compiler
def test_builds_are_each_variant_once(every_step: list[Step]) -> None:
    built: Counter[str] = Counter()
    for step in every_step:
        if step.kind == "build":
            (command,) = step.commands
            arch, pattern = command[command.index("--arch") + 1], command[-1]
            built.update(s.name for s in matrix.default_specs(arch, pattern))
    every = [s.name for arch in ("sm_90a", "sm_100a") for s in matrix.default_specs(arch)]
    assert built == Counter(every)


@needs_kernels
def test_kernels_that_are_named_need_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that steps that run them on the software GPU outlive a new table."""

    def data(name: str) -> None:
        raise AssertionError(f"{name} is read")

    monkeypatch.setattr(costs, "data", data)
    for kept in (costs.costs_of, verdicts.judge, calls.choose_known):
        kept.cache_clear()
    for name in ("plan_decode_sm90a", "decode_etap_r16_p64_obf16_sm90a"):
        spec = VariantSpec.from_name(name)
        directory = variants.find_or_build(spec, need_library=False).directory
        assert selfcheck.check(spec, directory).passed
    with pytest.raises(AssertionError, match="is read"):
        rank.choose_sparse(rank.card_named("H200"), 16)


def test_the_page_explains_what_may_survive() -> None:
    """Tables of survivors in docs/software-gpu.md name what passes, no more."""
    text = (prove.ROOT / "docs/software-gpu.md").read_text()
    section = text.partition("\n## Mutation")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|`]*`([\w.:@ ,'-]+)`[^|]* \| \S.* \|$", section, re.MULTILINE)
    own = {text for texts in prove.EXPLAINED_OF.values() for text in texts}
    assert set(rows) == {*prove.EXPLAINED, *prove.EXPLAINED_SM100, *own}


def test_some_kernels_explain_more(every_step: list[Step]) -> None:
    """A warpgroup's barrier is needless where its warps' arrivals follow; on SM90 none do."""
    steps = {step.name: step.commands[-1] for step in every_step}
    own = prove.EXPLAINED_OF["dense_decode_*_sm100a"]
    with_it = {name for name, command in steps.items() if set(own) & set(command)}
    assert with_it == {
        f"mutants:dense_decode_{kind}_p64_dbf16_sm100a" for kind in ("ws_r64", "pair_r128")
    }
    for glob, texts in prove.EXPLAINED_OF.items():
        studied = [c for n, c in steps.items() if fnmatch.fnmatchcase(n, f"mutants:{glob}")]
        assert studied and all(set(texts) <= set(command) for command in studied)


def test_sm100_explains_one_barrier_of_a_warp(every_step: list[Step]) -> None:
    """Where steps of SM90's kernels pass any, SM100's own pass that behind S' loads alone."""
    steps = [step for step in every_step if step.kind == "mutants"]
    for step in steps:
        own = "sm100" in str(registry.module_name(VariantSpec.from_name(step.what)))
        assert ("bar.warp.sync" in step.explained) == (not own)
    place = explanations.ROLES[prove.EXPLAINED_SM100[-1].partition(" @ ")[2]]
    for name in ("dense_softmax.py", "softmax_role.py"):
        [path] = (prove.ROOT / "dsl_kernels/sm100").rglob(name)
        assert path.read_text().count(place.text) == 1


def test_files_that_ask_for_the_matrix_are_found() -> None:
    found = prove.whole_matrix_files()
    assert {"tests/codegen/test_precompile.py", "tests/codegen/test_bundle.py"} <= set(found)
    assert not set(prove.PER_VARIANT) & set(found)


def test_a_command_that_finds_no_test_fails(book: Book) -> None:
    """A misspelt name in ``-k`` must not pass for a proof."""
    command = ("-m", "pytest", "-q", "-k", "no_such_variant", "tests/kernels/test_spec.py")
    (outcome,) = prove.run([Step("tests", "none", (command,), "1")], book, "x")
    assert not outcome.passed and "exit code 5" in outcome.message


def test_outcome_survives_the_disk(book: Book) -> None:
    outcome = Outcome("small:a", "1", True, "c", 1.5, "said", "2026-01-01T00:00:00+00:00")
    book.write(outcome)
    assert book.outcome(says("x")) == outcome

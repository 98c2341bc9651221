"""FlashMLA's own tests of sparse decode and sparse prefill, as they are, on our kernels.

    python -m profiles.flashmla_suites --suite build/flashmla-tests --out profiles/results

``--suite`` is a folder of yours with ``tests/`` of a FlashMLA checkout, whose files are not part
of this repository, its ``commit`` in a file of that name, and optionally ``standins/`` of packages
that are not installed (triton, by which its benchmark marks a kernel).  The tests import
``flash_mla``, which is ``snapmla.install_as_flash_mla``'s here; their inputs, references and
tolerances are their own.

Of each suite's list a seeded sample runs, of the cases that are expected to fit in ``--memory``
GiB; the seed of a case's numbers is its place in the list, as a run of the whole list would count
it.  Cases whose times are taken there (``num_runs``) run for their results alone, as our kernels
have other names.  Each case passes, is refused by a sentence of ours, or fails; those that are out
of memory, or that the time does not suffice for, count as not run.

``--device cpu`` runs the smallest cases on the software GPU.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import gc
import importlib
import io
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from codegen.artifacts import write_atomic
from profiles import page, timing
from profiles.machine import machine
from snapmla.errors import SnapMLAError

DECODE, PREFILL = "test_flash_mla_sparse_decoding", "test_flash_mla_sparse_prefill"
SUITES = {"decode": DECODE, "prefill": PREFILL}
REFUSALS = (ValueError, TypeError, NotImplementedError, SnapMLAError)
PASSED, REFUSED, FAILED, NO_ROOM = "passed", "refused", "failed", "out of memory"
GIB = 2.0**30


@dataclass(frozen=True)
class Suite:
    """One of FlashMLA's test files: its cases, and what runs one and says whether it is right."""

    name: str
    cases: list[Any]
    run: Callable[[Any], bool]


@dataclass
class Tally:
    """What became of a suite's cases.

    Attributes:
        listed, fitting: cases of the list, and those that fit in memory.
        counts: outcome -> cases.
        reasons: outcome -> sentence without its numbers -> cases.
        examples: (outcome, sentence) -> the first such case and what it said.
        left: cases that the time did not suffice for.
    """

    listed: int
    fitting: int
    counts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    examples: dict[tuple[str, str], str] = field(default_factory=dict)
    left: int = 0
    seconds: float = 0.0

    @property
    def ran(self) -> int:
        """Cases with a verdict."""
        return sum(self.counts[kind] for kind in (PASSED, REFUSED, FAILED))

    def add(self, outcome: str, said: str, case: object) -> None:
        """Counts a case."""
        self.counts[outcome] += 1
        if outcome == PASSED:
            return
        sentence = re.sub(
            r"-?\d[\d.e+-]*", "N", said.strip().splitlines()[0] if said.strip() else ""
        )
        self.reasons.setdefault(outcome, Counter())[sentence] += 1
        self.examples.setdefault((outcome, sentence), f"{told(case)}: {said.strip()[:400]}")


def told(case: Any) -> str:
    """The fields of a case that are not as usual."""
    if not dataclasses.is_dataclass(case) or isinstance(case, type):
        return str(case)
    words = []
    for one in dataclasses.fields(case):
        value = getattr(case, one.name)
        if dataclasses.is_dataclass(value):
            words.append(f"{one.name}({told(value)})")
        elif value != one.default:
            words.append(f"{one.name}={value}")
    return ", ".join(words)


# ---------------------------------------------------------------------------- loading


def cases_of_main(path: Path, module: Any) -> list[Any]:
    """The list ``testcases`` that a file makes where it is the program.

    The assignments there whose names say *case* run in the module, in order; nothing else does.

    Raises:
        ValueError: there are no such assignments.
    """
    body = next(
        (
            node.body
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.If) and "__main__" in ast.dump(node.test)
        ),
        [],
    )
    given: dict[str, Any] = dict(vars(module))
    for node in body:
        names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
        if any("case" in name for name in names):
            code = compile(ast.Module([node], []), str(path), "exec")
            exec(code, given)
    if not given.get("testcases"):
        raise ValueError(f"{path.name}: expected assignments that end in a list `testcases`")
    return list(given["testcases"])


@contextlib.contextmanager
def importing(folder: Path) -> Iterator[None]:
    """Imports find a suite's files first, and its stand-ins last."""
    if not (folder / "tests" / f"{DECODE}.py").is_file():
        raise ValueError(f"--suite: expected a folder with FlashMLA's tests/, got {folder}")
    snapmla.install_as_flash_mla()
    added = [str(folder / "tests"), str(folder / "standins")]
    sys.path.insert(0, added[0])
    sys.path.append(added[1])
    try:
        yield
    finally:
        for each in added:
            sys.path.remove(each)
        # torch looks for triton, too: a stand-in is for the suite's files alone
        for name in [n for n, m in sys.modules.items() if _from(m, folder / "standins")]:
            del sys.modules[name]


def _from(module: Any, folder: Path) -> bool:
    """True if a module's file is in a folder."""
    file = getattr(module, "__file__", None)
    return bool(file) and Path(str(file)).resolve().is_relative_to(folder.resolve())


def load(folder: Path, kind: str) -> Suite:
    """A suite out of a folder.  Raises ValueError if the folder has none."""
    with importing(folder):
        module = importlib.import_module(SUITES[kind])
    if kind == "decode":
        cases = [raw.to_test_param() for raw in module.gen_testcase()]
        return Suite(kind, cases, lambda case: bool(module.test_flash_mla(case).is_correct))
    cases = cases_of_main(folder / "tests" / f"{PREFILL}.py", module)
    return Suite(kind, cases, lambda case: bool(module.run_test(case)))


# ---------------------------------------------------------------------------- sampling


def gathered(case: Any) -> tuple[int, int]:
    """(query tokens, entries of a query token's lists)."""
    more = case.decode
    rows = case.s_q * (more.b if more else 1)
    return rows, case.topk + ((more.extra_topk or 0) if more else 0)


def memory(case: Any) -> float:
    """Bytes that a case takes at its peak, about: caches with copies, and the reference's gather.

    Lengths are normal numbers about ``s_kv`` there, half of it wide: some 2.5 times it are held.
    """
    rows, entries = gathered(case)
    channels, more = case.d_qk, case.decode
    if more is None:
        held = 3.0 * 2 * case.s_kv * (channels + 128)
        listed = 16.0 * rows * max(case.s_kv, case.topk)
    else:
        each = [(case.s_kv, case.topk), (more.extra_s_k or 0, more.extra_topk or 0)]
        wide = 2.5 if more.is_varlen else 1.0
        held = sum(9.0 * more.b * (wide * n + 256) * (channels + 128) for n, _ in each if n)
        listed = max(16.0 * rows * max(wide * n, k) for n, k in each)
    reference = 0.0
    if case.check_correctness:
        reference = rows * entries * (channels * 11.0 + case.h_q * 14.0)
    queries = rows * case.h_q * (channels * 10.0 + 512 * 12.0)
    return held + queries + max(listed, reference)


def sample(cases: Sequence[Any], count: int, limit: float, seed: int) -> tuple[list[Any], int]:
    """(cases to run in random order, how many fit in ``limit`` bytes), numbers seeded by place."""
    fitting = [
        dataclasses.replace(case, seed=place, num_runs=0)
        for place, case in enumerate(cases) if memory(case) <= limit
    ]  # fmt: skip
    chosen = random.Random(seed).sample(fitting, min(count, len(fitting)))
    return chosen, len(fitting)


def smallest(cases: Sequence[Any], count: int) -> list[Any]:
    """The cases with the least work, for the software GPU: each feature's by its place."""

    def work(case: Any) -> int:
        rows, entries = gathered(case)
        return rows * entries * case.h_q

    chosen = sorted(enumerate(cases), key=lambda both: work(both[1]))[:count]
    return [dataclasses.replace(case, seed=place, num_runs=0) for place, case in chosen]


# ---------------------------------------------------------------------------- running


def outcome(run: Callable[[Any], bool], case: Any) -> tuple[str, str]:
    """(outcome, sentence) of one case; what it prints is kept from the terminal.

    Raises:
        RuntimeError: the device's context is lost, so nothing can run any more.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            right = run(case)
        if right:
            return PASSED, ""
        said = [line for line in printed.getvalue().splitlines() if "`" in line or "diff" in line]
        return FAILED, " | ".join(said) or "wrong"
    except torch.OutOfMemoryError as error:
        return NO_ROOM, str(error)
    except REFUSALS as error:
        ours = _raised_by_us(error)
        return (REFUSED if ours else FAILED), f"{type(error).__name__}: {error}"
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises where the context is lost
        return FAILED, f"{type(error).__name__}: {error}"


def _raised_by_us(error: BaseException) -> bool:
    """True if the sentence is of this package, not of the test or of torch."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(last).is_relative_to(Path(str(snapmla.__file__)).parent)


def run_suite(
    suite: Suite, chosen: Sequence[Any], fitting: int, deadline: float, say: Callable[[str], None]
) -> Tally:
    """Runs the cases until ``deadline``, on time.monotonic's clock."""
    tally, begin = Tally(len(suite.cases), fitting), time.monotonic()
    for number, case in enumerate(chosen):
        if time.monotonic() > deadline:
            tally.left = len(chosen) - number
            break
        found, said = outcome(suite.run, case)
        tally.add(found, said, case)
        if found == NO_ROOM:
            gc.collect()
            torch.cuda.empty_cache()
        if (number + 1) % 50 == 0:
            say(f"{suite.name}: {number + 1} of {len(chosen)}, {time.monotonic() - begin:.0f} s")
    tally.seconds = time.monotonic() - begin
    return tally


@contextlib.contextmanager
def like_theirs(device: str) -> Iterator[None]:
    """The defaults that their programs set; where there is no GPU its calls do nothing."""
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    kept = torch.cuda.synchronize, torch.Tensor.cuda
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device(device)
    torch.set_float32_matmul_precision("high")
    if device == "cpu":
        torch.cuda.synchronize = lambda *_: None
        torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        torch.set_default_device(None)
        torch.set_float32_matmul_precision(before[1])
        torch.cuda.synchronize, torch.Tensor.cuda = kept  # type: ignore[method-assign]


# ---------------------------------------------------------------------------- telling


def line(name: str, tally: Tally) -> str:
    """A row of the table."""
    counts = [tally.counts[kind] for kind in (PASSED, REFUSED, FAILED, NO_ROOM)]
    cells = (name, tally.listed, tally.fitting, tally.ran, *counts, tally.left)
    return f"| {' | '.join(map(str, cells))} | {tally.seconds:.0f} |"


HEAD = (
    "| suite | cases | fit | ran | passed | refused | failed | out of memory | no time | s |",
    "|---" * 10 + "|",
)  # fmt: skip


def reasons(name: str, tally: Tally) -> list[str]:
    """Reasons why cases did not pass, most frequent first, with an example each."""
    lines = []
    for kind, sentences in tally.reasons.items():
        for sentence, count in sentences.most_common(12):
            example = tally.examples[kind, sentence].replace("\n", " ")
            lines.append(f"- {name}, {kind}, {count}: {sentence[:200]}; such as `{example}`")
    return lines


def main(
    suite: Annotated[Path, typer.Option(help="Folder with FlashMLA's tests/.")],
    cases: Annotated[int, typer.Option(min=1, help="Of each suite.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    limit: Annotated[float, typer.Option(help="Seconds of all suites together.")] = 500.0,
    room: Annotated[float, typer.Option("--memory", help="GiB that a case may take.")] = 48.0,
    kinds: Annotated[str, typer.Option(help="decode, prefill, by commas or +.")] = "decode+prefill",
    listing: Annotated[bool, typer.Option("--list", help="Count the cases, run none.")] = False,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
    device: Annotated[str, typer.Option(help="cpu: the smallest cases, software GPU.")] = "cuda",
) -> None:
    """Runs the samples, prints the counts and writes ``flashmla-suites-<card>.md``."""
    begin, names = time.monotonic(), [k for k in re.split(r"[,+]", kinds) if k]
    if odd := [name for name in names if name not in SUITES]:
        raise typer.BadParameter(f"--kinds: expected decode, prefill; got {', '.join(odd)}")
    rows, why, bad = list(HEAD), [], False
    for number, name in enumerate(names):
        try:
            found = load(suite, name)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if device == "cpu":
            chosen, fitting = smallest(found.cases, cases), len(found.cases)
        else:
            chosen, fitting = sample(found.cases, cases, room * GIB, seed)
        if listing:
            typer.echo(f"{name}: {len(found.cases)} cases, {fitting} fit, {len(chosen)} chosen")
            continue
        share = (limit - (time.monotonic() - begin)) / (len(names) - number)
        with like_theirs(device):
            tally = run_suite(found, chosen, fitting, time.monotonic() + share, typer.echo)
        rows.append(line(name, tally))
        why += reasons(name, tally)
        bad = bad or tally.counts[PASSED] < tally.ran or not tally.ran
        typer.echo("\n".join([rows[-1], *reasons(name, tally)]))
    if listing:
        return
    write_page(out, suite, seed, room, [*rows, "", *why])
    if bad:
        raise typer.Exit(1)


def write_page(out: Path, suite: Path, seed: int, room: float, lines: Sequence[str]) -> None:
    """Writes the record of a run."""
    from profiles.old_new import card

    cuda = torch.cuda.is_available()
    facts = machine(torch.device("cuda" if cuda else "cpu"), timing.Nvml() if cuda else None)
    commit = suite / "commit"
    theirs = commit.read_text().strip() if commit.is_file() else "unknown"
    head = page.head(
        "FlashMLA's own sparse suites", "profiles.flashmla_suites", page.told(facts, page.FACTS),
        f"FlashMLA's tests of commit {theirs}, on `snapmla.flash_mla`",
        f"a random sample (seed {seed}) of the cases that take at most {room:.0f} GiB, about",
    )  # fmt: skip
    write_atomic(out / f"flashmla-suites-{card(facts)}.md", "\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    typer.run(main)

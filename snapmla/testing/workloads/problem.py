"""Workloads whose arguments are laid out once: problems of an op, drawn in three ways.

An op's file names its problems as data and writes ``arguments(spec, problem, draw)``; ``workload``
makes the small, the recorded and the large calls of these.  ``draw.py`` says what a draw is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dsl_kernels.spec import VariantSpec
from snapmla.testing.workloads.call import Call, Judge, Sizes, Truth, Workload
from snapmla.testing.workloads.draw import Draw
from snapmla.testing.workloads.exact import Case, Exact, Recorded, Rows, Runner, hashes_of
from snapmla.testing.workloads.samples import Adversarial, Random


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call before any number is drawn; an op adds extents, lengths and what is planted.

    Attributes:
        note: for messages.
    """

    note: str = ""


class Made(NamedTuple):
    """Arguments by name, and the job that made them, which a judge asks."""

    arguments: dict[str, Any]
    job: Any


P = TypeVar("P", bound=Problem)


def workload(
    judge: Judge,
    truth: Truth | None,
    arguments: Callable[[VariantSpec, P, Draw], dict[str, Any] | Made],
    *,
    small: Callable[[VariantSpec], Iterable[P]],
    recorded: Callable[[Exact], Iterable[P]],
    sized: Callable[[VariantSpec, Sizes], P] | None,
    results: Callable[[VariantSpec, P], dict[str, str]],
    rows: Callable[[VariantSpec, Mapping[str, Any]], Rows],
    **known: Any,
) -> Workload:
    """The workload of an op.

    Args:
        judge, truth: as ``Workload`` has them.
        arguments: (spec, problem, draw) -> a call's arguments by name; a judge is told the problem
            as ``Call.job``, if no job made them.
        small: (spec) -> the problems of small calls, which one draw serves.
        recorded: (draw) -> the problems of a recorded case, which may draw lengths; each has run
            before the next is asked for.
        sized: (spec, sizes) -> the problem of a call as large as in service; None: the op's file
            puts arguments of its own there.
        results: (spec, problem) -> what messages call a result -> the argument that holds it.
        rows: (spec, arguments after the call) -> what a recorded case compares, problem by problem.
        known: other fields of ``Workload``.
    """

    def made(spec: VariantSpec, problem: P, draw: Draw) -> Made:
        found = arguments(spec, problem, draw)
        return found if isinstance(found, Made) else Made(found, problem)

    def calls(spec: VariantSpec) -> Iterator[Call]:
        draw = Adversarial()
        for problem in small(spec):
            given, job = made(spec, problem, draw)
            want = truth(spec, given) if truth else {}
            yield Call(given, results(spec, problem), want, job, problem.note)

    def run_case(case: Case, run: Runner) -> Recorded:
        draw = Exact(case, run.device)
        found = []
        for problem in recorded(draw):
            given, _ = made(case.spec, problem, draw)
            run.call(case.variant, **given)
            found.append(rows(case.spec, given))
        joined = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
        return Recorded(draw.inputs, joined)

    def large(spec: VariantSpec, sizes: Sizes, device: str, seed: int) -> dict[str, Any]:
        assert sized is not None
        return made(spec, sized(spec, sizes), Random(device, seed)).arguments

    return Workload(calls, judge, run_case, large, truth, **known)


def named(*results: str) -> Callable[[VariantSpec, Problem], dict[str, str]]:
    """Results that messages call by their argument's name."""
    return lambda _spec, _problem: {name: name for name in results}


def unnamed(_spec: VariantSpec, _problem: Problem) -> dict[str, str]:
    """No results by name: a job judges the call."""
    return {}


def hashed(name: str, *tables: str) -> Callable[[VariantSpec, Mapping[str, Any]], Rows]:
    """A recorded row of one hash: that of some arguments, each as a whole."""
    return lambda _spec, given: hashes_of([[given[table] for table in tables]], name)

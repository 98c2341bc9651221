"""The types of workloads, and what their judges share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing.workloads.exact import Case, Recorded, Runner

LN2 = math.log(2.0)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
INDEX = {"i32": torch.int32, "i64": torch.int64}
NATURAL = {"lse_factor": LN2, "empty_lse": -math.inf}  # the LSE that torch computes


@dataclass(frozen=True)
class Result:
    """Outcome of a check; ``summary`` is one line of figures."""

    passed: bool
    summary: str


class Call(NamedTuple):
    """One call of a variant.

    Attributes:
        arguments: by name, as the exported function takes them; on the CPU.
        results: what messages call a result -> the argument that holds it after the call.
        want: argument -> what it must hold then, as ``Workload.truth`` says; of what a judge works
            out by itself nothing.
        job: what the arguments were made from, if the judge asks it.
        note: for messages.
    """

    arguments: dict[str, Any]
    results: dict[str, str]
    want: Mapping[str, Tensor] = MappingProxyType({})
    job: Any = None
    note: str = ""

    @property
    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(value, truth) of each result."""
        return {k: (self.arguments[n], self.want[n]) for k, n in self.results.items()}


class Sizes(NamedTuple):
    """Extents of a call as large as in service.

    Attributes:
        batch: sequences.
        tokens: cached (appended, fetched) tokens of each.
        s_q, heads: query tokens of each, and their heads.
        parts: CTAs (clusters) that a work list is for; results that merge_states merges.
    """

    batch: int
    tokens: int
    s_q: int = 1
    heads: int = 1
    parts: int = 1


class Job(NamedTuple):
    """A call that the hazard check repeats.

    Attributes:
        run: calls a kernel, and returns (out, lse).
        errors: of what ``run`` gave.
        tiles: token tiles of its plan.
    """

    run: Callable[[variants.Kernel], tuple[Tensor, Tensor]]
    errors: Callable[[tuple[Tensor, Tensor]], Any]
    tiles: int


Small = Callable[[VariantSpec], Iterator[Call]]
Judge = Callable[[VariantSpec, Iterable[Call]], Result]
Truth = Callable[[VariantSpec, Mapping[str, Any]], dict[str, Tensor]]


def elements(_spec: VariantSpec, call: Call) -> int:
    """Elements of a call's results: the work of an op that walks no tiles."""
    return sum(call.arguments[name].numel() for name in call.results.values())


def planned(_spec: VariantSpec, call: Call) -> int:
    """Token tiles of the plan that a decode's call carries."""
    return int(call.job.plan.tiles)


class Workload(NamedTuple):
    """Builders and judges of an op's calls.

    Attributes:
        small: (spec) -> few small calls that take every path, poison wherever nothing may be read.
            Yields lazily: each call has run before the next is built.  Numbers are from torch's
            global generator.
        judge: (spec, calls that have run) -> verdict and figures.  It must iterate over all calls.
        recorded: (case, run) -> results of a case of the H200's record; inputs by ``exact`` alone.
        sized: (spec, sizes, device, seed) -> arguments of a call as large as in service, and what
            ``public`` needs beside them; device ``meta`` makes shapes only.
        truth: (spec, arguments before the call) -> expected results by name; the call changes no
            other argument.  None if only ``judge`` knows them.
        public: (spec, arguments of ``sized``) -> the library's call on them; None: there is none
            of its own.
        moved: (spec, sizes) -> bytes read plus bytes written.
        bench: name of a bench row -> its modes -> the axes that they stand for.
        job: (spec, lengths, planner) -> a call of a decode behind the planning kernel.
        tiles: (spec, call of ``small``) -> its tiles of work: without any, a check proves nothing.
        steady: (spec, tiles) -> extents of a call in which one CTA takes that many tiles.  For ops
            other than decode that have a steady state, so that their costs are told per tile.
        behind: (spec) -> calls that the mutation study adds to those of ``small``, for ops that are
            no helpers: each writes or reads what the grid in front of it has written.
    """

    small: Small
    judge: Judge
    recorded: Callable[[Case, Runner], Recorded]
    sized: Callable[[VariantSpec, Sizes, str, int], dict[str, Any]]
    truth: Truth | None = None
    public: Callable[[VariantSpec, Mapping[str, Any]], Callable[[], Any]] | None = None
    moved: Callable[[VariantSpec, Sizes], float] | None = None
    bench: Mapping[str, Mapping[str, Mapping[str, str]]] = {}
    job: Callable[[VariantSpec, Sequence[int], variants.Kernel], Job] | None = None
    tiles: Callable[[VariantSpec, Call], int] = elements
    steady: Callable[[VariantSpec, int], Sizes] | None = None
    behind: Small | None = None


# ---------------------------------------------------------------------------- judges


def same_bits(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> Result:
    """Bit-for-bit comparison; any NaN equals any NaN."""
    bad = {}
    for name, (got, want) in pairs.items():
        same = got == want
        if got.is_floating_point():
            same |= torch.isnan(got) & torch.isnan(want)
        if not bool(same.all()):
            bad[name] = f"{int((~same).sum())} of {same.numel()} values of {name} differ"
    return Result(not bad, "; ".join(bad.values()) or f"{', '.join(pairs)} bit for bit")


def bit_for_bit(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """The judge of ops whose truth is exact; what several calls name alike is one result."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for call in calls:
        for name, (got, want) in call.pairs.items():
            found.setdefault(name, []).append((got.flatten(), want.flatten()))
    joined = {}
    for name, pairs in found.items():
        sides = zip(*pairs, strict=True)
        joined[name] = torch.cat(next(sides)), torch.cat(next(sides))
    return same_bits(joined)


def decoded(_spec: VariantSpec, calls: Iterable[Call]) -> Result:
    """The judge of decodes: the errors that their job finds."""
    found = [call.job.errors((call.arguments["out"], call.arguments["lse"])) for call in calls]
    return Result(all(errors.right for errors in found), "; ".join(map(str, found)))


def wrong_entries(call: Call) -> list[str]:
    """Names of tables that are not the truth's, as far as it goes."""
    pairs = call.pairs.items()
    return [name for name, (got, want) in pairs if got[: len(want)].tolist() != want.tolist()]


def tables(**lists: Sequence[Any]) -> dict[str, Tensor]:
    """Tables of int32 from lists."""
    return {name: torch.tensor(list(x), dtype=torch.int32) for name, x in lists.items()}


# ---------------------------------------------------------------------------- running


def run_all(calls: Iterable[Call], kernel: Callable[[dict[str, Any]], None]) -> Iterator[Call]:
    """Each of the calls after ``kernel``, which takes arguments by name, ran it."""
    for call in calls:
        kernel(call.arguments)
        yield call

"""What ``snapmla.testing`` runs of each op: no case is empty, on either architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from codegen import matrix
from dsl_kernels.families import ARCHS, FAMILIES
from dsl_kernels.spec import VariantSpec
from profiles import prove
from snapmla.testing import __main__ as commands
from snapmla.testing import selfcheck, workloads
from snapmla.testing.workloads import merge_states
from tests.support.families import with_family

SPARSE = VariantSpec.from_name("sparse_decode_etap_r64_obf16_sm90a").replace(arch="sm_100a")


def studied(op: str) -> list[VariantSpec]:
    """A variant of each kernel and row tile that an op has on any architecture, for all."""
    points = [spec for arch in ARCHS for spec in matrix.points(arch) if spec.op == op]
    asked = [VariantSpec.from_name(name) for name in (*prove.ASKED, *prove.BESIDE)]
    found: dict[tuple[object, ...], VariantSpec] = {}
    for spec in (*points, *(spec for spec in asked if spec.op == op)):
        values = dict(spec.values)
        kind = tuple(map(values.get, ("pipeline", "row_tile", "keys", "lists", "cache_dtype")))
        found.setdefault(kind, spec)
    return [spec.replace(arch=arch) for spec in found.values() for arch in ARCHS]


@pytest.fixture
def sm100_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family of decodes with a kernel on both architectures, built or not: cases come before
    their kernels."""
    for op, family in FAMILIES.items():
        if family.token_tile is not None:
            there = {"module": lambda _arch, _values: "there", "token_tile": lambda *_: 64}
            with_family(monkeypatch, op, **there)


def tiles_of_calls(spec: VariantSpec) -> int:
    """Tiles of work of an op's small calls, which no kernel runs."""
    torch.manual_seed(0)
    work = workloads.of(spec.op)
    return sum(work.tiles(spec, call) for call in work.small(spec))


@pytest.mark.parametrize("op", FAMILIES)
@pytest.mark.usefixtures("sm100_twins")
def test_every_case_has_a_tile_of_work(op: str) -> None:
    """Of small calls (``run``; ``check`` and ``mutate`` without a job) and of jobs."""
    specs = studied(op)
    assert {spec.arch for spec in specs} == set(ARCHS)
    for spec in specs:
        assert tiles_of_calls(spec) > 0, spec.name
        job = selfcheck.job_of(spec, None)
        assert job is None or job.tiles > 0, spec.name


@pytest.mark.usefixtures("sm100_twins")
def test_jobs_of_sm100_have_its_lengths() -> None:
    """Empty lists in front, and an item longer than the ring behind them."""
    lengths = selfcheck.Workload.BY_ARCH["sm_100a"]
    want = sum(-(-n // 64) for n in lengths)
    job = selfcheck.job_of(SPARSE, None)
    assert job is not None and job.tiles == want == 13
    job = selfcheck.job_of(SPARSE.replace(arch="sm_90a"), None)
    assert job is not None and job.tiles == 12


@pytest.fixture
def no_lists(monkeypatch: pytest.MonkeyPatch, sm100_twins: None) -> Path:
    """A place of variants where SM100's job has lists of none alone; its kernel must not run."""

    def kernel(*_given: Any) -> NoReturn:
        raise AssertionError("an empty case ran")

    monkeypatch.setitem(selfcheck.Workload.BY_ARCH, "sm_100a", (0,) * 5)
    monkeypatch.setattr(selfcheck, "load", lambda spec, directory: kernel)
    return Path("there")


def test_a_case_without_tiles_is_refused(no_lists: Path) -> None:
    result = selfcheck.Workload(SPARSE, no_lists).run()
    assert not result.passed
    assert result.summary.startswith("no tile of work: the sparse_decode case of sm_100a has none")
    [problem] = commands._check(selfcheck.Workload(SPARSE, no_lists), range(2))
    assert problem.startswith("schedule 0: no tile of work")


def test_small_calls_without_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no job: a kernel that leaves nothing wrong is not right for that."""
    spec = VariantSpec(op="index_rows")
    work = workloads.of(spec.op)

    def small(_spec: VariantSpec) -> Iterator[Any]:
        for call in itertools.islice(work.small(spec), 1):
            empty = {name: call.arguments[name][:0] for name in call.results.values()}
            yield call._replace(arguments={**call.arguments, **empty}, want=empty)

    def kernel(*_given: Any) -> None:
        """Does nothing."""

    names = tuple(next(work.small(spec)).arguments)
    kernel.names = SimpleNamespace(arguments=names)  # type: ignore[attr-defined]
    monkeypatch.setattr(workloads, "of", lambda op: work._replace(small=small))
    result = selfcheck.check_kernel(spec, kernel)
    assert not result.passed and result.summary.startswith("no tile of work: the index_rows case")


def test_a_call_over_what_it_reads_is_made_once() -> None:
    """Made behind itself it would have other inputs: a right kernel would be called wrong."""
    spec = VariantSpec(op="merge_states", mode="pair")
    names = tuple(next(workloads.of(spec.op).small(spec)).arguments)
    called: list[bool] = []

    def kernel(*args: Any) -> None:
        given = dict(zip(names, args, strict=True))
        called.append(given["lse"].data_ptr() == given["lse_1"].data_ptr())
        for name, want in merge_states.truth(spec, given).items():
            given[name].copy_(want)

    assert selfcheck.check_kernel(spec, kernel, names, again=True).passed
    assert called == [True, False, False, False]

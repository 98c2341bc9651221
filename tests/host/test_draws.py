"""Draws and the problems that they fill: which numbers are shared, apart, planted, on record."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen import matrix
from dsl_kernels.spec import VariantSpec
from snapmla.testing import workloads
from snapmla.testing.workloads import merge
from snapmla.testing.workloads.call import Sizes
from snapmla.testing.workloads.exact import Case, Exact, Runner
from snapmla.testing.workloads.problem import Problem, named, workload
from snapmla.testing.workloads.samples import Adversarial, Random

NAME = "merge_obf16_sm90a"
OPS = (
    "merge", "merge_states", "quantize_q", "index_rows", "select_topk", "append_kv",
    "append_index_k", "dsa_prologue", "fetch_index_k",
)  # fmt: skip
SPECS = [
    spec for spec in matrix.default_specs("sm_90a", ask_kernels=False) if spec.op in OPS
]  # fmt: skip


def draws() -> list[Adversarial | Exact | Random]:
    torch.manual_seed(0)
    return [Adversarial(), Exact(Case(NAME, 1), "cpu"), Random("cpu", 0)]


def layout(given: dict[str, Any]) -> dict[str, Any]:
    """Dtype and rank of each argument."""
    return {
        name: (x.dtype, x.ndim) if isinstance(x, Tensor) else type(x) for name, x in given.items()
    }


@pytest.mark.parametrize("spec", SPECS[::3], ids=lambda spec: spec.name)
def test_all_draws_lay_arguments_out_alike(spec: VariantSpec) -> None:
    """The small, the recorded and the large call of a variant differ in numbers alone."""
    work, seen = workloads.of(spec.op), []
    work.recorded(Case(spec.name, 1), Runner("cpu", lambda _variant, **given: seen.append(given)))
    torch.manual_seed(0)
    seen += [
        next(iter(work.small(spec))).arguments,
        work.sized(spec, Sizes(2, 90, 2, 3, 2), "cpu", 0),
    ]
    assert layout(seen[0]) == layout(seen[1]) == layout(seen[2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots(dtype: torch.dtype) -> None:
    """Each token has its own, but for those that are outside; the last have the edges."""
    for draw in draws():
        found = draw.slots(9, 20, dtype, outside=(1, 3, 0, 2), edges=(19, 0, 7)).tolist()
        ends = torch.iinfo(dtype)
        assert found[:4] == [ends.min, -1, ends.max, 20] and found[-3:] == [19, 0, 7]
        others = set(found[4:-3])
        assert len(others) == 2 and others < set(range(20)) - {19, 0, 7}
        every = draw.slots(17, 20, dtype, edges=(19, 0, 7)).tolist()
        assert len({*every}) == 17 and draw.slots(20, 20, dtype).sort().values.tolist() == [
            *range(20)
        ]


def test_exact_streams_go_on_and_are_apart() -> None:
    """What one name's stream gave does not depend on what was drawn of another's."""
    alone, mixed = Exact(Case(NAME), "cpu"), Exact(Case(NAME), "cpu")
    first, second = alone.rows(3, 16), alone.rows(3, 16)
    mixed.cos_sin(torch.float32)
    assert torch.equal(mixed.rows(3, 16), first)
    mixed.gain(8, torch.float32)
    assert torch.equal(mixed.rows(3, 16), second) and not torch.equal(first, second)
    assert not torch.equal(mixed.of(VariantSpec(op="index_rows")).rows(3, 16), first)


def test_records_are_identified_by_what_was_planted() -> None:
    """One planted number more is other inputs."""

    def inputs(plant: Any) -> bytes:
        problem = merge.Slots(begin=(0, 2, 4), s_q=1, heads=2, room=4, rows=16, plant=plant)
        draw = Exact(Case(NAME), "cpu")
        merge.arguments(draw.case.spec, problem, draw)
        return draw.inputs.tobytes()

    def one(_draw: Exact, _o: Tensor, lse: Tensor) -> None:
        lse[1, 3] = -math.inf

    def none(*_: Any) -> None:
        """Plants nothing."""

    assert inputs(one) == inputs(one) != inputs(none)


def test_problems_of_one_draw_share_what_is_drawn_once() -> None:
    """Another call of ``small`` is another draw."""

    def arguments(_spec: VariantSpec, _problem: Problem, draw: Any) -> dict[str, Any]:
        return {"x": draw.once("x", lambda: draw.rows(4)), "y": draw.rows(4)}

    work = workload(
        None, lambda *_: {}, arguments, small=lambda _: [Problem(note="a"), Problem(note="b")],  # type: ignore[arg-type]
        recorded=lambda _: [Problem()], sized=lambda *_: Problem(), results=named("y"),
        rows=lambda *_: {},
    )  # fmt: skip
    spec = VariantSpec.from_name(NAME)
    torch.manual_seed(0)
    (a, b), (c, _) = work.small(spec), work.small(spec)
    assert a.arguments["x"] is b.arguments["x"] and not torch.equal(
        b.arguments["x"], c.arguments["x"]
    )
    assert not torch.equal(a.arguments["y"], b.arguments["y"])
    assert [call.note for call in (a, b)] == ["a", "b"] and a.results == {"y": "y"}


def test_nan_has_one_pattern_in_small_calls() -> None:
    """Casts of vectors of NaN give other bits than torch's own NaN on some CPUs."""
    made = Adversarial().there(torch.full((64,), math.nan), torch.bfloat16)
    assert {*made.view(torch.int16).tolist()} == {0x7FC0}

"""``snapmla.call.op``: an op of a toy, out = x * scale of rows, declared and called in every way.

Its launch is PyTorch's own product, so that nothing but the declaration is asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import snapmla
from snapmla.call import memo as calls
from snapmla.call import op
from snapmla.torch_ops import NAMESPACE, Operator, define

OURS = str(Path(snapmla.__file__ or "").parent)
F32 = (torch.float32,)


class Scaled(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor
    times: int
    out: torch.Tensor | None = None


def launch(call: Scaled, ready: bool | None) -> tuple[torch.Tensor, bool]:
    out = torch.empty_like(call.x) if call.out is None else call.out
    torch.mul(call.x, call.scale[:, None] * call.times, out=out)
    return out, True


SCALE = op.Declared(
    "scale_rows_of_a_test", Scaled, ("out",),
    (
        op.IntArg("times", 1, 4), op.TensorArg("x", F32, "n width", "rows of numbers"),
        op.TensorArg("scale", F32, "n", contiguous=True), op.TensorArg("out", F32, "n width"),
    ),
    launch,
)  # fmt: skip


def scale_rows(
    x: torch.Tensor, scale: torch.Tensor, times: int = 1, out: torch.Tensor | None = None
) -> torch.Tensor:
    return calls.run(SCALE.op, SCALE.op, Scaled(x, scale, times, out))


@pytest.fixture(scope="module", autouse=True)
def _operators() -> Iterator[None]:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for each in SCALE.operators:
        define(library, *Operator(*each))
    yield
    library._destroy()


def right() -> dict[str, Any]:
    return {"x": torch.rand(3, 4), "scale": torch.rand(3), "times": 2, "out": torch.zeros(3, 4)}


def test_schemas() -> None:
    name, given = SCALE.name, "Tensor x, Tensor scale, int times"
    assert [each[0] for each in SCALE.operators] == [
        f"{name}({given}) -> Tensor", f"{name}_out({given}, Tensor(a!) out) -> ()"
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error", "said"), [
    ("x", torch.rand(3), ValueError, r"x: expected shape \(n, width\), got \(3,\) \(rows of num"),
    ("x", torch.rand(3, 4).double(), TypeError, r"x: expected dtype float32, got float64 \(conv"),
    ("x", None, TypeError, r"x: expected a torch.Tensor, got NoneType \(build it once"),
    ("scale", torch.rand(4), ValueError, r"scale: expected shape \(3,\), got \(4,\)"),
    ("scale", torch.rand(6)[::2], ValueError, r"scale: expected a contiguous .* \(call"),
    ("times", 5, ValueError, r"times: expected 1 to 4, got 5"),
    ("times", True, TypeError, r"times: expected an int, got bool \(convert it"),
    ("out", torch.zeros(3, 5), ValueError, r"out: expected shape \(3, 4\), got \(3, 5\)"),
    ("out", torch.zeros(4).expand(3, 4), ValueError, r"out: expected strides of distinct rows"),
])  # fmt: skip
def test_a_wrong_argument_is_named(
    name: str, value: Any, error: type[Exception], said: str
) -> None:
    """Unknown and behind calls that were right."""
    for _ in range(2):
        with pytest.raises(error, match=f"^{said}"):
            scale_rows(**right() | {name: value})
        scale_rows(**right())


def test_results_over_arguments_are_refused() -> None:
    """Also if the call is known but for its addresses."""
    given = right()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^out: expected .* x, got tensors that overlap"):
            scale_rows(**given | {"out": given["x"]})
        scale_rows(**given)
        assert torch.equal(given["out"], given["x"] * given["scale"][:, None] * 2)


def test_what_a_repeated_call_enters() -> None:
    """No more if one tensor comes in two places."""
    one = torch.rand(4)
    for given in (right(), {"x": one[None].expand(4, 4), "scale": one}):
        for _ in range(2):
            scale_rows(**given)
        found: list[str] = []

        def note(frame: FrameType, event: str, _: object, found: list[str] = found) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(OURS):
                found.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            scale_rows(**given)
        finally:
            sys.setprofile(None)
        assert found[0] == "run" and len(found) <= 6, found  # and the public function and launch


def test_recorded_calls_are_the_operator() -> None:
    given = right()
    truth = given["x"] * given["scale"][:, None] * 2
    named = getattr(torch.ops.snapmla, SCALE.name)
    for out in (None, given["out"]):
        call = functools.partial(scale_rows, times=2, out=out)
        graph = make_fx(call)(given["x"], given["scale"])
        nodes = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        assert any(SCALE.name in node for node in nodes), nodes
        assert torch.equal(graph(given["x"], given["scale"]), truth)
    torch.library.opcheck(named.default, (given["x"], given["scale"], 2))
    compiled = torch.compile(lambda x, scale: scale_rows(x, scale, 2), backend="eager")
    assert torch.equal(compiled(given["x"], given["scale"]), truth)


def test_stand_ins_are_checked_and_have_results() -> None:
    with FakeTensorMode():
        x, scale = torch.rand(3, 4), torch.rand(3)
        assert scale_rows(x, scale).shape == (3, 4)
        with pytest.raises(ValueError, match=r"scale: expected shape \(3,\)"):
            scale_rows(x, torch.rand(2))

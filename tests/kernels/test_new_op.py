"""Cost of a new op: out = x * scale of rows, a kernel and a host file of 90 lines together.

``support/scale_rows.py`` and ``scale_rows_kernel.py`` are no part of the product, which never names
them.  Their op is called in every way that the product's own are, on the software GPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsl_kernels.families import FAMILIES
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import dump, variants
from snapmla.torch_ops import NAMESPACE, Operator, define
from tests.support import ROOT, scale_rows
from tests.support.needs import needs_compiler
from tests.support.scale_rows import FAMILY, SCALE

BUILD = """
import pathlib, sys
from codegen import compile
from dsl_kernels.families import FAMILIES
from dsl_kernels.spec import VariantSpec
from tests.support.scale_rows import FAMILY
FAMILIES["scale_rows"] = FAMILY
compile.build(VariantSpec(op="scale_rows"), pathlib.Path(sys.argv[1]), linked=False)
"""
FILES = [ROOT / "tests/support" / name for name in ("scale_rows.py", "scale_rows_kernel.py")]
OURS = (*(str(ROOT / name) + "/" for name in ("snapmla", "dsl_kernels")), str(FILES[0]))
pytestmark = needs_compiler


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernel; a process has one target to compile for, hence another."""
    folder = tmp_path_factory.mktemp("scale")
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], env=path, check=True)
    return folder


@pytest.fixture(autouse=True)
def declared(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its family, its operators, and its kernel where variants are looked for; hazards on."""
    monkeypatch.setitem(FAMILIES, "scale_rows", FAMILY)
    monkeypatch.setenv("SNAPMLA_VARIANT_DIR", str(built))
    monkeypatch.setenv("SNAPMLA_NO_JIT", "1")  # what runs is what ``built`` has
    monkeypatch.setenv("SOFTGPU_HAZARDS", "raise")
    variants.forget()
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for each in SCALE.operators:
        define(library, *Operator(*each))
    yield
    library._destroy()
    variants.forget()


def right() -> dict[str, Any]:
    return {"x": torch.rand(3, 40), "scale": torch.rand(3), "out": torch.zeros(3, 40)}


def test_it_is_short_and_nobody_knows_it() -> None:
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= 90
    packages = ("snapmla", "dsl_kernels", "codegen")
    sources = [file for name in packages for file in (ROOT / name).rglob("*.py")]
    assert len(sources) > 200
    assert not [file for file in sources if "scale_rows" in file.read_text()]


@pytest.mark.parametrize("given", ["out", "nothing", "one tensor twice", "no rows"])
def test_results(given: str) -> None:
    """Bit by bit those of PyTorch; a second call is like the first."""
    values = right()
    if given == "nothing":
        del values["out"]
    elif given == "one tensor twice":
        values = {"x": values["scale"][None].expand(3, 3), "scale": values["scale"]}
    elif given == "no rows":
        values = {name: value[:0] for name, value in values.items()}
    for _ in range(2):
        found = scale_rows.scale_rows(**values)
        assert torch.equal(found, values["x"] * values["scale"][:, None])
        assert given != "out" or found is values["out"]


@pytest.mark.parametrize(("name", "value", "error", "said"), [
    ("x", torch.rand(3), ValueError, r"x: expected shape \(n, width\), got \(3,\) \(rows of num"),
    ("x", torch.rand(3, 40).double(), TypeError, r"x: expected dtype float32, got float64 \(conv"),
    ("x", torch.rand(40, 3).mT, ValueError, r"x: expected innermost stride 1, got .* \(it is tran"),
    ("scale", torch.rand(4), ValueError, r"scale: expected shape \(3,\), got \(4,\)"),
    ("scale", [1.0, 2.0, 3.0], TypeError, r"scale: expected a torch.Tensor, got list \(build it"),
    ("scale", torch.rand(6)[::2], ValueError, r"scale: expected a contiguous tensor, .* \(call"),
    ("out", torch.zeros(3, 41), ValueError, r"out: expected shape \(3, 40\), got \(3, 41\)"),
    ("out", torch.zeros(40).expand(3, 40), ValueError, r"out: expected strides of distinct rows"),
])  # fmt: skip
def test_wrong_arguments(name: str, value: Any, error: type[Exception], said: str) -> None:
    """Name, expectation, advice; also behind a call that was right."""
    for _ in range(2):
        with pytest.raises(error, match=f"^{said}"):
            scale_rows.scale_rows(**right() | {name: value})
        scale_rows.scale_rows(**right())


@pytest.mark.parametrize("name", ["x", "scale"])
def test_a_result_over_what_is_read_is_refused(name: str) -> None:
    """At once, and where the call is known but for its addresses."""
    memory = torch.rand(160)
    inside = {"x": memory[20:140].view(3, 40), "scale": memory[60:63]}[name]
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^out: expected memory apart from {name}, got tens"):
            scale_rows.scale_rows(
                **right() | {"out": memory[:120].view(3, 40), name: inside}
            )  # fmt: skip
        scale_rows.scale_rows(**right())


@pytest.mark.parametrize("twice", [False, True])
def test_functions_of_a_second_call(twice: bool) -> None:
    """The public function and the launch among them; also with one tensor in two places."""
    values = right()
    if twice:
        values |= {"x": values["scale"][None].expand(3, 3), "out": torch.zeros(3, 3)}
        values["scale"] = values["x"][0]
    scale_rows.scale_rows(**values)
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        scale_rows.scale_rows(**values)
    finally:
        sys.setprofile(None)
    assert found[:2] == ["scale_rows", "run"] and len(found) <= 8, found


def test_compiled_and_recorded() -> None:
    values = right()
    truth = values["x"] * values["scale"][:, None]

    def both(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return scale_rows.scale_rows(x, scale), scale_rows.scale_rows(x, scale, out) + 0

    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        values["out"].zero_()
        compiled = torch.compile(both, backend=backend, fullgraph=True)
        found = compiled(**values)
        assert all(torch.equal(x, truth) for x in (*found, values["out"]))
    operators = torch.ops.snapmla
    torch.library.opcheck(operators.scale_rows.default, (values["x"], values["scale"]))
    torch.library.opcheck(operators.scale_rows_out.default, tuple(values.values()))


def test_stand_ins() -> None:
    with FakeTensorMode():
        x, scale = torch.rand(3, 40), torch.rand(3)
        found = scale_rows.scale_rows(x, scale)
        assert found.shape == (3, 40) and found.dtype == torch.float32
        with pytest.raises(ValueError, match=r"^scale: expected shape \(3,\), got \(2,\)"):
            scale_rows.scale_rows(x, torch.rand(2))


def test_log_and_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line a call, and a file that has its arguments as they were, and its result."""
    for name, value in {"LOG": "1", "DUMP": str(tmp_path), "DUMP_WHEN": "all"}.items():
        monkeypatch.setenv(f"SNAPMLA_{name}", value)
    variants.forget()
    values = right()
    with caplog.at_level(logging.INFO, "snapmla"):
        scale_rows.scale_rows(**values)
    name = VariantSpec(op="scale_rows").name
    assert f"{name} on cpu: x (3, 40)" in caplog.messages
    (file,) = tmp_path.glob("*.pt")
    kept = dump.read(file)
    assert (kept.variant, kept.op, kept.error) == (name, "scale_rows", "")
    assert list(kept.arguments) == ["x", "scale", "out"] and not kept.arguments["out"].any()
    assert torch.equal(kept.arguments["x"], values["x"])
    assert torch.equal(kept.results["out"], values["out"]) and values["out"].any()

"""Programs of ``tests.support``: built, run under schedules, with bugs planted in them.

A test changes instructions of the built program's PTX, found by what they are and by the text of
their source line, and expects the report.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import softgpu
from softgpu import mutate
from softgpu.ptx import Instr, Reg

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = [(mode, seed) for mode in ("early", "late", "random") for seed in (None, *range(1, 7))]


def line_of(path: Path, text: str, after: str = "") -> str:
    """``ws_chain.py:12``: the first line with ``text``, behind the first with ``after``."""
    seen = not after
    for number, content in enumerate(path.read_text().splitlines(), 1):
        if seen and text in content:
            return f"{path.name}:{number}"
        seen = seen or after in content
    raise AssertionError(f"{path.name} has no line with {text!r} behind {after!r}")


def error_of(
    kernel: softgpu.LoadedKernel, entry: str, changes: dict[int, str], run: Callable[[], object]
) -> softgpu.SoftGpuError:
    """The error that ``run`` raises while ``kernel`` has these changes."""
    with (
        mutate.planted(kernel, entry, changes),
        pytest.raises(softgpu.SoftGpuError) as error,
    ):
        run()
    return error.value


@dataclass(frozen=True)
class Source:
    """The text of program ``name``."""

    name: str

    def line(self, text: str, after: str = "") -> str:
        """``ws_chain.py:12``: the first line with ``text``, behind the first with ``after``."""
        return line_of(Path(__file__).with_name(f"{self.name}.py"), text, after)

    def build(self, directory: Path) -> softgpu.LoadedKernel:
        """Built for sm_100a, in a process of its own, and loaded."""
        subprocess.run(
            [sys.executable, "-m", f"tests.support.{self.name}", str(directory)],
            check=True, timeout=300, cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "CUTE_DSL_ARCH": "sm_100a"},
        )  # fmt: skip
        path = directory / self.name
        return softgpu.load(path.with_suffix(".o"), path.with_suffix(".ptx"), self.name)


@dataclass
class Bench:
    """A program with one input, and the oracle's result for it."""

    kernel: softgpu.LoadedKernel
    arguments: list[torch.Tensor]
    want: torch.Tensor

    @property
    def entry(self) -> str:
        return self.kernel.entry

    def all(self, opcode: str, source: str) -> list[Instr]:
        found = mutate.matching(self.kernel.program(self.entry), opcode, source)
        assert found, f"no {opcode} at {source}"
        return found

    def result(self, mode: str, seed: int | None, hazards: str = "raise") -> torch.Tensor:
        self.kernel.options = softgpu.Options(hazards=hazards, asynchronous=mode, seed=seed)
        return self._run()

    def _run(self) -> torch.Tensor:
        out = torch.full_like(self.want, torch.nan)
        self.kernel(*self.arguments, out)
        return out

    def right(self) -> bool:
        """A run with the kernel's present options, for ``mutate.study``."""
        return torch.allclose(self._run(), self.want, rtol=1e-5, atol=1e-5)

    def check_schedules(self) -> None:
        """One result, the oracle's, in every schedule, and no hazard."""
        assert len(SCHEDULES) > 20
        for mode, seed in SCHEDULES:
            assert torch.equal(self.result(mode, seed), self.want), (mode, seed)

    def broken(
        self, changes: dict[int, str], mode: str = "early", seed: int | None = None
    ) -> softgpu.SoftGpuError:
        return error_of(self.kernel, self.entry, changes, lambda: self.result(mode, seed))

    def reports(self, changes: dict[int, str], seeds: Iterable[int]) -> set[tuple[str, ...]]:
        """(kind, source lines) of the hazards under several schedules; each finds something."""
        errors = [self.broken(changes, "random", seed) for seed in seeds]
        hazards = [e for e in errors if isinstance(e, softgpu.Hazard)]
        return {(e.kind, *(event.source for event in e.events)) for e in hazards}


def check(error: softgpu.SoftGpuError, kind: str, *sources: str) -> None:
    """``error`` is a hazard of that kind between instructions of these source lines."""
    assert isinstance(error, softgpu.Hazard), error
    assert (error.kind, [e.source for e in error.events]) == (kind, list(sources)), error
    for event in error.events:
        assert f"{event.source} (PTX line {event.ptx_line})" in str(error)


def at(error: softgpu.SoftGpuError, kind: type[Exception], source: str, text: str) -> None:
    """``error`` is a fault of that kind, at this source line, and says ``text``."""
    assert type(error) is kind and source in str(error) and text in str(error), error


def granted(wait: Instr) -> str:
    """Stands for an mbarrier's try_wait: it succeeds at once."""
    done = wait.args[0]
    assert isinstance(done, Reg)
    return f"setp.eq.u32 {done.name.split('@')[0]}, 0, 0"


def with_operand(ins: Instr, number: int, change: str) -> str:
    """``ins`` with its register operand ``number`` changed: ``change`` makes ``n`` from it."""
    operand = ins.args[number]
    assert isinstance(operand, Reg)
    width = {"%rd": "b64", "%rs": "b16"}.get(operand.name[:3], "b32")
    text, count = re.subn(re.escape(operand.name) + r"(?!\d)", "n", ins.text)
    assert count == 1, ins.text
    return f"{{ .reg .{width} n; {change.format(operand.name)} {text}; }}"

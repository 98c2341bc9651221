"""SM100's index logits on the software GPU: planted bugs, each found by name.

The problems that they share with SM90's are in test_index_logits.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import dsl_kernels
from codegen import abi
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.workloads import index_logits as work
from softgpu import Hazard, Options, SoftGpuError, mutate, using
from softgpu.ptx import Instr
from tests.support.needs import needs_compiler
from tests.support.planting import granted, line_of

pytestmark = [needs_compiler, pytest.mark.whole_matrix]
SOURCE = Path(dsl_kernels.__file__).parent / "sm100/indexer/index_logits.py"


def commits(ins: Instr) -> str:
    """In place of a lane's arrival: that of its MMAs, at the same barrier."""
    [barrier] = re.findall(r"\[.*?\]", ins.text)
    return f"tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 {barrier}"


def none(ins: Instr) -> str:
    """In place of an instruction that is left out."""
    return ""


COMMITTED = "a commit frees the words of a unit, and no lane waits for the others"
# Bug: opcode, (text of its line, behind which text), what stands there, kind of hazard.
BUGS: dict[str, tuple[str, tuple[str, str], Callable[[Instr], str], str]] = {
    COMMITTED: (
        "mbarrier.arrive", ("self.slots.arrive_empty", "def _issue"), commits, "overwrite-in-use",
    ),
    "one lane frees the words of a unit while others read": (
        "bar.warp.sync", ("sync_warp()", "def _issue"), none, "overwrite-in-use",
    ),
    "keys are multiplied before they are there": (
        "mbarrier.try_wait", ("self.pages.wait_full", "def _issue"), granted,
        "read-before-complete",
    ),
    "a product takes the place of one that is not read": (
        "mbarrier.try_wait", ("self.acc.wait_empty", "def _issue"), granted, "overwrite-in-use",
    ),
    "scales are read before they are there": (
        "mbarrier.try_wait", ("self.pages.wait_full", "def _pair"), granted,
        "read-before-complete",
    ),
    "heads are summed before their product is there": (
        "mbarrier.try_wait", ("self.acc.wait_full", "def _pair"), granted, "read-before-complete",
    ),
    "an accumulator is freed before its loads are complete": (
        "tcgen05.wait::ld", ("umma.wait_loads()", "def _pair"), none, "overwrite-in-use",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_named(bug: str) -> None:
    """Every schedule notices, and some name it; others are faults and hangs that follow from it.
    One CTA, more units than slots, more pairs than accumulators."""
    opcode, where, change, kind = BUGS[bug]
    spec = VariantSpec(op="index_logits", arch="sm_100a", heads=64, unit_rows=2)
    kernel = selfcheck.load(spec, variants.find_or_build(spec, need_library=False).directory)
    place = line_of(SOURCE, *where)
    found = mutate.matching(kernel.program(kernel.entry), opcode, place)
    assert found, f"no {opcode} at {place}"
    changes = {ins.pc: change(ins) for ins in found}
    if bug == COMMITTED:
        opcode, where, change, _ = BUGS["one lane frees the words of a unit while others read"]
        others = mutate.matching(kernel.program(kernel.entry), opcode, line_of(SOURCE, *where))
        changes |= {ins.pc: change(ins) for ins in others}
    given, said = work.sample_call(64, (1500, 130), (4, 5), ctas=1), []
    for mode, seed in (("late", None), ("early", None), *(("random", n) for n in range(4))):
        with (
            mutate.planted(kernel, kernel.entry, changes),
            using(Options(asynchronous=mode, seed=seed, hazards="raise")),
            pytest.raises(SoftGpuError) as error,
        ):
            kernel(*abi.ordered(kernel.names.arguments, given))
        said.append(error.value.kind if isinstance(error.value, Hazard) else "fault")
    assert kind in said, said

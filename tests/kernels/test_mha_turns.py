"""SM100's dense prefill on the software GPU: planted bugs, each found by name.

The problems that it shares with SM90's are in test_mha_fwd.py and test_mha_hidden.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dsl_kernels
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.mha_job import MhaJob
from softgpu import Hazard, Options, SoftGpuError, mutate, using
from softgpu.ptx import Instr
from tests.kernels.test_mha_fwd import swings
from tests.support.needs import needs_compiler
from tests.support.planting import granted, line_of

pytestmark = [needs_compiler, pytest.mark.whole_matrix]
NAME = "mha_fwd_d192_dbf16_turns_sm100a"
SOURCES = Path(dsl_kernels.__file__).parent / "sm100" / "mha"


def none(ins: Instr) -> str:
    """In place of an instruction that is left out."""
    return ""


ROLE, ISSUE = "mha_softmax.py", "mha_issue.py"
# Bug: opcode, (file, text of its line, behind which text), what stands there, kind of hazard.
BUGS: dict[str, tuple[str, tuple[str, ...], Callable[[Instr], str], str]] = {
    "Q's tile is not waited for": (
        "mbarrier.try_wait", (ISSUE, "self.loads.q.wait_full"), granted, "read-before-complete",
    ),
    "P is stored before S is read": (
        "tcgen05.wait::ld", (ROLE, "umma.wait_loads()", "def block"), none, "overwrite-in-use",
    ),
    "O is rescaled without a wait for S, behind whose product is that of O": (
        "mbarrier.try_wait", (ROLE, "self.loads.s.wait_full", "def block"), granted,
        "read-before-complete",
    ),
    "rows are made of O before its last product": (
        "mbarrier.try_wait", (ROLE, "self.loads.o.wait_full", "def finish"), granted,
        "read-before-complete",
    ),
    "O is overwritten before its rows are made": (
        "mbarrier.try_wait", (ISSUE, "self.loads.ofree.wait_full"), granted, "overwrite-in-use",
    ),
    "P is multiplied before it is stored": (
        "mbarrier.try_wait", (ISSUE, "self.loads.p.wait_full"), granted, "unordered-mma",
    ),
    "V is multiplied before it is cleared": (
        "mbarrier.try_wait", (ISSUE, "self.loads.clean.wait_full"), granted, "race",
    ),
    "a turn's P is handed over without a fence": (
        "tcgen05.fence::before_thread_sync", (ROLE, "umma.before_sync()", "def block"), none,
        "tcgen05-fence",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_named(bug: str) -> None:
    """Every schedule notices, and some name it; others are faults and hangs that follow from it."""
    opcode, (file, *where), change, kind = BUGS[bug]
    spec = VariantSpec.from_name(NAME)
    kernel = selfcheck.load(spec, variants.find_or_build(spec, need_library=False).directory)
    place = line_of(SOURCES / file, *where)
    found = mutate.matching(kernel.program(kernel.entry), opcode, place)
    assert found, f"no {opcode} at {place}"
    torch.manual_seed(3)
    job = swings(MhaJob.draw(spec, (20, 9), (530, 140), 1, 1, causal=False, ctas=1))
    said = []
    for mode, seed in (("late", None), ("early", None), ("random", 0), ("random", 1)):
        changes, given = {ins.pc: change(ins) for ins in found}, job.arguments()
        with (
            mutate.planted(kernel, kernel.entry, changes),
            using(Options(asynchronous=mode, seed=seed, hazards="raise")),
            pytest.raises(SoftGpuError) as error,
        ):
            kernel(*(given[name] for name in kernel.names.arguments))
        said.append(error.value.kind if isinstance(error.value, Hazard) else "fault")
    assert kind in said, said

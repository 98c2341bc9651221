"""Small programs that break one rule of the hazard checker, each with a correct twin.

A case is a text with a gap.  ``wrong`` in the gap must be reported, as ``kind`` and with the two
instructions ``events``; ``right`` in the gap must be clean in every schedule.  Every schedule must
find something in the broken program; with ``some`` the order decides whether it is this report or
another of the same bug (such as a read of what is not even written yet).  ``order_matters`` marks
what is found in one order only: reads of global memory by copies are not remembered.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import softgpu
from softgpu import Hazard, Options, SoftGpuError
from softgpu.testing import aligned, launch

GAP = "<gap>"
SCHEDULES = [(mode, seed) for mode in ("early", "late", "random") for seed in (None, 1, 2)]


def wait(barrier: str = "%r1", parity: str = "0", guard: str = "") -> str:
    """Waits for a phase; ``guard`` is the predicate of the lanes that do not."""
    skip = f"@{guard} bra SKIP;" if guard else ""
    return (
        f"{{ {skip} W: mbarrier.try_wait.parity.shared.b64 %p60, [{barrier}], {parity};"
        " @!%p60 bra W; SKIP: }\n"
    )


@dataclass
class Case:
    """A program with a gap, see above.

    Attributes:
        head: what comes before the body.
        launch: of ``softgpu.testing.launch``; options: fields of ``Options`` that it needs.
    """

    kind: str
    body: str
    right: str
    wrong: str = ""
    events: tuple[str, ...] = ()
    some: bool = False
    order_matters: bool = False
    launch: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    head: str = ""

    def run(self, text: str, options: Options) -> softgpu.Stats:
        """Runs the program with ``text`` in the gap."""
        body, buffer = self.head + self.body.replace(GAP, text), aligned(4096, np.uint32)
        options = dataclasses.replace(options, **self.options)
        return launch(body, [buffer], options=options, **{"block": 64, **self.launch})

    def describes(self, error: SoftGpuError) -> bool:
        """True if a report is the one that the broken program should give."""
        if not isinstance(error, Hazard):
            return False
        texts = [e.text for e in error.events]
        return (
            error.kind == self.kind
            and len(texts) == len(self.events)
            and all(want in text for want, text in zip(self.events, texts, strict=True))
        )

    def check_broken(self) -> list[Hazard]:
        """Every schedule finds something in the broken program; returns the hazards."""
        found = []
        for mode, seed in SCHEDULES[:1] if self.order_matters else SCHEDULES:
            with pytest.raises(SoftGpuError) as caught:  # without the checker: a deadlock, at best
                self.run(self.wrong, Options(hazards="raise", asynchronous=mode, seed=seed))
            found.append(caught.value)
        print(*found, sep="\n")
        hazards = [e for e in found if isinstance(e, Hazard)]
        assert any(self.describes(e) for e in (hazards if self.some else found[:1]))
        for error in hazards:
            assert error.place and str(error).endswith(f"  why: {error.why}")
            for number, event in enumerate(error.events, 1):
                assert f"  {number}.  {event.action}: " in str(error) and event.ptx_line > 0
        return hazards

    def check_correct(self) -> None:
        """The correct twin is clean in every schedule."""
        for mode, seed in SCHEDULES:
            self.run(self.right, Options(hazards="raise", asynchronous=mode, seed=seed))

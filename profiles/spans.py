"""Times of kernels, as a profile of torch has them, and whose a moment is.

A kernel of programmatic dependent launch is on the card before the one that it waits for is over:
from its begin to its end a profile counts what it waited, too, and the durations of all kernels sum
up to more than they took.  So a moment belongs to the kernel that began first of those that run;
what waits is charged from the end of what it waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple


class Span(NamedTuple):
    """One run of a kernel, in microseconds."""

    begin: float
    end: float
    name: str


def of_profile(profile: Any) -> list[Span]:
    """Kernels, copies and fills on the device in a ``torch.profiler.profile`` that is over."""
    return [
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type.name == "CUDA"
    ]


def charged(spans: Iterable[Span]) -> dict[str, float]:
    """Microseconds by kernel; their sum is the time in which any ran."""
    found: dict[str, float] = defaultdict(float)
    over = float("-inf")
    for span in sorted(spans):
        found[span.name] += max(0.0, span.end - max(span.begin, over))
        over = max(over, span.end)
    return dict(found)


def durations(spans: Iterable[Span]) -> dict[str, float]:
    """Microseconds by kernel from begin to end, waiting included."""
    found: dict[str, float] = defaultdict(float)
    for span in spans:
        found[span.name] += span.end - span.begin
    return dict(found)

"""SM100's decode over a sample of its axes, a part at a time.

    python -m tests.support.sm100_sample fp8 1/8       every eighth point, from the first
    python -m tests.support.sm100_sample dense 2/6

Exit code 1 if a point is wrong or has a hazard; the last line counts.  It takes objects as they lie
and needs no compiler, so ``profiles.prove_away`` can run it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from softgpu import SoftGpuError
from tests.support import sample_dense, sample_fp8
from tests.support.pairwise import Point

SAMPLES: dict[str, Any] = {"fp8": sample_fp8, "dense": sample_dense}


def points(name: str, part: str) -> list[Point]:
    """The ``k/n``-th part of a sample."""
    k, n = map(int, part.split("/"))
    return SAMPLES[name].SAMPLE[k - 1 :: n]


def wrong(name: str, point: Point) -> str:
    """Text that says what is wrong with a point's results, empty if nothing is."""
    try:
        errors = SAMPLES[name].run(point)
    except (SoftGpuError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if errors.right else str(errors)


def main(name: str, part: str) -> int:
    """The exit code; a line for each point."""
    mine, failed = points(name, part), 0
    for point in mine:
        started = time.process_time()
        said = wrong(name, point)
        failed += bool(said)
        text = " ".join(f"{axis} {value}" for axis, value in point.items())
        took = time.process_time() - started
        print(f"{'WRONG' if said else 'right'} {took:.1f} s {text} {said}".rstrip(), flush=True)
    print(f"{name} {part}: {len(mine) - failed} of {len(mine)} points right, hazard check on")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

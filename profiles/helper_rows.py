"""The helper kernels' rows: append, quantise (both also behind RoPE), fetch, merge, plan, beside a
copy of as many bytes.

Arguments, the library's calls on them and what is right come from the ops' workloads
(``snapmla.testing.workloads``).  ``torch_copy`` moves half the bytes of the operation from one
tensor to another, so that bytes read plus bytes written are equal; it says what rate is attainable
at that size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from profiles import check as checks
from profiles.check import Check
from profiles.shapes import HelperShape
from profiles.timing import Call, TimingConfig, buffer_count
from snapmla.testing import workloads

# The truth repeats the kernels' arithmetic, so only a wrong rounding shows: a step of e4m3 in one
# element of a thousand.
GATE_EXACT = 1e-3


@dataclass
class Helper:
    """One contender of a helper row: its calls (one per buffer) and the check of a call."""

    name: str
    calls: Sequence[Call]
    check: Callable[[], Check]
    peer: bool


def build(shape: HelperShape, config: TimingConfig, device: torch.device) -> list[Helper]:
    """Our kernel and, where bytes are what it is about, the copy beside it."""
    if shape.op == "plan_decode":
        return [_ours(shape, 2, device)]
    buffers = buffer_count(shape.bytes, config)
    return [_ours(shape, buffers, device), _copy(shape.bytes, buffers, device)]


def _ours(shape: HelperShape, buffers: int, device: torch.device) -> Helper:
    work, spec = workloads.of(shape.spec.op), shape.spec
    assert work.public is not None and work.truth is not None  # of all that are benched
    public, truth = work.public, work.truth
    given = [work.sized(spec, shape.sizes, device.type, i) for i in range(buffers)]
    calls = [public(spec, each) for each in given]

    def check() -> Check:
        pairs = []
        for i in (0, buffers - 1):
            want = truth(spec, given[i])
            for name in want:
                _poison(given[i][name])
            want = {name: x.clone() for name, x in truth(spec, given[i]).items()}
            calls[i]()
            pairs += [(given[i][name], x) for name, x in want.items()]
        return _compare(pairs)

    return Helper("snapmla", calls, check, peer=False)


def _poison(x: torch.Tensor) -> None:
    """NaN, of bytes e4m3's; -7 in tables."""
    x.fill_(float("nan") if x.is_floating_point() else 0x7F if x.dtype == torch.uint8 else -7)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """float64; bytes are e4m3."""
    return (x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x).double()


def _copy(nbytes: float, buffers: int, device: torch.device) -> Helper:
    half = int(nbytes / 2) // 16 * 16
    source = torch.randint(0, 255, (buffers, half), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def call(i: int) -> Call:
        return lambda: target[i].copy_(source[i])

    def check() -> Check:
        target.zero_()
        call(0)()
        wrong = int((target[0] != source[0]).sum())
        return Check(wrong == 0, wrong / half)

    return Helper("torch_copy", [call(i) for i in range(buffers)], check, peer=True)


def _compare(pairs: Sequence[tuple[Any, torch.Tensor]]) -> Check:
    """(got, want), where want may end earlier; what is NaN in both, poison, is not looked at."""
    error, broken = 0.0, False
    for each in pairs:
        rounded = each[1].to(each[0].device, each[0].dtype)  # a truth may be fp64
        got, want = (_numbers(x).flatten() for x in (each[0][: len(rounded)], rounded))
        seen = ~torch.isnan(want)
        broken |= not torch.equal(seen, torch.isfinite(got))
        if bool(seen.any()):
            error = max(error, checks.relative_l2(got[seen], want[seen]))
    ok = error <= GATE_EXACT and not broken
    return Check(ok, error, text="" if ok else f"error {error:.2e} > {GATE_EXACT:.0e}")

"""Software GPU: mbarriers against a model of their words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgpu import BarrierError
from softgpu.testing import aligned, launch
from tests.support.ptx import FEW, TID, covers, run


class ModelBarrier:
    """The manual's mbarrier: a phase ends when nothing is pending, neither arrivals nor bytes."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.phase = self.bytes = 0

    def step(self, arrivals: int = 0, nbytes: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += nbytes
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


@covers("mbarrier.init", "mbarrier.arrive", "mbarrier.arrive_drop", "mbarrier.expect_tx",
        "mbarrier.complete_tx", "mbarrier.test_wait", "mbarrier.inval")  # fmt: skip
@FEW
@given(data=st.data())
def test_mbarrier_arithmetic(data: Any) -> None:
    """Random operations of one thread; both parities and an old state are tested after each."""
    count = data.draw(st.integers(1, 6))
    model = ModelBarrier(count)
    body = f"@%p50 mbarrier.init.shared.b64 [%r50], {count}; bar.warp.sync -1;"
    body += "mov.u64 %rd20, 0;\n"
    want: list[int] = []
    token = -1
    for i in range(24):
        choice = data.draw(st.sampled_from(["arrive", "arrive tx", "expect", "complete", "drop"]))
        most = model.pending
        if choice == "arrive" and most:
            n = data.draw(st.integers(1, most))
            token = model.phase
            model.step(n)
            body += f"@%p50 mbarrier.arrive.shared.b64 %rd20, [%r50], {n};"
        elif choice == "arrive tx" and most:
            n = data.draw(st.integers(0, 64)) * 16
            token = model.phase
            model.bytes += n
            model.step(1)
            body += f"@%p50 mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r50], {n};"
        elif choice == "drop" and most and model.count > 1:
            model.count -= 1
            model.step(1)
            body += "@%p50 mbarrier.arrive_drop.shared.b64 _, [%r50];"
        elif choice == "expect":
            n = data.draw(st.integers(1, 64)) * 16
            model.step(0, n)
            body += f"@%p50 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r50], {n};"
        else:  # bytes may also land before they are expected
            n = model.bytes if model.bytes > 0 else 32
            model.step(0, -n)
            body += f"@%p50 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r50], {n};"
        state = (model.phase & 1) + 2 * (model.phase & 1 == 0)
        old = 4 if token >= 0 and model.phase != token else 0
        want.append(state | old)
        body += f"""
        mbarrier.test_wait.parity.shared.b64 %p1, [%r50], 0;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r50], 1; mov.u32 %r1, 0; mov.pred %p3, 0;
        {"@%p50 mbarrier.test_wait.shared.b64 %p3, [%r50], %rd20;" if token >= 0 else ""}
        @%p1 or.b32 %r1, %r1, 1; @%p2 or.b32 %r1, %r1, 2; @%p3 or.b32 %r1, %r1, 4;
        @%p50 st.global.b32 [%rd1+{4 * i}], %r1;
        """
    # leave no bytes behind, as the end of a cluster demands
    if model.bytes:
        way = "complete_tx" if model.bytes > 0 else "expect_tx"
        body += f"@%p50 mbarrier.{way}.shared.b64 [%r50], {abs(model.bytes)};"
    body += "@%p50 mbarrier.inval.shared.b64 [%r50];"
    out = aligned(24, np.uint32)
    launch(TID + body, [out])
    assert out.tolist() == want


@covers("mbarrier.inval", "mbarrier.arrive")
def test_an_invalidated_mbarrier_is_gone() -> None:
    body = "@%p50 mbarrier.init.shared.b64 [%r50], 1; @%p50 mbarrier.inval.shared.b64 [%r50];"
    with pytest.raises(BarrierError, match="not initialised"):
        run(body + "@%p50 mbarrier.arrive.shared.b64 _, [%r50];")

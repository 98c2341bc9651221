"""Software GPU: what is malformed, unknown or not modelled stops where it is reached."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from softgpu import SoftGpuError, UnmodelledInstruction, decode
from softgpu.testing import aligned, launch
from tests.support.ptx import covers


@pytest.mark.parametrize("text", [
    "mul.wide.s64 %rd1, %rd2, %rd3", "redux.sync.add.f32 %f1, %f2, -1", "add.s32 %r1, %r2",
    "ld.global.b32 %r1, %rd1", "st.shared.b32 %r1, %r2", "mov.u32 %r1, %envreg3",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r1], [%rd1], [%r2]",
])  # fmt: skip
def test_malformed_instructions_stop_where_they_are_reached(text: str) -> None:
    launch(f"bra END; {text}; END:", [])
    with pytest.raises(UnmodelledInstruction, match=re.escape(text)):
        launch(f"{text};", [])


@covers("bar.red", "barrier.red", "bar.cta.red", "barrier.cta.red", "mbarrier.pending_count")
def test_named_but_unmodelled_instructions_say_so() -> None:
    for text in (
        "bar.red.popc.u32 %r1, 0, %p1", "barrier.red.popc.u32 %r1, 0, %p1",
        "bar.cta.red.popc.u32 %r1, 0, %p1", "barrier.cta.red.and.pred %p2, 0, %p1",
        "mbarrier.pending_count.b64 %r1, %rd1",
    ):  # fmt: skip
        with pytest.raises(UnmodelledInstruction) as error:
            launch(f".loc 1 42 7\n{text};", [])
        assert text in str(error.value) and "file 1:42 (PTX line" in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["cvt.rn.sat.f32.s32 %f1, %r1", "cvt.rz.f64.s64 %fd1, %rd1", "isspacep.const %p1, %rd1",
     "fma.rz.f32 %f1, %f1, %f1, %f1", "max.xorsign.abs.f32 %f1, %f1, %f1",
     "slct.sparkling.u32.s32 %r1, %r1, %r1, %r1", "cvt.pack.sat.u8.s32.b32 %r1, %r1, %r1, %r1"],
)  # fmt: skip
def test_forms_that_are_not_modelled_stop(text: str) -> None:
    with pytest.raises(UnmodelledInstruction, match="PTX line"):
        launch(text + ";", [])


def test_unmodelled_instruction_names_itself_and_its_line() -> None:
    body = "mov.u32 %r1, %tid.x;\n.loc 1 42 7\nfrobnicate.sync.b32 %r2, %r1;"
    with pytest.raises(UnmodelledInstruction, match=r"frobnicate\.sync\.b32.*(\n.*)*PTX line"):
        launch(body, [])


def test_unknown_modifier_is_refused() -> None:
    with pytest.raises(UnmodelledInstruction, match="modifier .sparkling"):
        launch("add.sparkling.s32 %r1, %r2, %r3;", [])


def test_unreached_unmodelled_instruction_is_harmless() -> None:
    launch("mov.u32 %r1, 0; setp.ne.b32 %p1, %r1, 0; @%p1 frobnicate.b32 %r2, %r1;", [])


def test_an_opcode_has_one_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would take the first one's place in silence, in the order of imports."""
    known = dict(decode._BUILDERS)
    monkeypatch.setattr(decode, "_BUILDERS", known)
    first = known["bar.warp.sync"]

    def second(ins: Any, k: Any) -> Any: ...

    with pytest.raises(ValueError) as caught:
        decode.op("bar.warp.sync")(second)
    names = [f"{builder.__module__}.{builder.__qualname__}" for builder in (first, second)]
    assert str(caught.value) == (
        f"opcode bar.warp.sync: expected one builder, got {names[0]} and {names[1]}"
    )
    assert names[0].startswith("softgpu.ops.") and known["bar.warp.sync"] is first
    assert decode.op("bar.warp.sync.new")(second) is second
    assert decode.builder_for("bar.warp.sync.new.b32") is second


# ---- registers by ranges (PTX ISA 5.3.3) ---------------------------------------------------------
def test_ranges_of_registers_of_any_name() -> None:
    """With and without %, stems that end in a digit, and ranges of a scope that hide others."""
    out = aligned(4, np.uint32)
    body = """
    .reg .b32 a_<3>; .reg .b32 t1<2>; .reg .b64 t<2>; mov.u32 a_0, 1; mov.u32 a_2, 3;
    mov.b64 t1, 10; mov.u32 t10, 5; mov.u32 t11, 6;
    { .reg .b32 a_<3>; .reg .pred t1<2>; mov.u32 a_0, 100; mov.u32 a_2, 300;
      setp.eq.u32 t11, a_0, 100; @t11 st.global.b32 [%rd1], a_2; }
    add.u32 a_1, a_0, a_2; st.global.b32 [%rd1+4], a_1; add.u32 a_1, t10, t11;
    st.global.b32 [%rd1+8], a_1; cvt.u32.u64 a_1, t1; st.global.b32 [%rd1+12], a_1;
    """
    launch(body, [out], block=1)
    assert out.tolist() == [300, 4, 11, 10]


def test_registers_behind_a_range_are_none() -> None:
    with pytest.raises(SoftGpuError, match="a_3"):
        launch(".reg .b32 a_<3>; mov.u32 %r1, a_3;", [])

"""Software GPU: atomics in both state spaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softgpu.testing import aligned, launch
from tests.support.ptx import FEW, TID, covers, ints, numpy_type, wrap

ATOMS: dict[str, Callable[[int, int], int]] = {
    "add": lambda o, b: o + b, "min": min, "max": max, "and": int.__and__, "or": int.__or__,
    "xor": int.__xor__, "exch": lambda o, b: b, "inc": lambda o, b: 0 if o >= b else o + 1,
    "dec": lambda o, b: b if o == 0 or o > b else o - 1,
}  # fmt: skip


@covers("atom", "red")
@pytest.mark.parametrize("name", sorted(ATOMS))
@FEW
@given(data=st.data(), space=st.sampled_from(["global", "shared", ""]))
def test_atomics(name: str, data: Any, space: str) -> None:
    """Lanes act one after the other, in ascending order."""
    kind = data.draw(st.sampled_from(["u32", "s32", "u64", "s64"]))
    if name in ("inc", "dec"):
        kind = "u32"
    typed = "b" + kind[1:] if name in ("and", "or", "xor", "exch") else kind
    if name == "add" and kind == "s64":
        typed = "u64"
    size, reg = int(kind[1:]) // 8, "%r" if kind[1:] == "32" else "%rd"
    x, start = data.draw(ints(kind)), int(data.draw(ints(kind))[0])
    dtype = numpy_type(kind)
    cell, old, red = (aligned(n, dtype) for n in (2, 32, 2))
    cell[0] = red[0] = start
    middle = "" if not space else "." + space
    target = "%rd1" if space != "shared" else "%r50"
    move = f"ld.global.b{8 * size} {reg}40, [%rd1]; @%p50 st.shared.b{8 * size} [%r50], {reg}40;"
    body = f"""
    {move} bar.warp.sync -1; mad.lo.s64 %rd11, %rd60, {size}, %rd2;
    mad.lo.s64 %rd12, %rd60, {size}, %rd3; ld.global.b{8 * size} {reg}41, [%rd11];
    atom{middle}.{name}.{typed} {reg}42, [{target}], {reg}41;
    st.global.b{8 * size} [%rd12], {reg}42;
    red.global.{"add.u" + kind[1:] if name == "exch" else f"{name}.{typed}"} [%rd4], {reg}41;
    bar.warp.sync -1;
    """
    if space == "shared":
        body += (
            f"ld.shared.b{8 * size} {reg}40, [%r50]; @%p50 st.global.b{8 * size} [%rd1], {reg}40;"
        )
    launch(TID + body, [cell, x, old, red])
    value, seen, total = start, [], start
    for b in x.tolist():
        seen.append(value)
        value = wrap(ATOMS[name](value, b), dtype)
        total = wrap(total + b, dtype)
    assert old.tolist() == seen and int(cell[0]) == value
    assert int(red[0]) == (total if name == "exch" else value)


@covers("atom", "red")
def test_float_and_compare_and_swap_atomics() -> None:
    x = np.arange(1, 33, dtype=np.float32) * np.float32(0.1)
    tiny = np.full(32, 2.0**-140, np.float32)
    cells = aligned(8, np.uint32)
    launch(
        TID
        + """
    mad.lo.s64 %rd10, %rd60, 4, %rd2; ld.global.b32 %r1, [%rd10];
    mad.lo.s64 %rd11, %rd60, 4, %rd3; ld.global.b32 %r2, [%rd11];
    red.global.add.f32 [%rd1], %r1; red.global.add.f32 [%rd1+4], %r2;
    @%p50 st.shared.b32 [%r50], 0; bar.warp.sync -1;
    atom.shared.add.f32 %r3, [%r50], %r2; bar.warp.sync -1;
    ld.shared.b32 %r4, [%r50]; @%p50 st.global.b32 [%rd1+8], %r4;
    atom.global.cas.b32 %r5, [%rd1+12], %r99, 7;
    mov.b32 %r6, 0x40003C00; red.global.add.noftz.f16x2 [%rd1+16], %r6;
    mov.b32 %r7, 0x40003F80; red.global.add.noftz.bf16x2 [%rd1+20], %r7;
    """,
        [cells, x, tiny],
    )
    total = np.float32(0)
    for v in x:
        total = np.float32(total + v)
    f = cells.view(np.float32)
    assert f[0] == total
    assert f[1] == 0.0 and f[2] == np.float32(32 * 2.0**-140)  # global memory flushes
    assert cells[3] == 7  # lane 0 swaps 0 for 7, lane 7 swaps 7 for 7
    assert cells[4:5].view(np.float16).tolist() == [32.0, 64.0]
    halves = torch.from_numpy(cells[5:6].view(np.int16).copy()).view(torch.bfloat16)
    assert halves.tolist() == [32.0, 64.0]

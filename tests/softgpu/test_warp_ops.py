"""Software GPU: what lanes of a warp do together."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgpu import SoftGpuError
from tests.support.ptx import FEW, covers, ints, run


@covers("shfl", "vote", "match", "redux", "elect", "activemask", "bar.warp.sync",
        "barrier.warp.sync")  # fmt: skip
@FEW
@given(
    mask=st.integers(1, 2**32 - 1), b=st.integers(0, 31),
    mode=st.sampled_from(["up", "down", "bfly", "idx"]), data=ints("u32"),
    votes=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_collectives_of_some_lanes(
    mask: int, b: int, mode: str, data: np.ndarray, votes: int
) -> None:
    """Lanes of ``mask`` branch off and work together; the others stay away."""
    inside = [i for i in range(32) if mask >> i & 1]
    body = f"""
    mov.u32 %r1, 1; shl.b32 %r1, %r1, %r99; and.b32 %r2, %r1, {mask}; setp.eq.s32 %p1, %r2, 0;
    mov.u32 %r10, 77; and.b32 %r3, %r1, {votes}; setp.ne.s32 %p2, %r3, 0; mov.u32 %r9, {mask};
    mad.lo.s64 %rd5, %rd60, 4, %rd2; ld.global.b32 %r4, [%rd5];
    @%p1 bra OUT;
    OP
    OUT:
    """

    def each(operation: str, oracle: Callable[[int], int]) -> None:
        got = run(body.replace("OP", operation), data)
        want = [oracle(i) & 0xFFFFFFFF if i in inside else 77 for i in range(32)]
        assert got == want, operation

    x = data.tolist()
    signed = data.view(np.int32).tolist()
    voters = [i for i in inside if votes >> i & 1]
    ballot = sum(1 << i for i in voters)
    each("vote.sync.ballot.b32 %r10, %p2, %r9;", lambda i: ballot)
    for name, truth in {
        "any": bool(voters), "all": voters == inside, "uni": voters in ([], inside),
    }.items():  # fmt: skip
        each(f"vote.sync.{name}.pred %p3, %p2, %r9; selp.b32 %r10, 1, 0, %p3;",
             lambda i, truth=truth: truth)  # fmt: skip
    each("activemask.b32 %r10;", lambda i: mask)
    each("bar.warp.sync %r9; barrier.warp.sync %r9; mov.u32 %r10, 5;", lambda i: 5)
    each(f"elect.sync %r5|%p3, {mask}; selp.b32 %r6, 64, 0, %p3; add.s32 %r10, %r5, %r6;",
         lambda i: inside[0] + (64 if i == inside[0] else 0))  # fmt: skip
    each(
        "match.any.sync.b32 %r10, %r4, %r9;", lambda i: sum(1 << j for j in inside if x[j] == x[i])
    )
    alike = len({x[i] for i in inside}) == 1
    each("match.all.sync.b32 %r10|%p3, %r4, %r9;", lambda i: mask if alike else 0)
    for name, kind, function in (
        ("add", "s32", sum), ("min", "u32", min), ("max", "u32", max), ("min", "s32", min),
        ("max", "s32", max), ("and", "b32", lambda v: functools.reduce(int.__and__, v)),
        ("or", "b32", lambda v: functools.reduce(int.__or__, v)),
        ("xor", "b32", lambda v: functools.reduce(int.__xor__, v)),
    ):  # fmt: skip
        value = function([(signed if kind == "s32" else x)[i] for i in inside])
        each(f"redux.sync.{name}.{kind} %r10, %r4, %r9;", lambda i, value=value: value)

    def shuffled(i: int) -> int:
        j = {"up": i - b, "down": i + b, "bfly": i ^ b, "idx": b}[mode]
        return x[j] if 0 <= j < 32 else x[i]

    source = {"up": lambda i: i - b, "down": lambda i: i + b, "bfly": lambda i: i ^ b,
              "idx": lambda i: b}[mode]  # fmt: skip
    if all(source(i) in inside or not 0 <= source(i) < 32 for i in inside):
        clamp = 0 if mode == "up" else 31
        each(f"shfl.sync.{mode}.b32 %r10, %r4, {b}, {clamp}, %r9;", shuffled)


@covers("vote")
def test_membermasks_that_differ_between_lanes_are_refused() -> None:
    body = "setp.lt.s32 %p1, %r99, 16; selp.b32 %r1, 0xffff, 0xffff0000, %p1;"
    with pytest.raises(SoftGpuError, match="different membermasks"):
        run(body + "vote.sync.ballot.b32 %r10, %p1, %r1;")

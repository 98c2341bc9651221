"""tcgen05's descriptors and operand layouts, against CUTLASS's canonical layouts and the DSL's.

The canonical layouts (``mma_sm100_desc.hpp``) say in CuTe's notation, in units of 16 bytes, which
bytes a descriptor names; the DSL's ``build`` functions and ``make_smem_layout_a/_b`` are asked in a
process of their own (``tests.support.dsl_tcgen05``).
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softgpu import DescriptorError
from softgpu.ops.operands import chunk_index
from softgpu.ops.tcgen05_mma import instruction
from tests.support.cute_layout import at, at2
from tests.support.tcgen05 import SPAN, descriptor, idesc

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 16


def swizzled(byte: np.ndarray, bits: int) -> np.ndarray:
    """Swizzle<bits, 4, 3> on byte addresses."""
    return byte ^ ((byte >> 7 & (1 << bits) - 1) << 4)


def canonical(
    span: int, mn: bool, lbo: int, sbo: int, inner: np.ndarray, outer: np.ndarray
) -> np.ndarray:
    """Offset of a chunk in chunks.

    K-major: ``inner`` a chunk of K, ``outer`` a row.  MN-major: a chunk of rows, a k.
    """
    x = span // CHUNK
    many = 1 << 16
    if mn and span:
        return at2(((x, many), (8, many)), ((1, lbo), (x, sbo)), inner, outer)
    if mn:
        return at2(((1, many), (8, many)), ((0, sbo), (1, lbo)), inner, outer)
    if span:
        return at2((2, (8, many)), (1, (x, sbo)), inner, outer)
    return at2((2, (8, many)), (lbo, (1, sbo)), inner, outer)


@settings(max_examples=50, deadline=None)
@given(
    layout=st.sampled_from([0, 2, 4, 6]), mn=st.booleans(), element=st.sampled_from([1, 2]),
    groups=st.integers(1, 16), start=st.integers(0, 63), lbo=st.integers(0, 1 << 10),
    sbo=st.integers(0, 1 << 10),
)  # fmt: skip
def test_a_descriptor_names_the_bytes_of_the_canonical_layout(
    layout: int, mn: bool, element: int, groups: int, start: int, lbo: int, sbo: int
) -> None:
    rows, depth, span = 16 * groups, 32 // element, SPAN[layout]
    got = chunk_index(
        rows, depth, element, CHUNK * start, CHUNK * lbo, CHUNK * sbo, span, mn
    )  # fmt: skip
    chunks = rows * element // CHUNK if mn else 2
    inner, outer = np.arange(chunks)[None, :], np.arange(depth if mn else rows)[:, None]
    where = start + canonical(span, mn, lbo, sbo, inner, outer)
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[span]
    np.testing.assert_array_equal(got, swizzled(CHUNK * where, bits) // CHUNK)


@settings(max_examples=50, deadline=None)
@given(
    kind=st.sampled_from(["e4m3", "e5m2", "f16", "bf16"]), form=st.sampled_from(["1", "2", "ws"]),
    m=st.sampled_from([32, 64, 128, 256]), n=st.integers(1, 32), a_mn=st.booleans(),
    b_mn=st.booleans(), negate=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)  # fmt: skip
def test_instruction_descriptors_come_back(
    kind: str, form: str, m: int, n: int, a_mn: bool, b_mn: bool, negate: tuple[int, int]
) -> None:
    n *= 8
    group, ws = (2 if form == "2" else 1), form == "ws"
    byte = kind in ("e4m3", "e5m2")
    heights = {"1": (64, 128), "2": (128, 256), "ws": (32, 64, 128)}[form]
    step = 8 * group * (2 if byte and b_mn else 1)
    word = idesc(m, n, kind, kind, a_mn=int(a_mn), b_mn=int(b_mn), negate=negate)
    name = "f8f6f4" if byte else "f16"
    if m not in heights or n % step or (ws and n not in (64, 128, 256)):
        with pytest.raises(DescriptorError, match=r" [MN] \d+, expected"):
            instruction(word, name, ws, group)
        return
    found = instruction(word, name, ws, group)
    assert (found.m, found.n, found.a, found.b) == (m, n, kind, kind)
    assert (found.a_mn, found.b_mn, found.depth) == (a_mn, b_mn, 16 if name == "f16" else 32)
    assert (found.a_sign, found.b_sign) == tuple(-1 if x else 1 for x in negate)


@pytest.fixture(scope="module")
def dsl() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.dsl_tcgen05"], cwd=ROOT, capture_output=True,
        text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_dsl_builds_these_words(dsl: dict[str, Any]) -> None:
    for start, lbo, sbo, layout, word in dsl["descriptors"]:
        assert word == descriptor(start, lbo, sbo, layout), (start, lbo, sbo, layout, hex(word))
    for kind, m, n, a_mn, b_mn, negate, word in dsl["instructions"]:
        want = idesc(m, n, kind, kind, a_mn=a_mn, b_mn=b_mn, negate=(negate, 0))
        assert word == want, (kind, m, n, hex(word))


def test_the_dsl_lays_operands_out_as_descriptors_name_them(dsl: dict[str, Any]) -> None:
    """Every byte of every K step, for each operand layout that the DSL chooses by itself."""
    spans = set()
    for kind, operand, mn, m, n, _, text in dsl["layouts"]:
        swizzle, _, rest = text.split(" o ")
        shape, stride = (ast.literal_eval(x) for x in rest.split(":"))
        bits, element = int(swizzle[2]), 1 if kind == "e4m3" else 2
        span, rows, depth = 16 << bits, m if operand == "a" else n, 32 // element
        spans.add((span, mn))
        # of MN-major operands only: from one span of rows to the next
        lbo = stride[0][0][1] * element if mn and rows * element > span else 0
        steps = int(np.prod(shape[2]))
        row, k = np.arange(rows)[:, None], np.arange(depth)[None, :]
        for step in range(steps):
            start = at(shape[2], stride[2], step) * element
            inside = element * at2(shape[0], stride[0], row, k)
            want = swizzled(start + inside, bits)
            index = chunk_index(
                rows, depth, element, start % 1024, lbo, 8 * span, span, mn
            ) + start // 1024 * (1024 // CHUNK)  # fmt: skip
            outer, inner = (k + 0 * row, row + 0 * k) if mn else (row + 0 * k, k + 0 * row)
            byte = inner * element
            got = CHUNK * index[outer, byte // CHUNK] + byte % CHUNK
            np.testing.assert_array_equal(got, want, f"{kind} {operand} {text} step {step}")
    assert {x for x, _ in spans} == {32, 64, 128} and {x for _, x in spans} == {False, True}

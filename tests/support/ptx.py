"""Instructions on 32 lanes against oracles, and which registered name a test is about.

Oracles are Python integers, fractions, torch or numpy, never the interpreter's own functions.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from softgpu import decode
from softgpu.testing import aligned, launch

FEW = settings(
    max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip


def registered(opcode: str) -> str | None:
    """The name under which an opcode's builder is registered."""
    parts = opcode.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((x for x in names if x in decode._BUILDERS), None)


def covers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The decorated test is about these registered names, and must decode each of them."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            seen: set[str | None] = set()
            original = decode.builder_for

            def builder_for(opcode: str) -> Any:
                seen.add(registered(opcode))
                return original(opcode)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decode, "builder_for", builder_for)
                test(*args, **kwargs)
            assert set(names) <= seen, f"claimed but not run: {sorted(set(names) - seen)}"

        return run

    return wrap


# ---- running instructions ------------------------------------------------------------------------
REGISTERS = ".reg .b16 %h<40>; .reg .b32 %w<60>; .reg .b64 %d<40>; .reg .pred %q<40>;"
PREFIX = {2: "%h", 4: "%w", 8: "%d"}
Case = tuple[str, Any, str]  # opcode, dtype of the result (bool: a predicate), source operands


def evaluate(cases: list[Case], **inputs: np.ndarray) -> list[np.ndarray]:
    """Runs each case once on 32 lanes.  Operands name the inputs; predicates are inputs != 0."""
    order = sorted(inputs)
    results = [np.zeros(32, np.uint32 if t is bool else t) for _, t, _ in cases]
    arrays = [*results, *(np.ascontiguousarray(inputs[x]) for x in order)]
    slots = np.zeros((len(arrays), 32), np.uint64)
    for row, x in zip(slots, arrays, strict=True):
        row.view(x.dtype)[:32] = x
    body = "mov.u32 %w59, %tid.x; cvt.u64.u32 %d39, %w59;\n"
    for i, name in enumerate(order):
        size, number = inputs[name].dtype.itemsize, ord(name) - 96
        body += f"mad.lo.s64 %d38, %d39, {size}, %rd1;\n"
        at = 256 * (len(cases) + i)
        body += f"ld.global.b{8 * size} {PREFIX[size]}{number}, [%d38+{at}];\n"
        body += f"setp.ne.b{8 * size} %q{number}, {PREFIX[size]}{number}, 0;\n"
    for i, (opcode, kind, operands) in enumerate(cases):
        sources = re.sub(
            r"\b(P)?([a-m])\b(?![\w:.])",
            lambda m: f"{PREFIX[inputs[m[2]].dtype.itemsize]}{ord(m[2]) - 96}",
            re.sub(r"P([a-m])\b", lambda m: f"%q{ord(m[1]) - 96}", operands),
        )
        size = results[i].dtype.itemsize
        target = "%q39" if kind is bool else f"{PREFIX[size]}30"
        body += f"{opcode} {target}, {sources};\n"
        if kind is bool:
            target = "%w30"
            body += "selp.b32 %w30, 1, 0, %q39;\n"
        body += f"mad.lo.s64 %d38, %d39, {size}, %rd1; "
        body += f"st.global.b{8 * size} [%d38+{256 * i}], {target};\n"
    launch(body, [slots], declarations=REGISTERS)
    return [
        slots[i].view(r.dtype)[:32].astype(bool if cases[i][1] is bool else r.dtype)
        for i, r in enumerate(results)
    ]


def check(cases: list[tuple[str, Any, str, Callable[..., Any]]], **inputs: np.ndarray) -> None:
    """Every case against its oracle, a function of Python numbers named in its operands."""
    got = evaluate([(opcode, kind, operands) for opcode, kind, operands, _ in cases], **inputs)
    for (opcode, kind, operands, oracle), result in zip(cases, got, strict=True):
        names = re.findall(r"\b!?P?([a-m])\b", operands)
        rows = zip(*(inputs[x].tolist() for x in names), strict=True)
        for lane, row in enumerate(rows):
            want = oracle(*row)
            value = result[lane]
            if kind is not bool and result.dtype.kind in "iu":
                want, value = wrap(want, result.dtype), int(value)
            assert value == want, f"{opcode} {operands}: {row} gave {value}, expected {want}"


def wrap(value: int, dtype: Any) -> int:
    dtype = np.dtype(dtype)
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value


def ints(kind: str) -> st.SearchStrategy[np.ndarray]:
    """32 values of a PTX integer type, edges likely."""
    bits = int(kind[1:])
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    edges = [0, 1, 2, 31, 32, 33, -1, -2, 1 << (bits - 1), (1 << (bits - 1)) - 1, 0x80, 0xFF00]
    one = st.one_of(
        st.sampled_from(edges), st.integers(0, (1 << bits) - 1), st.integers(-64, 64)
    ).map(lambda x: wrap(x, dtype))
    return st.lists(one, min_size=32, max_size=32).map(lambda x: np.array(x, dtype))


def numpy_type(kind: str) -> np.dtype:
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


# ---- floating point ------------------------------------------------------------------------------
# format: (bits of the significand with the hidden one, least exponent, greatest exponent)
FORMATS = {"f32": (24, -126, 127), "f16": (11, -14, 15), "bf16": (8, -126, 127)}


def rounded(value: Fraction, kind: str, mode: str = "rn", zero: float = 0.0) -> float:
    """An exact value in a format; ``zero`` is what an exact zero becomes (its sign)."""
    if value == 0:
        return zero
    precision, low, high = FORMATS[kind]
    sign, value = (-1 if value < 0 else 1), abs(value)
    e = value.numerator.bit_length() - value.denominator.bit_length()
    e -= Fraction(2) ** e > value
    unit = Fraction(2) ** (max(e, low) - precision + 1)
    n, rest = divmod(value, unit)
    up = {
        "rn": rest > unit / 2 or (rest == unit / 2 and n % 2 == 1), "rz": False,
        "rp": rest > 0 and sign > 0, "rm": rest > 0 and sign < 0,
    }[mode]  # fmt: skip
    result = (n + up) * unit
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** high
    if result > largest:
        toward = mode == "rz" or (mode == "rp" and sign < 0) or (mode == "rm" and sign > 0)
        return sign * (float(largest) if toward else math.inf)
    return sign * float(result)


def values(kind: str) -> st.SearchStrategy[np.ndarray]:
    """32 bit patterns of a format: random ones, neighbours of powers of two, specials."""
    dtype, fraction = (np.uint32, 23) if kind == "f32" else (np.uint16, FORMATS[kind][0] - 1)
    bits = 8 * np.dtype(dtype).itemsize
    top = (1 << bits - 1 - fraction) - 1 << fraction
    near = st.tuples(st.integers(0, top >> fraction), st.integers(-3, 3)).map(
        lambda x: max((x[0] << fraction) + x[1], 0)
    )
    edges = [0, 1, 2, 1 << fraction, (1 << fraction) - 1, top - 1, top, top + 1]
    middle = st.integers(
        (top >> fraction + 1) - 3 << fraction, (top >> fraction + 1) + 3 << fraction
    )
    one = st.one_of(st.sampled_from(edges), near, middle, st.integers(0, (1 << bits - 1) - 1))
    signed = st.tuples(one, st.booleans()).map(lambda x: x[0] | x[1] << bits - 1)
    return st.lists(signed, min_size=32, max_size=32).map(lambda x: np.array(x, dtype))


def numbers(x: np.ndarray, kind: str) -> list[float]:
    if kind == "f32":
        return [float(v) for v in x.view(np.float32)]
    t = torch.from_numpy(x.view(np.int16).copy())
    return [float(v) for v in t.view(torch.float16 if kind == "f16" else torch.bfloat16)]


def same(got: float, want: float) -> bool:
    if math.isnan(want) or math.isnan(got):
        return math.isnan(want) and math.isnan(got)
    return got == want and math.copysign(1, got) == math.copysign(1, want)


def compare(
    cases: list[tuple[str, str, Callable[..., float]]], kind: str, **inputs: np.ndarray
) -> None:
    """Cases (opcode, operands, oracle on floats) whose operands and results have one format."""
    t = np.uint32 if kind == "f32" else np.uint16
    got = evaluate([(opcode, t, operands) for opcode, operands, _ in cases], **inputs)
    numeric = {n: numbers(x, kind) for n, x in inputs.items()}
    for (opcode, operands, oracle), raw in zip(cases, got, strict=True):
        rows = zip(*(numeric[n] for n in re.findall(r"\b([a-m])\b", operands)), strict=True)
        for value, row in zip(numbers(raw, kind), rows, strict=True):
            want = oracle(*row)
            assert same(value, want), f"{opcode}: {row} gave {value!r}, expected {want!r}"


# ---- registers, addresses, warps -----------------------------------------------------------------
TID = "mov.u32 %r99, %tid.x; cvt.u64.u32 %rd60, %r99; mov.u32 %r50, smem; "
TID += "setp.eq.s32 %p50, %r99, 0;\n"

PUT = "mad.lo.s64 %rd61, %rd60, 4, %rd1; st.global.b32 [%rd61], %r10;\n"
WAIT = "W{0}: mbarrier.try_wait.parity.shared.b64 %p51, [%r50], {1}; @!%p51 bra W{0};\n"


def run(body: str, *args: Any, threads: int = 32, grid: int = 1, **kw: Any) -> list[int]:
    """Runs ``body``, which leaves a word in %r10, and returns it of every thread."""
    out = aligned(threads * grid, np.uint32)
    head = TID
    if grid > 1:
        head += f"mov.u32 %r98, %ctaid.x; mad.lo.s32 %r97, %r98, {threads}, %r99; "
        head += "cvt.u64.u32 %rd60, %r97;\n"
    launch(head + body + PUT, [out, *args], block=threads, grid=grid, **kw)
    return out.tolist()

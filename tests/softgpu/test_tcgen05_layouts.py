"""tcgen05's layouts, derived a second time from what others publish as shapes and strides.

Three sources, as facts: the fragments of CUTLASS 4.x (``tmem_frg``, ``tmem_frg_ws`` and the
``SM100_TMEM_LOAD`` traits, in CuTe's notation), and the datapath table of Apache TVM's TIRx
(``tmem_datapath_layout``, axes named with row-major digits).  No published program that ran here
uses layout G, so both sources have to agree on it with softgpu.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from softgpu.ops.tcgen05_memory import fragment
from softgpu.ops.tcgen05_mma import lane_groups
from tests.support.cute_layout import at, at2
from tests.support.tcgen05 import bits, idesc, place, run

FORMS = [("1", 64), ("1", 128), ("2", 128), ("2", 256), ("ws", 32), ("ws", 64), ("ws", 128)]
COLUMN = 128  # CUTLASS's virtual addresses: lane + 128 * column


def legal_n(form: str) -> list[int]:
    """Table 39 of the manual, kinds f16 and f8f6f4."""
    return {"1": list(range(8, 257, 8)), "2": list(range(16, 257, 16)), "ws": [64, 128, 256]}[form]


def own_rows(form: str, m: int) -> int:
    """Rows of D in one CTA."""
    return m // 2 if form == "2" else m


def cutlass_d(form: str, m: int, n: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Virtual address of D(i, j), i a row of this CTA: the fragment's atom."""
    rows = own_rows(form, m)
    if form == "1" and rows == 64:
        return at2(((16, 4), n), ((1, 32), COLUMN), i, j)
    parts = 128 // rows
    return at2((rows, (n // parts, parts)), (1, (COLUMN, rows)), i, j)


def tvm_d(form: str, m: int, n: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """The same address from TIRx's table: digits of i and j, first digit highest."""
    rows = own_rows(form, m)
    if form == "1" and rows == 64:  # (4, 16, n) : (32 lanes, 1 lane, 1 column)
        return i // 16 * 32 + i % 16 + j * COLUMN
    fold = {128: 1, 64: 2, 32: 4}[rows]  # (rows, fold, n / fold) : (1 lane, rows lanes, 1 column)
    return i + j // (n // fold) * rows + j % (n // fold) * COLUMN


def softgpu_d(form: str, m: int, n: int, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    groups = lane_groups(own_rows(form, m), 2 if form == "2" else 1, form == "ws", 0)
    width = n // len(groups)
    return np.stack(groups)[j // width, i] + COLUMN * (j % width)


def shapes() -> Iterator[tuple[str, int, int]]:
    for form, m in FORMS:
        for n in legal_n(form):
            yield form, m, n


def test_d_of_every_legal_shape_lies_where_cutlass_and_tvm_put_it() -> None:
    for form, m, n in shapes():
        i, j = np.arange(own_rows(form, m))[:, None], np.arange(n)[None, :]
        got = softgpu_d(form, m, n, i, j)
        np.testing.assert_array_equal(got, cutlass_d(form, m, n, i, j), f"{form} {m} {n}")
        np.testing.assert_array_equal(got, tvm_d(form, m, n, i, j), f"{form} {m} {n}")
        assert len(np.unique(got)) == got.size and got.max() < 128 * 512


def numbered(form: str, m: int, n: int, at_b: int = 16384) -> tuple[np.ndarray, int, int]:
    """Operands of kind::f16 whose product is 512 i + j: (image, descriptors of A and B)."""
    ctas = 2 if form == "2" else 1
    image = np.zeros((ctas, 32768), np.uint8)
    a, b = np.zeros((m, 16), np.float16), np.zeros((n, 16), np.float16)
    a[:, 0], a[:, 1] = np.arange(m), 1
    b[:, 0], b[:, 1] = 512, np.arange(n)
    for c in range(ctas):
        own_a, own_b = (np.split(x.view(np.uint8), ctas)[c] for x in (a, b))
        word_a = place(image[c], 0, own_a, 2, 6, False)
        word_b = place(image[c], at_b, own_b, 2, 6, False)
    return image, word_a, word_b


@pytest.mark.parametrize("form,m,n", [
    ("1", 64, 24), ("1", 128, 40), ("2", 128, 48), ("2", 256, 32), ("ws", 32, 64),
    ("ws", 32, 256), ("ws", 64, 128), ("ws", 128, 64),
])  # fmt: skip
def test_an_executed_mma_leaves_d_where_cutlass_puts_it(form: str, m: int, n: int) -> None:
    image, word_a, word_b = numbered(form, m, n)
    ctas, rows = len(image), own_rows(form, m)
    opcode = f"tcgen05.mma{'.ws' * (form == 'ws')}.cta_group::{ctas}.kind::f16"
    body = f"""
    mov.b64 %rd20, {word_a}; mov.b64 %rd21, {word_b}; mov.b32 %r81, {idesc(m, n, "f16", "f16")};
    setp.ne.u32 %p4, %r81, %r81; {opcode} [%r80], %rd20, %rd21, %r81, %p4;
    """
    cells = run(body, image=image, group=ctas, columns=64 if n <= 64 else 128)
    i, j = np.arange(rows)[:, None], np.arange(n)[None, :]
    where = cutlass_d(form, m, n, i, j)
    for c in range(ctas):
        want = bits(512.0 * (i + c * rows) + j)
        np.testing.assert_array_equal(cells[c][where % COLUMN, where // COLUMN], want)


def cutlass_a(form: str, m: int, k: int, i: np.ndarray, j: np.ndarray) -> list[np.ndarray]:
    """Virtual addresses, in elements, of every copy of A(i, j) in tensor memory.

    M 64 of one CTA: the fragment that is not interleaved, "required for address equivalence" with
    D.  M 128 of a pair: duplicated, a fragment of 128 rows whose halves are the same 64.
    """
    rows = own_rows(form, m)
    if rows == 64 and form == "1":
        return [at2(((16, 4), k), ((1, 32), COLUMN), i, j)]
    return [at2((128, k), (1, COLUMN), i + copy * rows, j) for copy in range(128 // rows)]


@pytest.mark.parametrize("element", [1, 2])
def test_a_in_tensor_memory_lies_where_cutlass_puts_it(element: int) -> None:
    k = 32 // element
    i, j = np.arange(128)[:, None], np.arange(k)[None, :]
    for form, m in FORMS:
        rows = own_rows(form, m)
        groups = lane_groups(rows, 2 if form == "2" else 1, form == "ws", 0)
        copies = cutlass_a(form, m, k, i[:rows], j)
        assert len(copies) == len(groups)
        for lanes, where in zip(groups, copies, strict=True):
            np.testing.assert_array_equal(lanes[:, None] + 0 * j, where % COLUMN)
            # one element column of CUTLASS's is element * 8 bits of a cell, low bits first
            np.testing.assert_array_equal(
                where // COLUMN * element // 4, (j + 0 * i[:rows]) * element // 4
            )


@pytest.mark.parametrize("m", [32, 64])
def test_each_group_of_lanes_multiplies_its_own_a(m: int) -> None:
    """Other rows of A in each copy make .ws two or four products, as FlashMLA's kernels use it."""
    n, parts = 64, 128 // m
    image, _, word_b = numbered("ws", m, n)
    a = np.zeros((128, 16), np.float16)
    a[:, 0], a[:, 1] = np.arange(128), 1
    cells = np.zeros((1, 128, 64), np.uint32)
    cells[0, :, 32:40] = a.view(np.uint32)
    body = f"""
    mov.b64 %rd21, {word_b}; mov.b32 %r81, {idesc(m, n, "f16", "f16")};
    setp.ne.u32 %p4, %r81, %r81;
    tcgen05.mma.ws.cta_group::1.kind::f16 [%r80], [%r80+32], %rd21, %r81, %p4;
    """
    got = run(body, image=image, cells=cells, columns=64)[0, :, : n // parts].view(np.float32)
    lane, column = np.arange(128)[:, None], np.arange(n // parts)[None, :]
    np.testing.assert_array_equal(got, 512.0 * lane + column + lane // m * (n // parts))


LANE = 1 << 21  # of a thread-value layout's target: (bits of one row) below, lanes above


def cutlass_load(shape: str, num: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) of register r in thread t by the traits of SM100_TMEM_LOAD_*.

    The traits number the bits that an instruction moves: rows of ``wide`` bits, one row a lane;
    ``threads`` and ``values`` are the two modes of their destination layout.
    """
    t, r = np.arange(32)[None, :], None
    if shape == "32x32b":
        wide, registers = 32 * num, num
        thread, value = (32, wide), (wide, 1)
    elif shape == "16x32bx2":
        wide, registers = 64 * num, num
        thread, value = ((16, 2), (wide, 32 * num)), (32 * num, 1)
    elif shape == "16x64b":
        wide, registers = 64 * num, num
        thread = ((2, 2, 8), (8 * wide, 32, wide))
        value = ((32, num), (1, 64))
    elif shape == "16x128b":
        wide, registers = 128 * num, 2 * num
        thread, value = ((4, 8), (32, wide)), ((32, 2, num), (1, 8 * wide, 128))
    else:
        wide, registers = 256 * num, 4 * num
        thread, value = ((4, 8), (64, wide)), ((64, 2, num), (1, 8 * wide, 256))
    r = np.arange(registers)[:, None]
    bit = at(*thread, t) + at(*value, 32 * r)
    where = at((wide, 32), (1, LANE), bit)
    return where // LANE, where % LANE // 32


@pytest.mark.parametrize("shape", ["32x32b", "16x32bx2", "16x64b", "16x128b", "16x256b"])
def test_loads_and_stores_move_what_cutlass_says(shape: str) -> None:
    most = {"16x128b": 64, "16x256b": 32}.get(shape, 128)
    for num in (1 << i for i in range(8)):
        if num > most:
            continue
        lane, column = fragment(shape, num, num, False)
        want_lane, want_column = cutlass_load(shape, num)
        np.testing.assert_array_equal(lane, want_lane, f"{shape} x{num}")
        np.testing.assert_array_equal(column, want_column, f"{shape} x{num}")
        if shape != "16x32bx2":  # a packed register takes the low halves of two columns
            np.testing.assert_array_equal(fragment(shape, num, num, True)[1], 2 * want_column)

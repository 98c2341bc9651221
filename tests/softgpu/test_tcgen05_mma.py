"""Software GPU: tcgen05.mma, every form against a product in float64 laid out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from softgpu import (
    DescriptorError,
    Options,
    SoftGpuError,
    TensorMemoryError,
    UnmodelledInstruction,
    exact,
    floats,
)
from softgpu.tensor_core import half_step_numpy
from softgpu.testing import launch
from tests.support.ptx import covers
from tests.support.tcgen05 import (
    CODES,
    bits,
    copies_of_a,
    descriptor,
    idesc,
    place,
    place_of_d,
    run,
    small_numbers,
)

A_AT, B_AT, SIZE = 0, 16384, 49152  # of the operands in the image


class Case:
    """One mma: operands in place, D as it was, and what D has to become."""

    def __init__(
        self, form: str, m: int, n: int, *, a: str = "e4m3", b: str = "e4m3", a_mn: bool = False,
        b_mn: bool = False, layout: int = 2, from_cells: bool = False,
        negate: tuple[int, int] = (0, 0), base: int = 0,
    ) -> None:  # fmt: skip
        self.form, self.m, self.n, self.kind, self.base = form, m, n, CODES[a][0], base
        self.ctas = 2 if form == "2" else 1
        element = 2 if self.kind == "f16" else 1
        depth = 32 // element
        raw_a, self.a = small_numbers((m, depth), a, 1)
        raw_b, self.b = small_numbers((n, depth), b, 2)
        raw_a, raw_b = raw_a.reshape(m, 32), raw_b.reshape(n, 32)
        self.sign = [-1 if x else 1 for x in negate]
        self.word = idesc(m, n, a, b, a_mn=int(a_mn), b_mn=int(b_mn), negate=negate)
        self.image = np.zeros((self.ctas, SIZE), np.uint8)
        self.old = np.random.default_rng(3).integers(-40, 41, (m, n)) / 4.0
        self.columns = 128 if n <= 128 else 256
        self.cells = np.zeros((self.ctas, 128, self.columns + 32), np.uint32)
        for i in range(m):
            for j in range(n):
                for c, lane, column in place_of_d(i, j, m, n, form):
                    self.cells[c, lane + base, column] = bits(self.old[i, j])[()]
        for c in range(self.ctas):
            part = slice(c * m // self.ctas, (c + 1) * m // self.ctas)
            own = slice(c * n // self.ctas, (c + 1) * n // self.ctas)
            self.da = place(self.image[c], A_AT, raw_a[part], element, layout, a_mn)
            self.db = place(self.image[c], B_AT, raw_b[own], element, layout, b_mn)
        self.from_cells = from_cells
        if from_cells:
            self.image[:, A_AT : A_AT + 16384] = 0
            for i in range(m):
                for c, lane in copies_of_a(i, m, form):
                    row = raw_a[i].view(np.uint32)
                    self.cells[c, lane + base, self.columns : self.columns + 8] = row

    @property
    def opcode(self) -> str:
        ws = ".ws" if self.form == "ws" else ""
        return f"tcgen05.mma{ws}.cta_group::{self.ctas}.kind::{self.kind}"

    def operands(self) -> str:
        return f"""
        mov.b64 %rd20, {self.da}; mov.b64 %rd21, {self.db}; mov.b32 %r81, {self.word};
        add.s32 %r85, %r80, {self.base << 16}; setp.eq.u32 %p4, %r81, %r81;
        """

    def step(self, *, keep: bool = True, opcode: str = "", tail: str = "", mask: str = "") -> str:
        a = f"[%r85+{self.columns}]" if self.from_cells else "%rd20"
        enable = "%p4" if keep else "!%p4"
        return f"{opcode or self.opcode} [%r85], {a}, %rd21, %r81, {mask}{enable}{tail};\n"

    def body(self, **kw: Any) -> str:
        return self.operands() + self.step(**kw)

    def run(self, body: str, **kw: Any) -> np.ndarray:
        columns = self.columns + 32
        return run(body, image=self.image, cells=self.cells, columns=columns, group=self.ctas, **kw)

    def check(self, got: np.ndarray, old: Any, rows: Any = None) -> None:
        """D = old + A B^T; where ``rows`` is false, and elsewhere, nothing has changed."""
        want = old + (self.sign[0] * self.a) @ (self.sign[1] * self.b).T
        cells = self.cells.copy()
        for i in range(self.m):
            for j in range(self.n):
                for c, lane, column in place_of_d(i, j, self.m, self.n, self.form):
                    if rows is None or rows[c, lane + self.base]:
                        cells[c, lane + self.base, column] = bits(want[i, j])[()]
        np.testing.assert_array_equal(got, cells)


FORMS = [
    ("1", 64, 8), ("1", 64, 248), ("1", 128, 24), ("1", 128, 256), ("ws", 32, 64), ("ws", 32, 256),
    ("ws", 64, 64), ("ws", 64, 128), ("ws", 64, 256), ("ws", 128, 64), ("2", 128, 16),
    ("2", 128, 96), ("2", 256, 32), ("2", 256, 256),
]  # fmt: skip


@covers("tcgen05.mma", "tcgen05.commit", "tcgen05.alloc", "tcgen05.dealloc",
        "tcgen05.relinquish_alloc_permit", "tcgen05.ld", "tcgen05.st", "tcgen05.wait::ld",
        "tcgen05.wait::st", "tcgen05.fence::before_thread_sync",
        "tcgen05.fence::after_thread_sync")  # fmt: skip
@pytest.mark.parametrize("from_cells", [False, True], ids=["SS", "TS"])
@pytest.mark.parametrize(("form", "m", "n"), FORMS)
def test_every_layout_of_d(form: str, m: int, n: int, from_cells: bool) -> None:
    case = Case(form, m, n, from_cells=from_cells)
    case.check(case.run(case.body()), case.old)


@pytest.mark.parametrize("layout", [0, 2, 4, 6])
@pytest.mark.parametrize(("a", "b"), [("e5m2", "e4m3"), ("bf16", "bf16"), ("f16", "f16")])
def test_every_swizzle_and_major(a: str, b: str, layout: int) -> None:
    for a_mn, b_mn in ((False, True), (True, False)):
        case = Case("1", 64, 128, a=a, b=b, a_mn=a_mn, b_mn=b_mn, layout=layout)
        case.check(case.run(case.body(keep=False)), 0.0)


@pytest.mark.parametrize(("form", "m", "n"), [("ws", 64, 256), ("2", 128, 64), ("2", 256, 128)])
def test_transposed_b_of_few_rows_and_of_pairs(form: str, m: int, n: int) -> None:
    case = Case(form, m, n, b_mn=True)
    case.check(case.run(case.body()), case.old)


def test_second_accumulator_in_the_other_lanes() -> None:
    """Layout F with D, and A, 16 lanes up."""
    for from_cells in (False, True):
        case = Case("1", 64, 16, base=16, from_cells=from_cells)
        case.check(case.run(case.body()), case.old)


@pytest.mark.parametrize("negate", [(1, 0), (0, 1), (1, 1)])
def test_negated_elements(negate: tuple[int, int]) -> None:
    case = Case("1", 64, 16, negate=negate)
    case.check(case.run(case.body()), case.old)


def test_scaled_accumulator() -> None:
    case = Case("1", 64, 16, a="bf16", b="bf16")
    case.check(case.run(case.body(tail=", 3")), case.old / 8)
    with pytest.raises(UnmodelledInstruction, match="scale-input-d"):
        case.run(case.body(tail=", 16"))
    case = Case("1", 64, 16)
    with pytest.raises(UnmodelledInstruction, match="scale-input-d"):
        case.run(case.body(tail=", 1"))


@pytest.mark.parametrize("ctas", [1, 2])
def test_lanes_that_keep_their_value(ctas: int) -> None:
    case = Case(str(ctas), 128, 16)
    words = [0x80000001, 0, 0xFFFFFFFF, 0x00F0, 0x1234, 0, 7, 0][: 4 * ctas]
    rows = np.array([[not words[4 * c + x // 32] >> x % 32 & 1 for x in range(128)]
                     for c in range(ctas)])  # fmt: skip
    head = "".join(f"mov.b32 %r{90 + i}, {x};" for i, x in enumerate(words))
    mask = "{" + ", ".join(f"%r{90 + i}" for i in range(len(words))) + "}, "
    case.check(case.run(head + case.body(mask=mask)), case.old, rows)


def test_hints_change_nothing() -> None:
    case = Case("1", 64, 16)
    for use in ("fill", "use", "lastuse", "discard"):
        opcode = f"tcgen05.mma.cta_group::1.kind::f8f6f4.collector::a::{use}"
        case.check(case.run(case.body(opcode=opcode)), case.old)
    case = Case("ws", 32, 64)
    opcode = "tcgen05.mma.ws.cta_group::1.kind::f8f6f4.collector::b2::fill"
    case.check(case.run(case.body(opcode=opcode, tail=", 0")), case.old)


def test_arithmetic_follows_the_target() -> None:
    """Without options: 25 bits below the largest addend, cut; with ``exact``: rounded once."""
    case = Case("1", 64, 16)
    rng = np.random.default_rng(4)
    codes = [rng.integers(0, 0x7F, (n, 32)).astype(np.uint8) for n in (64, 16)]
    for at, rows in zip((A_AT, B_AT), codes, strict=True):
        place(case.image[0], at, rows, 1, 2, False)
    case.cells[..., :16] = bits(rng.standard_normal((1, 128, 16)) * 1e5)
    a, b = (floats.E4M3[x] for x in codes)
    lanes = [i % 16 + i // 16 * 32 for i in range(64)]
    old = case.cells[0, lanes, :16].view(np.float32)
    got = case.run(case.body())[0, lanes, :16].view(np.float32)
    np.testing.assert_array_equal(got, half_step_numpy(old, a, b, 2.0**-6))
    rounded = case.run(case.body(), options=Options(accumulate=exact))[0, lanes, :16]
    want = (old + a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(rounded.view(np.float32), want)
    assert (got != want).any()


@pytest.mark.parametrize("mode", ["late", "random"])
def test_a_chain_lands_in_order(mode: str) -> None:
    """Two steps on one accumulator form a pipeline; the commit comes after both."""
    case = Case("1", 64, 16)
    for seed in range(4):
        got = case.run(
            case.body(keep=False) + case.step(), options=Options(asynchronous=mode, seed=seed)
        )
        case.check(got, case.a @ case.b.T)


def test_another_shape_may_overtake() -> None:
    """N 16, then N 8 with an A of zeros, on one address: nothing orders them without a commit."""
    case = Case("1", 64, 16)
    zeros = descriptor(2048 + B_AT + 16384, 16, 1024, 2)
    body = case.body(keep=False)
    body += f"mov.b64 %rd20, {zeros}; mov.b32 %r81, {idesc(64, 8)};" + case.step(keep=False)
    want = case.a @ case.b.T
    assert want[0, 0]
    seen = {
        float(case.run(body, options=Options(asynchronous="random", seed=seed))
              [0, 0, 0].view(np.float32))
        for seed in range(12)
    }  # fmt: skip
    assert seen == {0.0, float(want[0, 0])}


@pytest.mark.parametrize("mode", ["late", "random"])
def test_copies_and_products_in_order(mode: str) -> None:
    """A product follows the copy that writes its A; a copy over A follows the product."""
    copy = "tcgen05.cp.cta_group::1.128x256b [%r80+128], %rd20;\n"
    for seed in range(4):
        options = Options(asynchronous=mode, seed=seed)
        case = Case("1", 128, 16)
        step = case.step().replace("%rd20", "[%r80+128]")
        got = case.run(case.operands() + copy + step, options=options)
        raw, _ = small_numbers((128, 32), "e4m3", 1)
        case.cells[0, :, 128:136] = raw.view(np.uint32)
        case.check(got, case.old)
        case = Case("1", 128, 16, from_cells=True)  # zeros where A would be in shared memory
        got = case.run(case.body() + copy, options=options)
        case.cells[0, :, 128:136] = 0
        case.check(got, case.old)


WORD = idesc(64, 16)
MISUSE: list[tuple[dict[str, Any], type[SoftGpuError], str]] = [
    ({"word": WORD | 1}, DescriptorError, "sparsity selector"),
    ({"word": WORD | 4}, DescriptorError, "sparsity is 1"),
    ({"word": WORD | 8}, DescriptorError, "saturate"),
    ({"word": WORD & ~0x30}, DescriptorError, "D format 0"),
    ({"word": WORD | 5 << 7}, DescriptorError, "A format 5 \\(e2m1\\)"),
    ({"word": WORD | 2 << 10}, DescriptorError, "B format 2"),
    ({"word": WORD | 1 << 6}, DescriptorError, "bit 6"),
    ({"word": WORD | 1 << 23}, DescriptorError, "bit 23"),
    ({"word": WORD | 1 << 29}, DescriptorError, "bit 29"),
    ({"word": WORD | 1 << 30}, DescriptorError, "maximum shift"),
    ({"word": idesc(32, 16)}, DescriptorError, "M 32"),
    ({"word": idesc(256, 16)}, DescriptorError, "M 256"),
    ({"word": idesc(64, 0)}, DescriptorError, "N 0"),
    ({"word": idesc(64, 264)}, DescriptorError, "N 264"),
    ({"word": idesc(64, 24, b_mn=1)}, DescriptorError, "N 24, expected a multiple of 16"),
    ({"da": 1 << 14}, DescriptorError, "bits 14-15"),
    ({"da": 1 << 46}, DescriptorError, "version"),
    ({"da": 1 << 49}, DescriptorError, "base offset"),
    ({"da": 1 << 52}, DescriptorError, "leading dimension mode"),
    ({"da": 1 << 53}, DescriptorError, "bits 53-60"),
    ({"da": 3 << 61}, DescriptorError, "layout type 1"),
    ({"db": 0x3FFF ^ 1}, DescriptorError, "reaches offset"),
    ({"base": 32}, TensorMemoryError, "D at lane 32"),
    ({"base": 8}, TensorMemoryError, "D at lane 8"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISUSE)
def test_misuse(change: dict[str, Any], error: type[SoftGpuError], message: str) -> None:
    """``da`` and ``db``: bits of the descriptor that are flipped."""
    case = Case("1", 64, 16)
    case.da ^= change.pop("da", 0)
    case.db ^= change.pop("db", 0)
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(error, match=message):
        case.run(case.body())


def test_forms_of_ws() -> None:
    case = Case("ws", 64, 64)
    for word, message in ((idesc(64, 96), "N 96, expected 64"), (idesc(256, 64), "M 256")):
        case.word = word
        with pytest.raises(DescriptorError, match=message):
            case.run(case.body())
    with pytest.raises(SoftGpuError, match="zero-column mask"):
        Case.run(case, Case("ws", 64, 64).body(tail=", %rd20"))


def test_a_in_tensor_memory() -> None:
    """K-major, in D's lanes, in columns that are allocated."""
    case = Case("1", 64, 16, from_cells=True)
    case.word = idesc(64, 16, a_mn=1)
    with pytest.raises(TensorMemoryError, match="MN-major"):
        case.run(case.body())
    case = Case("1", 64, 16, from_cells=True)
    body = case.body().replace("[%r85+", "[%r80+")
    with pytest.raises(TensorMemoryError, match="A in tensor memory at lane 0, D at lane 16"):
        case.run("add.s32 %r80, %r80, 0;" + body.replace("%r80, 0;", "%r80, 1048576;"))
    with pytest.raises(TensorMemoryError, match="columns 508 to 515"):
        case.run(case.body().replace("[%r85+128]", "[%r85+508]"))
    with pytest.raises(TensorMemoryError, match="columns 128 to 143 .* allocated are columns 0"):
        run(Case("1", 64, 16).body().replace("[%r85]", "[%r85+128]"), image=case.image, taken=128)


def test_what_is_not_modelled() -> None:
    case = Case("1", 64, 16)
    for opcode, message in (
        ("tcgen05.mma.cta_group::1.kind::tf32", "kind::tf32"),
        ("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale", "kind::mxf8f6f4"),
        ("tcgen05.mma.cta_group::1.kind::f8f6f4.ashift", "ashift"),
        ("tcgen05.mma.sp.cta_group::1.kind::f8f6f4", "sp"),
        ("tcgen05.mma.ws.cta_group::2.kind::f8f6f4", "cta_group::1 too"),
        ("tcgen05.mma.kind::f8f6f4", "cta_group expected"),
    ):
        with pytest.raises(UnmodelledInstruction, match=message):
            case.run(case.body(opcode=opcode))
    with pytest.raises(UnmodelledInstruction, match="sm_90 has no tensor memory"):
        launch("tcgen05.wait::ld.sync.aligned;", [])
    with pytest.raises(UnmodelledInstruction, match="tcgen05.shift"):
        launch("tcgen05.shift.cta_group::1.down [%r1];", [], target="sm_100a")
    with pytest.raises(TensorMemoryError, match="there is no pair"):
        launch("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;", [],
               target="sm_100a")  # fmt: skip

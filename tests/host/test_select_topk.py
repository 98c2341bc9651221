"""``snapmla.dsa.select_topk``: the kernel that serves a call, checks, results given, tracers."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from snapmla.dsa import select_topk
from snapmla.indexer import shapes
from snapmla.runtime import variants
from snapmla.testing import topk_reference
from tests.support.needs import needs_kernels

selecting: Any = importlib.import_module("snapmla.indexer.select_topk")
MOST = 1048576 + 64 * 64  # columns: a context of 1M tokens, and drafts
SMALL = shapes.TopkShape(64, 8, 2)  # what these calls take instead of 1024 threads


def arguments() -> dict[str, Any]:
    logits = topk_reference.scores("normal", 4, 300, 1)
    return {
        "logits": logits, "lengths": torch.tensor([300, 0, 9, 41]).int(), "k": 20,
        "block_table": torch.randperm(10).int().view(2, 5), "page_size": 64, "next_n": 2,
        "row_starts": torch.tensor([0, 3, 1, 2]).int(),
        "out": torch.full((4, 20), -7).int(), "counts": torch.full((4,), -7).int(),
    }  # fmt: skip


def wanted(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    read = {name: x for name, x in given.items() if name not in ("out", "counts")}
    return topk_reference.select_topk_reference(**read)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "choose", lambda *_: SMALL)


def same(made: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for mine, right in zip(made, want, strict=True):
        assert mine.dtype == torch.int32 and torch.equal(mine, right)


# ---------------------------------------------------------------------------- shapes


def test_every_shape_is_chosen_and_holds_its_rows() -> None:
    chosen = set()
    for columns in (1, 8192, 8193, 32768, 32769, 131072, 131073, 262144, 262145, 1048577, MOST):
        for rows in (1, 8, 9, 24, 25, 64, 65, 96, 97, 4096):
            shape = shapes.choose(rows, columns)
            assert shape.columns >= columns
            chosen.add(shape)
    assert chosen == set(shapes.ALL)
    assert shapes.MAX_COLUMNS == MOST


@pytest.mark.parametrize(
    ("columns", "clusters"),
    [
        (8192, (1, 1, 1, 1, 1, 1)), (32768, (2, 2, 2, 2, 2, 1)), (131072, (8, 8, 4, 2, 1, 1)),
        (163840, (8, 8, 4, 2, 1, 1)), (262147, (8, 8, 4, 2, 2, 2)), (524289, (8, 8, 4, 4, 4, 4)),
        (MOST, (8, 8, 8, 8, 8, 8)),
    ],
)  # fmt: skip
def test_rows_choose_where_rows_are_wide(columns: int, clusters: tuple[int, ...]) -> None:
    """CTAs a row for 1, 8, 24, 64, 96 and 256 rows: the fewer the more rows, if they hold the
    width; up to 8 rows of 128K columns keep their keys."""
    chosen = [shapes.choose(rows, columns) for rows in (1, 8, 24, 64, 96, 256)]
    assert tuple(shape.cluster for shape in chosen) == clusters
    kept = [shape.keys > 0 for shape in chosen]
    assert kept == [columns <= 32768 or (columns <= 131072 and i < 2) for i in range(6)]


@pytest.mark.parametrize(
    ("columns", "most", "clusters"),
    [(32768, 96, (2, 1)), (163840, 8, (8, 4)), (163840, 24, (4, 2)), (163840, 64, (2, 1))],
)
def test_where_the_choice_turns(columns: int, most: int, clusters: tuple[int, int]) -> None:
    """CTAs a row for the most rows that have as many, and for one row more: an H200's times."""
    chosen = [shapes.choose(rows, columns).cluster for rows in (most, most + 1)]
    assert tuple(chosen) == clusters


@pytest.mark.parametrize("most", [8192, 16384 * 2, 131072, 262144])
def test_rows_between_16_bytes_want_room(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Kernels count up to three columns before such a row: one that just held it does no more."""
    asked: list[int] = []
    monkeypatch.setattr(shapes, "choose", lambda _, columns: asked.append(columns))
    monkeypatch.setattr(selecting, "_kernel", lambda *_: None)
    memory = torch.empty(3 * most)
    for step, begin, rows, room in (
        (most, 0, 2, most), (most + 4, 4, 2, most), (most + 1, 0, 1, most),
        (most + 1, 0, 2, most + 3), (most, 1, 2, most + 3), (most, 3, 1, most + 3),
    ):  # fmt: skip
        selecting.kernel_of(memory.as_strided((rows, most), (step, 1), begin))
        assert asked.pop() == room, (step, begin, rows)


# ---------------------------------------------------------------------------- calls


@needs_kernels
@pytest.mark.usefixtures("small")
def test_calls() -> None:
    """Positions and slots; results given and not; a call of a known kind."""
    given = arguments()
    want = wanted(given)
    for _ in range(2):
        made = select_topk(**given)
        assert made[0] is given["out"] and made[1] is given["counts"]
        same(made, want)
    assert want[1].tolist() == [20, 0, 9, 20]
    plain = {name: given[name] for name in ("logits", "lengths", "k")}
    same(select_topk(**plain), wanted(plain))
    memory = torch.full((4, 33), -7).int()
    made = select_topk(**plain, out=memory[:, 5:25])
    same(made, wanted(plain))
    assert (memory[:, :5] == -7).all() and (memory[:, 25:] == -7).all()
    none = select_topk(given["logits"][:0], given["lengths"][:0], 5)
    assert none[0].shape == (0, 5) and none[1].shape == (0,)


@needs_kernels
@pytest.mark.usefixtures("small")
def test_known_calls_are_logged_when_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No kernel that was loaded before is kept."""
    given = arguments()
    for _ in range(2):
        select_topk(**given)
    monkeypatch.setenv("SNAPMLA_LOG", "1")
    variants.forget()
    with caplog.at_level(logging.INFO, "snapmla"):
        select_topk(**given)
    monkeypatch.delenv("SNAPMLA_LOG")
    variants.forget()
    text = "select_topk_t64_e8_c2_sm90a on cpu: logits (4, 300), block_table (2, 5), out (4, 20)"
    assert text in caplog.messages


@needs_kernels
@pytest.mark.usefixtures("small")
def test_strides() -> None:
    """Rows of a larger buffer, and one row for all."""
    logits = topk_reference.scores("zeros", 3, 420, 2)
    lengths = torch.tensor([297, 300, 5]).int()
    for view in (logits[:, 4:304], logits[:1, 8:308].expand(3, -1)):
        given = {"logits": view, "lengths": lengths, "k": 30}
        same(select_topk(**given), wanted(given))


@needs_kernels
@pytest.mark.parametrize("columns", [2050, 4097])
def test_rows_of_any_width(columns: int) -> None:
    """Contiguous, as vLLM's own test has them, and a slice; by the kernel of their width."""
    logits = topk_reference.scores("zeros", 3, columns, 2)
    logits[0, ::5], logits[1, 7::3] = float("nan"), -float("inf")
    lengths = torch.tensor([columns, columns - 1, 7]).int()
    for view in (logits, logits[:, 1:]):
        given = {"logits": view, "lengths": lengths, "k": 2048}
        same(select_topk(**given), wanted(given))


@needs_kernels
def test_an_address_between_16_bytes_is_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shapes and strides: the kernel of the one might not hold the other."""
    found: list[int] = []
    monkeypatch.setattr(selecting, "kernel_of", lambda x: found.append(x.data_ptr() % 16) or stub)
    stub, memory = (lambda *_: None), torch.zeros(3, 2, 8)
    lengths = torch.zeros(2, dtype=torch.int32)
    for begin in (0, 0, 4, 1, 0, 1, 5):
        select_topk(memory.as_strided((2, 8), (8, 1), begin), lengths, 3)
    assert found == [0, 4]


# ---------------------------------------------------------------------------- what is wrong

I32, F32 = torch.int32, torch.float32
WRONG: list[tuple[str, Callable[[dict[str, Any]], Any], type[Exception], str]] = [
    ("logits", lambda a: a["logits"].bfloat16(), TypeError, "logits: expected dtype float32"),
    ("logits", lambda a: a["logits"][0], ValueError, "logits: expected shape (rows, columns)"),
    ("logits", lambda _: torch.zeros(300, 4).T, ValueError, "logits: expected innermost stride 1"),
    ("logits", lambda _: torch.frombuffer(bytearray(4802), dtype=F32, offset=2).view(4, 300),
     ValueError, "logits: expected storage aligned to 4 bytes"),
    ("logits", lambda _: torch.zeros(4, 0), ValueError,
     "logits: expected 1 to 1052672 columns, got 0"),
    ("logits", lambda _: torch.zeros(1).expand(4, MOST + 1), ValueError,
     "logits: expected 1 to 1052672 columns"),
    ("lengths", lambda _: torch.zeros(4).long(), TypeError, "lengths: expected dtype int32"),
    ("lengths", lambda _: torch.zeros(5, dtype=I32), ValueError, "lengths: expected shape (4,)"),
    ("lengths", lambda _: torch.zeros(8, dtype=I32)[::2], ValueError,
     "lengths: expected a contiguous tensor"),
    ("lengths", lambda _: [1, 2, 3, 4], TypeError, "lengths: expected a torch.Tensor, got list"),
    ("k", lambda _: 0, ValueError, "k: expected 1 to 2048, got 0"),
    ("k", lambda _: 2049, ValueError, "k: expected 1 to 2048, got 2049"),
    ("k", lambda _: 2.0, TypeError, "k: expected an int, got float"),
    ("k", lambda _: True, TypeError, "k: expected an int, got bool"),
    ("page_size", lambda _: 0, ValueError, "page_size: expected 1 to 1048576, got 0"),
    ("next_n", lambda _: 3, ValueError, "next_n: expected a divisor of the 4 rows of logits"),
    ("next_n", lambda _: 0, ValueError, "next_n: expected 1 or more, got 0"),
    ("block_table", lambda _: torch.zeros(4, 5, dtype=I32), ValueError,
     "block_table: expected shape (2, width)"),
    ("block_table", lambda _: torch.zeros(2, 0, dtype=I32), ValueError,
     "block_table: expected a width of 1 or more pages"),
    ("block_table", lambda _: torch.zeros(2, 5), TypeError, "block_table: expected dtype int32"),
    ("row_starts", lambda _: torch.zeros(3, dtype=I32), ValueError,
     "row_starts: expected shape (4,)"),
    ("out", lambda _: torch.zeros(4, 21, dtype=I32), ValueError, "out: expected shape (4, 20)"),
    ("out", lambda _: torch.zeros(4, 20), TypeError, "out: expected dtype int32"),
    ("out", lambda _: torch.zeros(20, 4, dtype=I32).T, ValueError,
     "out: expected innermost stride 1"),
    ("out", lambda _: torch.zeros(1, 20, dtype=I32).expand(4, 20), ValueError,
     "out: expected strides of distinct rows"),
    ("out", lambda a: a["logits"].view(I32)[:, :20], ValueError,
     "out: expected memory apart from logits"),
    ("out", lambda a: a["block_table"].view(-1)[:1].expand(4, 20), ValueError,
     "out: expected innermost stride 1"),
    ("counts", lambda _: torch.zeros(4, 1, dtype=I32), ValueError, "counts: expected shape (4,)"),
    ("counts", lambda a: a["lengths"], ValueError, "counts: expected memory apart from lengths"),
    ("counts", lambda a: a["out"][0, :4], ValueError, "counts: expected memory apart from out"),
]  # fmt: skip


@needs_kernels
@pytest.mark.usefixtures("small")
def test_wrong_arguments() -> None:
    """One sentence, also where all else is like a call that is known; nothing is written."""
    given = arguments()
    select_topk(**given)
    given["out"].fill_(-7)
    for name, wrong, error, text in WRONG:
        with pytest.raises(error, match=f"^{re.escape(text)}"):
            select_topk(**{**given, name: wrong(given)})
    assert (given["out"] == -7).all()
    same(select_topk(**given), wanted(given))


@needs_kernels
def test_on_other_devices() -> None:
    given = arguments()
    for name in ("lengths", "row_starts", "block_table", "out", "counts"):
        with pytest.raises(ValueError, match=f"^{name}: expected a tensor on cpu, got meta"):
            select_topk(**{**given, name: given[name].to("meta")})


# ---------------------------------------------------------------------------- tracers


def call(logits: Tensor, lengths: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return select_topk(logits, lengths, 20, block_table=table, next_n=2)


def into(logits: Tensor, lengths: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    return select_topk(logits, lengths, 20, out=out)


@needs_kernels
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compiled", [False, True])
def test_recorded(compiled: bool) -> None:
    """As one operator, whose graph gives the bits of eager calls on other data."""
    given = arguments()
    read = given["logits"], given["lengths"], given["block_table"]
    other = given["logits"].flip(1).contiguous(), given["lengths"] // 2, given["block_table"] + 9
    if compiled:
        torch._dynamo.reset()
        graph: Any = torch.compile(call, backend="eager", fullgraph=True)
    else:
        graph = make_fx(call)(*read)
        targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        assert "snapmla.select_topk.default" in targets
    for data in (read, other):
        same(graph(*data), call(*data))
    graph = make_fx(into)(*read[:2], given["out"])
    targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert "snapmla.select_topk_out.default" in targets
    same(graph(*other[:2], torch.zeros_like(given["out"])), into(*other[:2], given["out"]))


def test_on_shapes_alone() -> None:
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x
                for n, x in arguments().items()}  # fmt: skip
        out, counts = select_topk(**{**fake, "out": None, "counts": None})
        assert out.shape == (4, 20) and counts.shape == (4,)
        assert out.dtype == counts.dtype == torch.int32
        with pytest.raises(ValueError, match="^next_n: expected a divisor"):
            select_topk(**{**fake, "next_n": 3})


def test_inside_a_transform() -> None:
    lengths = torch.zeros(4, dtype=I32)
    with pytest.raises(ValueError, match="one inside of vmap"):
        torch.func.vmap(lambda x: select_topk(x, lengths, 3))(torch.zeros(2, 4, 8))


@needs_kernels
@pytest.mark.usefixtures("small")
def test_results_never_require_gradients() -> None:
    given = arguments()
    given["logits"].requires_grad_()
    out, counts = select_topk(**given)
    assert not out.requires_grad and not counts.requires_grad
    same((out, counts), wanted({**given, "logits": given["logits"].detach()}))

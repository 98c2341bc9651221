"""``select_topk`` against a stable sort: sets, order, ties, bounds, in every shape of variant."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.topk_share import share
from snapmla.testing import topk_reference
from snapmla.testing.workloads import select_topk as workload
from softgpu import Options, using
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import device_of, kernel

pytestmark = needs_kernels
# (threads, keys, cluster): two CTAs a row that keep their keys; that read them in every sweep
KEPT, STREAMED = (64, 8, 2), (64, 0, 2)
LIST = {KEPT: 384, STREAMED: 1024}  # entries of a CTA's list
EVERYDAY = [KEPT, pytest.param(STREAMED, marks=pytest.mark.whole_matrix)]
WHOLE = ((64, 16, 8), (128, 32, 1), (512, 8, 4), (1024, 8, 1))
SHAPES = [*EVERYDAY, *(pytest.param(x, marks=pytest.mark.whole_matrix) for x in WHOLE)]
AXES = ("threads", "keys", "cluster")
DISTRIBUTIONS = list(topk_reference.DISTRIBUTIONS)
COMPARED = [
    *((KEPT, name) for name in DISTRIBUTIONS),
    *(
        pytest.param(x, name, marks=pytest.mark.whole_matrix)
        for x in (STREAMED, *WHOLE)
        for name in DISTRIBUTIONS
    ),
]
K = 100


def select(
    target: str,
    shape: tuple[int, int, int],
    logits: Tensor,
    lengths: Tensor,
    k: int,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """(out, counts) of one launch with the hazard check on, on the CPU."""
    call = kernel(target, op="select_topk", **dict(zip(AXES, shape, strict=True)))
    moved = {n: x.to(device_of(target)) if isinstance(x, Tensor) else x for n, x in options.items()}
    here = logits.to(device_of(target)), lengths.to(device_of(target))
    given = workload.laid_out(*here, k, **moved)  # type: ignore[arg-type]
    with using(Options(hazards="raise")):
        call(*given.values())
    return given["out"].cpu(), given["counts"].cpu()


def wanted(
    logits: Tensor, lengths: Tensor, k: int, *, table: Tensor | None = None,
    starts: Tensor | None = None, **options: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return topk_reference.select_topk_reference(
        logits, lengths, k, block_table=table, row_starts=starts, **options
    )


def ragged(columns: int, k: int) -> Tensor:
    """Lengths about k, about a CTA's share and a warp's chunk, and all columns."""
    lengths = (columns, 0, 7, k - 1, k, k + 1, columns // 2 + 3)
    return torch.tensor([min(n, columns) for n in lengths], dtype=torch.int32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("shape", "name"), COMPARED)
def test_stable_sort(target: str, shape: tuple[int, int, int], name: str) -> None:
    """Every distribution, ragged, NaN around the rows; as slots of a table that drafts share."""
    columns = 1024
    lengths = ragged(columns, K)
    logits = topk_reference.padded(
        topk_reference.scores(name, len(lengths), columns, 3), lengths, gap=12
    )
    draw = torch.Generator().manual_seed(5)
    table = torch.randperm(columns // 64, generator=draw).int().view(1, -1)
    options = {"table": table, "next_n": 7}
    got = select(target, shape, logits, lengths, K, **options)
    for mine, want in zip(got, wanted(logits, lengths, K, **options), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_row_starts(target: str, shape: tuple[int, int, int]) -> None:
    """Rows that begin and end anywhere between four columns; of one score; cut by the columns."""
    columns, k = 700, 3
    starts = torch.tensor([*range(5), 690, 0, 695, 800, -4], dtype=torch.int32)
    lengths = torch.tensor([*range(260, 265), 10, 4, 9, 5, 20], dtype=torch.int32)
    found = topk_reference.scores("normal", len(starts), columns, 1)
    logits = topk_reference.padded(found, lengths, starts)
    assert logits.stride(0) == 700
    got = select(target, shape, logits, lengths, k, starts=starts)
    for mine, want in zip(got, wanted(logits, lengths, k, starts=starts), strict=True):
        assert torch.equal(mine, want)
    assert got[1].tolist() == [3] * 8 + [0, 3]


def apart(logits: Tensor, step: int, begin: int) -> Tensor:
    """The same rows, ``step`` elements apart, the first ``begin`` elements behind 16 bytes; between
    them lies what would be selected first."""
    rows, columns = logits.shape
    memory = torch.full((begin + rows * step + 4,), math.inf)
    view = memory.as_strided((rows, columns), (step, 1), begin)
    view.copy_(logits)
    return view


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("begin", [pytest.param(0, marks=pytest.mark.whole_matrix), 3])
def test_rows_between_16_bytes(target: str, shape: tuple[int, int, int], begin: int) -> None:
    """Neighbouring rows begin at other words of 16 bytes, in memory of infinities."""
    columns, k = 1021, 60  # with three more, all that the smaller variant holds
    lengths = torch.tensor([columns, 61, columns - begin, columns]).int()
    starts = torch.tensor([0, 959 - begin, begin, 2]).int()
    table = torch.randperm(9).int().view(1, -1)  # of 16 pages: positions behind it are no slot
    for name, step, options in (
        ("special", 1021, {"starts": starts}),
        ("close", 1022, {"table": table, "next_n": 4}),
        ("normal", 1027, {"table": table, "next_n": 4, "starts": starts}),
    ):
        found = topk_reference.scores(name, len(lengths), columns, begin)
        found = topk_reference.padded(found, lengths, options.get("starts"))
        got = select(target, shape, apart(found, step, begin), lengths, k, **options)
        for mine, want in zip(got, wanted(found, lengths, k, **options), strict=True):
            assert torch.equal(mine, want), (name, step)


@pytest.mark.parametrize("shape", EVERYDAY)
def test_ties_go_to_the_lowest_position(shape: tuple[int, int, int]) -> None:
    """All of the highest scores are selected, then the first of those that tie, across CTAs of a
    row; the ties overflow their lists."""
    columns, k = 2 * LIST[shape] + 150, 600
    logits = torch.zeros(1, columns)
    logits[0, ::2] = -0.0
    high = torch.tensor([3, columns // 2 - 1, columns // 2, 700, columns - 1])
    logits[0, high] = torch.tensor([1.0, math.nan, math.inf, 1.0, -math.nan])
    out, counts = select("sm_90a", shape, logits, torch.tensor([columns]).int(), k)
    low = [i for i in range(columns) if i not in high][: k - len(high)]
    assert out[0].tolist() == sorted([*high.tolist(), *low])
    assert counts.tolist() == [k]


@pytest.mark.parametrize("k", [1, 999, 2048])
def test_every_k(k: int) -> None:
    logits = topk_reference.scores("wide", 2, 1000, k)
    lengths = torch.tensor([1000, 400]).int()
    got = select("sm_90a", KEPT, logits, lengths, k)
    for mine, want in zip(got, wanted(logits, lengths, k), strict=True):
        assert torch.equal(mine, want)


def test_pages_that_are_not_there() -> None:
    """-1 of a page below 0 or outside the table's width, also where a row is taken whole."""
    logits = topk_reference.scores("rising", 2, 400).view(2, 400)
    table = torch.tensor([[5, -1, 3, 9], [7, 8, -3, 6]]).int()[:, :3]
    lengths, k = torch.tensor([400, 230]).int(), 250
    options = {"table": table, "page_size": 100}
    out, counts = select("sm_90a", KEPT, logits, lengths, k, **options)
    assert torch.equal(out, wanted(logits, lengths, k, **options)[0])
    assert out[0, -100:].tolist() == [-1] * 100 and out[1, 200:].tolist() == [-1] * 50
    assert out[1, 199] == 899 and counts.tolist() == [250, 230]


@pytest.mark.parametrize(("asynchronous", "seed"), [("late", 1), ("early", 2)])
def test_schedules(asynchronous: str, seed: int) -> None:
    """The same bits whenever warps run: lists are filled in another order."""
    logits = topk_reference.scores("zeros", 2, 1000, 8)
    lengths = torch.tensor([1000, 997]).int()
    call = kernel("sm_90a", op="select_topk", **dict(zip(AXES, KEPT, strict=True)))
    given = workload.laid_out(logits, lengths, K)
    with using(Options(asynchronous=asynchronous, hazards="raise", seed=seed)):
        call(*given.values())
    assert torch.equal(given["out"], wanted(logits, lengths, K)[0])


# ---------------------------------------------------------------------------- make prove


def cases() -> Iterator[tuple[str, int, bool, bool]]:
    """(distribution, columns, whether slots are wanted, whether rows begin anywhere)."""
    for name in DISTRIBUTIONS:
        for columns in (257, 1000, 2047):
            for flags in range(4):
                yield name, columns, bool(flags & 1), bool(flags & 2)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("shape", [(128, 8, 2), (64, 16, 8), (128, 32, 1), STREAMED])
def test_a_thousand_comparisons(shape: tuple[int, int, int]) -> None:
    """More than a thousand rows of all four shapes together, each entry."""
    compared = 0
    for index, (name, columns, slots, begun) in enumerate(cases()):
        if columns > math.prod(shape) and shape[1]:
            continue
        k = (1, 64, columns - 1)[index % 3]
        lengths = ragged(columns, k)
        draw = torch.Generator().manual_seed(index)
        starts = torch.randint(0, 9, (len(lengths),), generator=draw).int() if begun else None
        width = columns // 64 + 1
        table = torch.randperm(8 * width, generator=draw).int().view(8, -1) if slots else None
        found = topk_reference.scores(name, len(lengths), columns, index)
        logits = topk_reference.padded(found, lengths, starts, 4 * (index % 5))
        options = {"table": table, "starts": starts}
        got = select("sm_90a", shape, logits, lengths, k, **options)
        for mine, want in zip(got, wanted(logits, lengths, k, **options), strict=True):
            assert torch.equal(mine, want), (name, columns, k, slots, begun)
        compared += len(lengths)
    assert compared >= 250


@pytest.mark.whole_matrix
def test_more_columns_than_registers_hold() -> None:
    """A row of 262500, of the kernel that the host takes for it; its list overflows, or not."""
    columns, k = 262500, 2048
    for name in ("normal", "zeros"):
        logits = topk_reference.scores(name, 1, columns, 2)
        lengths = torch.tensor([columns - 1]).int()
        got = select("sm_90a", (1024, 0, 8), logits, lengths, k)
        assert torch.equal(got[0], wanted(logits, lengths, k)[0])


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", ["normal", "zeros"])
def test_as_many_columns_as_it_holds(name: str) -> None:
    """A row that begins between 16 bytes, each sweep of which reads memory."""
    columns, k = share(*STREAMED) * STREAMED[2] - 3, 2048
    found = topk_reference.scores(name, 1, columns, 2)
    lengths = torch.tensor([columns]).int()
    got = select("sm_90a", STREAMED, apart(found, columns, 3), lengths, k)
    assert torch.equal(got[0], wanted(found, lengths, k)[0])

"""``select_topk`` on a real GPU: a thousand rows against a stable sort, the same bits of every
shape and of repeats, graphs, the longest rows.

Variants are compiled when they are asked for, or come from elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.dsa import select_topk
from snapmla.indexer import shapes
from snapmla.runtime import variants
from snapmla.testing import topk_reference
from snapmla.testing.workloads import select_topk as workload

pytestmark = pytest.mark.gpu
K = 2048
NAMES = ("normal", "zeros", "minus_zero", "two_values", "wide", "special")
COLUMNS = (2052, 8192, 16388, 32768, 131072, 262144, 300000)
LENGTHS = (0, 7, K - 1, K, K + 1, 16385, 131072, 300000)  # of rows that have as many columns
GAPS = (0, 4, 20, 64)  # columns between rows: strides of any multiple of 16 bytes


def kernel(shape: shapes.TopkShape) -> variants.Kernel:
    arch = variants.arch_of(torch.device("cuda"))
    return variants.kernel(VariantSpec(op="select_topk", arch=arch, **shape._asdict()), "cuda")


def rows_of(name: str, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, lengths, block table) of eleven ragged rows, NaN behind the lengths."""
    seed = COLUMNS.index(columns)
    lengths = [columns, columns // 2 + 1, columns - 1, *LENGTHS]
    ragged = torch.tensor([min(n, columns) for n in lengths], dtype=torch.int32)
    found = topk_reference.scores(name, len(lengths), columns, seed)
    logits = topk_reference.padded(found, ragged, gap=GAPS[seed % len(GAPS)])
    table = torch.randperm(len(lengths) * (columns // 64 + 1), generator=draw(seed)).int()
    return logits.cuda(), ragged.cuda(), table.view(len(lengths), -1).cuda()


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", NAMES)
def test_stable_sort(name: str, columns: int) -> None:
    """Of every shape that takes the rows, as positions and as slots: 4000 rows and more."""
    logits, lengths, table = rows_of(name, columns)
    for slots in (None, table):
        want, counts = topk_reference.select_topk_reference(
            logits, lengths.cpu(), K, block_table=slots
        )
        for shape in shapes.ALL:
            if shape.columns < columns:
                continue
            given = workload.laid_out(logits, lengths, K, slots)
            kernel(shape)(*given.values())
            assert torch.equal(given["out"].cpu(), want), (shape, slots is None)
            assert torch.equal(given["counts"].cpu(), counts)


@pytest.mark.parametrize("name", NAMES)
def test_every_length_in_one_batch(name: str) -> None:
    """The call that an engine makes: rows of all lengths, in any order, with k from 1 to 2048; each
    has the bits that it has alone."""
    columns, rows = max(LENGTHS), 2 * len(LENGTHS)
    for number, k in enumerate((1, 512, 1000, K)):
        order = torch.randperm(rows, generator=draw(number)) % len(LENGTHS)
        lengths = torch.tensor(LENGTHS, dtype=torch.int32)[order]
        found = topk_reference.scores(name, rows, columns, number)
        logits = topk_reference.padded(found, lengths, gap=GAPS[number])
        want = topk_reference.select_topk_reference(logits, lengths, k)
        there, device_lengths = logits.cuda(), lengths.cuda()
        together = select_topk(there, device_lengths, k)
        for mine, right in zip(together, want, strict=True):
            assert torch.equal(mine.cpu(), right), k
        for row in range(rows):  # by another variant, where fewer columns are given
            most = max(k, int(lengths[row]) + 3) // 4 * 4 + 4
            given = there[row : row + 1, :most], device_lengths[row : row + 1]
            for mine, right in zip(select_topk(*given, k), together, strict=True):
                assert torch.equal(mine[0], right[row]), (k, row)


@pytest.mark.parametrize("columns", [8192, 32768, 131072])
def test_the_same_bits_of_every_configuration(columns: int) -> None:
    """Ties at the k-th place, 20 times, by every shape that takes them, of another grid each."""
    scores = topk_reference.scores("zeros", 1, columns, 5).cuda()
    lengths = torch.full((1,), columns, dtype=torch.int32, device="cuda")
    want, _ = topk_reference.select_topk_reference(scores, lengths.cpu(), K)
    for repeat in range(20):
        rows = 1 + 37 * repeat % 140
        logits = scores.expand(rows, -1).contiguous()
        for shape in shapes.ALL:
            if shape.columns < columns:
                continue
            given = workload.laid_out(logits, lengths.expand(rows).contiguous(), K)
            kernel(shape)(*given.values())
            assert torch.equal(given["out"].cpu(), want.expand(rows, -1)), (shape, rows)


@pytest.mark.parametrize("rows", [1, 64, 300])
def test_the_same_bits_of_every_repeat(rows: int) -> None:
    """The k-th score among zeros; alone, in a batch, in a graph with lengths of its replay."""
    columns = 16384
    scores = topk_reference.scores("zeros", 1, columns, 3).cuda()
    logits = scores.expand(rows, -1).contiguous()
    lengths = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    want, _ = topk_reference.select_topk_reference(scores, lengths[:1].cpu(), K)
    for _ in range(20):
        out, _ = select_topk(logits, lengths, K)
        assert torch.equal(out.cpu(), want.expand(rows, -1))
    graph, counts = torch.cuda.CUDAGraph(), torch.empty_like(lengths)
    with torch.cuda.graph(graph):
        select_topk(logits, lengths, K, out=out, counts=counts)
    lengths.fill_(9001)
    for _ in range(3):
        out.fill_(-7)
        graph.replay()
        want, _ = topk_reference.select_topk_reference(scores, lengths[:1].cpu(), K)
        assert torch.equal(out.cpu(), want.expand(rows, -1))


def test_ragged_prefill() -> None:
    """Rows that begin anywhere, and every k about what matters."""
    columns, rows = 5000, 64
    source = draw(4)
    starts = torch.randint(0, 900, (rows,), generator=source).int()
    lengths = torch.randint(0, columns - 900, (rows,), generator=source).int()
    found = topk_reference.scores("normal", rows, columns, 4)
    logits = topk_reference.padded(found, lengths, starts)
    for k in (1, 31, 512, 1000, 2048):
        want = topk_reference.select_topk_reference(logits, lengths, k, row_starts=starts)
        made = select_topk(logits.cuda(), lengths.cuda(), k, row_starts=starts.cuda())
        for mine, right in zip(made, want, strict=True):
            assert torch.equal(mine.cpu(), right)


def test_the_longest_rows() -> None:
    columns = shapes.MAX_COLUMNS
    lengths = torch.tensor([columns, columns - 5], dtype=torch.int32)
    for name in ("normal", "zeros"):
        logits = topk_reference.scores(name, 2, columns, 6)
        want = topk_reference.select_topk_reference(logits, lengths, K)
        for mine, right in zip(select_topk(logits.cuda(), lengths.cuda(), K), want, strict=True):
            assert torch.equal(mine.cpu(), right)


@pytest.mark.parametrize("columns", [2050, 8190, 16390, 34893, 262142])
def test_rows_of_any_width(columns: int) -> None:
    """Contiguous rows, as vLLM's own test has them, and the same from the second column on."""
    found = topk_reference.scores("zeros", 5, columns, 7)
    lengths = torch.tensor([columns - 1, columns - 1, 2049, 2048, 3], dtype=torch.int32)
    for begin in (0, 1):
        want = topk_reference.select_topk_reference(found[:, begin:], lengths, K)
        made = select_topk(found.cuda()[:, begin:], lengths.cuda(), K)
        for mine, right in zip(made, want, strict=True):
            assert torch.equal(mine.cpu(), right)

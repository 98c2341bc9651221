"""``select_topk`` on a real GPU: a thousand rows against a stable sort, the same bits of every
shape and of repeats, graphs, the longest rows.

Variants are compiled when they are asked for, or come from elsewhere.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla import runtime
from snapmla.dsa import select_topk, shapes
from snapmla.testing import topk_reference
from snapmla.testing.workloads import select_topk as workload

pytestmark = pytest.mark.gpu
K = 2048
NAMES = ("normal", "zeros", "minus_zero", "two_values", "wide", "special")
COLUMNS = (2052, 8192, 16388, 32768, 131072, 262144, 300000)


def kernel(shape: shapes.TopkShape) -> runtime.Kernel:
    arch = runtime.arch_of(torch.device("cuda"))
    return runtime.kernel(VariantSpec(op="select_topk", arch=arch, **shape._asdict()), "cuda")


def rows_of(name: str, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, lengths, block table) of nine ragged rows, NaN behind the lengths."""
    seed = COLUMNS.index(columns)
    lengths = [columns, 0, 7, K - 1, K, K + 1, columns // 2 + 1, columns - 1, 16385]
    ragged = torch.tensor([min(n, columns) for n in lengths], dtype=torch.int32)
    found = topk_reference.scores(name, len(lengths), columns, seed)
    logits = topk_reference.padded(found, ragged, gap=4 * seed)
    width = columns // 64 + 1
    table = torch.randperm(9 * width, generator=torch.Generator().manual_seed(seed)).int()
    return logits.cuda(), ragged.cuda(), table.view(9, -1).cuda()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", NAMES)
def test_stable_sort(name: str, columns: int) -> None:
    """Of every shape that takes the rows, as positions and as slots: 1000 rows and more."""
    logits, lengths, table = rows_of(name, columns)
    for slots in (None, table):
        want, counts = topk_reference.select_topk_reference(
            logits, lengths.cpu(), K, block_table=slots
        )
        for shape in shapes.ALL:
            if shape.columns < columns:
                continue
            given = workload.arguments(logits, lengths, K, slots)
            kernel(shape)(*given.values())
            assert torch.equal(given["out"].cpu(), want), (shape, slots is None)
            assert torch.equal(given["counts"].cpu(), counts)


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
    draw = torch.Generator().manual_seed(4)
    starts = torch.randint(0, 900, (rows,), generator=draw).int()
    lengths = torch.randint(0, columns - 900, (rows,), generator=draw).int()
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

"""``select_topk`` of rows that registers do not hold: the bound of a row's first keys, one sweep over
the rest, what overflows the list; short rows of a cluster, which its first CTA takes alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsl_kernels.families.select_topk import share
from snapmla.testing import topk_reference
from snapmla.testing.workloads import select_topk as workload
from softgpu import Options, using
from tests.support.needs import TARGETS, needs_kernels
from tests.support.rows import device_of, kernel

pytestmark = needs_kernels
PAIR, ONE, EIGHT = (64, 8, 2), (64, 8, 1), (64, 16, 8)  # threads, keys of a thread, CTAs a row
WHOLE = [pytest.param(x, marks=pytest.mark.whole_matrix) for x in (ONE, EIGHT, (128, 32, 1))]
DISTRIBUTIONS = list(topk_reference.DISTRIBUTIONS)


def right(
    target: str,
    shape: tuple[int, int, int],
    logits: Tensor,
    lengths: list[int],
    k: int,
    options: Options | None = None,
    **given: Tensor | int,
) -> None:
    """Raises unless one launch, with the hazard check on, is what a stable sort gives."""
    threads, keys, cluster = shape
    call = kernel(
        target, op="select_topk", threads=threads, keys=keys, cluster=cluster, longer="sampled"
    )
    device, counts = device_of(target), torch.tensor(lengths).int()
    there = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
    made = workload.arguments(logits.to(device), counts.to(device), k, **there)  # type: ignore[arg-type]
    with using(options or Options(hazards="raise")):
        call(*made.values())
    want = topk_reference.select_topk_reference(
        logits, counts, k, block_table=given.get("table"), row_starts=given.get("starts"),
        next_n=given.get("next_n", 1),
    )  # type: ignore[arg-type]  # fmt: skip
    for mine, each in zip((made["out"], made["counts"]), want, strict=True):
        assert torch.equal(mine.cpu(), each)


def apart(rows: Tensor, step: int, begin: int) -> Tensor:
    """The same rows, ``step`` elements apart, the first ``begin`` elements behind 16 bytes."""
    memory = torch.full((begin + len(rows) * step + 4,), torch.inf)
    view = memory.as_strided(rows.shape, (step, 1), begin)
    view.copy_(rows)
    return view


def rows_of(
    shape: tuple[int, int, int], columns: int, everyday: bool = False
) -> tuple[Tensor, list[int]]:
    """(scores, lengths): about what one CTA and the cluster hold, and longer; several kinds."""
    held = shape[0] * shape[1]
    whole = held * shape[2]
    cases = [("normal", columns), ("close", whole), ("special", held - 5), ("normal", 60)]
    if not everyday:
        cases += [
            ("special", whole + 300), ("zeros", whole + 1), ("normal", held + 1),
            ("special", held), ("lowest", whole + 200),
        ]  # fmt: skip
    rows = [topk_reference.scores(name, 1, columns, i)[0] for i, (name, _) in enumerate(cases)]
    lengths = [min(n, columns) for _, n in cases]
    warps = shape[0] // 32 * shape[2]
    misled = topk_reference.misleading(columns, warps, shape[1] // 4)
    return torch.cat([torch.stack(rows), misled]), [*lengths, columns]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [PAIR, *WHOLE])
def test_rows_of_all_lengths(target: str, shape: tuple[int, int, int]) -> None:
    """In one launch, to slots; rows begin anywhere between 16 bytes, infinities around them."""
    columns = shape[0] * shape[1] * shape[2] + 1030 * shape[2]
    columns = min(columns, share(*shape, "sampled") * shape[2]) - 3
    found, lengths = rows_of(shape, columns, everyday=shape == PAIR)
    table = torch.randperm(columns // 64 + 1).int().view(1, -1)
    given = {"table": table, "next_n": len(lengths)}
    right(target, shape, apart(found, columns + 2, 3), lengths, 100, **given)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("shape", [PAIR, ONE, EIGHT])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_every_distribution(shape: tuple[int, int, int], name: str) -> None:
    """Longer than registers hold, shorter, begun anywhere; every k."""
    held = shape[0] * shape[1]
    columns = 2 * held * shape[2] + 77
    lengths = [columns, held * shape[2] + 1, held, 2 * held - 3, 70, 0]
    starts = torch.tensor([0, 3, 1, 2, columns - 70, 5]).int()
    lengths[0] -= 4
    for k in (1, 64, held):
        found = topk_reference.scores(name, len(lengths), columns, k)
        found = topk_reference.padded(found, torch.tensor(lengths), starts)
        right("sm_90a", shape, found, lengths, k, starts=starts)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("seed", range(8))
def test_schedules(seed: int) -> None:
    """The same bits whenever warps run."""
    options = Options(asynchronous=("late", "early")[seed % 2], hazards="raise", seed=seed)
    for shape in (PAIR, ONE):
        found, lengths = rows_of(shape, 2100)
        right("sm_90a", shape, found, lengths, 60, options)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", ["normal", "zeros", "rising"])
def test_what_hosts_take(name: str) -> None:
    """A CTA of the matrix: rows that it keeps, rows that are read once, as many as it holds."""
    lengths = [40000, 32768, 5000] if name == "normal" else [33000]
    columns = 40001
    found = topk_reference.scores(name, len(lengths), columns, 2)
    right("sm_90a", (1024, 32, 1), apart(found, columns, 1), lengths, 2048)
    if name == "normal":
        longest = share(1024, 32, 1, "sampled") - 3
        found = topk_reference.scores(name, 1, longest, 2)
        right("sm_90a", (1024, 32, 1), apart(found, longest, 3), [longest], 2048)

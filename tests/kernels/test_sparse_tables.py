"""Sparse decode of random index tables under the hazard check, over planes and over bytes.

A table is a number: heads, batch, query tokens, pages, lists and their lengths follow from it.  Six
run every day, with ``--whole-matrix``, which is a step of ``make prove``, 200 over planes and over
rows of 656 bytes, 25 over each other format of bytes.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.record_job import (
    GROUP_SUM_ROWS,
    RATIO_ROUNDING,
    SHORT,
    RecordJob,
    RecordShape,
)
from snapmla.testing.record_reference import magnitudes_of, record_decode_reference
from snapmla.testing.sparse_job import INT_MAX, SparseJob, SparseShape
from softgpu import Options, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
TABLES, EVERYDAY = 200, (58, 78, 134)
PAGES = (1, 2, 53, 61, 64, 69, 256)
HEADS = {16: (1, 3, 8, 16, 17, 40), 32: (20, 32, 33), 64: (40, 64, 65, 100, 128)}
TOPK = (1, 5, 17, 63, 64, 65, 100, 128, 190, 257)
CELLS = 12_000  # heads * entries of a call, about: what the software GPU does in a second
NAMES = {
    "fp8": "sparse_decode_etap_r{}_obf16_sm90a",
    "fp8_ds_mla": "sparse_decode_mix16_r{}_obf16_sm90a",
}
BESIDE = ("fp8_v4", "fp8_v41_planar", "fp8_v41_rows", "fp8_nope")
NAMES |= {fmt: f"sparse_decode_mix16_r{{}}_obf16_kv{fmt}_sm90a" for fmt in BESIDE}

# Where a list leaves few tokens an LSE may be all but 0: the sum of an m_ref and the logarithm of a
# mass over scales, numbers of 16 to 32, so two last places of such in fp32.  FlashMLA's gate, 1e-6,
# is made for its own tests, whose lists are long.
LSE_PLACES = 2.0**-18
WHOLE = pytest.mark.whole_matrix


def shape_of(number: int, fmt: str) -> tuple[int, SparseShape]:
    """(row tile, shape) of a table: most calls have one long list or several short ones."""
    draw = random.Random(number)
    tile = draw.choice((16, 64) if number in EVERYDAY else (16, 32, 64))
    heads, topk, ragged = draw.choice(HEADS[tile]), draw.choice(TOPK), draw.random() < 0.4
    room = max(min(CELLS // (heads * topk), 6), 1)
    tokens = draw.randint(1, room)
    begins = None
    if ragged:
        batch = draw.randint(1, tokens + 1)
        begins = (0, *sorted(draw.randint(0, tokens) for _ in range(batch - 1)), tokens)
        s_q = tokens + draw.randint(0, 1)
    else:
        batch = draw.choice([n for n in range(1, tokens + 1) if tokens % n == 0])
        s_q = tokens // batch
    lengths = tuple(
        draw.choice((0 if i else topk, topk, topk, 3 * topk, draw.randint(1, topk)))
        for i in range(batch)
    )
    own = None
    if draw.random() < 0.3:
        own = tuple(draw.randint(0, topk) for _ in range(s_q * (1 if ragged else batch)))
    shape = SparseShape(
        heads, topk, lengths, PAGES[number % len(PAGES)], s_q, begins, own,
        sink=draw.random() < 0.5, parts=draw.randint(1, 4), split_tiles=draw.choice((0, 0, 1, 2)),
        fixed_overhead=draw.choice((0, 1, 6)),
    )  # fmt: skip
    if fmt == "fp8":
        return tile, replace(shape, layout=draw.choice(("split", "paged", "row640", "packed")))
    layout, powers = draw.choice(("split", "padded", "packed")), draw.random() < 0.5
    return tile, RecordShape(**{**vars(shape), "layout": layout, "powers": powers})


def scramble(job: SparseJob, number: int) -> None:
    """Tokens named twice, entries of none anywhere, among them the one just behind the pool."""
    torch.manual_seed(number)
    pool = job.planes[0].shape[0] * job.shape.page_size
    none = torch.tensor([-1, -1, -1, pool, pool + 7, INT_MAX, -(2**31)], dtype=torch.int32)
    for row, count in zip(job.indices, job.shape.counts, strict=True):
        own = row[:count]
        if not count:
            continue
        again = torch.rand(count) < random.choice((0.0, 0.1, 0.5))
        own[again] = own[torch.randint(count, (count,))][again]
        idle = torch.rand(count) < random.choice((0.0, 0.05, 0.3, 0.95))
        own[idle] = none[torch.randint(len(none), (int(idle.sum()),))]


def frames_apart(job: SparseJob, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """``result`` with the truth for LSEs that are off by no more than ``LSE_PLACES``, or, where K
    is rounded and a list leaves few tokens, by what ``record_job`` allows short lists."""
    assert isinstance(job, RecordJob)
    call = job.call()
    truth = record_decode_reference(call)[1].float()
    lse = result[1].transpose(0, 1).flatten(1).clone()
    mine, allowed = lse[:, : truth.shape[1]], torch.full_like(truth, LSE_PLACES)
    if job.spec.row_tile > GROUP_SUM_ROWS and not (job.shape.powers or job.record.powers):
        lists = [row[named] for row, named in map(call.named, range(len(call.q)))]
        few = torch.tensor([len(tokens.unique()) < SHORT for tokens in lists]).expand_as(truth)
        rounding = RATIO_ROUNDING * magnitudes_of(call, few).float()
        allowed = torch.where(few, rounding.clamp_min(LSE_PLACES), allowed)
    right = (mine - truth).abs() <= allowed
    mine[right] = truth[right]
    return result[0], lse.unflatten(1, (result[1].shape[0], -1)).transpose(0, 1)


def cases() -> Iterator[Any]:
    """(number, format), all but a few of the whole matrix."""
    for fmt in NAMES:
        for number in range(0, TABLES, 8 if fmt in BESIDE else 1):
            everyday = number in EVERYDAY and fmt not in BESIDE
            yield (number, fmt) if everyday else pytest.param(number, fmt, marks=WHOLE)


@pytest.mark.parametrize(("number", "fmt"), cases())
def test_any_table(number: int, fmt: str) -> None:
    """Nothing read that no entry names, no hazard, copies landing at random or not, the reference's
    results.  The everyday tables stand for these kernels in test_variants.py's first test."""
    seed = zlib.crc32(f"{number} {fmt}".encode())
    random.seed(seed)
    torch.manual_seed(seed)
    tile, shape = shape_of(number, fmt)
    spec = VariantSpec.from_name(NAMES[fmt].format(tile))
    directory = variants.find_or_build(spec, need_library=False).directory
    kernel = selfcheck.load(spec, directory)
    job = SparseJob(spec, shape) if fmt == "fp8" else RecordJob(spec, shape)
    scramble(job, seed)
    with using(Options(hazards="raise", asynchronous="random", seed=number)):
        result = job.run(kernel)
    errors = job.errors(result if fmt == "fp8" else frames_apart(job, result))
    assert errors.right, f"{shape}: {errors}"
    covered = job.shape.covered
    assert not bool(result[0].flatten(0, 1)[:covered].isnan().any())
    assert bool(result[0].flatten(0, 1)[covered:].isnan().all()), "rows of nobody are left alone"


def test_tables_reach_what_they_are_made_for() -> None:
    """Every page size, row tile and kind of list, in both halves of the everyday sample too."""
    shapes = [shape_of(n, "fp8") for n in range(TABLES)]
    assert {shape.page_size for _, shape in shapes} == set(PAGES)
    assert {(tile, shape.heads) for tile, shape in shapes} == {
        (tile, heads) for tile, some in HEADS.items() for heads in some
    }
    for number in (range(TABLES), EVERYDAY):
        found = [shapes[n][1] for n in number]
        assert any(shape.begins is not None for shape in found)
        assert any(shape.own_lengths is not None for shape in found)
        assert any(0 in shape.lengths for shape in found) and any(s.sink for s in found)
        assert any(max(shape.lengths) > shape.topk for shape in found)
        assert {tile for tile, _ in (shapes[n] for n in number)} >= {16, 64}
    assert any(s.topk > 128 and s.split_tiles == 0 and s.parts > 1 for _, s in shapes)

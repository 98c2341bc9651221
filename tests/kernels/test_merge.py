"""``merge`` against weighted sums in fp64 of the partial rows as they are stored."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.dims import ITEM_WORDS, MERGE, MERGE_CHECKED
from dsl_kernels.spec import VariantSpec
from snapmla.dense.plan_decode import MAX_SLOTS
from snapmla.runtime import variants
from snapmla.testing import partials, selfcheck
from snapmla.testing.record_job import RecordJob, RecordShape
from softgpu import Options, using
from softgpu.machine import Machine
from tests.support.needs import TARGETS, needs_compiler, needs_kernels
from tests.support.rows import DTYPES, device_of, kernel

pytestmark = needs_kernels


def alone(device: torch.device | str) -> Tensor:
    """``units`` of a plan in which every sequence is one."""
    return torch.zeros((0, 2), dtype=torch.int32, device=device)


def merged(
    o: Tensor, lse: Tensor, begin: list[int], rows: int, factor: float, empty: float
) -> list[tuple[Tensor, Tensor] | None]:
    """fp64 oracle: (out (rows, 512), lse (rows,)) for every split batch, else None."""
    decoded = partials.decode(o).double()
    results: list[tuple[Tensor, Tensor] | None] = []
    for x, y in itertools.pairwise(begin):
        if x == y:
            results.append(None)
            continue
        part, logs = decoded[x:y, :rows], lse[x:y, :rows].double()
        logs = torch.where(logs == math.inf, math.nan, logs)  # an infinite weight has no result
        top = torch.where(logs.isnan(), -math.inf, logs).amax(0)
        none = logs.eq(-math.inf).all(0)
        weight = torch.exp2(logs - torch.where(top.isinf(), 0, top))
        total = weight.sum(0)
        out = (weight[..., None] * part).sum(0) / torch.where(none, 1, total)[:, None]
        value = torch.where(none, empty, (top + total.log2()) * factor)
        results.append((out, value))
    return results


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("out_dtype", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("counts", "s_q", "h", "factor", "empty"),
    [
        ([2, 0, 3, 8], 1, 5, math.log(2), -math.inf),
        ([0, 9, 1], 2, 3, 1.0, math.inf),
        ([37], 1, 2, math.log(2), -math.inf),
        ([0, 0], 1, 2, 1.0, 0.0),
    ],
)
def test_merge(
    target: str,
    out_dtype: str,
    counts: list[int],
    s_q: int,
    h: int,
    factor: float,
    empty: float,
) -> None:
    device = device_of(target)
    rows, rows_pad, slots = s_q * h, 8, sum(counts) + 2
    o = torch.randn(slots, rows_pad, 512)
    lse = torch.randn(slots, rows_pad) * 30
    o[:, rows:], lse[:, rows:] = math.nan, math.nan
    o[sum(counts) :], lse[sum(counts) :] = math.nan, math.nan
    lse[0, 0], o[0, 0] = -math.inf, 0  # one split saw nothing
    lse[:, rows - 1], o[:, rows - 1] = -math.inf, 0  # nobody did
    if rows > 4:
        lse[1, 1] = math.nan
        lse[0, 2], o[0, 2] = math.inf, 1
    o = partials.encode(o)
    begin = [0]
    for n in counts:
        begin.append(begin[-1] + n)
    dtype = DTYPES[out_dtype]
    b = len(counts)
    out = torch.full((b, s_q, h, 512), 7.0, dtype=dtype, device=device)
    out_lse = torch.full((b, h, s_q), 7.0, device=device)
    kernel(target, op="merge", out_dtype=out_dtype)(
        o.to(device),
        lse.to(device),
        torch.tensor(begin, dtype=torch.int32, device=device),
        alone(device),
        out,
        out_lse,
        factor,
        empty,
    )
    for i, result in enumerate(merged(o, lse, begin, rows, factor, empty)):
        got, got_lse = out[i].cpu().double().view(rows, 512), out_lse[i].cpu().double().t()
        if result is None:
            assert (got == 7).all() and (got_lse == 7).all()
            continue
        ulp = 2.0**-8 if out_dtype == "bf16" else 2e-6
        torch.testing.assert_close(got, result[0], rtol=ulp, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(
            got_lse.reshape(-1), result[1], rtol=1e-6, atol=2e-6, equal_nan=True
        )
        assert (got[rows - 1] == 0).all() and got_lse.reshape(-1)[rows - 1] == empty


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("counts", [[0, 2, 0, 0, 0, 0, 0, 11, 0], [2, 0, 3, 2, 0, 9, 2, 12, 3]])
def test_merge_units_share_a_cta(target: str, counts: list[int]) -> None:
    """So many units that a CTA owns several, also of several sequences."""
    device, h = device_of(target), 30
    counts = counts * (30 if target == "cuda" else 1)
    b, slots = len(counts), sum(counts)
    begin = [0, *itertools.accumulate(counts)]
    o, lse = partials.encode(torch.randn(slots, 32, 512)), torch.randn(slots, 32)
    out, out_lse = (
        torch.full((b, 1, h, 512), 7.0, device=device),
        torch.zeros(b, h, 1, device=device),
    )
    table = torch.tensor(begin, dtype=torch.int32, device=device)
    kernel(target, op="merge", out_dtype="f32")(
        o.to(device), lse.to(device), table, alone(device), out, out_lse, 1.0, -math.inf
    )
    for i, result in enumerate(merged(o, lse, begin, h, 1.0, -math.inf)):
        if result is None:
            assert (out[i] == 7).all()
            continue
        torch.testing.assert_close(out[i, 0].cpu().double(), result[0], rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(out_lse[i, :, 0].cpu().double(), result[1], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("counts", [[2, 0, 3, 9, 0], [17, 3, 2, 4, 16]])
def test_merge_of_units(target: str, counts: list[int]) -> None:
    """Ragged units of 8 rows: ends of sequences within one, tokens within two, nobody's rows."""
    device, h, tokens = device_of(target), 3, 11
    units = [(0, 15), (8, 15), (15, 18), (18, 30), (26, 30)]  # row 30 on: no sequence's
    begin = [0, *itertools.accumulate(counts)]
    o, lse = partials.encode(torch.randn(begin[-1] + 1, 8, 512)), torch.randn(begin[-1] + 1, 8)
    out = torch.full((1, tokens, h, 512), 7.0, device=device)
    out_lse = torch.full((1, h, tokens), 7.0, device=device)
    i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
    # two units behind the live ones: the capacity, whose entries may be anything
    table, rows = i32([*begin, begin[-1], begin[-1]]), i32([*units, (-5, 2**31 - 1), (99, 0)])
    kernel(target, op="merge", out_dtype="f32")(
        o.to(device), lse.to(device), table, rows, out, out_lse, 1.0, -math.inf
    )
    want, want_lse = torch.full((tokens * h, 512), 7.0).double(), torch.full((tokens * h,), 7.0)
    for (first, end), result in zip(units, merged(o, lse, begin, 8, 1.0, -math.inf), strict=True):
        if result is not None:
            end = min(first + 8, end)
            want[first:end], want_lse[first:end] = (x[: end - first] for x in result)
    got, got_lse = out.cpu().view(-1, 512).double(), out_lse[0].cpu().T.reshape(-1)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-6, atol=2e-6)


@dataclass(frozen=True)
class Behind:
    """Sparse decode without items, so that partial rows are the test's, and merge behind it: more
    units than a wave deals, so CTAs' second turns have the last ones."""

    variant: str
    units = 270

    def run(self, begin: list[int], o: Tensor, lse: Tensor, asked: int) -> tuple[Tensor, Tensor]:
        """(out, lse) of one head, 7 where nothing is written; asked: ``may_split``."""
        spec = VariantSpec.from_name(f"sparse_decode_mix16_{self.variant}_sm90a")
        decode = selfcheck.load(spec, variants.find_or_build(spec, need_library=False).directory)
        job = RecordJob(spec, RecordShape(1, 17, (0,) * self.units, 64, parts=1))
        i32 = lambda x: torch.tensor(x, dtype=torch.int32)
        with using(Options(hazards="raise", seed=3)):
            return job.run(
                decode, out=torch.full((self.units, 1, 1, 512), 7.0, dtype=torch.bfloat16),
                lse=torch.full((self.units, 1, 1), 7.0), o_accum=o, lse_accum=lse,
                split_begin=i32(begin), part_begin=i32([0, 0]),
                work_items=torch.zeros(1, ITEM_WORDS, dtype=torch.int32), may_split=asked,
                lse_factor=1.0,
            )  # fmt: skip


@needs_compiler
def test_merge_behind_sparse_decode_takes_turns() -> None:
    """The variant of its own gives the same bits; rows of units without slots stay."""
    behind, cut = Behind("r16_obf16_kvfp8_v4"), {0: 2, 70: 3, 136: 9, 268: 17, 269: 2}
    begin = [0, *itertools.accumulate(cut.get(i, 0) for i in range(behind.units))]
    o, lse = partials.encode(torch.randn(begin[-1], 1, 512)), torch.randn(begin[-1], 1)
    got, got_lse = behind.run(begin, o, lse, asked=MERGE)
    want, want_lse = torch.full_like(got, 7), torch.full_like(got_lse, 7)
    table = torch.tensor(begin, dtype=torch.int32)
    kernel("sm_90a", op="merge", out_dtype="bf16")(
        o, lse, table, alone("cpu"), want, want_lse, 1.0, -math.inf
    )
    assert torch.equal(got, want) and torch.equal(got_lse, want_lse)
    assert got_lse.ne(7).flatten().nonzero().flatten().tolist() == list(cut)
    for i, result in enumerate(merged(o, lse, begin, 1, 1.0, -math.inf)):
        if result is not None:
            torch.testing.assert_close(got[i, 0].double(), result[0], rtol=2.0**-8, atol=1e-6)


@needs_compiler
def test_merge_behind_sparse_decode_asks_in_each_turn() -> None:
    """Tables from outside that cover no sequence: NaN in all of them, also without any slot."""
    behind = Behind("r16_obf16")
    o, lse = partials.encode(torch.randn(1, 1, 512)), torch.randn(1, 1)
    got, got_lse = behind.run([0] * (behind.units + 1), o, lse, asked=MERGE_CHECKED)
    assert got.isnan().all() and got_lse.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [9, 132, 264])
def test_merge_is_deterministic(slots: int) -> None:
    o = partials.encode(torch.randn(slots, 16, 512, device="cuda"))
    lse = torch.randn(slots, 16, device="cuda")
    begin = torch.tensor([0, slots], dtype=torch.int32, device="cuda")
    run = kernel("cuda", op="merge", out_dtype="f32")
    seen = []
    for _ in range(20):
        out, out_lse = (
            torch.empty(1, 1, 16, 512, device="cuda"),
            torch.empty(1, 16, 1, device="cuda"),
        )
        run(o, lse, begin, alone("cuda"), out, out_lse, 1.0, -math.inf)
        seen.append((out.cpu(), out_lse.cpu()))
    assert all(torch.equal(x[0], seen[0][0]) and torch.equal(x[1], seen[0][1]) for x in seen)


def test_merge_bound_is_the_plans() -> None:
    from dsl_kernels.combine import merge

    assert (merge.CTAS + 1) * MAX_SLOTS < 2**32


def test_merge_finds_the_sequence_of_a_huge_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """8192 sequences of 62 pieces (17 GB of partial results, here one slot seen through stride 0):
    a few CTAs of the grid, which must write rows of their own sequences and of no other."""
    from dsl_kernels.combine import merge

    batch, pieces, ctas = 8192, 62, merge.CTAS // 2
    begin = torch.arange(batch + 1, dtype=torch.int32) * pieces
    starts = [i + i * pieces * ctas // (batch * pieces) for i in range(batch)]
    picked = [0, 1, 4000, 8200, batch + ctas - 1]
    wanted = {bisect.bisect_right(starts, block) - 1 for block in picked}
    monkeypatch.setattr(Machine, "_clusters", lambda self: (len(picked), 1, 1))
    monkeypatch.setattr(Machine, "block_at", lambda self, index, rank=0: (picked[index], 0, 0))
    o, lse = partials.encode(torch.ones(1, 1, 512)), torch.zeros(1, 1)
    out, out_lse = torch.zeros(batch, 1, 1, 512), torch.zeros(batch, 1, 1)
    slots = batch * pieces
    run = kernel("sm_90a", op="merge", out_dtype="f32")
    one = (o.expand(slots, -1, -1), lse.expand(slots, -1))
    run(*one, begin, alone("cpu"), out, out_lse, 1.0, -math.inf)
    written = out.view(batch, -1).ne(0).any(1).nonzero().flatten().tolist()
    assert set(written) == wanted

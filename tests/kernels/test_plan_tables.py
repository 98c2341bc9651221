"""Whatever int32s a plan's tables hold, decode and merge stay inside their arguments and end.

200 random tables run on the software GPU with the hazard check on, a quarter of them where the
whole matrix is not asked for: an access outside of the arguments is a MemoryFault, roles that count
tiles differently are a Deadlock or a hazard, and what lies around the tensors that are written is
compared afterwards.  Two parts that are told to write the same rows may do so in any order: that
race, and no other hazard, is what garbage may cause.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.dims import ITEM_WORDS, PARTIAL_ROW, TOKEN_TILE
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import partials, selfcheck
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import plan_reference
from softgpu import Options, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
FENCE = 1024  # elements before and behind a tensor that is written
LENGTHS = (65, 0, 64)
MORE = (*LENGTHS, 70, 64)  # another step's batch, two sequences larger
PARTS = 2
HEADS = 3  # few CTAs to merge: most of the time is theirs
MOST_INSTRUCTIONS = 2_000_000  # the slowest case needs a third of it
LAST = 2**31 - 1
Tables = tuple[Tensor, Tensor, Tensor]  # work_items, part_begin, split_begin
# units and row_limits of a plan in which every sequence is one unit
ALONE = (torch.zeros((0, 2), dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
NO_OFFSETS = torch.zeros(0, dtype=torch.int32)  # of a call without a witness


class Fenced:
    """A contiguous NaN-filled tensor with known bytes around it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        count = math.prod(shape)
        self.memory = torch.full((count + 2 * FENCE,), 7.0, dtype=dtype)
        self.tensor = self.memory[FENCE : FENCE + count].view(shape)
        self.tensor.fill_(math.nan)

    def intact(self) -> bool:
        return bool((self.memory[:FENCE] == 7).all() and (self.memory[-FENCE:] == 7).all())


class Step:
    """One decode whose plan may be anything."""

    def __init__(self, name: str) -> None:
        self.spec = VariantSpec.from_name(name)
        self.kernel: Any = variants.kernel(self.spec, "cpu")
        self.job = selfcheck.DecodeJob(self.spec, LENGTHS, PARTS, heads=HEADS, s_q=1)
        self.most_tiles = -(-self.job.table.shape[1] * self.spec.page_size // TOKEN_TILE)

    def tables(self, lengths: tuple[int, ...] = LENGTHS) -> Tables:
        """A right plan for these lengths; the item list has room for the most there can be."""
        plan = plan_reference(lengths, PARTS, TOKEN_TILE, 1, queries=self.job.queries)
        tables = PlanTables.of(plan)
        room = torch.zeros(PARTS + len(lengths), ITEM_WORDS, dtype=torch.int32)
        room[: len(plan.work_items)] = tables.work_items
        return room, tables.part_begin, tables.split_begin[: len(LENGTHS) + 1].clone()

    def run(
        self, tables: Tables, merges: bool = True, more: tuple[Tensor, Tensor] = ALONE
    ) -> tuple[Tensor, Tensor]:
        """(out, lse), with everything around them, the workspace and the inputs compared.

        Args:
            more: units, row_limits.
        """
        job, b = self.job, len(LENGTHS)
        rows_pad = job.queries.unit_rows
        out = Fenced((b, job.s_q, job.heads, 512), selfcheck.DTYPES[self.spec.out_dtype])
        lse = Fenced((b, job.heads, job.s_q))
        o_accum = Fenced((2 * PARTS, rows_pad, PARTIAL_ROW), torch.float16)
        lse_accum = Fenced((2 * PARTS, rows_pad))
        before = [t.clone() for t in (*tables, *more)]
        self.kernel(
            job.q.nope_u8, job.q.rope, job.q.row_scale, job.cache.content_u8, job.cache.rope,
            job.cache.scale, job.table, job.seqlens, *tables, *more, NO_OFFSETS, out.tensor,
            lse.tensor, o_accum.tensor, lse_accum.tensor, 0.1, 1, math.log(2), -math.inf,
            int(merges), 0,
        )  # fmt: skip
        assert all(x.intact() for x in (out, lse, o_accum, lse_accum)), "written outside"
        assert all(torch.equal(x, y) for x, y in zip(before, (*tables, *more), strict=True))
        kinds = {h.kind for stats in self.kernel.last_stats for h in stats.hazards}
        assert kinds <= {"global-race"}, kinds
        return out.tensor, lse.tensor


def uniform(step: Step, pick: random.Random) -> Tables:
    """Any int32 at all."""
    tables = step.tables()
    for t in tables:
        t.copy_(torch.tensor([pick.randint(-LAST - 1, LAST) for _ in range(t.numel())]).view_as(t))
    return tables


def small(step: Step, pick: random.Random) -> Tables:
    """Numbers in and around the legal ranges, the extremes of int32 among them."""
    items, part_begin, split_begin = step.tables()
    odd = (-LAST - 1, -1, LAST)

    def fill(t: Tensor, most: int) -> None:
        values = [
            pick.choice(odd) if pick.random() < 0.1 else pick.randint(-1, most + 1)
            for _ in range(t.numel())
        ]
        t.copy_(torch.tensor(values).view_as(t))

    rows, tokens = HEADS * len(LENGTHS), step.most_tiles * TOKEN_TILE
    for column, most in enumerate(
        (len(LENGTHS), step.most_tiles, step.most_tiles, 2 * PARTS, rows, rows, tokens, 0)
    ):
        fill(items[:, column], most)
    fill(part_begin, len(items))
    fill(split_begin, 2 * PARTS)
    return items, part_begin, split_begin


def corrupted(step: Step, pick: random.Random) -> Tables:
    """A right plan with one wrong entry."""
    tables = step.tables()
    flat = pick.choice(tables).view(-1)
    wrong = pick.choice((-LAST - 1, -1, 1, 2, 3, 5, 1000, 2**20, LAST))
    flat[pick.randrange(len(flat))] = wrong
    return tables


def larger_batch(step: Step, pick: random.Random) -> Tables:
    """Tables of a step with more sequences, other lengths among them."""
    return step.tables(MORE if pick.random() < 0.5 else (*MORE[::-1], 500))


def permuted(step: Step, pick: random.Random) -> Tables:
    """A right plan's items in another order."""
    items, part_begin, split_begin = step.tables()
    order = pick.sample(range(len(items)), len(items))
    return items[order].contiguous(), part_begin, split_begin


KINDS: tuple[Callable[[Step, random.Random], Tables], ...] = (
    uniform, small, corrupted, larger_batch, permuted,
)  # fmt: skip
EVERYDAY = ("decode_etap_r16_p64_obf16_sm90a", "decode_etap_r128_p64_obf16_sm90a")
CASES = {
    "decode_etap_r16_p64_obf16_sm90a": 100,
    "decode_etap_r64_p16_obf16_sm90a": 12,
    "decode_etap_r128_p64_obf16_sm90a": 8,
    "decode_dual_wg_r64_p64_of32_sm90a": 12,
    "decode_dual_wg_r128_p64_obf16_sm90a": 8,
}
MERGES = 60


def any_ints(pick: random.Random, *shape: int) -> Tensor:
    """Small numbers and the extremes of int32."""
    values = [pick.choice((-LAST - 1, -1, 0, 2, 5, 64, LAST)) for _ in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.int32).view(shape)


def checked(case: int) -> Options:
    """Hazards collected; every eighth case under an adversarial schedule, which takes longer."""
    return Options(
        asynchronous="late", hazards="collect", seed=None if case % 8 else case,
        max_instructions=MOST_INSTRUCTIONS,
    )  # fmt: skip


NAMES = [pytest.param(n, marks=[] if n in EVERYDAY else [pytest.mark.whole_matrix]) for n in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_random_tables(name: str, pytestconfig: pytest.Config) -> None:
    step, pick = Step(name), random.Random(name)
    cases = CASES[name] if pytestconfig.getoption("--whole-matrix") else CASES[name] // 4
    for case in range(cases):
        tables = KINDS[case % len(KINDS)](step, pick)
        more = (any_ints(pick, len(LENGTHS), 2), any_ints(pick, len(LENGTHS)))
        with using(checked(case)):
            step.run(tables, merges=case % 8 == 7, more=more if case % 3 else ALONE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("planned", [LENGTHS, MORE, (65, 0, 1000)], ids=["own", "more", "longer"])
def test_tables_of_another_step_give_what_both_have(name: str, planned: tuple[int, ...]) -> None:
    """Items of sequences that are not there are left out; of tiles behind the block table's end a
    slot says that it saw nothing."""
    step = Step(name)
    tables = step.tables(planned)
    assert int(tables[0][:, 0].max()) == len(planned) - 1
    assert (int(tables[0][:, 1].max()) > step.most_tiles) == (planned[2] == 1000)
    with using(Options(hazards="raise")):
        out, lse = step.run(tables)
    errors = selfcheck.decode_errors(
        out, lse, step.job.q, step.job.cache, step.job.table, step.job.seqlens, 0.1
    )
    assert errors.right, str(errors)


def random_splits(pick: random.Random, kind: int, b: int, slots: int) -> list[int]:
    """A split_begin of ``b`` sequences: right but for one entry, near the range, or anything."""
    if kind == 0:
        begin = [0, *sorted(pick.randint(0, slots) for _ in range(b))]
        begin[pick.randrange(b + 1)] = pick.choice((-LAST - 1, -1, 3, slots + 1, 2**20, LAST))
        return begin
    if kind == 1:
        return [pick.randint(-2, slots + 2) for _ in range(b + 1)]
    return [pick.randint(-LAST - 1, LAST) for _ in range(b + 1)]


def test_random_tables_of_merge() -> None:
    """Up to four slots a sequence, and more than a lane holds."""
    kernel = variants.kernel(VariantSpec(op="merge", out_dtype="bf16", arch="sm_90a"), "cpu")
    pick = random.Random(0)
    for case in range(MERGES):
        b, slots = pick.choice(((3, 4), (2, 12), (5, 20)))
        begin = torch.tensor(random_splits(pick, case % 3, b, slots), dtype=torch.int32)
        o, lse = partials.encode(torch.randn(slots, 16, 512)), torch.randn(slots, 16)
        out, out_lse = Fenced((b, 1, 1, 512), torch.bfloat16), Fenced((b, 1, 1))
        units = any_ints(pick, b, 2) if case % 2 else ALONE[0]
        with using(checked(case)):
            kernel(o, lse, begin, units, out.tensor, out_lse.tensor, 1.0, -math.inf)
        assert out.intact() and out_lse.intact(), begin.tolist()


def test_two_hundred_cases() -> None:
    assert sum(CASES.values()) + MERGES == 200

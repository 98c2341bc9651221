"""SM100's sparse decode on the software GPU: schedules, copies, planted bugs, the public API.

The problems that it shares with SM90's are in test_sparse_decode.py.  ``make test`` takes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dsl_kernels
import snapmla
from snapmla.sparse.plan import SparseOptions, plan_sparse
from snapmla.testing.sparse_job import LAYOUTS, SparseJob, SparseShape
from snapmla.testing.sparse_reference import sparse_decode_reference
from softgpu import Hazard, Options, SoftGpuError, memory, mutate, using
from softgpu.ptx import Instr
from tests.kernels.test_sparse_decode import BLACKWELL, GATHER4, kernel_of
from tests.support.needs import needs_compiler
from tests.support.on_blackwell import blackwell
from tests.support.planting import granted, line_of

pytestmark = needs_compiler
F32 = BLACKWELL.replace("obf16", "of32")
# A list in two pieces, an empty one, idle entries, sinks, pages of another size than a tile.
SMALL = SparseShape(
    3, 100, (100, 0), 53, layout="packed", sink=True, style="swings", fixed_overhead=0
)
SCHEDULES = [("early", None), ("late", None), ("random", 1)]
MORE = [(mode, seed) for mode in ("early", "late", "random") for seed in (2, 3, 4, 5)]


def right_in(
    shape: SparseShape, schedules: Sequence[tuple[str, int | None]], name: str = BLACKWELL
) -> None:
    """Right and clean, with the same bits in every schedule."""
    spec, kernel = kernel_of(name)
    job, found = SparseJob(spec, shape), []
    for mode, seed in schedules:
        with using(Options(asynchronous=mode, seed=seed, hazards="raise")):
            found.append(job.run(kernel))
    errors = job.errors(found[0])
    assert errors.right, f"{shape}: {errors}"
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])


def test_right_and_clean_in_three_schedules() -> None:
    right_in(SMALL, SCHEDULES)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", [BLACKWELL, F32, GATHER4])
@pytest.mark.parametrize("heads", [64, 100])
def test_right_and_clean_in_more_schedules(heads: int, name: str) -> None:
    """Lists without tokens in a row, more than the ring has stages, and a longer one than it."""
    lengths = (*6 * (0,), 400, 70, 0, 1)
    right_in(SparseShape(heads, 400, lengths, 2, layout="row640", style="equal"), MORE, name)


# --------------------------------------------------------------------------------------- copies


@pytest.mark.whole_matrix
@pytest.mark.parametrize("heads", [20, 64, 100])
@pytest.mark.parametrize("page_size", [1, 2, 53, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_named_token_is_copied_once_a_row_block(
    layout: str, page_size: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 640 bytes and its scale; nothing of a token that no entry names, and nothing else."""
    spec, kernel = kernel_of(BLACKWELL)
    shape = SparseShape(heads, 130, (130, 70), page_size, s_q=2, layout=layout, parts=3)
    job, times = SparseJob(spec, shape), dict[int, int]()
    read = memory.GlobalMemory.read

    def counted(self: Any, address: int, nbytes: int, what: str = "load") -> Any:
        if what == "cp.async":
            assert nbytes == (4 if address in scales else 16)
            times[address] = times.get(address, 0) + 1
        return read(self, address, nbytes, what)

    content, rope, scale = job.planes
    scales = {
        scale[token // page_size, token % page_size].data_ptr() for token in range(scale.numel())
    }
    monkeypatch.setattr(memory.GlobalMemory, "read", counted)
    assert job.errors(job.run(kernel)).right
    pool, blocks = scale.numel(), -(-heads // spec.row_tile)
    named = [row[:n] for row, n in zip(job.indices, shape.counts, strict=True)]
    tokens = torch.cat(named)
    tokens = tokens[(tokens >= 0) & (tokens < pool)]
    want = blocks * torch.bincount(tokens.long(), minlength=pool)
    assert want.unique().tolist() == [0, blocks]
    for token in range(pool):
        page, at = divmod(token, page_size)
        for plane in (content, rope):
            first = plane[page, at].data_ptr()
            chunks = range(first, first + plane.shape[-1] * plane.element_size(), 16)
            assert {times.pop(x, 0) for x in chunks} == {int(want[token])}, token
        assert times.pop(scale[page, at].data_ptr(), 0) == want[token], token
    assert not times, "bytes of no token"


# ---------------------------------------------------------------------------------- planted bugs

SOURCES = Path(dsl_kernels.__file__).parent
# Empty lists put Q tiles alone round the ring, a long one fills it.
WORK = SparseShape(5, 400, (*6 * (0,), 400, 70), 64, style="swings", parts=1)


def place(file: str, text: str, after: str = "") -> str:
    """``rings.py:12``: the first line of a file of the kernels that has ``text``."""
    return line_of(SOURCES / file, text, after)


def arrives_at_once(ins: Instr) -> str:
    """In place of the arrival of copies: that of the thread, whatever it still copies."""
    return f"mbarrier.arrive.shared.b64 _, {ins.text.rpartition(' ')[2].rstrip(';')}"


def none(ins: Instr) -> str:
    return ""


LOADS, WS, ROLE = "sm100/fp8/sparse_loads.py", "sm100/fp8/ws.py", "sm100/fp8/softmax_role.py"
GATHER, PROMOTION = "load/gather.py", "sm100/fp8/promotion.py"
# Bug: opcode, (file, text of its line, behind which text), what stands there, kind of hazard.
BUGS: dict[str, tuple[str, tuple[str, ...], Callable[[Instr], str], str]] = {
    "the announcer has no proxy fence": (
        "fence.proxy.async", (LOADS, "fence_proxy("), none, "missing-proxy-fence",
    ),
    "the announcer does not wait": (
        "mbarrier.try_wait", (LOADS, "landed.wait_full", "def announce"), granted,
        "read-before-complete",
    ),
    "Q's tile is not waited for": (
        "mbarrier.try_wait", (LOADS, "k_pipe.consumer_wait"), granted, "read-before-complete",
    ),
    "rows and scales arrive before their copies": (
        "cp.async.mbarrier.arrive", (GATHER, "arrive_landed(", "self._copy("), arrives_at_once,
        "read-before-complete",
    ),
    "P is stored before P.V has read what was there": (
        "mbarrier.try_wait", (ROLE, "self.rings.p.wait_empty", "def hand_over"), granted,
        "overwrite-in-use",
    ),
    "S is overwritten before it is read": (
        "mbarrier.try_wait", (WS, "self.rings.s.wait_empty"), granted, "overwrite-in-use",
    ),
    "O is rescaled and added to before X is there": (
        "mbarrier.try_wait", (PROMOTION, "self.rings.x.wait_full"), granted,
        "read-before-complete",
    ),
}  # fmt: skip


@pytest.mark.whole_matrix
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_named(bug: str) -> None:
    """Every schedule notices, and some name it; others are faults and hangs that follow from it."""
    opcode, where, change, kind = BUGS[bug]
    spec, kernel = kernel_of(BLACKWELL)
    found = mutate.matching(kernel.program(kernel.entry), opcode, place(*where))
    assert found, f"no {opcode} at {place(*where)}"
    job, said = SparseJob(spec, WORK), []
    for mode, seed in (("late", None), ("early", None), *(("random", n) for n in range(4))):
        options = Options(asynchronous=mode, seed=seed, hazards="raise")
        changes = {ins.pc: change(ins) for ins in found}
        with (
            mutate.planted(kernel, kernel.entry, changes),
            using(options),
            pytest.raises(SoftGpuError) as error,
        ):
            job.run(kernel)
        said.append(error.value.kind if isinstance(error.value, Hazard) else "fault")
    assert kind in said, said


# A stretch of a warp that takes long, in front of the statement that stood there.
LATE = (
    "{ .reg .b32 left; .reg .pred more; mov.u32 left, 8000; LATE: sub.u32 left, left, 1; "
    "setp.ne.u32 more, left, 0; @more bra LATE; } " + mutate.OLD
)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("waits", [True, False])
def test_q_s_stage_is_waited_for(waits: bool) -> None:
    """A gather warp that is late for Q's stages, of more lists of none in a row than the ring has
    stages: others wait for it, or are a phase off."""
    spec, kernel = kernel_of(BLACKWELL)
    program = kernel.program(kernel.entry)
    [wait] = mutate.matching(
        program, "mbarrier.try_wait", place(LOADS, "landed.wait_full", "def wait_q")
    )
    _, last = mutate.matching(
        program, "cp.async.mbarrier.arrive", place(GATHER, "arrive_landed(", "def _fill")
    )
    changes = {last.pc: LATE} if waits else {last.pc: LATE, wait.pc: granted(wait)}
    job = SparseJob(spec, SparseShape(5, 64, (*12 * (0,), 64), 64, parts=1))
    with mutate.planted(kernel, kernel.entry, changes), using(Options(hazards="raise")):
        if waits:
            assert job.errors(job.run(kernel)).right
            return
        with pytest.raises(SoftGpuError):
            job.run(kernel)


# ------------------------------------------------------------------------------------ public API


class Step:
    """One step over a cache of 256 tokens, entries of no token among the others."""

    def __init__(self, *rows: int, topk: int) -> None:
        pages, p = 4, 64
        self.cache = snapmla.PagedKVCache.allocate(pages, p, "paged", "cpu")
        slots = torch.arange(pages * p, dtype=torch.int32)
        given = torch.randn(len(slots), 576).bfloat16()
        content, rope = (x.contiguous() for x in given.split([512, 64], -1))
        snapmla.append_kv(self.cache, content, rope, slots)
        q = torch.randn(*rows, 576).bfloat16()
        self.q = snapmla.quantize_q(*(x.contiguous() for x in q.split([512, 64], -1)))
        self.indices = torch.randint(pages * p, (*rows[:-1], topk), dtype=torch.int32)
        none = torch.rand(self.indices.shape) < 0.2
        self.indices[none] = torch.tensor([-1, 2**31 - 1]).int()[torch.randint(2, none.shape)][none]

    def truth(self, counts: list[int], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(out (tokens, heads, 512), LSE (heads, tokens)) in fp64."""
        heads, q, cache = self.q.rope.shape[-2], self.q, self.cache
        assert cache.scale is not None
        return sparse_decode_reference(
            q.nope.reshape(-1, heads, 512), q.rope.reshape(-1, heads, 64),
            q.row_scale.reshape(-1, heads), cache.content, cache.rope, cache.scale,
            self.indices.flatten(0, -2), torch.tensor(counts), 576**-0.5, **more,
        )  # fmt: skip

    def call(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls ``snapmla.decode``; hazards are raised."""
        given = {"softmax_scale": 576**-0.5, "out_dtype": torch.float32, **more}
        with using(Options(hazards="raise")):
            return snapmla.decode(self.q, self.cache, indices=self.indices, **given)


def near(got: torch.Tensor, want: torch.Tensor, allowed: float) -> bool:
    return float((got - want).norm()) <= allowed * float(want.norm())


@pytest.mark.whole_matrix
def test_sequences_of_query_tokens() -> None:
    """A plan of the host's, splits, sinks, LSE to base 2; and without a plan."""
    sink = torch.tensor([0.5, -math.inf, math.inf, 3.0, -2.0])
    length = torch.tensor([150, 0, 70], dtype=torch.int32)
    with blackwell():
        step = Step(3, 2, 5, topk=150)
        plan = snapmla.plan_sparse_decode(5, 2, topk=150, topk_length=length, num_parts=4)
        assert (plan.pipeline, plan.row_tile) == ("ws", 64)
        given = {"topk_length": length, "attn_sink": sink, "lse_base": "2", "empty_lse": "+inf"}
        out, lse = step.call(plan=plan, **given)
        alone = step.call(pipeline="ws", **given)
        with pytest.raises(ValueError, match="^pipeline: expected one of 'ws'"):
            step.call(pipeline="etap", **given)
    want, want_lse = step.truth(
        [150, 150, 0, 0, 70, 70], attn_sink=sink, lse_base="2", empty_lse="+inf"
    )
    for got, found in ((out, lse), alone):
        assert near(got.flatten(0, 1), want, 3e-2)  # e4m3 of P
        found = found.transpose(0, 1).flatten(1)
        empty = torch.isposinf(want_lse)
        assert torch.isposinf(found[empty]).all()
        assert float((found - want_lse)[~empty].abs().max()) < 1e-4


@pytest.mark.whole_matrix
def test_ragged_queries_and_their_witness() -> None:
    """Offsets given to the call: what the plan did not know is NaN; rows of none stay."""
    planned, own = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 4, 6], [0, 3, 4, 6]))
    length = torch.tensor([80, 64, 3], dtype=torch.int32)
    with blackwell():
        step = Step(7, 5, topk=80)
        plan = snapmla.plan_sparse_decode(
            5, topk=80, topk_length=length, cu_seqlens_q=planned, total_q=7
        )
        given = {"topk_length": length, "plan": plan}
        fresh, lse = step.call(out=torch.full((7, 5, 512), 9.0), **given)
        same, same_lse = step.call(cu_seqlens_q=planned, **given)
        moved, moved_lse = step.call(cu_seqlens_q=own, **given)
        longer = torch.tensor([80, 64, 70], dtype=torch.int32)
        stale, _ = step.call(cu_seqlens_q=planned, topk_length=longer, plan=plan)
    want, want_lse = step.truth([80, 64, 64, 64, 3, 3, 0])
    assert near(fresh[:6], want[:6], 3e-2) and bool((fresh[6] == 9).all())
    assert float((lse[:, :6] - want_lse[:, :6]).abs().max()) < 1e-4
    assert torch.equal(same[:6], fresh[:6]) and torch.equal(same_lse[:, :6], lse[:, :6])
    assert bool(moved[:3].isnan().all() & moved_lse[:, :3].isnan().all())
    assert torch.equal(moved[3:6], fresh[3:6]) and torch.equal(moved_lse[:, 3:6], lse[:, 3:6])
    assert bool(stale[4:6].isnan().all()) and torch.equal(stale[:4], fresh[:4])


@pytest.mark.whole_matrix
def test_lengths_of_query_tokens_given_to_the_call() -> None:
    """``row_seqlens`` of the call: rows that see more than was planned are NaN."""
    limits, own, more = (
        torch.tensor(x, dtype=torch.int32) for x in ([[9], [70]], [[1], [30]], [[9], [140]])
    )
    length = torch.tensor([150, 150], dtype=torch.int32)
    with blackwell():
        step = Step(2, 1, 4, topk=150)
        plan = plan_sparse(
            SparseOptions(num_heads=4, num_parts=1), 150, 1, length, row_lengths=limits
        )
        given = {"topk_length": length, "plan": plan}
        fresh, _ = step.call(**given)
        fewer, _ = step.call(row_seqlens=own, **given)
        void, _ = step.call(row_seqlens=more, **given)
    assert near(fresh.flatten(0, 1), step.truth([9, 70])[0], 3e-2)
    assert near(fewer.flatten(0, 1), step.truth([1, 30])[0], 3e-2)
    assert torch.equal(void[0], fresh[0]) and bool(void[1].isnan().all())


@pytest.mark.whole_matrix
def test_a_prompt_over_the_cache() -> None:
    """``sparse_prefill`` over an FP8 cache is a plan of the same kernel."""
    with blackwell():
        step = Step(5, 4, topk=70)
        out, _, lse = snapmla.sparse_prefill(
            step.q, step.cache, step.indices.unsqueeze(1), softmax_scale=576**-0.5
        )
    want, want_lse = step.truth([70] * 5)
    assert near(out.float(), want, 3e-2)
    assert float((lse - want_lse.T).abs().max()) < 1e-4


# ------------------------------------------------------------------------------------------ CTAs


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", [BLACKWELL, GATHER4])
def test_bits_do_not_follow_from_ctas(name: str) -> None:
    """Pieces of two tiles, dealt to one CTA, to two and to seven, in schedules of their own."""
    spec, kernel = kernel_of(name)
    shape = SparseShape(9, 300, (300, 130, 0, 211), 53, split_tiles=2, parts=1, sink=True)
    job, found = SparseJob(spec, shape), []
    same = {name: job.arguments()[name] for name in ("q_nope", "q_rope", "q_scale", "attn_sink")}
    same |= dict(zip(("content", "rope", "scale"), job.planes, strict=True))
    for ctas in (1, 2, 7):
        other = SparseJob(spec, replace(shape, parts=ctas))
        assert other.plan.split_begin[-1] > 0 and len(other.plan.part_begin) == ctas + 1
        with using(mutate.schedule(ctas)):
            found.append(other.run(kernel, indices=job.indices, **same))
    assert job.errors(found[0]).right
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])

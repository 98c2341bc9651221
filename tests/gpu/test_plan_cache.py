"""Plans of a ``PlanCache`` under CUDA graphs, on a real GPU.

A hundred shapes are captured over one cache that keeps few unpinned plans; whatever was given up
leaves its memory to others, which fill it with NaN.  A replay that read a plan that is gone, or one
of another shape, would be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

import snapmla
from snapmla.dense import TENSORS
from snapmla.testing import selfcheck

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SCALE = 192**-0.5
HEADS, PAGE, WIDTH, BATCH = 16, 64, 16, 50
CAPACITY = PAGE * WIDTH


@dataclass
class Runner:
    """What an engine's steps of all shapes share: KV cache, plans, and the scheduler's buffers."""

    pool: snapmla.PagedKVCache
    table: torch.Tensor
    lengths: torch.Tensor
    plans: snapmla.PlanCache

    @classmethod
    def make(cls, capacity: int) -> Runner:
        torch.manual_seed(0)
        pool = snapmla.PagedKVCache.allocate(BATCH * WIDTH, PAGE, device=DEVICE)
        tokens = torch.randn(pool.num_slots, 576, device=DEVICE).bfloat16()
        every = torch.arange(pool.num_slots, device=DEVICE)
        snapmla.append_kv(pool, tokens[:, :512], tokens[:, 512:], every)
        return cls(
            pool,
            torch.arange(BATCH * WIDTH, dtype=torch.int32, device=DEVICE).view(BATCH, WIDTH),
            torch.full((BATCH,), CAPACITY, dtype=torch.int32, device=DEVICE),
            snapmla.PlanCache(HEADS, page_size=PAGE, device=DEVICE, capacity=capacity),
        )

    def new_lengths(self, generator: torch.Generator) -> None:
        """Lengths of all sizes, empty sequences among them."""
        new = (torch.rand(BATCH, generator=generator) ** 2 * (CAPACITY + 1)).int()
        self.lengths.copy_(torch.where(new % 5 == 0, 0, new))


class Captured:
    """A step of one shape as a graph; it keeps what the graph reads and writes."""

    def __init__(self, runner: Runner, batch: int, s_q: int) -> None:
        self.runner, self.s_q = runner, s_q
        self.lengths, self.table = runner.lengths[:batch], runner.table[:batch]
        q = torch.randn(batch, s_q, HEADS, 576, device=DEVICE).bfloat16()
        self.q = snapmla.quantize_q(q[..., :512], q[..., 512:])
        self.out = torch.empty(batch, s_q, HEADS, 512, dtype=torch.bfloat16, device=DEVICE)
        self.lse = torch.empty(batch, HEADS, s_q, device=DEVICE)
        self.graph = torch.cuda.CUDAGraph()

    def plan(self, *, pin: bool = False) -> snapmla.DecodePlan:
        return self.runner.plans.get(self.lengths, self.s_q, max_pages=WIDTH, pin=pin)

    def decode(self, plan: snapmla.DecodePlan) -> None:
        snapmla.decode(
            self.q, self.runner.pool, self.table, self.lengths, softmax_scale=SCALE, plan=plan,
            out=self.out, lse=self.lse,
        )  # fmt: skip

    def capture(self, call: Callable[[], None]) -> None:
        """As ``torch.cuda.graph``, without its collecting of garbage, a hundred times."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.graph.capture_begin()
            try:
                call()
            finally:
                self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)

    def assert_right(self, what: str) -> None:
        errors = selfcheck.decode_errors(
            self.out, self.lse, self.q, self.runner.pool, self.table, self.lengths, SCALE,
            heads=[0, HEADS - 1],
        )  # fmt: skip
        assert errors.right, f"{what}, b {len(self.lengths)}, s_q {self.s_q}: {errors}"

    def replay(self) -> None:
        """Into results that are NaN."""
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.graph.replay()


def poison() -> None:
    """What nobody holds any more becomes NaN bytes, in all blocks that would be given again."""
    torch.cuda.synchronize()
    sizes = [1 << n for n in range(9, 20)]
    taken = [torch.full((n,), 0xFF, dtype=torch.uint8, device=DEVICE) for n in sizes * 20]
    del taken
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def warm_up_and_capture(step: Captured, update: str) -> list[int]:
    """Returns where the plan lies; nobody but the cache keeps it."""
    plan = step.plan(pin=update == "before")
    step.decode(plan)
    step.capture(lambda: step.decode(plan if update == "before" else step.plan()))
    return [getattr(plan, name).data_ptr() for name in TENSORS]


SHAPES = [(b, s_q) for b in range(1, BATCH + 1) for s_q in (1, 2)]


@pytest.fixture
def runner() -> Iterator[Runner]:
    yield Runner.make(capacity=4)
    torch.cuda.synchronize()


@pytest.mark.parametrize("update", ["captured", "before"])
def test_a_hundred_shapes_and_the_first_again(runner: Runner, update: str) -> None:
    """Updates as the graphs' first node, or before each replay, as engines do either."""
    steps, places = [], []
    for shape in SHAPES:
        steps.append(Captured(runner, *shape))
        places.append(warm_up_and_capture(steps[-1], update))
    assert runner.plans.stats()[:2] == (100, 100)
    for batch in range(BATCH, 0, -5):  # other shapes come and go
        lengths = runner.lengths[:batch]
        for width in (WIDTH + 1, WIDTH + 2):
            runner.plans.get(lengths, 1, max_pages=width).o_accum.fill_(float("nan"))
    assert runner.plans.stats()[:2] == (104, 100)
    poison()

    generator = torch.Generator().manual_seed(1)
    for number in (0, 99, 0, 57, 98, 1, 0):
        runner.new_lengths(generator)
        step = steps[number]
        if update == "before":
            step.plan()
        step.replay()
        step.assert_right(f"shape {number}")
    for step, place in zip(steps, places):
        assert [getattr(step.plan(), name).data_ptr() for name in TENSORS] == place
    assert len({step.plan().o_accum.untyped_storage().data_ptr() for step in steps}) <= 2


def test_a_new_shape_under_capture_is_refused(runner: Runner) -> None:
    """In one sentence, and the capture goes on with a shape that is there."""
    step, other = Captured(runner, 3, 1), Captured(runner, 5, 1)
    step.decode(step.plan())

    def work() -> None:
        with pytest.raises(ValueError, match=r"PlanCache.get: .*captured, got b = 5, s_q = 1"):
            other.plan()
        step.decode(step.plan())

    step.capture(work)
    assert runner.plans.stats()[:2] == (1, 1)
    runner.new_lengths(torch.Generator().manual_seed(2))
    step.replay()
    step.assert_right("after a refusal")


def test_a_hit_neither_waits_nor_allocates(runner: Runner) -> None:
    step = Captured(runner, 7, 1)
    step.plan()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for pin in (False, True, False):
            step.plan(pin=pin)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

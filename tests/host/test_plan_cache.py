"""Plans by shape of step: what is kept and what given up, over which memory, under what.

Where results or tables count, the compiled kernels run on the software GPU; the bookkeeping runs
with kernels that do nothing.  Graphs: tests/gpu/test_plan_cache.py.
"""

from __future__ import annotations

import copy
import enum
import itertools
import math
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import snapmla
from snapmla import PlanCache
from snapmla.dense import STATIC, TENSORS
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from tests.support.needs import needs_compiler

HEADS, PAGE, WIDTH = 16, 64, 3
SCALE = 192**-0.5
SPLITTING = {"num_parts": 2, "fixed_overhead": 0}  # so that a sequence of two tiles is split


def lengths(batch: int, tokens: int = 100) -> torch.Tensor:
    return torch.full((batch,), tokens, dtype=torch.int32)


def plan_cache(**options: Any) -> PlanCache:
    return PlanCache(HEADS, **{"page_size": PAGE, "device": "cpu", **options})


def get(cache: PlanCache, batch: int, s_q: int = 1, **options: Any) -> snapmla.DecodePlan:
    return cache.get(lengths(batch), s_q, **{"max_pages": WIDTH, **options})


def addresses(plan: snapmla.DecodePlan) -> list[int]:
    return [getattr(plan, name).data_ptr() for name in TENSORS]


def storage(plan: snapmla.DecodePlan) -> int:
    """Which workspace a plan is on."""
    return plan.o_accum.untyped_storage().data_ptr()


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels do nothing."""
    variants.forget()
    monkeypatch.setattr(variants, "kernel", lambda spec, device_type: lambda *arguments: None)
    yield
    variants.forget()


# ---------------------------------------------------------------------------- right plans


@needs_compiler
def test_the_first_of_a_hundred_shapes() -> None:
    """Pinned, it stays where it was, and what is computed with it stays right."""
    pool, table, long = selfcheck.filled_cache((130,), PAGE)
    table = table[:, :WIDTH].contiguous()
    q = selfcheck.sample_query(1, 1, HEADS)
    cache = plan_cache(capacity=5, **SPLITTING)

    def assert_right(now: torch.Tensor, plan: snapmla.DecodePlan) -> None:
        out, lse = snapmla.decode(q, pool, table, now, softmax_scale=SCALE, plan=plan)
        errors = selfcheck.decode_errors(out, lse, q, pool, table, now, SCALE)
        assert errors.right, str(errors)

    first = cache.get(lengths(1, 1), 1, max_pages=WIDTH, pin=True)
    place = addresses(first)
    shapes = [(b, s_q) for b in range(1, 51) for s_q in (1, 2)][1:]
    for b, s_q in shapes:
        get(cache, b, s_q).o_accum.fill_(math.nan)
    assert cache.stats()[:2] == (6, 1)
    assert cache.get(long, 1, max_pages=WIDTH) is first
    assert addresses(first) == place and int(first.split_begin[-1]) == 2
    assert_right(long, first)
    assert get(cache, 50, 2) is not None and cache.stats()[:2] == (6, 1)


STEPS: dict[str, dict[str, Any]] = {
    "even": {"s_q": 2},
    "ragged": {"total_q": 9, "cu_seqlens_q": torch.tensor([0, 3, 3, 7], dtype=torch.int32)},
    "limited": {"s_q": 2, "row_seqlens": torch.tensor([[3, 4], [60, 61], [9, 1]]).int()},
    "ragged-limited": {
        "total_q": 4, "cu_seqlens_q": torch.tensor([0, 3, 3, 4], dtype=torch.int32),
        "row_seqlens": torch.tensor([1, 2, 3, 99]).int(),
    },
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "all": {
        "causal": False, "num_parts": 3, "pipeline": "etap", "row_tile": 32,
        "row_blocks": "in_step", "fixed_overhead": 2, "fixed_split_tokens": 128,
        "check_stale": True,
    },
    "accurate": {"accuracy": "high", "row_blocks": "balanced"},
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("options", OPTIONS)
def test_plans_are_those_of_plan_decode(options: str) -> None:
    """Made and updated; every kind of step has a plan of its own."""
    cache, old, new = plan_cache(**OPTIONS[options]), lengths(3, 190), lengths(3, 7)
    plans = []
    for step in STEPS.values():
        want = snapmla.plan_decode(
            old, HEADS, page_size=PAGE, max_pages=WIDTH, **OPTIONS[options], **step
        )
        plan = cache.get(old, max_pages=WIDTH, **step)
        tables = {"cu_seqlens_q": step.get("cu_seqlens_q"), "row_seqlens": step.get("row_seqlens")}
        for now in (old, new):
            assert cache.get(now, max_pages=WIDTH, **step) is plan
            want.update_(now, **tables)
            for name in STATIC:
                assert getattr(plan, name) == getattr(want, name), name
            for name in ("part_begin", "split_begin", "planned_seqlens", "unit_begin"):
                assert torch.equal(getattr(plan, name), getattr(want, name)), name
            items = int(want.part_begin[-1])
            assert torch.equal(plan.work_items[:items], want.work_items[:items])
            assert plan.o_accum.shape == want.o_accum.shape
            assert plan.lse_accum.shape == want.lse_accum.shape
        plans.append(plan)
    assert len(set(map(id, plans))) == len(STEPS) == cache.stats().plans
    assert cache.device == torch.device("cpu")


@pytest.mark.usefixtures("no_launch")
def test_what_makes_another_plan() -> None:
    """Batch, query tokens, table width and kind of step do; values do not."""
    cache = plan_cache()
    offsets = torch.zeros(3, dtype=torch.int32)

    def ragged(total_q: int, **options: Any) -> snapmla.DecodePlan:
        return cache.get(
            lengths(2), cu_seqlens_q=offsets, total_q=total_q, max_pages=WIDTH, **options
        )

    calls: list[Callable[[], snapmla.DecodePlan]] = [
        lambda: get(cache, 2),
        lambda: get(cache, 3),
        lambda: get(cache, 2, 2),
        lambda: get(cache, 2, max_pages=WIDTH + 1),
        lambda: get(cache, 2, row_seqlens=torch.zeros(2, 1, dtype=torch.int32)),
        lambda: ragged(2),
        lambda: ragged(4),
        lambda: ragged(4, row_seqlens=torch.zeros(4, dtype=torch.int32)),
        lambda: get(cache, 0),
    ]
    plans = [call() for call in calls]
    assert len(set(map(id, plans))) == len(plans)
    assert [call() for call in calls] == plans
    assert cache.get(lengths(2, 5), 1, max_pages=WIDTH) is plans[0]


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    ("name", "value"), [("max_pages", 3.0), ("s_q", True), ("total_q", 4.0), ("s_q", 1.0)]
)
def test_what_equals_a_number_is_none(name: str, value: object) -> None:
    """Refused, whether a plan of an equal shape is there or not."""
    cache = plan_cache()
    step: dict[str, Any] = {"s_q": 1}
    if name == "total_q":
        step = {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32), "total_q": 4}
    step["max_pages"] = WIDTH

    def refused() -> None:
        with pytest.raises(
            TypeError, match=f"^{name}: expected an int, got {type(value).__name__}"
        ):
            cache.get(lengths(2), **{**step, name: value})

    refused()
    cache.get(lengths(2), **step)
    refused()
    cache.get(lengths(2), **step, pin=True)
    refused()
    assert cache.stats().plans == 1


@pytest.mark.usefixtures("no_launch")
def test_an_enumerated_number_is_one() -> None:
    cache, shape = plan_cache(), enum.IntEnum("shape", {"s_q": 1, "pages": WIDTH})
    plan = cache.get(lengths(2), shape.s_q, max_pages=shape.pages, pin=True)
    assert get(cache, 2) is plan and cache.stats()[:2] == (1, 1)


# ---------------------------------------------------------------------------- what is kept


@pytest.mark.usefixtures("no_launch")
def test_the_longest_unused_goes_first() -> None:
    cache = plan_cache(capacity=3)
    plans = {b: get(cache, b) for b in (1, 2, 3)}
    assert get(cache, 1) is plans[1]
    get(cache, 4)  # 2 goes
    assert all(get(cache, b) is plans[b] for b in (3, 1))
    assert get(cache, 2) is not plans[2]  # 4 goes
    assert cache.stats()[:2] == (3, 0)
    assert all(get(cache, b) is plans[b] for b in (3, 1))


@pytest.mark.usefixtures("no_launch")
def test_pinned_plans_stay_until_they_are_released() -> None:
    cache = plan_cache(capacity=2)
    pinned = [get(cache, b, pin=True) for b in (1, 2, 3)]
    late = get(cache, 4)
    assert get(cache, 4, pin=True) is late  # pinned while it was held
    assert get(cache, 4) is late
    for b in range(5, 15):
        get(cache, b)
    assert cache.stats()[:2] == (6, 4)
    assert [get(cache, b) for b in (1, 2, 3, 4)] == [*pinned, late]

    cache.release(pinned[1])
    assert cache.stats()[:2] == (5, 3), "it counts as used last: one of the others went"
    with pytest.raises(ValueError, match="plan: expected a plan that is pinned here"):
        cache.release(pinned[1])
    assert get(cache, 2) is pinned[1]
    get(cache, 21), get(cache, 22)
    assert get(cache, 2) is not pinned[1]
    cache.release()
    assert cache.stats()[:2] == (2, 0)
    cache.release()


@pytest.mark.usefixtures("no_launch")
def test_a_refused_call_leaves_nothing() -> None:
    cache = plan_cache()
    for _ in range(2):
        with pytest.raises(ValueError, match="row_seqlens: expected shape"):
            get(cache, 2, row_seqlens=torch.zeros(2, dtype=torch.int32), pin=True)
    assert cache.stats()[:2] == (0, 0)


@pytest.mark.usefixtures("no_launch")
def test_under_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed out is pinned; what is not there is refused, and capturing can go on."""
    cache = plan_cache(capacity=1)
    plan = get(cache, 2)
    monkeypatch.setattr(PlanCache, "_capturing", lambda self: True)
    words = r"PlanCache.get: expected a shape that .*, got b = 3, s_q = 1, max_pages = 3 \(call get"
    with pytest.raises(ValueError, match=words):
        get(cache, 3)
    words = r"got b = 2, max_pages = 3, total_q = 4, row_seqlens \(.*capacity = 1 "
    with pytest.raises(ValueError, match=words):
        cache.get(
            lengths(2), cu_seqlens_q=torch.zeros(3).int(), total_q=4, max_pages=WIDTH,
            row_seqlens=torch.zeros(4).int(),
        )  # fmt: skip
    assert get(cache, 2) is plan and cache.stats()[:2] == (1, 1)
    monkeypatch.undo()
    assert get(cache, 2) is plan and cache.stats()[:2] == (1, 1)


SHAPES = st.tuples(st.integers(0, 4), st.integers(1, 2))


@pytest.mark.usefixtures("no_launch")
def test_any_order_of_calls() -> None:
    """Against the plainest bookkeeping: lists of shapes, the latest used last."""

    class Calls(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.cache = plan_cache(capacity=2)
            self.pinned: list[tuple[int, int]] = []
            self.unpinned: list[tuple[int, int]] = []
            self.plans: dict[tuple[int, int], tuple[snapmla.DecodePlan, list[int]]] = {}

        @rule(shape=SHAPES, pin=st.booleans())
        def get(self, shape: tuple[int, int], pin: bool) -> None:
            plan = get(self.cache, *shape, pin=pin)
            if shape in (*self.pinned, *self.unpinned):
                known, place = self.plans[shape]
                assert plan is known and addresses(plan) == place
            assert (plan.batch, plan.s_q) == shape
            self.plans[shape] = plan, addresses(plan)
            self.use(shape, pin or shape in self.pinned)

        @precondition(lambda self: self.pinned)
        @rule(data=st.data())
        def release_one(self, data: st.DataObject) -> None:
            shape = data.draw(st.sampled_from(self.pinned))
            self.cache.release(self.plans[shape][0])
            self.pinned.remove(shape)
            self.use(shape, False)

        @rule()
        def release_all(self) -> None:
            self.cache.release()
            while self.pinned:
                self.use(self.pinned.pop(0), False)

        def use(self, shape: tuple[int, int], pin: bool) -> None:
            for shapes in (self.pinned, self.unpinned):
                if shape in shapes and not (pin and shapes is self.pinned):
                    shapes.remove(shape)
            if not pin:
                self.unpinned = [*self.unpinned, shape][-2:]
            elif shape not in self.pinned:
                self.pinned.append(shape)

        @invariant()
        def holds_these(self) -> None:
            held = [
                [(key[0], key[1]) for key in plans]
                for plans in (self.cache._pinned, self.cache._unpinned)
            ]
            assert held == [self.pinned, self.unpinned]

    machine = Calls.TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    machine().runTest()


# ---------------------------------------------------------------------------- threads


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_two_threads_get_one_plan(
    first: bool, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second asks while the first plans, and waits for it; it is pinned if either wants so."""
    planning = threading.Event()

    def slow(spec: object, device_type: str) -> Callable[..., None]:
        planning.set()
        time.sleep(0.2)  # the second has asked by then
        return lambda *arguments: None

    monkeypatch.setattr(variants, "kernel", slow)
    cache, found = plan_cache(), []
    thread = threading.Thread(target=lambda: found.append(get(cache, 3, pin=first)))
    thread.start()
    assert planning.wait(10)
    found.append(get(cache, 3, pin=second))
    thread.join()
    assert found[0] is found[1]
    assert cache.stats()[:2] == (1, int(first or second))


@pytest.mark.usefixtures("no_launch")
def test_many_threads_and_a_small_cache() -> None:
    cache, wrong = plan_cache(capacity=2), []

    def hammer(seed: int) -> None:
        chosen = random.Random(seed)
        try:
            for _ in range(300):
                b = chosen.randint(1, 6)
                plan = get(cache, b, pin=chosen.random() < 0.1)
                if plan.batch != b or plan.planned_seqlens.shape != (b,):
                    wrong.append(plan)
                if chosen.random() < 0.1:
                    cache.release()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=hammer, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.release()
    assert not wrong and cache.stats()[:2] == (2, 0)


# ---------------------------------------------------------------------------- memory


@pytest.mark.usefixtures("no_launch")
def test_batches_share_one_workspace() -> None:
    cache = plan_cache(capacity=256)
    plans = [get(cache, b, pin=True) for b in range(1, 257)]
    assert len(set(map(storage, plans))) == 1
    tables = sum(
        getattr(p, name).nbytes for p in plans for name in TENSORS if not name.endswith("_accum")
    )
    assert cache.stats() == (256, 256, tables + plans[0].workspace_bytes)
    size = (tables + plans[0].workspace_bytes) / 1e6
    assert repr(cache) == (
        f"PlanCache(16 heads, pages of 64, cpu: 256 plans, 256 pinned, {size:.1f} MB)"
    )


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_a_workspace_that_is_too_small_is_succeeded(order: str) -> None:
    """By one at least twice as large; plans that exist stay where they are."""
    cache = plan_cache(fixed_split_tokens=64)
    batches = list(range(1, 40))
    plans, places = [], []
    for b in batches if order == "ascending" else reversed(batches):
        plans.append(get(cache, b))
        places.append(addresses(plans[-1]))
    assert [addresses(p) for p in plans] == places
    most = max(p.workspace_bytes for p in plans)
    for p in plans:
        assert p.o_accum.is_contiguous() and p.lse_accum.is_contiguous()
        assert p.o_accum.shape[0] == p.batch * WIDTH, "room for all pieces"
    spaces = {storage(p): p.o_accum.untyped_storage().nbytes() for p in plans}
    sizes = list(spaces.values())
    if order == "descending":
        assert len(sizes) == 1
    else:
        assert all(new >= 2 * old for old, new in itertools.pairwise(sizes)) and len(sizes) > 3
        assert sum(sizes) < 4 * most


@pytest.mark.usefixtures("no_launch")
def test_a_succeeded_workspace_lives_as_long_as_its_plans() -> None:
    cache = plan_cache(fixed_split_tokens=64, capacity=1)
    small = get(cache, 1, pin=True)
    large = get(cache, 30)
    assert storage(large) != storage(small)
    both = cache.stats().bytes
    of_small = sum(getattr(small, name).nbytes for name in TENSORS)
    cache.release(small)  # the large one goes, its workspace does not
    del small
    get(cache, 30)
    assert cache.stats().bytes == both - of_small


# ---------------------------------------------------------------------------- tracing


@needs_compiler
def test_under_torch_compile() -> None:
    """Between two graphs, and then as ever; where nothing may stand between, the reason is said."""
    cache, now = plan_cache(), lengths(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        plan = cache.get(x + 1, 1, max_pages=WIDTH)
        return plan.planned_seqlens * 2

    compiled = torch.compile(step, backend="eager")
    assert compiled(now).tolist() == [202, 202] == compiled(now).tolist()
    assert cache.stats().plans == 1
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"outside of the compiled function \(or PlanCache.get\)"):
        torch.compile(step, backend="eager", fullgraph=True)(now)


@needs_compiler
def test_a_runner_that_is_copied() -> None:
    """Its copy has a cache, a plan and a workspace of its own; what is shared in it stays so."""
    cache = plan_cache(capacity=3, **SPLITTING)
    runner = {"plan": get(cache, 1, pin=True), "cache": cache}
    others = [get(cache, b) for b in (2, 3)]
    twin = copy.deepcopy(runner)
    copied, plan = twin["cache"], twin["plan"]
    assert copied.stats() == cache.stats() and copied.stats()[:2] == (3, 1)
    mine = [runner["plan"], *others]
    theirs = [plan, *(get(copied, b) for b in (2, 3))]
    assert get(copied, 1) is plan and len({storage(p) for p in theirs}) == 1
    memory = [{getattr(p, n).data_ptr() for p in ps for n in TENSORS if getattr(p, n).numel()}
              for ps in (mine, theirs)]  # fmt: skip
    assert not memory[0] & memory[1]
    before = runner["plan"].planned_seqlens.clone()
    assert copied.get(lengths(1, 7), 1, max_pages=WIDTH).planned_seqlens.tolist() == [7]
    assert torch.equal(runner["plan"].planned_seqlens, before)
    assert storage(get(copied, 4)) == storage(plan), "a new one is over the same workspace"
    copied.release(plan)
    assert cache.stats()[:2] == (3, 1) and copied.stats()[:2] == (3, 0)


def test_what_is_no_copy_is_refused() -> None:
    for make in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"^PlanCache: expected copy.deepcopy, or another Plan"):
            make(plan_cache())


@needs_compiler
def test_stand_ins_are_not_kept() -> None:
    cache = plan_cache()
    real = get(cache, 2)
    with FakeTensorMode() as mode:
        fake = cache.get(mode.from_tensor(lengths(2)), 1, max_pages=WIDTH, pin=True)
    assert isinstance(fake.work_items, FakeTensor) and isinstance(fake.o_accum, FakeTensor)
    assert get(cache, 2) is real and cache.stats()[:2] == (1, 0)
    other = plan_cache()
    with FakeTensorMode(allow_non_fake_inputs=True):  # real lengths, and yet
        fake = other.get(real.planned_seqlens, 1, max_pages=WIDTH)
    assert isinstance(fake.work_items, FakeTensor) and other.stats().plans == 0


@needs_compiler
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_what_is_traced_runs(mode: str) -> None:
    """A graph updates the plan that was held; one that makes its own keeps it to itself."""
    cache = plan_cache()

    def planned(x: torch.Tensor) -> torch.Tensor:
        return cache.get(x, 1, max_pages=WIDTH).planned_seqlens.clone()

    for held in (False, True):
        if held:
            get(cache, 2)
        graph = make_fx(planned, tracing_mode=mode)(lengths(2, 5))
        assert "snapmla.plan_update" in graph.code
        assert graph(lengths(2, 64)).tolist() == [64, 64]
        assert graph(lengths(2, 65)).tolist() == [65, 65]


def test_transforms_are_refused() -> None:
    cache = plan_cache()
    with pytest.raises(ValueError, match="a call outside of torch.func"):
        torch.vmap(lambda x: cache.get(x, 1, max_pages=WIDTH).planned_seqlens)(
            torch.ones(2, 3, dtype=torch.int32)
        )
    assert cache.stats().plans == 0

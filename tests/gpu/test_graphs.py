"""CUDA graphs, synchronisation, allocation and launches, on a real GPU.

A layer's step (append, quantise, decode) is captured once and replayed for random lengths; every
replay is compared with float64 within the gates of ``snapmla.selfcheck``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import snapmla
from snapmla.compat import metadata_pair
from snapmla.runtime import launch
from snapmla.testing import selfcheck

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SCALE = 192**-0.5
PAGE, WIDTH, BATCH = 64, 48, 9
CAPACITY = PAGE * WIDTH
REPLAYS, FEWER_REPLAYS = 50, 12


@dataclass
class Step:
    """Static buffers of one decode step, as an engine keeps them for a graph.

    The cache holds random tokens for every slot of every sequence; a step appends the last ``s_q``
    tokens of each sequence anew.  A padded batch slot has length 0 and slot mapping -1.
    """

    heads: int
    s_q: int
    cache: snapmla.PagedKVCache
    table: torch.Tensor
    lengths: torch.Tensor
    c_kv: torch.Tensor
    k_rope: torch.Tensor
    slots: torch.Tensor
    q_nope: torch.Tensor
    q_rope: torch.Tensor
    q: snapmla.QuantizedQuery
    plan: snapmla.DecodePlan
    out: torch.Tensor
    lse: torch.Tensor

    def run(self) -> None:
        """What is captured."""
        snapmla.append_kv(self.cache, self.c_kv, self.k_rope, self.slots)
        snapmla.quantize_q(self.q_nope, self.q_rope, out=self.q)
        snapmla.decode(
            self.q, self.cache, self.table, self.lengths, softmax_scale=SCALE, plan=self.plan,
            out=self.out, lse=self.lse,
        )  # fmt: skip

    def set_inputs(self, lengths: list[int]) -> None:
        """New lengths, tokens and queries into the static buffers, results poisoned."""
        slots = []
        for i, n in enumerate(lengths):
            new = range(n - self.s_q, n)
            slots += [i * CAPACITY + t if t >= 0 else -1 for t in new]
        self.slots.copy_(torch.tensor(slots))
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        for tensor in (self.c_kv, self.k_rope, self.q_nope, self.q_rope):
            tensor.copy_(torch.randn(tensor.shape, device=DEVICE))
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def assert_right(self, what: str) -> None:
        errors = selfcheck.decode_errors(
            self.out, self.lse, self.q, self.cache, self.table, self.lengths, SCALE,
            heads=sorted({0, 1, self.heads // 2, self.heads - 1}),
        )  # fmt: skip
        assert errors.right, f"{what}: {errors}"
        empty = self.lengths == 0
        assert (self.out[empty] == 0).all() and torch.isneginf(self.lse[empty]).all(), what


def make_step(heads: int, s_q: int, **options: object) -> Step:
    torch.manual_seed(heads)
    cache = snapmla.PagedKVCache.allocate(BATCH * WIDTH, PAGE, device=DEVICE)
    tokens = torch.randn(cache.num_slots, 576, device=DEVICE).bfloat16()
    every = torch.arange(cache.num_slots, device=DEVICE)
    snapmla.append_kv(cache, tokens[:, :512], tokens[:, 512:], every)
    table = torch.arange(BATCH * WIDTH, dtype=torch.int32, device=DEVICE).view(BATCH, WIDTH)
    lengths = torch.full((BATCH,), CAPACITY, dtype=torch.int32, device=DEVICE)
    plan = snapmla.plan_decode(
        lengths, heads, s_q, page_size=PAGE, max_pages=WIDTH, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    q_nope = torch.randn(BATCH, s_q, heads, 512, device=DEVICE).bfloat16()
    q_rope = torch.randn(BATCH, s_q, heads, 64, device=DEVICE).bfloat16()
    return Step(
        heads=heads,
        s_q=s_q,
        cache=cache,
        table=table,
        lengths=lengths,
        c_kv=torch.randn(BATCH * s_q, 512, device=DEVICE).bfloat16(),
        k_rope=torch.randn(BATCH * s_q, 64, device=DEVICE).bfloat16(),
        slots=torch.full((BATCH * s_q,), -1, device=DEVICE),
        q_nope=q_nope,
        q_rope=q_rope,
        q=snapmla.quantize_q(q_nope, q_rope),
        plan=plan,
        out=torch.empty(BATCH, s_q, heads, 512, dtype=torch.bfloat16, device=DEVICE),
        lse=torch.empty(BATCH, heads, s_q, device=DEVICE),
    )


def random_lengths(generator: torch.Generator) -> list[int]:
    """Lengths of all sizes: about a fifth are padded slots, some are full."""
    kind = torch.rand(BATCH, generator=generator)
    size = (torch.rand(BATCH, generator=generator) ** 3 * CAPACITY).long() + 1
    size[kind < 0.2] = 0
    size[kind > 0.9] = CAPACITY
    return size.tolist()


def capture(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@pytest.mark.parametrize(
    ("heads", "s_q", "options"),
    [
        (16, 1, {}),
        (16, 2, {"fixed_split_tokens": 512}),
        (64, 1, {}),
        (128, 2, {}),
        (16, 1, {"check_stale": True}),
    ],
    ids=["h16", "h16q2-fixed", "h64", "h128q2", "h16-checked"],
)
def test_replays_are_right(heads: int, s_q: int, options: dict[str, object]) -> None:
    step = make_step(heads, s_q, **options)
    graph = capture(step.run)
    generator = torch.Generator().manual_seed(heads)
    split = unsplit = 0
    for number in range(FEWER_REPLAYS if options or heads > 16 else REPLAYS):
        lengths = [0] * BATCH if number == 7 else random_lengths(generator)
        step.set_inputs(lengths)
        torch.cuda.synchronize()
        before = allocations()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.plan.update_(step.lengths)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert allocations() == before, "plan.update_ or the replay allocated"
        step.assert_right(f"replay {number}, lengths {lengths}")
        pieces = int(step.plan.split_begin[-1])
        split, unsplit = split + (pieces > 0), unsplit + (pieces == 0)
    assert split > 0, "no replay had a split sequence"


def test_update_inside_the_graph() -> None:
    step = make_step(16, 1)

    def whole() -> None:
        step.plan.update_(step.lengths)
        step.run()

    graph = capture(whole)
    generator = torch.Generator().manual_seed(3)
    for number in range(5):
        step.set_inputs(random_lengths(generator))
        graph.replay()
        step.assert_right(f"replay {number}")


def test_without_update_the_replay_is_wrong() -> None:
    """The tests above can fail: a plan for other lengths gives another result."""
    step = make_step(16, 1)
    graph = capture(step.run)
    step.set_inputs([100] * BATCH)
    step.plan.update_(step.lengths)
    step.set_inputs([2000] * BATCH)
    graph.replay()
    with pytest.raises(AssertionError):
        step.assert_right("stale")


def test_stale_plan_is_caught_on_the_gpu() -> None:
    step = make_step(16, 1, check_stale=True)
    step.set_inputs([100] * BATCH)
    with pytest.raises(ValueError, match=rf"sequence 0 \({CAPACITY} -> 100\)"):
        step.run()
    step.plan.update_(step.lengths)
    step.run()
    step.assert_right("updated")


def test_a_witness_is_read_at_each_replay() -> None:
    """Offsets that are rewritten in place, and no ``update_``: rows that do not stand are NaN."""
    lengths = torch.tensor([300, 40, 65], dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=DEVICE)
    cache = snapmla.PagedKVCache.allocate(15, PAGE, device=DEVICE)
    rows = torch.randn(15 * PAGE, 576, device=DEVICE).bfloat16()
    slots = torch.arange(15 * PAGE, device=DEVICE)
    snapmla.append_kv(cache, rows[:, :512], rows[:, 512:], slots)
    table = torch.arange(15, dtype=torch.int32, device=DEVICE).view(3, 5)
    x = torch.randn(6, 16, 576, device=DEVICE).bfloat16()
    q = snapmla.quantize_q(x[..., :512], x[..., 512:])
    plan = snapmla.plan_decode(
        lengths, 16, cu_seqlens_q=offsets, total_q=6, page_size=PAGE, max_pages=5
    )
    out = torch.empty(6, 16, 512, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(16, 6, device=DEVICE)

    def run() -> None:
        snapmla.decode(
            q, cache, table, lengths, softmax_scale=SCALE, plan=plan, out=out, lse=lse,
            cu_seqlens_q=offsets,
        )  # fmt: skip

    run()
    want, want_lse = out.clone(), lse.clone()
    assert want.isfinite().all() and want_lse.isfinite().all()
    graph = capture(run)
    for own, void in (((0, 1, 4, 6), 0), ((0, 3, 4, 6), 3), ((0, 1, 4, 6), 0)):
        offsets.copy_(torch.tensor(own))
        out.fill_(7.0), lse.fill_(7.0)
        graph.replay()
        # of the first two requests; those of the third one stand
        assert out[:void].isnan().all() and lse[:, :void].isnan().all()
        rest = 4 if void else 0  # tokens of a request that lost some may be NaN, too
        assert torch.equal(out[rest:], want[rest:]) and torch.equal(
            lse[:, rest:], want_lse[:, rest:]
        )
        between = out[void:rest]
        assert torch.equal(between, want[void:rest]) or between.isnan().all()


def allocations() -> tuple[int, ...]:
    stats = torch.cuda.memory_stats()
    names = ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries")
    return tuple(stats[n] for n in names)


FORBIDDEN = (
    "Memcpy",
    "Memset",
    "cudaMemcpy",
    "cudaMemset",
    "Synchronize",
    "cudaMalloc",
    "MemAlloc",
)


def test_trace_of_an_eager_step() -> None:
    """Five kernels a step (plan, append, quantise, decode, merge); no copy, no wait, no memory."""
    step = make_step(16, 1)
    step.set_inputs([700] * BATCH)
    steps = 10

    def whole() -> None:
        step.plan.update_(step.lengths)
        step.run()

    for _ in range(3):
        whole()
    torch.cuda.synchronize()
    before = allocations()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=activities) as profiler:
            with torch.profiler.record_function("steps"):
                for _ in range(steps):
                    whole()
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocations() == before, "the step allocated"
    events = profiler.events()
    marks = [e for e in events if e.name == "steps" and e.device_type.name == "CPU"]
    end = marks[0].time_range.end
    kernels = [
        e.name for e in events if e.device_type.name == "CUDA" and e.name.startswith("kernel_")
    ]
    others = [
        e.name
        for e in events
        if any(word in e.name for word in FORBIDDEN) and e.time_range.start <= end
    ]
    assert not others, others
    print(f"{len(kernels)} kernels in {steps} steps: {sorted(set(kernels))}")
    assert len(kernels) == 5 * steps
    decode = [k for k in kernels if "decode" in k.lower() and "plan" not in k.lower()]
    merge = [k for k in kernels if "merge" in k.lower()]
    assert len(decode) == len(merge) == steps, sorted(set(kernels))
    step.assert_right("after the trace")


def test_another_stream_and_its_order() -> None:
    """Everything goes to torch's current stream."""
    step = make_step(64, 1)
    step.set_inputs([1500] * BATCH)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # the default stream would be done long before
        step.lengths.fill_(900)
        step.plan.update_(step.lengths)
        step.run()
    side.synchronize()
    step.assert_right("side stream")


def test_batch_invariant_on_the_gpu() -> None:
    """A request's bits are the same alone and in 20 random batches."""
    step = make_step(16, 1, fixed_split_tokens=256)
    pool = [3072, 1, 700, 64, 2049, 256, 257, 1900, 3000]
    step.set_inputs(pool)
    snapmla.quantize_q(step.q_nope, step.q_rope, out=step.q)

    def run(requests: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.tensor(requests, device=DEVICE)
        q = snapmla.QuantizedQuery(step.q.nope[at], step.q.rope[at], step.q.scale[at])
        lengths = step.lengths[at]
        plan = snapmla.plan_decode(
            lengths, 16, 1, page_size=PAGE, max_pages=WIDTH, fixed_split_tokens=256
        )
        return snapmla.decode(
            q, step.cache, step.table[at], lengths, softmax_scale=SCALE, plan=plan
        )

    alone = [run([i]) for i in range(BATCH)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        size = int(torch.randint(2, 200, (), generator=generator))
        batch = torch.randint(0, BATCH, (size,), generator=generator).tolist()
        out, lse = run(batch)
        want_out = torch.cat([alone[i][0] for i in batch])
        want_lse = torch.cat([alone[i][1] for i in batch])
        assert torch.equal(out.view(torch.int16), want_out.view(torch.int16)), batch
        assert torch.equal(lse.view(torch.int32), want_lse.view(torch.int32)), batch


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_capture_on_a_device_that_is_not_current() -> None:
    """Whether a stream is captured is asked of the tensors' device: a kept workspace would outlive
    its place in the cache, but not the graph."""
    device, graph = torch.device("cuda", 1), torch.cuda.CUDAGraph()
    assert not launch.capturing(device)
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        torch.zeros(1, device=device)
        with torch.cuda.device(0):
            assert not torch.cuda.is_current_stream_capturing()
            assert launch.capturing(device) and metadata_pair.stream_of(device) is None
            assert torch.cuda.current_device() == 0
    assert not launch.capturing(device)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_a_device_that_is_not_current() -> None:
    lengths = torch.tensor([300, 5], dtype=torch.int32, device="cuda:1")
    cache, table, _ = selfcheck.filled_cache((300, 5), PAGE)
    cache = snapmla.PagedKVCache(
        *(t.to("cuda:1") for t in (cache.content, cache.rope, cache.scale))
    )
    table = table.to("cuda:1")
    torch.cuda.set_device(0)
    x = torch.randn(2, 1, 16, 576, device="cuda:1").bfloat16()
    q = snapmla.quantize_q(x[..., :512], x[..., 512:])
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=PAGE, max_pages=table.shape[1])
    out, lse = snapmla.decode(q, cache, table, lengths, softmax_scale=SCALE, plan=plan)
    assert torch.cuda.current_device() == 0
    errors = selfcheck.decode_errors(out, lse, q, cache, table, lengths, SCALE)
    assert errors.right, str(errors)

    # on that device's current stream: what waits there before it holds it back
    result, result_lse = torch.zeros_like(out), torch.zeros_like(lse)
    assert not bool(result.any())  # loads that kernel, which waits for the device
    stream, other, ended = torch.cuda.Stream(1), torch.cuda.Stream(1), torch.cuda.Event()
    before = torch.cuda.current_stream(1)
    torch.cuda.set_stream(stream)
    torch.cuda._sleep(1_000_000_000)
    torch.cuda.set_device(0)
    try:
        snapmla.decode(
            q, cache, table, lengths, softmax_scale=SCALE, plan=plan, out=result, lse=result_lse
        )
        assert torch.cuda.current_device() == 0
        ended.record(stream)
        with torch.cuda.stream(other):
            seen = bool(result.any())
        assert not ended.query() and not seen
        stream.synchronize()
    finally:
        torch.cuda.set_stream(before)
        torch.cuda.set_device(0)
    assert torch.equal(result, out) and torch.equal(result_lse, lse)

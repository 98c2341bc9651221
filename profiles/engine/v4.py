"""vLLM's class of DeepSeek-V4's attention, alone, in a CUDA graph: ours beside FlashMLA.

The model itself needs more than the pack has (tilelang 0.1.9 for its hyper-connections, 43 MiB, and
nvidia-cutlass-dsl 4.6 for its compressor), so here the class is made without it:
``DeepseekV4FlashMLAAttention.forward_mqa`` over metadata of vLLM's own classes, as many layers a
graph as a model has of a type, planned inside as vLLM does it. Caches, heads and lists are those of
the table ``sparse_v4_cost``, whose row is measured in the same run: what the names' own calls gain
is to be left in the step.

Kernels of attention and planning are told apart by a profile of the graph's replays; a layer of
every fourth token also turns its choice into rows, which is vLLM's kernel in both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from profiles import spans, table
from profiles.engine.within import replaced
from profiles.gate import Gate
from profiles.gate import page as gates_page
from profiles.tables import sparse_v4_cost
from profiles.tables.sparse_cost import filled
from snapmla.cache.paged import PagedKVCache
from snapmla.integrations.vllm import flashmla

KEPT, EQUAL = 0.92, 1.02  # of the row's ratio; times that count as equal
CLOSE = 6e-3  # relative L2 of both results: each is within 4e-3 of fp64
ROUNDS, REPLAYS, LAYERS = 7, 6, 20
MODULE = "vllm.models.deepseek_v4.nvidia.flashmla"
NAME = "flash_mla_with_kvcache"
SHAPES = (  # tokens, heads, second list, tokens of a compressed one
    (256, 64, 512, 128), (256, 128, 512, 128), (256, 64, 0, 1), (128, 16, 512, 128),
    (256, 64, 512, 4),
)  # fmt: skip
TITLE = "# V4's attention class of vLLM in a CUDA graph"


class Shape(NamedTuple):
    """A step: query tokens, heads, entries of the second list, tokens of a compressed one."""

    tokens: int
    heads: int
    more: int
    ratio: int

    @property
    def label(self) -> str:
        kind = {1: "window alone", 4: "every 4th", 128: "every 128th"}[self.ratio]
        return f"{self.tokens} tokens, {self.heads} heads, 128 + {self.more}, {kind}"


class Step:
    """What vLLM's builders hand to the layers of a step, and the layers.

    Args:
        caches: the window's and the compressed, as ``sparse_v4_cost.caches_of`` makes them.
        padded: heads of queries and results.
    """

    def __init__(self, shape: Shape, caches: Sequence[Any], q: Tensor, padded: int) -> None:
        self.shape, self.padded, self.device = shape, padded, q.device
        self.sets = sparse_v4_cost.list_sets((shape.tokens, 1, shape.heads, shape.more), q.device)
        self.q = q.new_zeros(shape.tokens, padded, 512)
        self.q[:, : shape.heads] = q
        self.window, self.more = (each.kv.squeeze(2) for each in caches)
        full = lambda n: torch.full((shape.tokens,), n, dtype=torch.int32, device=q.device)
        self.lengths, self.others = full(sparse_v4_cost.WINDOW), full(shape.more)
        self.token = torch.arange(shape.tokens, dtype=torch.int32, device=q.device)
        pages = torch.arange(self.more.shape[0], dtype=torch.int32, device=q.device)
        self.table = pages.expand(shape.tokens, -1)
        self.valid = torch.ones(shape.tokens, dtype=torch.bool, device=q.device)
        self.sink = q.new_full((padded,), -torch.inf, dtype=torch.float32)
        self.out = torch.full_like(
            self.q, torch.nan
        )  # each layer's, as vLLM's memory is used again
        self.layers = [self.layer(i) for i in range(LAYERS)]

    def layer(self, i: int) -> Any:
        """One of vLLM's layers, made without its model."""
        from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

        second = self.sets[i % len(self.sets)].second
        made = DeepseekV4FlashMLAAttention.__new__(DeepseekV4FlashMLAAttention)
        nn.Module.__init__(made)
        vars(made).update(
            prefix=f"layers.{i}", compress_ratio=self.shape.ratio, scale=sparse_v4_cost.SCALE,
            attn_sink=self.sink, window_size=sparse_v4_cost.WINDOW, kv_cache=self.more,
            swa_cache_layer=SimpleNamespace(prefix=f"window.{i}", kv_cache=self.window),
            topk_indices_buffer=None if second is None else second.squeeze(1),
        )  # fmt: skip
        return made

    def metadata(self) -> dict[str, Any]:
        """Of a step, by layer: fresh, so that its first layer plans."""
        from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata
        from vllm.v1.attention.ops.flashmla import get_mla_metadata

        tokens, found = self.shape.tokens, {}
        schedules = {f"tile_sched_{n}": get_mla_metadata()[0] for n in ("swaonly", "c4a", "c128a")}
        for i, each in enumerate(self.layers):
            lists = self.sets[i % len(self.sets)]
            found[each.swa_cache_layer.prefix] = DeepseekSparseSWAMetadata(
                block_table=self.table, slot_mapping=self.token, block_size=self.window.shape[1],
                is_valid_token=self.valid, token_to_req_indices=self.token,
                decode_swa_indices=lists.first, decode_swa_lens=self.lengths, num_decodes=tokens,
                num_decode_tokens=tokens, **schedules,
            )  # fmt: skip
            found[each.prefix] = DeepseekV4FlashMLAMetadata(
                num_reqs=tokens, max_query_len=1, max_seq_len=1, num_actual_tokens=tokens,
                query_start_loc=self.token, slot_mapping=self.token, block_table=self.table,
                req_id_per_token=self.token, topk_tokens=self.shape.more,
                block_size=self.more.shape[1] * self.shape.ratio,
                c128a_global_decode_topk_indices=lists.second,
                c128a_decode_topk_lens=self.others,
            )  # fmt: skip
        return found

    def run(self, name: Callable[..., Any]) -> None:
        """All layers, through one of FlashMLA's names."""
        import importlib

        from vllm.forward_context import override_forward_context

        context: Any = SimpleNamespace(attn_metadata=self.metadata())
        module = importlib.import_module(MODULE)
        with replaced(module, NAME, name), override_forward_context(context):
            for each in self.layers:
                each.forward_mqa(self.q, None, None, self.out)


@contextmanager
def stream() -> Iterator[torch.cuda.Stream]:
    made = torch.cuda.Stream()
    with torch.cuda.stream(made):
        yield made
    torch.cuda.synchronize()


def captured(step: Step, name: Callable[..., Any]) -> torch.cuda.CUDAGraph:
    """A graph of the step, whose first call plans inside of it."""
    with stream() as own:
        step.run(name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=own):
        step.run(name)
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of a replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def in_turn(graphs: Mapping[Any, torch.cuda.CUDAGraph], calls: int = LAYERS) -> dict[Any, float]:
    """Microseconds of a call in replays, of so many, the median of rounds."""
    times: dict[Any, list[float]] = {name: [] for name in graphs}
    pick = random.Random(0)
    for _ in range(ROUNDS):
        for name in pick.sample(list(graphs), len(graphs)):
            times[name].append(timed(graphs[name]))
    return {name: 1e3 * median(ms) / calls for name, ms in times.items()}


def kernels_us(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a layer's kernels but vLLM's own, which turns a choice into rows."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    spent = spans.charged(spans.of_profile(profile))
    ours = {name: us for name, us in spent.items() if "global_topk" not in name}
    return sum(ours.values()) / REPLAYS / LAYERS


def measured(shape: Shape, caches: Sequence[Any]) -> dict[str, Any]:
    """The table's row, and the step's times by contender.

    Raises:
        ValueError: results are wrong.
    """
    sizes = (shape.tokens, 1, shape.heads, shape.more)
    row = table.measure(sparse_v4_cost.COST, caches, sizes, caches[0].device)
    q = torch.randn(shape.tokens, shape.heads, 512, device=caches[0].device).bfloat16()
    padded = 64 if shape.heads <= 64 else 128
    theirs = flashmla_name().theirs
    torch.manual_seed(1)  # of the lists
    steps = {"FlashMLA": (Step(shape, caches, q, padded), theirs)}
    for heads in dict.fromkeys((shape.heads, padded)):
        torch.manual_seed(1)
        steps[f"snapmla, {heads} heads"] = Step(shape, caches, q, heads), flashmla_name()
    graphs = {name: captured(*step) for name, step in steps.items()}
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    wanted, worst = steps["FlashMLA"][0].out[:, : shape.heads].float(), {}  # of the last layer
    for name, (step, _) in steps.items():
        got = step.out[:, : shape.heads].float()
        worst[name] = float(((got - wanted).norm() / wanted.norm()).nan_to_num(torch.inf))
    if not max(worst.values()) <= CLOSE:
        raise ValueError(f"{shape.label}: results differ, {worst}")
    return {
        "shape": shape.label, "table": row["us"], "difference": worst, "us": in_turn(graphs),
        "kernels_us": {name: kernels_us(graph) for name, graph in graphs.items()},
    }  # fmt: skip


def flashmla_name() -> Any:
    """FlashMLA's decode in vLLM, which is ours with theirs behind it."""
    from vllm.v1.attention.ops import flashmla as module

    if not flashmla.installed() and not flashmla.install():
        raise RuntimeError("FlashMLA's names were not replaced: another release of vLLM?")
    return getattr(module, NAME)


def each_shape(
    shapes: Sequence[tuple[int, int, int, int]],
) -> Iterator[tuple[Shape, Sequence[PagedKVCache]]]:
    """Shapes and the two caches, the same for all, in inference mode with FlashMLA's names ours."""
    flashmla_name()  # before a row takes FlashMLA's operator from vLLM's library
    torch.manual_seed(0)
    with torch.inference_mode():
        device = torch.device("cuda")
        caches = [filled("fp8_v4", sparse_v4_cost.TOKENS, device, 64, mean=0.0) for _ in range(2)]
        for each in shapes:
            yield Shape(*each), caches
            torch.cuda.empty_cache()


def measure(shapes: Sequence[tuple[int, int, int, int]] = SHAPES) -> dict[str, Any]:
    """All shapes."""
    found: dict[str, Any] = {}
    for shape, caches in each_shape(shapes):
        found[shape.label] = measured(shape, caches)
        print(line(found[shape.label]), flush=True)
    return found


def ratios(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """FlashMLA's time over ours: of the table's calls, of the step's kernels, of its replays."""
    name = next(each for each in row["us"] if each != "FlashMLA")  # heads as they are
    calls, kernels, replays = row["table"], row["kernels_us"], row["us"]
    return (
        calls["FlashMLA"] / calls["snapmla"], kernels["FlashMLA"] / kernels[name],
        replays["FlashMLA"] / replays[name],
    )  # fmt: skip


def gates(results: Mapping[str, Mapping[str, Any]]) -> list[Gate]:
    """The acceptance."""
    claim = f"kernels in the step keep >= {KEPT} of the ratio of the names' own calls"
    figures, kept, faster = [], [], []
    for label, row in results.items():
        calls, kernels, replays = ratios(row)
        figures.append(
            f"{label}: calls {calls:.2f}, kernels {kernels:.2f} ({kernels / calls:.3f}), "
            f"replays {replays:.2f}"
        )
        kept.append(kernels >= KEPT * calls)
        faster.append(replays * EQUAL >= 1)
    passed = all(kept) if kept else None
    slower = "a step's replay is not slower"
    return [
        Gate("kept", claim, passed, tuple(figures)),
        Gate("step", slower, all(faster) if faster else None),
    ]


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    calls, kernels, replays = ratios(row)
    times = "; ".join(
        f"{name}: {row['us'][name]:.1f} ({row['kernels_us'][name]:.1f})" for name in row["us"]
    )
    worst = max(row["difference"].values())
    return (
        f"| {row['shape']} | {calls:.2f} | {kernels:.2f} | {kernels / calls:.3f} | {replays:.2f} | "
        f"{times} | {worst:.1e} |"
    )


def page(header: Sequence[str], results: Mapping[str, Mapping[str, Any]]) -> str:
    """What was found, as Markdown."""
    lines = [TITLE, "", *header, f"- {LAYERS} layers a graph, planned inside of it", "",
             gates_page(gates(results)).rstrip(), "",
             "FlashMLA's time by ours, and µs of a layer: replays (kernels).", "",
             "| step | calls | kernels | kept | replays | µs | difference |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    return "\n".join([*lines, *map(line, results.values())]) + "\n"

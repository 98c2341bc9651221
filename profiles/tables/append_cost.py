"""``append_kv`` on one GPU, beside vLLM's op, another checkout's and a copy of as many bytes:
``python -m profiles.bench append_cost --peers DIR --set against=DIR,DIR``.

Alone: calls one behind the other in a CUDA graph.  Ours are launched while the call before them
still runs (programmatic dependent launch), vLLM's and torch's are not.  ``cold`` is one call behind
something that filled L2, with two events (2 to 3 us).

In a step: as in a layer of sparse attention, behind ``select_topk`` and before a small kernel of
torch's.  A layer takes longer with the append than without it: that difference is what the append
costs.  A profile says something else: from the begin of the kernel to its end, where it has mostly
waited for top-k; ``profiles.spans`` counts from the end of that.

All bytes that a call leaves are compared with the truth.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dsl_kernels.spec import VariantSpec
from profiles import checkouts, spans, table, timing
from profiles.peer_ops import vllm_ops
from profiles.table import Calls, Run, Table
from profiles.tables import dsa_cost
from snapmla.testing.workloads.append_kv import WORKLOAD, moved, truth
from snapmla.testing.workloads.call import Sizes

ROWS656 = "fp8_ds_mla"
KINDS: dict[str, dict[str, Any]] = {  # what is called -> values of its variant
    "fp8": {},
    ROWS656: {"cache_dtype": ROWS656},
    f"{ROWS656}, norm and RoPE": {
        "cache_dtype": ROWS656, "rope_style": "interleaved", "norm": "rms"
    },
    "fp8_v4": {"cache_dtype": "fp8_v4"},
}  # fmt: skip
TOKENS = (1, 8, 32, 128, 1024, 4096, 32768)
STEPS = ((32, 32768), (8, 131072))  # requests, cached tokens of each
CONFIG = timing.TimingConfig(graph_ms=4.0, rounds=11, cold_iters=11, host_iters=0)
LAYERS = timing.TimingConfig(graph_ms=1.0, rounds=15, cold_iters=0, host_iters=0)
PLANES = ("content", "rope", "scale", "kv")
OURS, COPY, NO_APPEND = "ours", "copy", "none"
APPEND = ("append_kv", "concat_and_cache")  # in names of kernels
Given = dict[str, Any]
Make = Callable[[str, Given], timing.Call | None]  # of a kind, None where there is none
Shared = tuple[dict[str, Make], torch.device]


def ours(package: str = "") -> Make:
    """``snapmla.append_kv``: ours, or of the checkout in a folder."""

    def call_of(kind: str, given: Given) -> timing.Call:
        workload = importlib.import_module("snapmla.testing.workloads.append_kv").WORKLOAD
        made = importlib.import_module("dsl_kernels.spec").VariantSpec
        call = workload.public(spec_of(kind, made), given)
        call()  # loads its kernel
        return call  # type: ignore[no-any-return]

    def theirs(kind: str, given: Given) -> timing.Call:
        with checkouts.checkout(package).active():
            return call_of(kind, given)

    return theirs if package else call_of


def vllm(kind: str, given: Given) -> timing.Call | None:
    """vLLM's op, which writes rows of 656 bytes."""
    if kind != ROWS656:
        return None
    kv = given["kv"].squeeze(2)
    one = torch.ones(1, device=kv.device)
    tokens = given["c_kv"], given["k_rope"], kv, given["slot_mapping"]
    return lambda: torch.ops._C_cache_ops.concat_and_cache_mla(*tokens, ROWS656, one)


def makes_of(run: Run) -> Shared:
    """All contenders that are there, ours first.

    Raises:
        ValueError: a checkout cannot be used.
    """
    found: dict[str, Make] = {OURS: ours()}
    for folder in filter(None, run.options.get("against", "").split(",")):
        if reason := checkouts.checkout(folder).unavailable():
            raise ValueError(reason)
        found[Path(folder).name] = ours(folder)
    vllm_ops(run.peers)
    if hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        found["vLLM"] = vllm
    return found, run.device


def spec_of(kind: str, made: type[VariantSpec] = VariantSpec) -> VariantSpec:
    """The variant that engines call."""
    return made(op="append_kv", index_dtype="i64", **KINDS[kind])


class Tokens(table.Problem):
    """A row of the first table: buffers of calls, and each contender's calls on them."""

    def __init__(self, shared: Shared, shape: tuple[str, int]) -> None:
        (self.kind, self.tokens), (makes, device) = shape, shared
        spec, sizes = spec_of(self.kind), Sizes(1, self.tokens)
        self.size = moved(spec, sizes)
        count = min(64, timing.buffer_count(self.size, CONFIG))
        self.given = [WORKLOAD.sized(spec, sizes, device.type, seed) for seed in range(count)]
        made = {name: [make(self.kind, g) for g in self.given] for name, make in makes.items()}
        self.calls = {name: [c for c in each if c is not None] for name, each in made.items()}
        half = int(self.size / 2) // 16 * 16
        pairs = [torch.zeros(2, half, dtype=torch.uint8, device=device) for _ in self.given]
        self.calls[COPY] = [functools.partial(one.copy_, other) for one, other in pairs]

    def contenders(self) -> Calls:
        return {name: each for name, each in self.calls.items() if each}

    def facts(self) -> dict[str, Any]:
        shape = f"{self.kind}, {self.tokens} tokens"
        return {"shape": shape, "kind": self.kind, "tokens": self.tokens, "bytes": self.size}

    def check(self, name: str, calls: Sequence[timing.Call]) -> None:
        if name != COPY:
            compare(self.kind, self.given[-1], calls[-1])


def compare(kind: str, given: Given, call: timing.Call) -> None:
    """Raises ValueError unless the call leaves the bytes of the truth, and no others."""
    planes = {key: given[key] for key in PLANES if key in given}
    for plane in planes.values():
        plane.view(torch.uint8).fill_(0x7F)
    # its sums and products are those of the kernels on a CPU only
    want = truth(spec_of(kind), {k: x.cpu() if torch.is_tensor(x) else x for k, x in given.items()})
    call()
    for key, plane in planes.items():
        got = plane.cpu().contiguous()
        wrong = int((got.view(torch.uint8) != want[key].view(torch.uint8)).sum())
        if wrong:
            raise ValueError(f"{wrong} byte(s) of {key} differ")


class Layer(table.Problem):
    """A row of the other table: top-k, the append, a small kernel of torch's."""

    def __init__(self, shared: Shared, shape: tuple[int, int]) -> None:
        (self.requests, self.tokens), (makes, device) = shape, shared
        scores = dsa_cost.Problem.of(self.requests, self.tokens, "normal", device=device)
        self.given = WORKLOAD.sized(spec_of(ROWS656), Sizes(1, self.requests), device.type, 0)
        made = {name: make(ROWS656, self.given) for name, make in makes.items()}
        self.appends = {name: call for name, call in made.items() if call is not None}
        self.topk, self.small = dsa_cost.ours(scores, True), torch.zeros(4096, device=device)

    def layer(self, append: timing.Call) -> timing.Call:
        return lambda: (self.topk(), append(), self.small.add_(1.0))

    def contenders(self) -> Calls:
        appends = {NO_APPEND: lambda: None, **self.appends}
        return {name: [self.layer(call)] for name, call in appends.items()}

    def facts(self) -> dict[str, Any]:
        return {"shape": f"{self.requests} × {self.tokens}"}

    def check(self, name: str, calls: Sequence[timing.Call]) -> None:
        if name != NO_APPEND:
            compare(ROWS656, self.given, self.appends[name])

    def extra(self, calls: Calls) -> dict[str, Any]:
        """Microseconds of each layer's append by a profile: from its begin, from top-k's end."""
        found = {}
        for name, each in calls.items():
            loop = timing.make_loop(name, each, LAYERS, True)
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                loop.run()
                torch.cuda.synchronize()
            ran = spans.of_profile(profile)
            whole, part = (
                sum(
                    us
                    for kernel, us in count(ran).items()
                    if any(word in kernel for word in APPEND)
                )
                for count in (spans.durations, spans.charged)
            )
            found[name] = [whole / loop.count, part / loop.count]
        return {"profile": found}


def in_profile(head: str, number: int) -> table.Column:
    """The profile's figures."""
    return head, lambda row: f"{row['profile'][row['who']][number]:.2f}"


IN_A_STEP = Table(
    "", "", Layer, STEPS,
    (
        table.fact("requests × tokens", "shape"), table.fact("append", "who"),
        table.us(head="µs a layer", form=".2f"),
        ("it adds", lambda row: f"{row['us'][row['who']] - row['us'][NO_APPEND]:.2f}"),
        in_profile("profile: from its begin", 0), in_profile("profile: from top-k's end", 1),
    ),
    LAYERS, intro=("", f"## In a step, {ROWS656}", ""), ours=(OURS, NO_APPEND), each=True,
)  # fmt: skip
TABLES = (
    Table(
        "append_cost", "Appending tokens", Tokens,
        [(kind, tokens) for kind in KINDS for tokens in TOKENS],
        (
            table.fact("tokens as", "kind"), table.fact("tokens", "tokens"),
            table.fact("who", "who"), table.us(head="µs", form=".2f"), table.least(),
            ("cold µs", lambda row: table.told(row["cold"].get(row["who"]), ".2f")),
            ("GB/s", lambda row: f"{row['bytes'] / row['us'][row['who']] / 1e3:.0f}"),
            ("of copy", lambda row: f"{row['us'][COPY] / row['us'][row['who']]:.0%}"),
        ),
        CONFIG,
        notes=(
            "alone: median and least µs a call in a CUDA graph, contenders in turn; one call on a "
            "cold L2; GB/s of all bytes; of the speed of a copy of as many bytes",
            "in a step: µs of a layer (top-k, append, a small kernel), what the append adds, and "
            "what a profile says of it from its begin and from top-k's end",
        ),
        setup=makes_of, ours=(OURS, COPY), each=True, intro=("## Alone", ""), more=(IN_A_STEP,),
        takes=("peers", "against"),
    ),
)  # fmt: skip

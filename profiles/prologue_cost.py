"""The prologue of a layer of sparse attention on one GPU, beside the same in single calls.

    python -m profiles.prologue_cost --out profiles/results

Who:

    prologue    ``dsa.prologue``, RoPE of attention's queries (128 heads) with it; one launch
    no q_rope   the same without; one launch
    appends     ``rope_append_kv`` and ``append_index_k``, norms and RoPE inside: two launches, and
                nothing of the indexer's queries
    steps       torch's norms, RoPE and quantisation of queries, ``append_kv``, ``append_index_k``

Alone: calls one behind the other in a CUDA graph, whose launches overlap where they may
(programmatic dependent launch).  Between: each call stands between two small kernels of torch's,
as in a layer between its products; what such a layer takes longer than one without the call.

Before it is timed ours is compared with the truth, bit for bit, and both others' caches with it,
by how many bytes differ: torch adds squares in an order of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

import snapmla
from codegen.artifacts import write_atomic
from dsl_kernels.spec import VariantSpec
from profiles import page, timing
from profiles.machine import machine
from snapmla import dsa
from snapmla.testing import rope
from snapmla.testing.workloads import dsa_prologue, samples
from snapmla.testing.workloads.call import Sizes

FORMATS = ("fp8_ds_mla", "fp8")
TOKENS = (1, 8, 32, 128, 512)
BUFFERS = 4  # what products wrote lies in L2, as in a layer
LAYERS, ROUNDS = 27, 15
CONFIG = timing.TimingConfig(graph_ms=2.0, rounds=9, cold_iters=0, host_iters=0)
OURS, NO_ROPE, APPENDS, STEPS = "prologue", "no q_rope", "appends", "steps"
Given = dict[str, Any]


def spec_of(fmt: str) -> VariantSpec:
    """The variant that engines call."""
    return VariantSpec(op="dsa_prologue", index_dtype="i64", cache_dtype=fmt)


def without_rope(given: Given) -> Given:
    """The same call without attention's queries."""
    return {**given, "q_rope": given["q_rope"][:, :0], "out_rope": given["out_rope"][:, :0]}


def appends(fmt: str, given: Given) -> timing.Call:
    """Both appends, which norm and turn tokens."""
    cache = samples.cache_of(given, fmt)
    latents = [given[n] for n in ("c_kv", "k_rope", "slot_mapping", "positions", "cos_sin")]
    keys = [given[n] for n in ("index_cache", "index_k", "index_slot_mapping")]
    told = {
        "norm_weight": given["index_norm_weight"], "norm_bias": given["index_norm_bias"],
        "positions": given["positions"], "cos_sin_cache": given["cos_sin"],
    }  # fmt: skip

    def call() -> None:
        snapmla.rope_append_kv(cache, *latents, norm_weight=given["kv_norm_weight"])
        dsa.append_index_k(keys[0], keys[1], keys[2], **told)

    return call


def steps(fmt: str, given: Given) -> timing.Call:
    """Kernels of torch's around the plain appends."""
    cache, at, table = samples.cache_of(given, fmt), given["positions"], given["cos_sin"]
    functional, weight = torch.nn.functional, given["kv_norm_weight"]
    norm = given["index_norm_weight"], given["index_norm_bias"]

    def index_turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([rope.rotate_rows(x[..., :64], at, table, True), x[..., 64:]], -1)

    def call() -> None:
        c = functional.rms_norm(given["c_kv"], (512,), weight, dsa_prologue.EPS)
        r = rope.rotate_rows(given["k_rope"], at, table)
        snapmla.append_kv(cache, c, r, given["slot_mapping"])
        k = functional.layer_norm(given["index_k"].float(), (128,), *norm, dsa_prologue.EPS)
        k = index_turned(k.to(c.dtype))
        dsa.append_index_k(given["index_cache"], k, given["index_slot_mapping"])
        q = index_turned(given["index_q"]).float()
        scale = q.abs().amax(-1).clamp(min=1e-4) / 448.0
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
        given["out_q"].view(torch.float8_e4m3fn).copy_(q / scale[..., None])
        w = given["index_weights"] * scale * given["weight_scale"]
        given["out_weights"].copy_(w)
        given["out_rope"].copy_(rope.rotate_rows(given["q_rope"], at, table))

    return call


def contenders(fmt: str, given: Given) -> dict[str, timing.Call]:
    """All, ours first."""
    spec = spec_of(fmt)
    return {
        OURS: dsa_prologue.public(spec, given),
        NO_ROPE: dsa_prologue.public(spec, without_rope(given)),
        APPENDS: appends(fmt, given),
        STEPS: steps(fmt, given),
    }


def wrong_bytes(
    given: Given, want: Mapping[str, torch.Tensor], call: timing.Call
) -> dict[str, int]:
    """Bytes that a call leaves otherwise than the truth, by result; all are poison before."""
    for name in want:
        given[name].fill_(float("nan") if given[name].is_floating_point() else 0x7F)
    call()
    found = {}
    for name, right in want.items():
        got = given[name].cpu().contiguous()
        found[name] = int((got.view(torch.uint8) != right.contiguous().view(torch.uint8)).sum())
    return found


def check(fmt: str, given: Given) -> dict[str, str]:
    """What of each contender differs from the truth.

    Raises:
        ValueError: ours does.
    """
    for name in ("content", "kv", "scale", "rope", "index_cache"):
        if name in given:
            given[name].fill_(float("nan") if given[name].is_floating_point() else 0x7F)
    there = {n: x.cpu() if torch.is_tensor(x) else x for n, x in given.items()}
    want = dsa_prologue.truth(spec_of(fmt), there)
    told = {}
    for name, call in contenders(fmt, given).items():
        of = [n for n in want if name not in (NO_ROPE, APPENDS) or not n.startswith("out_")]
        wrong = wrong_bytes(given, {n: want[n] for n in of}, call)
        told[name] = ", ".join(f"{n} {count}" for n, count in wrong.items() if count) or "none"
        if any(wrong.values()) and name != STEPS:
            raise ValueError(f"{name}, {fmt}, {len(given['c_kv'])} tokens: bytes differ: {wrong}")
    return told


def between(call: timing.Call | None) -> torch.cuda.CUDAGraph:
    """A graph of LAYERS times a small kernel of torch's, the call, and another."""
    small = torch.zeros(4096, device="cuda")

    def layer() -> None:
        small.add_(1.0)
        if call is not None:
            call()
        small.add_(1.0)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAYERS):
            layer()
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a layer."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(timing.SPIN_CYCLES)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / LAYERS


def added(calls: Mapping[str, timing.Call]) -> dict[str, float]:
    """Microseconds that each call adds to a layer."""
    graphs = {"none": between(None), **{name: between(call) for name, call in calls.items()}}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(2 + ROUNDS):
        for name, graph in graphs.items():
            us = replayed(graph)
            if number >= 2:  # the first warm up
                times[name].append(us)
    least = median(times["none"])
    return {name: median(us) - least for name, us in times.items() if name != "none"}


def rows(fmt: str, tokens: int, device: torch.device) -> list[str]:
    """Lines of the table, one a contender."""
    spec, sizes = spec_of(fmt), Sizes(1, tokens)
    given = [dsa_prologue.sized(spec, sizes, device.type, seed) for seed in range(BUFFERS)]
    told = check(fmt, given[-1])
    each = [contenders(fmt, one) for one in given]
    loops = [
        timing.make_loop(name, [calls[name] for calls in each], CONFIG, True) for name in each[0]
    ]
    times = timing.interleave(loops, CONFIG, flush=None)
    adds = added(each[0])
    return [
        f"| {fmt} | {tokens} | {name} | {times[name].us:.2f} | {times[name].us_min:.2f} | "
        f"{adds[name]:.2f} | {told[name]} |"
        for name in each[0]
    ]


def main(
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
) -> None:
    """Times all and writes ``prologue_cost.md``."""
    device = torch.device("cuda")
    lines = page.head(
        "The prologue of a layer of sparse attention", "profiles.prologue_cost",
        page.told(machine(device, timing.Nvml()), page.FACTS),
        "median and least µs a call in a CUDA graph, contenders in turn; between two small "
        "kernels: what a layer takes longer with the call",
        "bytes that differ from the truth; ours must not have any",
    )  # fmt: skip
    columns = ("cache", "tokens", "who", "µs", "least", "between", "bytes off")
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    with torch.inference_mode():
        for fmt in FORMATS:
            for tokens in TOKENS:
                group = rows(fmt, tokens, device)
                lines += group
                typer.echo("\n".join(group))
                write_atomic(out / "prologue_cost.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""``append_kv`` on one GPU, beside vLLM's op, another checkout's and a copy of as many bytes.

    python -m profiles.append_cost --peers DIR --against DIR --out profiles/results

Alone: calls one behind the other in a CUDA graph.  Ours are launched while the call before them
still runs (programmatic dependent launch), vLLM's and torch's are not.  ``cold`` is one call behind
something that filled L2, with two events (2 to 3 us).

In a step: as in a layer of sparse attention, behind ``select_topk`` and before a small kernel of
torch's.  A layer takes longer with the append than without it: that difference is what the append
costs.  A profile says something else: from the begin of the kernel to its end, where it has mostly
waited for top-k; ``profiles.spans`` counts from the end of that.

Everything that is timed alone is first compared with the truth, byte for byte.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from dsl_kernels.spec import VariantSpec
from profiles import checkouts, dsa_cost, page, spans, timing
from profiles.machine import machine
from snapmla.testing.workloads.append_kv import moved, sized, truth
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
LAYERS, ROUNDS = 27, 15
CONFIG = timing.TimingConfig(graph_ms=4.0, rounds=11, cold_iters=11, host_iters=0)
PLANES = ("content", "rope", "scale", "kv")
OURS = "ours"
APPEND = ("append_kv", "concat_and_cache")  # in names of kernels
Given = dict[str, Any]
Make = Callable[[str, Given], timing.Call | None]  # of a kind, None where there is none


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


def contenders(peers: Path | None, against: Sequence[Path]) -> dict[str, Make]:
    """All that are there, ours first."""
    found: dict[str, Make] = {OURS: ours()}
    for folder in against:
        reason = checkouts.checkout(str(folder)).unavailable()
        if reason is None:
            found[folder.name] = ours(str(folder))
        else:
            typer.echo(reason)
    dsa_cost.vllm_ops(peers)
    if hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        found["vLLM"] = vllm
    return found


def spec_of(kind: str, made: type[VariantSpec] = VariantSpec) -> VariantSpec:
    """The variant that engines call."""
    return made(op="append_kv", index_dtype="i64", **KINDS[kind])


def is_right(kind: str, given: Given, name: str, call: timing.Call) -> bool:
    """Whether the call leaves the bytes of the truth, and no others; prints if it does not.

    Raises:
        ValueError: of ours, if it does not.
    """
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
            told = f"{name}, {kind}, {len(given['c_kv'])} tokens: {wrong} byte(s) of {key} differ"
            if name == OURS:
                raise ValueError(told)
            typer.echo(told)
            return False
    return True


def alone(
    kind: str, tokens: int, makes: dict[str, Make], device: torch.device,
    config: timing.TimingConfig = CONFIG,
) -> list[str]:  # fmt: skip
    """Lines of the first table, one a contender."""
    spec, sizes, cuda = spec_of(kind), Sizes(1, tokens), device.type == "cuda"
    size = moved(spec, sizes)
    count = min(64, timing.buffer_count(size, config))
    given = [sized(spec, sizes, device.type, seed) for seed in range(count)]
    loops = []
    for name, make in makes.items():
        calls = [call for each in given if (call := make(kind, each)) is not None]
        if calls and is_right(kind, given[-1], name, calls[-1]):
            loops.append(timing.make_loop(name, calls, config, cuda))
    half = int(size / 2) // 16 * 16
    pairs = [torch.zeros(2, half, dtype=torch.uint8, device=device) for _ in given]
    copies = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
    loops.append(timing.make_loop("copy", copies, config, cuda))
    flush = timing.L2Flush(device) if cuda else None
    times = timing.interleave(loops, config, flush=flush)
    copy = times["copy"].us
    return [
        f"| {kind} | {tokens} | {name} | {t.us:.2f} | {t.us_min:.2f} | "
        f"{'–' if t.us_cold is None else format(t.us_cold, '.2f')} | {size / t.us / 1e3:.0f} | "
        f"{copy / t.us:.0%} |"
        for name, t in times.items()
    ]


# ------------------------------------------------------------------------------------- in a step


def layers_of(call: timing.Call | None, topk: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of LAYERS times top-k, the call, and a small kernel of torch's."""
    small = torch.zeros(4096, device="cuda")

    def layer() -> None:
        topk()
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


def profiled(graph: torch.cuda.CUDAGraph) -> tuple[float, float]:
    """Microseconds of a layer's append by a profile: from its begin, and from top-k's end."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        graph.replay()
        torch.cuda.synchronize()
    found = spans.of_profile(profile)
    whole, part = (
        sum(us for name, us in each(found).items() if any(word in name for word in APPEND))
        for each in (spans.durations, spans.charged)
    )
    return whole / LAYERS, part / LAYERS


def in_a_step(requests: int, tokens: int, makes: dict[str, Make]) -> list[str]:
    """Lines of the second table, one a contender."""
    problem = dsa_cost.Problem.of(requests, tokens, "normal")
    topk = dsa_cost.ours(problem, True)
    given = sized(spec_of(ROWS656), Sizes(1, requests), "cuda", 0)
    graphs = {"none": layers_of(None, topk)}
    for name, make in makes.items():
        call = make(ROWS656, given)
        if call is not None:
            graphs[name] = layers_of(call, topk)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for number in range(2 + ROUNDS):
        for name, graph in graphs.items():
            us = replayed(graph)
            if number >= 2:  # the first warm up
                times[name].append(us)
    least = median(times["none"])
    lines = []
    for name, graph in graphs.items():
        us = median(times[name])
        whole, part = profiled(graph)
        lines.append(
            f"| {requests} × {tokens} | {name} | {us:.2f} | {us - least:.2f} | {whole:.2f} | "
            f"{part:.2f} |"
        )
    return lines


def main(
    peers: Annotated[Path | None, typer.Option(help="Folder of peers' libraries.")] = None,
    against: Annotated[list[Path] | None, typer.Option(help="Other checkouts.")] = None,
    out: Annotated[Path, typer.Option(help="Folder.")] = Path("build/bench"),
) -> None:
    """Times all and writes ``append_cost.md``."""
    device = torch.device("cuda")
    lines = page.head(
        "Appending tokens", "profiles.append_cost",
        page.told(machine(device, timing.Nvml()), page.FACTS),
        "alone: median and least µs a call in a CUDA graph, contenders in turn; one call on a cold "
        "L2; GB/s of all bytes; of the speed of a copy of as many bytes",
        "in a step: µs of a layer (top-k, append, a small kernel), what the append adds, and what "
        "a profile says of it from its begin and from top-k's end",
    )  # fmt: skip
    makes = contenders(peers, against or [])
    path = out / "append_cost.md"

    with torch.inference_mode():
        table(
            lines, path, "Alone",
            ("tokens as", "tokens", "who", "µs", "least", "cold µs", "GB/s", "of copy"),
            (alone(kind, n, makes, device) for kind in KINDS for n in TOKENS),
        )  # fmt: skip
        table(
            lines, path, f"In a step, {ROWS656}",
            ("requests × tokens", "append", "µs a layer", "it adds", "profile: from its begin",
             "profile: from top-k's end"),
            (in_a_step(requests, n, makes) for requests, n in STEPS),
        )  # fmt: skip


def table(
    lines: list[str], path: Path, title: str, columns: Sequence[str], rows: Iterable[list[str]]
) -> None:
    """Adds a table to the page, whose file is written anew behind every group of rows."""
    lines += [f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for group in rows:
        lines += group
        typer.echo("\n".join(group))
        write_atomic(path, "\n".join(lines) + "\n")
    lines.append("")


if __name__ == "__main__":
    typer.run(main)

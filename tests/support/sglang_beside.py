"""SGLang's calls of FlashMLA beside themselves with ours: layers of a step in CUDA graphs, in turn.

    PYTHONPATH=... SNAPMLA_SGLANG=DIR python -m tests.support.sglang_beside [SECONDS]

Needs an unpacked SGLang (``fetch_sglang``) and its wheel of FlashMLA (sgl-flash-mla) on the path.
A graph has the attention of ``LAYERS`` layers by SGLang's own text, with what it does around a call
(heads that are padded, a schedule a step); pools change from layer to layer.  Before they are timed
both are compared with float64.  A ratio is FlashMLA's time over ours, the median of rounds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch

from snapmla.integrations.sglang import flashmla, surface
from tests.support import fetch_sglang, sglang_calls
from tests.support.sglang_calls import V4, Case, Dense, Found, Prompts, Sparse

LAYERS, POOLS, ROUNDS, SEEDS = 12, 3, 9, range(2, 5)
Make = Callable[[Path, Found], Case]


def dsa(heads: int, tokens: int) -> Make:
    padded = 64 if heads <= 64 else 128
    return lambda of, found: Sparse(
        of, found.names, heads, padded, tokens, topk=2048, pages=1024, device="cuda"
    )


def v4(heads: int, tokens: int, ratio: int, more: int) -> Make:
    page = 256 // ratio if ratio else 64
    padded = 64 if heads <= 64 else 128
    return lambda of, found: V4(
        of, found.names, heads, padded, ratio, page, tokens, more=more, pages=512,
        more_pages=65536 // page, device="cuda",
    )  # fmt: skip


def dense(heads: int, batch: int, width: int) -> Make:
    return lambda of, found: Dense(of, found.bound, heads, batch, batch * width, width, "cuda")


def rows(heads: int, tokens: int) -> Make:
    return lambda of, found: Prompts(
        of, found.names, heads, tokens=tokens, topk=2048, pages=1024, device="cuda"
    )


SHAPES: dict[str, Make] = {
    "V3.2, 16 heads (padded to 64), 128 tokens": dsa(16, 128),
    "V3.2, 128 heads, 32 tokens": dsa(128, 32),
    "V4, 64 heads, 128 tokens, 128 + 512": v4(64, 128, 4, 512),
    "V4, 64 heads, 128 tokens, 128 alone": v4(64, 128, 0, 64),
    "V4, 16 heads (padded to 64), 32 tokens, 128 + 512 in pages of 2": v4(16, 32, 128, 512),
    "V3.2 in 16 bits, 16 heads (padded to 64), 128 tokens": rows(16, 128),
    "dense, 16 heads, 32 x 8K": dense(16, 32, 128),
}


@contextlib.contextmanager
def without(found: Found) -> Iterator[None]:
    """SGLang as it is without hooks."""
    places = [(found.names, name) for name in surface.FLASHMLA_NAMES]
    places.append((found.bound, surface.FLASHMLA_NAMES[0]))
    ours = [(module, name, getattr(module, name)) for module, name in places]
    for module, name, hook in ours:
        setattr(module, name, hook.__wrapped__)
    try:
        yield
    finally:
        for each in ours:
            setattr(*each)


def graph_of(cases: list[Case]) -> torch.cuda.CUDAGraph:
    """Captures a step's layers in a CUDA graph; checks the first case's results on both sides."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for case in cases:
            case.bind()
            case.metadata()
            case.run()
        for case in cases:
            case.metadata()
            case.follow(cases[0])
        torch.cuda.synchronize()
        cases[0].check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(LAYERS):
                cases[i % POOLS].run()
    graph.replay()
    torch.cuda.synchronize()
    cases[0].check()
    return graph


def timed(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds a layer."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / count / LAYERS


def row(make: Make, folder: Path, found: Found) -> str:
    cases = [make(folder, found) for _ in SEEDS]
    for seed, case in zip(SEEDS, cases, strict=True):
        case.fill(seed)
        case.follow(cases[0])
    before = flashmla.calls()
    ours = graph_of(cases)
    served = flashmla.calls() - before
    with without(found):
        theirs = graph_of(cases)
    times: dict[str, list[float]] = {"ours": [], "FlashMLA": []}
    for i in range(ROUNDS):
        pair = [("ours", ours), ("FlashMLA", theirs)]
        for name, graph in pair[:: 1 if i % 2 else -1]:
            times[name].append(timed(graph, 40))
    ratios = [b / a for a, b in zip(times["ours"], times["FlashMLA"], strict=True)]
    first, second = (median(each) for each in times.values())
    fell = "" if served == POOLS + LAYERS else f" ({served} calls were ours)"
    return f"{first:.1f} | {second:.1f} | {median(ratios):.3f}{fell}"


def main(seconds: float) -> None:
    (release,) = fetch_sglang.RELEASES
    path = fetch_sglang.path_of(release)
    if path is None:
        sys.exit(f"SGLang {release} is not there: python -m tests.support.fetch_sglang")
    surface.known_release = lambda: release  # type: ignore[assignment]  # it is not installed
    begin = time.monotonic()
    print(f"SGLang {release}, torch {torch.__version__}, {torch.cuda.get_device_name()}")
    print("us a layer: ours | FlashMLA | ratio", flush=True)
    with sglang_calls.engine(path[0], real=True) as found, torch.inference_mode():
        assert flashmla.register()
        found.hooks.HookRegistry.apply_hooks()
        for name, make in SHAPES.items():
            if time.monotonic() - begin > seconds:
                print(f"{name}: not run")
                continue
            try:
                print(f"{name}: {row(make, path[0], found)}", flush=True)
            except Exception as error:  # what the other shapes tell is wanted all the same
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main(float(sys.argv[1]) if sys.argv[1:] else 600.0)

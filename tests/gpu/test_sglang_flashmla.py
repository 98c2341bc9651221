"""FlashMLA's names inside of SGLang, ours, where the first call of a step is captured.

SGLang's own text, of an unpacked release (``python -m tests.support.fetch_sglang``, or a folder of
the same form that ``SNAPMLA_SGLANG`` names), with its registry of hooks.  Replays have other lists
and lengths than the capture.  Results by FlashMLA's gates to float64; where SGLang's wheel of
FlashMLA (sgl-flash-mla) is installed, its kernels are held to the same.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from snapmla.integrations.sglang import flashmla, surface
from tests.support import fetch_sglang, sglang_calls
from tests.support.sglang_calls import V4, Case, Dense, Found, Prompts, Sparse

pytestmark = pytest.mark.gpu
(RELEASE,) = fetch_sglang.RELEASES
Make = Callable[[Path, Found], Case]
CASES: dict[str, Make] = {
    "V3.2, 64 heads": lambda of, found: Sparse(of, found.names, device="cuda"),
    "V3.2, 16 heads": lambda of, found: Sparse(of, found.names, padded=16, device="cuda"),
    "V4, the window": lambda of, found: V4(of, found.names, ratio=0, device="cuda"),
    "V4, pages of 2": lambda of, found: V4(of, found.names, more_pages=200, device="cuda"),
    "V4, 16 heads": lambda of, found: V4(of, found.names, padded=16, device="cuda"),
    "dense": lambda of, found: Dense(of, found.bound, device="cuda"),
    "rows of 16 bits": lambda of, found: Prompts(of, found.names, device="cuda"),
}


def folder() -> Path:
    path = fetch_sglang.path_of(RELEASE)
    if path is None:
        pytest.skip(f"SGLang {RELEASE} is not there: python -m tests.support.fetch_sglang")
    return path[0]


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Found]:
    monkeypatch.setattr(flashmla, "_registered", {})
    monkeypatch.setattr(surface, "known_release", lambda: RELEASE)
    with sglang_calls.engine(folder()) as found:
        assert flashmla.register()
        found.hooks.HookRegistry.apply_hooks()
        yield found


def capture_nothing(stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of one launch: torch's first capture allocates its generator's state."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        torch.zeros(1, device="cuda")
    return graph


def outside_of_pools() -> int:
    """Bytes of segments that no graph's pool has."""
    found = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in found if s["segment_pool_id"] == (0, 0))


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_first_call_of_a_step_is_captured(name: str, warm: bool, hooked: Found) -> None:
    """After SGLang's warm-up of the shape; and without it, kernels being loaded."""
    case, stream = CASES[name](folder(), hooked), torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        case.fill(1)
        if warm:
            case.run()
            case.check()
            case.metadata()  # as SGLang does behind its warm-up
        else:  # what is loaded at a first call is not captured
            other = CASES[name](folder(), hooked)
            other.fill(2)
            with torch.cuda.stream(torch.cuda.Stream()):
                other.run()
            del other
        kept = capture_nothing(stream)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # as a capture begins: what is left then is what counts
        before, graph = outside_of_pools(), torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph, stream=stream):
                case.run()
                first = case.out
                case.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert outside_of_pools() <= before
        for seed in (5, 9):
            case.fill(seed)
            graph.replay()
            torch.cuda.synchronize()
            case.check()
            assert torch.equal(first, case.out)  # two layers
        del kept
    assert flashmla.calls() == 3


@pytest.mark.skipif(
    importlib.util.find_spec("flash_mla") is None, reason="sgl-flash-mla is not installed"
)
@pytest.mark.parametrize("name", [name for name in CASES if "16 heads" not in name])
def test_beside_flashmla(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's wheel without hooks, then ours: both within the gates."""
    monkeypatch.setattr(flashmla, "_registered", {})
    monkeypatch.setattr(surface, "known_release", lambda: RELEASE)
    with sglang_calls.engine(folder(), real=True) as found, torch.inference_mode():
        case: Any = CASES[name](folder(), found)
        case.fill(3)
        case.run()
        case.check()
        theirs = case.out.clone()
        assert flashmla.register()
        found.hooks.HookRegistry.apply_hooks()
        case.bind()
        case.metadata()
        case.run()
        case.check()
        assert flashmla.calls() == 1
        assert (theirs - case.out).abs().max() < 2e-2

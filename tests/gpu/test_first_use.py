"""A process's first calls, on a real GPU: under capture, and what they do to the other GPUs.

Each program runs in a process of its own, where nothing is loaded yet.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent.parent

SETUP = """
import ctypes
import torch, snapmla
def step(device):
    torch.manual_seed(0)
    cache = snapmla.PagedKVCache.allocate(8, device=device)
    table = torch.tensor([[5, 0, 3], [1, 7, 2]], dtype=torch.int32, device=device)
    lengths = torch.full((2,), 100, dtype=torch.int32, device=device)
    t = torch.arange(100, device=device)
    slots = (table[:, t // 64] * 64 + t % 64).flatten()
    latent = torch.randn(200, 576, device=device).bfloat16()
    q = torch.randn(2, 1, 16, 576, device=device).bfloat16()
    def run():
        snapmla.append_kv(cache, latent[:, :512], latent[:, 512:], slots)
        plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=3)
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])
        return snapmla.decode(query, cache, table, lengths, softmax_scale=192**-0.5, plan=plan)[0]
    return run
"""
CAPTURE = """
run = step("cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = run()
graph.replay()
torch.cuda.synchronize()
assert torch.equal(captured, step("cuda")())
print("right")
"""
OTHERS = """
step("cuda:0")()
torch.cuda.synchronize(0)
flags, active = ctypes.c_uint(), ctypes.c_int()
driver = ctypes.CDLL("libcuda.so.1")
for other in range(1, torch.cuda.device_count()):
    assert driver.cuDevicePrimaryCtxGetState(other, ctypes.byref(flags), ctypes.byref(active)) == 0
    assert not active.value, f"a context, hundreds of megabytes, on GPU {other}"
    assert torch.equal(step(f"cuda:{other}")().cpu(), step("cuda:0")().cpu())
print("right")
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + program], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr[-3000:]


def test_first_calls_may_be_captured() -> None:
    run(CAPTURE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_gpu_is_used_without_touching_the_others() -> None:
    run(OTHERS)

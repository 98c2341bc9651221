"""A process's first calls, on a real GPU: under capture, and what they do to the other GPUs.

Each program runs in a process of its own, where nothing is loaded yet.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support import ROOT
from tests.support.old_torch import WITHOUT_API

pytestmark = pytest.mark.gpu

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
OLD_TORCH = (
    WITHOUT_API
    + """
plain = torch.utils.dlpack.to_dlpack
def to_dlpack(t):
    return plain(t.as_strided(t.shape, [1 if n < 2 else s for n, s in zip(t.shape, t.stride())]))
torch.utils.dlpack.to_dlpack = to_dlpack
"""
)
ONE_OF_ALL = """
cache = snapmla.PagedKVCache.allocate(1, device="cuda")
latent = torch.ones(1, 576, device="cuda").bfloat16()
slots, table = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (1, (1, 1)))
snapmla.append_kv(cache, latent[:, :512], latent[:, 512:], slots)
query = snapmla.quantize_q(latent[:, None, None, :512], latent[:, None, None, 512:])
lengths = torch.ones(1, dtype=torch.int32, device="cuda")
plan = snapmla.plan_decode(lengths, 1, 1, page_size=64, max_pages=1)
out, _ = snapmla.decode(query, cache, table, lengths, softmax_scale=1.0, plan=plan)
assert (out - 1).abs().max().item() < 1e-2, out
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


ONLY_1 = """
import sys, threading
def first_gpu_is_free(when):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
    assert not active.value, f"{when}: a context, hundreds of megabytes, on GPU 0"

def calls(device):
    cache = snapmla.PagedKVCache.allocate(2, device=device)
    lengths = torch.full((1,), 100, dtype=torch.int32, device=device)
    table = torch.arange(2, dtype=torch.int32, device=device)[None]
    slots = torch.arange(100, dtype=torch.int32, device=device)
    latent = torch.ones(100, 576, device=device).bfloat16()
    q = torch.ones(1, 1, 16, 576, device=device).bfloat16()
    out = torch.empty(1, 1, 16, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(1, 16, 1, device=device)
    def append_kv():
        snapmla.append_kv(cache, latent[:, :512], latent[:, 512:], slots)
    if sys.argv[1] == "append_kv":
        return append_kv, lambda: None
    append_kv()
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=2)
    query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    def decode():
        snapmla.decode(query, cache, table, lengths, softmax_scale=1.0, plan=plan, out=out, lse=lse)
    def check():
        assert (out - 1).abs().max().item() < 1e-2, out
    return decode, check

call, check = calls("cuda:1")
first_gpu_is_free("before the call")
if sys.argv[2] == "thread":  # has no context, while this one has GPU 1's
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
else:
    call()
first_gpu_is_free("after the call")
check()
first_gpu_is_free("at the end")
print("right", flush=True)
sys.stdin.read()
"""


def run(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + program], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and done.stdout == "right\n", done.stdout + done.stderr[-3000:]


def test_first_calls_may_be_captured() -> None:
    run(CAPTURE)


def test_first_calls_with_a_torch_before_2_10() -> None:
    """Its DLPack has no exchange API, and names 1 as the stride of every extent of 1."""
    done = subprocess.run(
        [sys.executable, "-c", OLD_TORCH + SETUP + CAPTURE.replace('print("right")', ONE_OF_ALL)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_gpu_is_used_without_touching_the_others() -> None:
    run(OTHERS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("thread", ["main", "thread"])
@pytest.mark.parametrize("call", ["append_kv", "decode"])
def test_the_first_gpu_is_free_while_the_second_works(call: str, thread: str) -> None:
    """A server's worker for cuda:1 that never names its GPU to torch: nothing of it is on GPU 0.

    Asked of the driver in the process itself, and of GPU 0 from outside.
    """
    torch.cuda.mem_get_info(0)  # this process' own context is there from here on
    free, _ = torch.cuda.mem_get_info(0)
    worker = subprocess.Popen(
        [sys.executable, "-c", SETUP + ONLY_1, call, thread], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert worker.stdout is not None
    line = worker.stdout.readline()
    left, _ = torch.cuda.mem_get_info(0)  # while it waits for the end of its input
    _, errors = worker.communicate()
    assert worker.returncode == 0 and line == "right\n", errors[-3000:]
    assert free - left < 32 << 20, f"{(free - left) >> 20} MiB of GPU 0 for work on GPU 1"

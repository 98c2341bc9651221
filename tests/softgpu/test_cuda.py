"""Software GPU: objects that nvcc makes of CUDA C++ (``cuda_kernels.cu``), host code and all.

Each kernel runs under every schedule with one result; with a ``flaw``, a synchronisation left out,
the hazard check or the deadlock report names what is missing.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softgpu
from softgpu import Deadlock, Hazard, LaunchError, Options, SoftGpuError, ToolchainError
from softgpu.testing import aligned

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
SOURCE = Path(__file__).with_name("cuda_kernels.cu")
SCHEDULES = [("early", None), ("late", None), ("random", 1), ("random", 2), ("late", 3)]


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> softgpu.CudaObject:
    folder = tmp_path_factory.mktemp("cuda")
    command = [
        "nvcc", "-gencode", "arch=compute_100a,code=compute_100a", "-std=c++17", "-lineinfo",
        "-Xcompiler", "-fPIC", "-c", str(SOURCE), "-o", "kernels.o", "--keep",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTGPU_CACHE_DIR", str(folder))
        return softgpu.load_cuda(folder / "kernels.o", folder / "cuda_kernels.ptx")


def every_schedule(cuda: softgpu.CudaObject, call: Callable[[], Any]) -> None:
    for mode, seed in SCHEDULES:
        cuda.options = Options(asynchronous=mode, seed=seed, hazards="raise")
        call()


def reported(cuda: softgpu.CudaObject, call: Callable[[], Any]) -> set[str]:
    """Kinds of hazards, or names of errors, over the schedules; each finds something."""
    found = set()
    for mode, seed in SCHEDULES:
        cuda.options = Options(asynchronous=mode, seed=seed, hazards="raise")
        with pytest.raises(SoftGpuError) as caught:
            call()
        error = caught.value
        assert "cuda_kernels.cu:" in str(error)
        found.add(error.kind if isinstance(error, Hazard) else type(error).__name__)
    return found


def test_a_gemm_of_a_cluster(cuda: softgpu.CudaObject) -> None:
    """Tensor maps that the driver's entry point encodes, multicast, tcgen05, a cluster launch."""
    torch.manual_seed(1)
    a, b = (torch.randint(-8, 9, (128, 64)).bfloat16() for _ in range(2))
    want = a.float() @ b.float().T

    def go(flaw: int = 0) -> None:
        d = torch.full((128, 128), float("nan"))
        cuda.call("run_gemm", a, b, d, flaw)
        assert torch.equal(d, want)

    every_schedule(cuda, go)
    [launch] = cuda.launches
    assert (launch.grid, launch.cluster, launch.dynamic_smem) == ((2, 1, 1), (2, 1, 1), 25600)
    assert reported(cuda, lambda: go(1)) == {"read-before-complete"}
    assert reported(cuda, lambda: go(2)) <= {"read-before-complete", "uninitialised"}
    assert "mbarrier-init" in reported(cuda, lambda: go(3))


def test_gathered_rows_of_8_byte_elements(cuda: softgpu.CudaObject) -> None:
    data = aligned((20, 16), np.int64)
    data[:] = np.random.default_rng(1).integers(-(2**63), 2**63, data.shape)
    rows = [3, 19, -1, 3]  # outside is zero

    def go() -> None:
        out = aligned((4, 16), np.int64)
        cuda.call("run_gather", data, 20, out, *rows)
        for got, row in zip(out, rows, strict=True):
            assert got.tolist() == (data[row].tolist() if row >= 0 else [0] * 16)

    every_schedule(cuda, go)


def test_lanes_of_a_warp_come_to_a_barrier_on_two_paths(cuda: softgpu.CudaObject) -> None:
    def go(flaw: int = 0) -> None:
        out = np.zeros(64, np.int32)
        cuda.call("run_by_threads", out, flaw)
        assert out.tolist() == [-1 if i % 32 == 7 else 101 - i // 32 for i in range(64)]

    every_schedule(cuda, go)
    cuda.options = Options(hazards="raise")
    for flaw in (1, 2):  # another barrier; bar.sync, which all lanes execute together
        with pytest.raises(Deadlock, match=r"barrier 1: lanes \[7\] of its own warp"):
            go(flaw)


def test_a_ring_of_clusters(cuda: softgpu.CudaObject) -> None:
    """``__cluster_dims__`` and <<<>>>, a variable of the device, more than 48 KB of dynamic and
    distributed shared memory, additions by bulk copies of four CTAs."""
    n = 64
    numbers = np.arange(4 * n, dtype=np.float32).reshape(4, n)

    def go(flaw: int = 0, limit: int = 60000) -> None:
        total, out = aligned(n, np.float32), np.zeros((4, n), np.float32)
        cuda.call("run_ring", numbers, total, out, n, limit, flaw)
        assert (total == 3 * numbers.sum(0)).all()
        assert (out == 3 * numbers[[1, 0, 3, 2]]).all()

    every_schedule(cuda, go)
    [launch] = cuda.launches
    assert launch.cluster == (2, 1, 1) and launch.max_dynamic_smem == 60000
    assert reported(cuda, lambda: go(1)) == {"missing-proxy-fence"}
    assert reported(cuda, lambda: go(2)) <= {"race", "uninitialised"}
    cuda.options = Options()
    with pytest.raises(SoftGpuError, match="run_ring returned CUDA error 98"):
        go(limit=300000)  # more than a multiprocessor has: the attribute is refused


def test_exponents_as_the_header_computes_them(cuda: softgpu.CudaObject) -> None:
    """Of special and random patterns, all roundings; the host's code is NVIDIA's, without PTX."""
    edges = [
        0,
        1,
        0x3FFFFF,
        0x400000,
        0x400001,
        0x7FFFFF,
        0x800000,
        0x800001,
        0x3F800000,
        0x3F800001,
        0x7F000000,
        0x7F000001,
        0x7F7FFFFF,
        0x7F800000,
        0x7F800001,
        0x7FC00000,
    ]
    bits = np.array(edges + [e | 1 << 31 for e in edges], np.uint32)
    rest = np.random.default_rng(5).integers(0, 1 << 32, 224, dtype=np.uint32)
    x = np.concatenate([bits, rest])
    device, host = (np.zeros((128, 6), np.uint16) for _ in range(2))
    cuda.options = Options(hazards="raise")
    cuda.call("run_exponents", x, device, host, 128)
    np.testing.assert_array_equal(device, host)
    assert len(np.unique(host)) > 100


# ---- what goes wrong before a kernel runs --------------------------------------------------------
def test_the_host_code_asks_for_the_device(cuda: softgpu.CudaObject) -> None:
    facts = np.zeros(2, np.int32)
    cuda.call("device_facts", facts)
    assert facts.tolist() == [148, 10]
    cuda.call("no_such_entry")


def test_errors_of_a_call(cuda: softgpu.CudaObject) -> None:
    with pytest.raises(SoftGpuError, match="fails returned CUDA error 1"):
        cuda.call("fails")
    with pytest.raises(SoftGpuError, match="exports no function 'missing'"):
        cuda.call("missing")
    for wrong in (1.5, "text", 1 << 40):
        with pytest.raises(TypeError, match="argument 1: expected a tensor.* got"):
            cuda.call("run_by_threads", np.zeros(64, np.int32), wrong)
    with pytest.raises(TypeError, match="argument 0: expected a contiguous array"):
        cuda.call("run_by_threads", np.zeros((64, 2), np.int32)[:, 0], 0)
    with pytest.raises(SoftGpuError, match="argument 0: expected a CPU tensor, got meta"):
        cuda.call("run_by_threads", torch.zeros(64, device="meta"), 0)
    with pytest.raises(softgpu.MemoryFault, match=r"argument 0 int32\[32\]"):
        cuda.call("run_by_threads", np.zeros(32, np.int32), ctypes.c_int(0))
    with pytest.raises(LaunchError, match="allows 32, 1, 1 threads at most"):
        kernel = cuda.module.kernels["_Z10by_threadsPii"]
        try:
            kernel.directives["maxntid"], text = "32, 1, 1", kernel.directives["maxntid"]
            cuda.call("run_by_threads", np.zeros(64, np.int32), 0)
        finally:
            kernel.directives["maxntid"] = text
    with pytest.raises(LaunchError, match="has no kernel"):
        kernels = cuda.module.kernels
        try:
            cuda.module.kernels = {}
            cuda._programs.clear()
            cuda.call("run_by_threads", np.zeros(64, np.int32), 0)
        finally:
            cuda.module.kernels = kernels


def test_a_call_that_the_runtime_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTGPU_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.c").write_text("int cudaMalloc(void **, long); int f(void) { void *p;"
                                  " return cudaMalloc(&p, 4); }")  # fmt: skip
    compiler = softgpu.runtime._compiler()
    subprocess.run([compiler, "-c", "-fPIC", "a.c", "-o", "a.o"], cwd=tmp_path, check=True)
    (tmp_path / "a.ptx").write_text(".version 8.8\n.target sm_90a\n.address_size 64\n")
    with pytest.raises(ToolchainError, match=r"cudart.c does not offer(.*\n)*.*cudaMalloc"):
        softgpu.load_cuda(tmp_path / "a.o", tmp_path / "a.ptx")

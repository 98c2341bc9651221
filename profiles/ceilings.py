"""What this card reaches today: read-only stream, BF16 and FP8 matrix multiplication.

Run at the start of every benchmark, so that a fraction of the roof is not judged against another
day's card.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from profiles import timing
from profiles.roofline import Ceilings

MATRIX = 8192
STREAM_BYTES = 4 << 30
# (int32 elements per program, per load, warps): which of these streams fastest differs by card.
READ_TILINGS = ((65536, 4096, 8), (131072, 8192, 8), (32768, 8192, 16), (16384, 4096, 4))


@dataclasses.dataclass(frozen=True)
class Probe:
    """One ceiling: what was run, its time, its rate in ``unit``."""

    what: str
    us: float
    rate: float
    unit: str
    mhz: float | None
    watts: float | None


def probe(nvml: timing.Nvml, quick: bool = False) -> tuple[Ceilings | None, list[Probe], list[str]]:
    """Measures all ceilings; returns (best of each kind, every probe, what failed and why)."""
    config = timing.TimingConfig(graph_ms=20.0, rounds=5, cold_iters=0, host_iters=0)
    probes: list[Probe] = []
    notes: list[str] = []
    for part in (_read_stream, _matmul):
        try:
            probes += part(config, nvml, quick)
        except Exception as error:
            notes.append(f"{part.__name__.strip('_')}: {type(error).__name__}: {error}"[:300])
        torch.cuda.empty_cache()
    best = {
        kind: max((p.rate for p in probes if p.what.startswith(kind)), default=0.0)
        for kind in ("read", "bf16", "fp8")
    }
    if not any(best.values()):
        return None, probes, notes
    return Ceilings(best["read"], best["bf16"], best["fp8"], "probe"), probes, notes


def _measure(
    what: str, calls: list[timing.Call], work: float, unit: str, config: timing.TimingConfig,
    nvml: timing.Nvml,
) -> Probe:  # fmt: skip
    loop = timing.make_loop(what, calls, config, cuda=True)
    result = timing.interleave([loop], config, nvml)[what]
    scale = 1e-3 if unit == "GB/s" else 1e-6
    return Probe(what, result.us, work / result.us * scale, unit, result.mhz, result.watts)


def _read_stream(config: timing.TimingConfig, nvml: timing.Nvml, quick: bool) -> list[Probe]:
    from profiles.read_kernel import read_stream

    size = STREAM_BYTES >> (2 if quick else 0)
    source = torch.full((size // 4,), 7, dtype=torch.int32, device="cuda")
    sums = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
    probes = []
    for per, block, warps in READ_TILINGS:

        def call(per: int = per, block: int = block, warps: int = warps) -> None:
            read_stream(source, sums, per, block, warps)

        what = f"read {size >> 30} GiB, {per}/{block}/{warps}"
        probes.append(_measure(what, [call], float(size), "GB/s", config, nvml))
    half = source.view(2, -1)
    copy = _measure(
        f"copy {size >> 31} GiB",
        [lambda: half[1].copy_(half[0])],
        float(size),
        "GB/s",
        config,
        nvml,
    )
    return [*probes, copy]


def matmul_calls(n: int = MATRIX) -> dict[str, list[timing.Call]]:
    """Products of n x n matrices of N(0, 1), ``bf16`` and ``fp8`` (e4m3), two pairs of operands."""
    a = [torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    b = [torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    out = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
    a8 = [x.to(torch.float8_e4m3fn) for x in a]
    b8 = [x.to(torch.float8_e4m3fn).t() for x in b]
    one = torch.ones((), device="cuda", dtype=torch.float32)

    def bf16(i: int) -> timing.Call:
        return lambda: torch.mm(a[i], b[i].t(), out=out)

    def fp8(i: int) -> timing.Call:
        def call() -> Any:
            return torch._scaled_mm(
                a8[i], b8[i], scale_a=one, scale_b=one, out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )  # fmt: skip

        return call

    return {"bf16": [bf16(0), bf16(1)], "fp8": [fp8(0), fp8(1)]}


def _matmul(config: timing.TimingConfig, nvml: timing.Nvml, quick: bool) -> list[Probe]:
    flops = 2.0 * MATRIX**3
    return [
        _measure(f"{kind} mm {MATRIX}^3", calls, flops, "TFLOP/s", config, nvml)
        for kind, calls in matmul_calls().items()
    ]

"""The script that runs published programs: what it calls a pass, and what it replaces."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from profiles.published.__main__ import app, verdict
from profiles.published.blackwell import CudaOnCpu, relative_l2
from profiles.published.programs import BF16, E4M3, PROGRAMS, SOURCES, roundings

GEMM, MLA = PROGRAMS["dense_gemm_bf16"], PROGRAMS["mla_decode_fp8_long"]


@pytest.mark.parametrize(("program", "seen", "differing", "text"), [
    (GEMM, [(0.0, 0.0)], [], "passes"),
    (GEMM, [(1e-9, 0.0)], [], "comparison 0: off by 1.00e-09, bound 0.00e+00"),
    (GEMM, [], [], "compared nothing"),
    (GEMM, [(0.0, 0.0)], ["random 1", "random 1"], "other bits under random 1"),
    (MLA, [(0.04, 0.0), (1e-6, 0.0)] * 2, [], "passes"),
    (MLA, [(0.04, 0.0), (1e-6, 0.0), (0.06, 0.0)], [], "comparison 2: off by 6.00e-02"),
    (MLA, [(float("nan"), 0.0)], [], "comparison 0: off by nan"),
    (PROGRAMS["fmha_bwd"], [(1e-3, 0.0)], ["random 0"], "passes"),
])  # fmt: skip
def test_verdicts(program: object, seen: list, differing: list, text: str) -> None:
    assert verdict(program, "", seen, differing).startswith(text)
    assert verdict(program, "Traceback\nValueError: no", seen, differing) == "ValueError: no"
    long = "Traceback\n  File a\nValueError: no\n  at kernel.py:3\n  by block 0"
    assert verdict(program, long, seen, differing) == "ValueError: no"


def test_bounds_hold_for_rounded_numbers() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for kind, bits in ((torch.bfloat16, BF16), (torch.float8_e4m3fn, E4M3)):
        # float8 is subnormal below 2^-6: leave those out, as a bound for normal numbers must
        normal = x[x.abs() > 2.0**-6]
        assert 0.5 * roundings(bits) < relative_l2(normal.to(kind), normal) < roundings(bits)


def test_tensors_on_cuda_are_made_on_the_cpu() -> None:
    host = torch.arange(4.0)
    with CudaOnCpu():
        there = [
            torch.zeros(4, device="cuda"),
            host.cuda(),
            host.to("cuda"),
            host.to(device="cuda"),
        ]
        assert all(t.is_cuda and t.device.type == "cuda" for t in there)
        there[2][0] = 9
    assert all(t.device.type == "cpu" for t in there) and host[0] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "nothing", "--from", "."], "no program nothing; there are 1cta_mma_basic"),
        (["one", "nothing", "--from", "."], "no program nothing"),
        (["run"], "--from"),
        (["run", "--from", "not there"], "not there"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "NO_COLOR": "1"})
    assert done.exit_code == 2 and text in done.output


def test_every_source_has_a_program() -> None:
    assert {p.source for p in PROGRAMS.values()} == SOURCES.keys()

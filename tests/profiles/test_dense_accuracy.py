"""The accuracy of 16-bit decode beside its peers: the machinery, on kernels that are torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles import dense_accuracy, flashmla_grid
from profiles.decode_row import SOFTMAX_SCALE, Contender, Entry, Problem
from profiles.dense_accuracy import Figure, Found
from profiles.flashmla_grid import KINDS, NEAR_ZERO
from snapmla.testing.dense_reference import dense_decode_reference

CPU = torch.device("cpu")
FACTS = {"name": "x", "command": "c", "commit": "abc", "created": "now", "machine": {"gpu": "none"}}


class Rounded(Contender):
    """The truth, rounded to the inputs' dtype, with a relative error on top."""

    def __init__(self, wrong: Callable[[Problem], float] = lambda problem: 0.0) -> None:
        self.wrong = wrong

    def enter(self, problem: Problem, pool: Any) -> Entry:
        out, lse = dense_decode_reference(
            problem.query, pool.cache, problem.tables[64][0], problem.lengths, SOFTMAX_SCALE
        )
        out = (out * (1 + self.wrong(problem))).to(problem.query.dtype)
        return Entry([lambda: (out, lse)], problem.query)


class Refuses(Contender):
    def enter(self, problem: Problem, pool: Any) -> Entry:
        raise RuntimeError("no fp16\nfile.cu:12")


def sweep(ours: Contender, peer: Contender | str = "no peers folder") -> list[Figure]:
    def found(name: str) -> Contender | str:
        return peer if name == "flashmla_bf16" else ours

    return dense_accuracy.sweep(((64, 3), (130, 2)), (2,), CPU, found)


def test_sweep_gates_growth() -> None:
    figures = sweep(Rounded(), Refuses())
    assert not any(f.failed for f in figures)
    own = [f for f in figures if f.who == "ours"]
    assert len(own) == 2 * 2 * 3 * 2 and all(f.base is not None for f in own)
    for dtype, scale in (("bf16", 2.0**-9), ("f16", 2.0**-12)):  # of the outputs' rounding
        errors = [f.error for f in own if f.dtype == dtype]
        assert all(e is not None and scale / 2 < e < 2 * scale for e in errors)
    shown = [f for f in figures if f.who != "ours"]
    assert {f.who for f in shown} == {"ours, a part a sequence", "flashmla_bf16"}
    assert {f.note for f in shown if f.error is None} == {"RuntimeError: no fp16"}

    grows = sweep(Rounded(lambda problem: 1e-2 if problem.shape.seqlen > 64 else 0.0))
    assert {f.length for f in grows if f.failed} == {130}
    assert {f.who for f in grows if f.failed} == {"ours"}
    missing = sweep(Refuses())
    assert all(f.failed for f in missing if f.who == "ours")  # also where there is no base


def test_sweep_draws_the_same_tokens_for_all() -> None:
    """One memory a dtype; logits as wide as asked for."""
    steps = list(dense_accuracy.sweep_steps(300, 2, 0.5, (2, 3), CPU))
    assert [(i, d) for i, d, _ in steps] == [
        (f"h{h} std {std:g} mean 0.5", d)
        for d in ("bf16", "f16") for h in (2, 3) for std in (0.1, 1.0)
    ]  # fmt: skip
    (*_, a), (*_, b) = steps[0], steps[4]
    assert a.pool.cache.dtype == torch.bfloat16 and b.pool.cache.dtype == torch.float16
    torch.testing.assert_close(a.pool.cache.float(), b.pool.cache.float(), atol=0, rtol=2.0**-8)
    for inputs, _, step in steps:
        token = step.problem.tables[64][0][0].long().repeat_interleave(64)[:300] * 64
        keys = step.pool.load(token + torch.arange(300) % 64)
        logits = step.problem.query[0, 0].double() @ keys.T * SOFTMAX_SCALE
        want = float(inputs.split()[2]) * math.sqrt(2)  # content and RoPE
        assert 0.7 * want < float(logits.std()) < 1.4 * want


def test_rmse_is_gated_by_the_best_peer() -> None:
    peers = {
        "flashmla_bf16": Rounded(lambda p: 1e-2), "fa3": Refuses(), "etap": "no such contender",
    }  # fmt: skip

    def run(ours: Contender) -> list[Figure]:
        return dense_accuracy.rmse((100,), CPU, lambda name: peers.get(name, ours), heads=2)

    figures = run(Rounded(lambda p: 1.02e-2))
    assert len(figures) == 2 * 3 * 5 and not any(f.failed for f in figures)
    own = [f for f in figures if f.who == "ours"]
    assert all(f.base == g.error for f, g in zip(own, figures[2::5], strict=True))
    assert {f.note for f in figures if f.who in ("fa3", "etap")} == {
        "RuntimeError: no fp16", "no such contender"
    }  # fmt: skip
    assert all(f.failed for f in run(Rounded(lambda p: 1.2e-2)) if f.who == "ours")
    assert all(f.failed for f in run(Rounded(lambda p: math.nan)) if f.who == "ours")
    assert all(f.failed for f in run(Refuses()) if f.who == "ours")


@pytest.mark.parametrize("kind", ["RoPE to 1e3", "latent x 64"])
def test_outliers_leave_the_logits(kind: str) -> None:
    """What a token's channel gains, the query's loses; up to the bound."""
    plain, loud = (dense_accuracy.rmse_step(k, "bf16", 200, 1, 2, CPU) for k in ("N(0, 1)", kind))
    top = float(loud.pool.cache.abs().max())
    assert (top == 1000 if kind.startswith("RoPE") else 150 < top < 400) and top < 65504
    a, b = (s.truth(0).lse for s in (plain, loud))
    torch.testing.assert_close(a, b, atol=5e-2, rtol=0)


@dataclass
class Torch:
    """The reference by its plain definition, and what is wrong with it."""

    out: float = 0.0
    lse: float = 0.0
    empty: float = math.inf

    def __call__(
        self, q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out, lse = dense_decode_reference(
            q, cache, table, lengths, flashmla_grid.SCALE, causal=causal, empty_lse=self.empty
        )
        out[0, -1, -1, 0] += self.out
        lse[0, -1, -1] += self.lse
        return out.to(q.dtype), lse.float()


def grid(kernel: Any, theirs: Any = "no peers folder") -> list[flashmla_grid.Tally]:
    """Two sequences of 70 tokens at most, the second of them empty in the last kind."""
    kernels = {"ours": kernel, "flashmla": theirs}
    return flashmla_grid.run(kernels, CPU, batches=(2,), lengths=(70,), heads=(2,))


def test_grid() -> None:
    """By a reference of another making; a peer's violations are counted and fail nothing."""
    tallies = grid(Torch(), Torch(out=1e-2))
    assert [t.kind for t in tallies[::4]] == [*KINDS, NEAR_ZERO]
    for t in tallies:
        assert t.failures() == []
        assert t.cases == (2 * 5 if t.kind in KINDS else 1) and not t.refused
        assert (t.out_outside == t.cases) == (t.who == "flashmla") and not t.lse_outside
        assert (t.condition is not None) == (t.kind == NEAR_ZERO)
    text = "\n".join(flashmla_grid.lines(tallies))
    assert "| equal | bf16 | flashmla | 10 |" in text and "s_q 2 h 2 h_kv 1 s_k 70 causal" in text


@pytest.mark.parametrize(
    ("kernel", "kinds"),
    [
        (Torch(lse=1e-2), (*KINDS, NEAR_ZERO)),
        (Torch(lse=math.nan), (*KINDS, NEAR_ZERO)),
        (Torch(out=1e-2), (*KINDS, NEAR_ZERO)),
        (Torch(empty=-math.inf), KINDS[2:]),
        ("not there", (*KINDS, NEAR_ZERO)),
    ],
    ids=str,
)
def test_grid_fails(kernel: Any, kinds: tuple[str, ...]) -> None:
    failed = {t.kind for t in grid(kernel) if t.failures()}
    assert failed == set(kinds)


def test_few_lses_may_be_right_by_their_condition() -> None:
    """3 of 3000, by less than 8 x 2^-24 of the magnitudes; none on a grid of exact kernels."""
    assert not any(t.by_condition for t in grid(Torch()))
    tally = flashmla_grid.Tally("ours", "bf16", NEAR_ZERO, gated=True)
    truth = torch.ones(3, 2, 500, 512, dtype=torch.float64), torch.zeros(3, 500, 2).double()

    def judge(wrong: int, error: float) -> list[str]:
        lse = truth[1].clone()
        lse[0, :wrong, 0] = error
        tally.judge((truth[0], lse), truth, lambda of: torch.where(of, 10.0, 0.0), "case")
        return tally.failures()

    unit = 10.0 * 2.0**-24
    assert judge(3, 7 * unit) == [] and tally.by_condition == 3 and tally.lse_outside == 0
    assert "LSEs right by their logits' condition alone, 1 cases" in "".join(judge(4, 7 * unit))
    judge(2, 9 * unit)
    assert tally.lse_outside == 2 and tally.by_condition == 7 and tally.condition_cases == 1
    assert "| 2 | 7 | 0 |" in "\n".join(flashmla_grid.lines([tally]))


def test_lengths_only_shrink() -> None:
    """Else what an earlier kind poisoned would be read."""
    for batch in flashmla_grid.BATCHES:
        for s_k in flashmla_grid.LENGTHS:
            all_ = [flashmla_grid.lengths_of(kind, batch, s_k) for kind in KINDS]
            assert all(a >= b >= c for a, b, c in zip(*all_, strict=True))
            assert 0 in all_[2] and 0 not in all_[1] and min(all_[1]) >= 4


def test_report(tmp_path: Path) -> None:
    good = Figure("h16 std 1 mean 0", "f16", "ours", 1024, 2e-4, 2e-4, 1.3)
    found = Found(
        sweep=[good, replace(good, length=16384, error=3e-4),
               Figure("h16 std 1 mean 0", "f16", "flashmla_bf16", 1024, None, note="refused")],
        rmse=[Figure("N(0, 1)", "f16", "ours", 512, 2e-5, 1.9e-5, 1.05)],
        grid=[flashmla_grid.Tally("ours", "f16", "equal", gated=True)],
        seconds={"sweep": 1.0},
    )  # fmt: skip
    dense_accuracy.save(found, FACTS, tmp_path)
    report = json.loads((tmp_path / "dense-accuracy.json").read_text())
    assert len(report["failures"]) == 3 and len(report["sweep"]) == 3  # one, RMSE, no case ran
    text = (tmp_path / "dense-accuracy.md").read_text()
    assert "| h16 std 1 mean 0 | f16 | ours | 2.00e-04 (1.00) | 3.00e-04 (1.50) **FAIL** |" in text
    assert "- flashmla_bf16, f16: refused" in text and "2.00e-05 (1.05) **FAIL**" in text
    assert "no case ran" in text and "1.25e-5" in text
    assert "rows" not in report  # profiles.report leaves it alone

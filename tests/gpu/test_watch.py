"""Calls on a real GPU that are logged and dumped: the same bits again, graphs, faults."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import snapmla
from snapmla.runtime import dump, variants
from snapmla.testing import selfcheck
from snapmla.tools import repro
from tests.support import ROOT

pytestmark = pytest.mark.gpu
SCALE, HEADS, LENGTHS = 192**-0.5, 16, (700, 0, 65, 3)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where every call is dumped."""
    monkeypatch.setenv("SNAPMLA_LOG", "1")
    monkeypatch.setenv("SNAPMLA_DUMP", str(tmp_path))
    monkeypatch.setenv("SNAPMLA_DUMP_WHEN", "all")
    variants.forget()
    yield tmp_path
    monkeypatch.undo()
    variants.forget()


class Step:
    """A decode of small sequences in a pool of layout ``paged``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        cache, table, lengths = selfcheck.filled_cache(LENGTHS, 64, "paged")
        made = snapmla.PagedKVCache.allocate(cache.num_pages, 64, "paged", "cuda")
        for name in ("content_u8", "rope", "scale"):
            getattr(made, name).copy_(getattr(cache, name))
        q = selfcheck.sample_query(len(LENGTHS), 1, HEADS)
        self.cache, self.table, self.lengths = made, table.cuda(), lengths.cuda()
        self.q = snapmla.QuantizedQuery(q.nope.cuda(), q.rope.cuda(), q.scale.cuda())
        self.plan = snapmla.plan_decode(
            self.lengths, HEADS, 1, page_size=64, max_pages=table.shape[1]
        )
        self.out = torch.empty(len(LENGTHS), 1, HEADS, 512, dtype=torch.bfloat16, device="cuda")
        self.lse = torch.empty(len(LENGTHS), HEADS, 1, device="cuda")

    def run(self) -> None:
        snapmla.decode(
            self.q, self.cache, self.table, self.lengths, softmax_scale=SCALE, plan=self.plan,
            out=self.out, lse=self.lse,
        )  # fmt: skip


def test_a_decode_has_the_same_bits_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    step.run()
    assert [m.partition(" ")[0] for m in caplog.messages if " on cuda:0: " in m][-1].startswith(
        "decode_"
    )
    path = max(folder.glob("*-decode_*.pt"))
    call, outcome = repro.repeat(path, "cuda")
    assert outcome.good and outcome.compared and outcome.reference is not None, outcome
    assert "pages are kept" in call.notes[0]
    assert torch.equal(outcome.results["out"], step.out)


def test_captured_calls_pass_by(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    step = Step()
    step.run()
    want, before = step.out.clone(), len(list(folder.iterdir()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    step.out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(step.out, want) and len(list(folder.iterdir())) == before


FAULT = """
import sys, torch
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import watch

def fault(*arguments):
    torch._assert_async(torch.zeros(1, device="cuda"))

names = ("q_nope", "q_rope", "out_nope", "out_rope", "out_scale")
call = watch.watched(fault, VariantSpec(op="quantize_q", mode="token_head"), names)
try:
    call(*(torch.full((2,), 3.0, device="cuda") for _ in names))
except RuntimeError as error:
    print(type(error).__name__)
"""


def test_a_fault_leaves_a_file(tmp_path: Path) -> None:
    """Which shows behind the launch, when the device's memory cannot be read any more."""
    done = subprocess.run(
        [sys.executable, "-c", FAULT], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "SNAPMLA_DUMP": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    (path,) = tmp_path.iterdir()
    call = dump.read(path)
    assert "assert" in call.error and bool((call.arguments["q_nope"] == 3).all()), done.stderr
    assert f"failed: its arguments are in {path}" in done.stderr

"""SNAPMLA_PROFILE_NAMES: public calls in profiles, and nothing at all without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import snapmla
from snapmla.compat import flash_mla_fp8
from snapmla.runtime import env, profiler

PROGRAM = """
import json, torch, snapmla
from snapmla import flash_mla, flash_mla_fp8
from torch.fx.experimental.proxy_tensor import make_fx

lengths = torch.tensor([1], dtype=torch.int32)
table = torch.zeros(1, 1, dtype=torch.int32)
cache = snapmla.PagedKVCache.allocate(1, 16, device="cpu")
tokens = torch.ones(1, 576).bfloat16()
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    snapmla.append_kv(cache, tokens[:, :512], tokens[:, 512:], table[0])
    plan = snapmla.plan_decode(lengths, 1, 1, page_size=16, max_pages=1, num_parts=1)
    q = snapmla.quantize_q(tokens[None, None, :, :512], tokens[None, None, :, 512:])
    snapmla.decode(q, cache, table, lengths, softmax_scale=1.0, plan=plan)
    snapmla.fetch_dequant(cache, table[0])
    plan.update_(lengths)
    flash_mla_fp8.get_mla_metadata(lengths, 1, 1)
    flash_mla.get_mla_metadata()
def quantised(x):
    return snapmla.quantize_q(x[..., :512], x[..., 512:]).row_scale
graph = make_fx(quantised)(tokens[None, None])
torch.compile(quantised, fullgraph=True, backend="eager")(tokens[None, None])
names = {e.key: e.count for e in profile.key_averages() if e.key.startswith("snapmla::")}
print(json.dumps([names, "record_function" in graph.code]))
"""
NAMED = {
    "append_kv": 1, "plan_decode": 1, "quantize_q": 1, "decode": 1, "fetch_dequant": 1,
    "plan.update_": 2, "get_mla_metadata": 2,
}  # fmt: skip


def test_calls_have_names_in_profiles() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=env.ROOT,
        env={**os.environ, "SNAPMLA_PROFILE_NAMES": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names, traced = json.loads(done.stdout.splitlines()[-1])
    assert names == {f"snapmla::{name}": n for name, n in NAMED.items()}
    assert not traced, "a range is no operator"


def test_ranges_for_nsight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch has CUDA; closed also when the call fails."""
    told: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    whole = profiler.named(int, "snapmla::whole")
    assert whole("3") == 3
    with pytest.raises(ValueError, match="invalid literal"):
        whole("a third")
    assert told == ["snapmla::whole", "end"] * 2


def test_nothing_is_wrapped_without_the_switch() -> None:
    if env.PROFILE_NAMES.enabled():
        pytest.skip("the switch is set")
    for module in (snapmla, flash_mla_fp8):
        for name in module.__all__:
            assert not hasattr(getattr(module, name), "__wrapped__"), name
    assert not hasattr(snapmla.DecodePlan.update_, "__wrapped__")

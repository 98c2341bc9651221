"""The prologue of a layer of sparse attention on one GPU, beside the same in single calls:
``python -m profiles.bench prologue_cost``.

Who:

    prologue    ``dsa.prologue``, RoPE of attention's queries (128 heads) with it; one launch
    no q_rope   the same without; one launch
    appends     ``rope_append_kv`` and ``append_index_k``, norms and RoPE inside: two launches, and
                nothing of the indexer's queries
    steps       torch's norms, RoPE and quantisation of queries, ``append_kv``, ``append_index_k``

Alone: calls one behind the other in a CUDA graph, whose launches overlap where they may
(programmatic dependent launch).  Between: each call stands between two small kernels of torch's,
as in a layer between its products; what such a layer takes longer than one without the call.

Ours is compared with the truth, bit for bit, and both others' caches with it, by how many bytes
differ: torch adds squares in an order of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

import snapmla
from dsl_kernels.spec import VariantSpec
from profiles import table, timing
from profiles.table import Calls, Table
from snapmla import dsa
from snapmla.testing import rope
from snapmla.testing.workloads import dsa_prologue, samples
from snapmla.testing.workloads.call import Sizes

FORMATS = ("fp8_ds_mla", "fp8")
TOKENS = (1, 8, 32, 128, 512)
BUFFERS = 4  # what products wrote lies in L2, as in a layer
LAYERS = timing.TimingConfig(graph_ms=1.0, rounds=15, cold_iters=0, host_iters=0)
CONFIG = timing.TimingConfig(graph_ms=2.0, rounds=9, cold_iters=0, host_iters=0)
OURS, NO_ROPE, APPENDS, STEPS = "prologue", "no q_rope", "appends", "steps"
Given = dict[str, Any]


def spec_of(fmt: str) -> VariantSpec:
    """The variant that engines call."""
    return VariantSpec(op="dsa_prologue", index_dtype="i64", cache_dtype=fmt)


def without_rope(given: Given) -> Given:
    """The same call without attention's queries."""
    return {**given, "q_rope": given["q_rope"][:, :0], "out_rope": given["out_rope"][:, :0]}


def appends(fmt: str, given: Given) -> timing.Call:
    """Both appends, which norm and turn tokens."""
    cache = samples.cache_of(given, fmt)
    latents = [given[n] for n in ("c_kv", "k_rope", "slot_mapping", "positions", "cos_sin")]
    keys = [given[n] for n in ("index_cache", "index_k", "index_slot_mapping")]
    told = {
        "norm_weight": given["index_norm_weight"], "norm_bias": given["index_norm_bias"],
        "positions": given["positions"], "cos_sin_cache": given["cos_sin"],
    }  # fmt: skip

    def call() -> None:
        snapmla.rope_append_kv(cache, *latents, norm_weight=given["kv_norm_weight"])
        dsa.append_index_k(keys[0], keys[1], keys[2], **told)

    return call


def steps(fmt: str, given: Given) -> timing.Call:
    """Kernels of torch's around the plain appends."""
    cache, at, table = samples.cache_of(given, fmt), given["positions"], given["cos_sin"]
    functional, weight = torch.nn.functional, given["kv_norm_weight"]
    norm = given["index_norm_weight"], given["index_norm_bias"]

    def index_turned(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([rope.rotate_rows(x[..., :64], at, table, True), x[..., 64:]], -1)

    def call() -> None:
        c = functional.rms_norm(given["c_kv"], (512,), weight, dsa_prologue.EPS)
        r = rope.rotate_rows(given["k_rope"], at, table)
        snapmla.append_kv(cache, c, r, given["slot_mapping"])
        k = functional.layer_norm(given["index_k"].float(), (128,), *norm, dsa_prologue.EPS)
        k = index_turned(k.to(c.dtype))
        dsa.append_index_k(given["index_cache"], k, given["index_slot_mapping"])
        q = index_turned(given["index_q"]).float()
        scale = q.abs().amax(-1).clamp(min=1e-4) / 448.0
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
        given["out_q"].view(torch.float8_e4m3fn).copy_(q / scale[..., None])
        w = given["index_weights"] * scale * given["weight_scale"]
        given["out_weights"].copy_(w)
        given["out_rope"].copy_(rope.rotate_rows(given["q_rope"], at, table))

    return call


def contenders(fmt: str, given: Given) -> dict[str, timing.Call]:
    """All, ours first."""
    spec = spec_of(fmt)
    return {
        OURS: dsa_prologue.public(spec, given),
        NO_ROPE: dsa_prologue.public(spec, without_rope(given)),
        APPENDS: appends(fmt, given),
        STEPS: steps(fmt, given),
    }


def wrong_bytes(
    given: Given, want: Mapping[str, torch.Tensor], call: timing.Call
) -> dict[str, int]:
    """Bytes that a call leaves otherwise than the truth, by result; all are poison before."""
    for name in want:
        given[name].fill_(float("nan") if given[name].is_floating_point() else 0x7F)
    call()
    found = {}
    for name, right in want.items():
        got = given[name].cpu().contiguous()
        found[name] = int((got.view(torch.uint8) != right.contiguous().view(torch.uint8)).sum())
    return found


class Prologue(table.Problem):
    """A row: buffers of calls, and what is right in the last one."""

    def __init__(self, device: torch.device, shape: tuple[str, int]) -> None:
        self.fmt, self.tokens = shape
        spec, sizes = spec_of(self.fmt), Sizes(1, self.tokens)
        self.given = [
            dsa_prologue.WORKLOAD.sized(spec, sizes, device.type, i) for i in range(BUFFERS)
        ]
        self.each = [contenders(self.fmt, one) for one in self.given]
        last = self.given[-1]
        for name in ("content", "kv", "scale", "rope", "index_cache"):
            if name in last:
                last[name].fill_(float("nan") if last[name].is_floating_point() else 0x7F)
        there = {n: x.cpu() if torch.is_tensor(x) else x for n, x in last.items()}
        self.want = dsa_prologue.truth(spec, there)

    def facts(self) -> dict[str, Any]:
        shape = f"{self.fmt}, {self.tokens} tokens"
        return {"shape": shape, "format": self.fmt, "tokens": self.tokens}

    def contenders(self) -> Calls:
        return {name: [calls[name] for calls in self.each] for name in self.each[0]}

    def check(self, name: str, calls: Sequence[timing.Call]) -> str:
        """Bytes of a contender that differ from the truth.

        Raises:
            ValueError: some do, of ours or of the appends.
        """
        of = [n for n in self.want if name not in (NO_ROPE, APPENDS) or not n.startswith("out_")]
        wrong = wrong_bytes(self.given[-1], {n: self.want[n] for n in of}, calls[-1])
        if any(wrong.values()) and name != STEPS:
            raise ValueError(f"bytes differ: {wrong}")
        return ", ".join(f"{n} {count}" for n, count in wrong.items() if count) or "none"

    def extra(self, calls: Calls) -> dict[str, Any]:
        """Microseconds that each call adds to a layer of two small kernels of torch's."""
        small = torch.zeros(4096, device=self.given[0]["c_kv"].device)

        def layer(call: timing.Call) -> timing.Call:
            return lambda: (small.add_(1.0), call(), small.add_(1.0))

        layers = {"": [layer(lambda: None)], **{n: [layer(c[0])] for n, c in calls.items()}}
        us = table.times_of(layers, LAYERS, small.device)["us"]
        return {"between": {name: us[name] - us[""] for name in calls}}


TABLES = (
    Table(
        "prologue_cost", "The prologue of a layer of sparse attention", Prologue,
        [(fmt, tokens) for fmt in FORMATS for tokens in TOKENS],
        (
            table.fact("cache", "format"), table.fact("tokens", "tokens"),
            table.fact("who", "who"), table.us(head="µs", form=".2f"), table.least(),
            ("between", lambda row: f"{row['between'][row['who']]:.2f}"),
            table.error(head="bytes off", form=""),
        ),
        CONFIG,
        notes=(
            "median and least µs a call in a CUDA graph, contenders in turn; between two small "
            "kernels: what a layer takes longer with the call",
            "bytes that differ from the truth; ours must not have any",
        ),
        each=True,
    ),
)  # fmt: skip

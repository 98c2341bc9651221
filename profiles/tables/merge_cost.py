"""Cost of the merge launch: decode with and without it, and the merge alone:
``python -m profiles.bench merge_cost``.

``bound`` is the least that a last-arriving CTA (one SM) would need to read its sequence's partial
results, at ``SM_GBS``; it would stand at the end of the decode kernel instead of the launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

import snapmla
from dsl_kernels.formats.dims import PARTIAL_ROW
from dsl_kernels.spec import VariantSpec
from profiles import table
from profiles.check import relative_l2
from profiles.shapes import DecodeShape
from profiles.table import Table
from profiles.timing import Call, TimingConfig
from snapmla.dense import decode as dense
from snapmla.runtime import variants
from snapmla.testing.reference import mla_decode_reference

PAGE = 64
SM_GBS = 100.0  # one SM's read rate out of L2: about 64 bytes a cycle at 1.6 GHz
SHAPES = (
    DecodeShape(132, 2048, 16),  # a sequence a part: nothing is split
    DecodeShape(32, 2048, 16),
    DecodeShape(32, 8192, 64),
    DecodeShape(32, 8192, 128),
    DecodeShape(32, 131072, 64, skewed=True),
    DecodeShape(1, 131072, 16),
    DecodeShape(1, 131072, 128),
)
BOTH, DECODE, MERGE = "decode + merge", "decode", "merge alone"
SCALE = 0.04


def drawn(shape: DecodeShape, device: torch.device) -> tuple[Any, ...]:
    """(q, cache, block_table, lengths, plan) of a decode step, random."""
    lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=device)
    width = -(-shape.seqlen // PAGE)
    used = [-(-n // PAGE) for n in shape.lengths()]
    cache = snapmla.PagedKVCache.allocate(sum(used), PAGE, device=device)
    x = torch.randn(cache.num_slots, 576, device=device).bfloat16()
    snapmla.append_kv(cache, x[:, :512], x[:, 512:], torch.arange(cache.num_slots, device=device))
    table = torch.zeros(shape.batch, width, dtype=torch.int32, device=device)
    for i, pages in enumerate(used):
        table[i, :pages] = torch.arange(pages, device=device) + sum(used[:i])
    y = torch.randn(shape.batch, 1, shape.num_heads, 576, device=device).bfloat16()
    q = snapmla.quantize_q(y[..., :512], y[..., 512:])
    plan = snapmla.plan_decode(lengths, shape.num_heads, 1, page_size=PAGE, max_pages=width)
    return q, cache, table, lengths, plan


class Merge(table.Problem):
    """A row: the launches of a decode step."""

    def __init__(self, device: torch.device, shape: DecodeShape) -> None:
        self.shape = shape
        self.q, self.cache, self.table, self.lengths, self.plan = drawn(shape, device)
        b, h = shape.batch, shape.num_heads
        self.out = torch.empty(b, 1, h, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(b, h, 1, device=device)
        spec = VariantSpec(op="merge", arch=variants.arch_of(device))
        self.kernel = variants.kernel(spec, device.type)

    def decode(self, split: bool) -> Call:
        query = (self.q.nope_u8, self.q.rope, self.q.row_scale)
        return lambda: dense.launch_decode(
            query, self.cache.arguments, self.table, self.lengths, self.plan.variant,
            self.plan.arguments, int(split), (self.out, self.lse), (SCALE, 1, 0.69, 0.0),
        )  # fmt: skip

    def merge(self) -> None:
        _, _, split_begin, units, _, *accum = self.plan.arguments
        self.kernel(*accum, split_begin, units, self.out, self.lse, 0.69, 0.0)

    def contenders(self) -> dict[str, list[Call]]:
        return {BOTH: [self.decode(True)], DECODE: [self.decode(False)], MERGE: [self.merge]}

    def check(self, name: str, calls: Sequence[Call]) -> float:
        """Relative L2 of a longest sequence's results to fp64, merged by the same launch or, of the
        decode kernel alone, by another one behind it."""
        self.out.fill_(torch.nan)
        if name == MERGE:
            self.decode(False)()
        calls[0]()
        if name == DECODE:
            self.merge()
        i = int(self.lengths.argmax())
        want, _ = mla_decode_reference(
            self.q.nope, self.q.rope, self.q.scale, self.cache.content, self.cache.rope,
            self.cache.scale, self.table, self.lengths, SCALE, batches=[i],
        )  # fmt: skip
        return relative_l2(self.out[i], want[0])

    def facts(self) -> dict[str, Any]:
        begin = self.plan.split_begin.tolist()
        most = max(y - x for x, y in itertools.pairwise(begin))
        bound = most * min(self.shape.num_heads, 64) * PARTIAL_ROW * 2 / SM_GBS * 1e-3
        return {"shape": self.shape.label, "slots": begin[-1], "most": most, "bound": bound}


TABLES = (
    Table(
        "merge_cost", "merge_cost", Merge, SHAPES,
        (
            table.fact("shape", "shape"), table.fact("slots", "slots"),
            table.fact("most of one sequence", "most"), table.us(BOTH), table.us(DECODE),
            ("difference", lambda row: f"{row['us'][BOTH] - row['us'][DECODE]:.1f}"),
            table.us(MERGE),
            table.fact("one SM reading one sequence's partials, at least", "bound", ".1f"),
        ),
        TimingConfig(graph_ms=2.0, rounds=7, cold_iters=0, host_iters=0),
        notes=(
            "µs a call in a CUDA graph; the same cache every call, so the short ones run out of L2",
        ),
        gate=3e-2,
    ),
)  # fmt: skip

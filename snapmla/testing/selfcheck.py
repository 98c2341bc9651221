"""One small right-or-wrong check per variant, on the software GPU, at the level of the ABI.

``make try`` runs it after an edit.  It calls the exported function of exactly the variant that was
built, on CPU tensors, with unused cache bytes poisoned, and compares with
``snapmla.testing.reference``.  The wide tests live in ``tests/``; this one is about seconds.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from dsl_kernels import registry
from dsl_kernels.dims import HEAD_DIM_QK, ITEM_WORDS, KV_LORA_RANK, PARTIAL_ROW, QK_ROPE_HEAD_DIM
from dsl_kernels.families.formats import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import layouts, runtime
from snapmla.cache import PagedKVCache
from snapmla.errors import VariantError
from snapmla.quant import QuantizedQuery
from snapmla.testing import fetched, metrics, partials, reference, rope, rounding
from snapmla.testing.comparison import MIMIC_FACTOR, MIMIC_OF, DecodeErrors, decode_errors
from snapmla.testing.dense_job import DenseJob
from snapmla.testing.plan_tables import PlanTables
from snapmla.testing.reference_plan import Queries, plan_reference, records_of, records_reference

if TYPE_CHECKING:
    import softgpu

LN2 = math.log(2.0)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
INDEX = {"i32": torch.int32, "i64": torch.int64}
ABSURD_PAGE = 2147480000
SHAPES = {16: (7, 2), 32: (16, 2), 64: (20, 3), 128: (64, 2)}  # row tile: (heads, s_q)
LENGTHS = (64, 0, 130, 1)
PARTS = 2
HEAD_SCALE = 576**-0.5


@dataclass(frozen=True)
class Result:
    """Outcome of a check; ``summary`` is one line of figures."""

    passed: bool
    summary: str


Check = Callable[[VariantSpec, Any], Result]  # of a loaded variant


def check(spec: VariantSpec, directory: Path) -> Result:
    """Runs the variant of ``spec`` in ``directory`` on the software GPU.

    Raises:
        VariantError: it is not there.
    """
    torch.manual_seed(0)
    return check_of(spec)(spec, load(spec, directory))


def check_of(spec: VariantSpec) -> Check:
    """The check that the op's family names.  Raises ValueError of one without."""
    if not spec.family.selfcheck:
        raise ValueError(f"{spec.name}: its family names no self-check")
    return cast(Check, registry.named(spec.family.selfcheck))


def load(spec: VariantSpec, directory: Path) -> softgpu.LoadedKernel:
    """The variant for the software GPU.  Raises VariantError if ``directory`` lacks it."""
    artifact = runtime.find(spec, [directory])
    if artifact is None:
        raise VariantError(f"{spec.name}: not built in {directory}")
    return cast("softgpu.LoadedKernel", runtime.load(artifact, "cpu"))


class Workload:
    """What the hazard checker and the mutation study run: small, but every path is taken.

    A decode comes right behind the planning kernel, as a dependent launch; the ring of stages wraps
    several times; sequences of 0, 1 and many tokens; splits, merged by the launch behind it.
    """

    LENGTHS = (70, 0, 450, 64, 1)

    def __init__(self, spec: VariantSpec, directory: Path) -> None:
        self.spec, self.kernel = spec, load(spec, directory)
        self.job: DecodeJob | DenseJob | None = None
        if spec.family.job:
            torch.manual_seed(0)
            planner = load(VariantSpec(op="plan_decode", arch=spec.arch), directory)
            self.job = registry.named(spec.family.job)(spec, self.LENGTHS, planner=planner)
        self.expected: tuple[torch.Tensor, torch.Tensor] | None = None

    def run(self) -> Result:
        """The result against the reference, then bit for bit against the first run."""
        if self.job is None:
            torch.manual_seed(0)
            return check_of(self.spec)(self.spec, self.kernel)
        got = self.job.run(self.kernel)
        if self.expected is not None:
            names = ("out", "lse")
            return _same_bits(dict(zip(names, zip(got, self.expected, strict=True), strict=True)))
        errors = self.job.errors(got)
        if errors.right:
            self.expected = got
        return Result(errors.right, str(errors))


def poisoned_cache(pages: int, page_size: int, layout: str = "split") -> PagedKVCache:
    """A cache whose every byte is NaN in all three tensors."""
    cache = PagedKVCache.allocate(pages, page_size, layout, "cpu")
    cache.content_u8.fill_(0x7F)
    cache.rope.fill_(math.nan)
    cache.named_tensors["scale"].fill_(math.nan)
    return cache


def poisoned_rows(
    pages: int, page_size: int, dtype: torch.dtype, heads: int = 1, *, strided: bool = False
) -> PagedKVCache:
    """A cache of 16 bits whose every value is NaN; ``strided``: heads before tokens, and gaps."""
    if not strided:
        rows = torch.full((pages, page_size, heads, HEAD_DIM_QK), math.nan, dtype=dtype)
        return PagedKVCache.from_tensors(rows)
    memory = torch.full((pages, heads, page_size + 1, HEAD_DIM_QK + 8), math.nan, dtype=dtype)
    return PagedKVCache.from_tensors(memory[:, :, 1:, 8:].transpose(1, 2))


def shuffled_table(lengths: tuple[int, ...], page_size: int) -> tuple[int, torch.Tensor]:
    """(pages of the pool, block_table) with shuffled pages and ids of none where no token is."""
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts) + 2).tolist()
    pool = len(order)
    table = torch.full((len(lengths), max(counts) + 1), ABSURD_PAGE, dtype=torch.int32)
    for i, count in enumerate(counts):
        pages = [order.pop() for _ in range(count)]
        table[i, :count] = torch.tensor(pages, dtype=torch.int32)
        table[i, count:-1] = -1
    return pool, table


def places(table: torch.Tensor, n: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, offset) of the first ``n`` tokens of a sequence, whose row of the table is given."""
    t = torch.arange(n)
    return table[t // page_size].long(), t % page_size


def filled_cache(
    lengths: tuple[int, ...], page_size: int, layout: str = "split"
) -> tuple[PagedKVCache, torch.Tensor, torch.Tensor]:
    """(cache, block_table, cache_seqlens) with shuffled pages and poison wherever no token is."""
    pool, table = shuffled_table(lengths, page_size)
    cache = poisoned_cache(pool, page_size, layout)
    for i, n in enumerate(lengths):
        content, rope, scale = rounding.quantize_rows(*sample_tokens(n), slots=torch.arange(n))
        at = places(table[i], n, page_size)
        cache.content_u8[at] = content.view(torch.uint8)
        cache.rope[at] = rope
        cache.named_tensors["scale"][at] = scale
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def filled_rows(
    lengths: tuple[int, ...],
    page_size: int,
    dtype: torch.dtype,
    heads: int = 1,
    *,
    strided: bool = False,
) -> tuple[PagedKVCache, torch.Tensor, torch.Tensor]:
    """As ``filled_cache``, of 16 bits."""
    pool, table = shuffled_table(lengths, page_size)
    cache = poisoned_rows(pool, page_size, dtype, heads, strided=strided)
    for i, n in enumerate(lengths):
        rows = torch.cat(sample_tokens(n * heads), -1).view(n, heads, HEAD_DIM_QK)
        cache.named_tensors["kv"][places(table[i], n, page_size)] = rows.to(dtype)
    return cache, table, torch.tensor(lengths, dtype=torch.int32)


def sample_tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(c_kv (n, 512), k_rope (n, 64)): biased channels, log-normal token amplitudes."""
    amplitude = torch.exp(0.3 * torch.randn(n, 1))
    return (
        amplitude * (torch.randn(n, KV_LORA_RANK) + 0.5),
        3.0 * torch.randn(n, QK_ROPE_HEAD_DIM),
    )


def sample_query(b: int, s_q: int, heads: int) -> QuantizedQuery:
    """A quantised query of unit-variance rows."""
    nope = torch.randn(b, s_q, heads, KV_LORA_RANK)
    return QuantizedQuery(
        *rounding.quantize_rows(nope, torch.randn(b, s_q, heads, QK_ROPE_HEAD_DIM))
    )


def check_decode(spec: VariantSpec, kernel: softgpu.LoadedKernel) -> Result:
    job = registry.named(spec.family.job)(spec)
    errors = job.errors(job.run(kernel))
    return Result(errors.right, str(errors))


class DecodeJob:
    """One decode at the level of the ABI: ragged lengths, splits, poison wherever no token is.

    Args:
        spec: the decode variant; its row tile picks heads and s_q.
        lengths: tokens per sequence.  parts: CTAs (or clusters) that share them.
        heads, s_q: None takes ``SHAPES``.  layout: of the cache.
        planner: the plan_decode kernel; None plans with ``reference_plan``.
    """

    def __init__(
        self,
        spec: VariantSpec,
        lengths: Sequence[int] = LENGTHS,
        parts: int = PARTS,
        *,
        heads: int | None = None,
        s_q: int | None = None,
        layout: str = "split",
        planner: runtime.Kernel | None = None,
    ) -> None:
        self.spec, self.lengths, self.parts = spec, tuple(lengths), parts
        self.planner = planner
        usual = SHAPES[spec.row_tile]
        self.heads, self.s_q = heads or usual[0], s_q or usual[1]
        self.cache, self.table, self.seqlens = filled_cache(self.lengths, spec.page_size, layout)
        self.q = sample_query(len(self.lengths), self.s_q, self.heads)
        capacity = self.table.shape[1] * spec.page_size
        unit_rows = -(-self.heads * self.s_q // spec.row_tile) * spec.row_tile
        self.queries = Queries(self.heads, self.s_q, unit_rows, causal=True)
        self.plan = plan_reference(
            self.lengths, parts, spec.token_tile, 1, capacity, queries=self.queries
        )

    def run(self, kernel: softgpu.LoadedKernel) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of one call, into fresh NaN-filled buffers."""
        b, q, cache = len(self.lengths), self.q, self.cache
        unit_rows = self.queries.unit_rows
        out = torch.full((b, self.s_q, self.heads, KV_LORA_RANK), math.nan)
        out = out.to(DTYPES[self.spec.out_dtype])
        lse = torch.full((b, self.heads, self.s_q), math.nan)
        o_accum = torch.full((2 * self.parts, unit_rows, PARTIAL_ROW), math.nan).half()
        lse_accum = torch.full((2 * self.parts, unit_rows), math.nan)
        from codegen import abi  # not at the top: ``decode_errors`` is of use without the compiler

        tables = self._planned()
        values = {
            "q_nope": q.nope_u8, "q_rope": q.rope, "q_scale": q.row_scale,
            "content": cache.content_u8, "rope": cache.rope, "scale": cache.scale,
            "block_table": self.table, "cache_seqlens": self.seqlens,
            "out": out, "lse": lse, "o_accum": o_accum, "lse_accum": lse_accum,
            **tables.arguments(),
            "softmax_scale": HEAD_SCALE, "causal": 1, "lse_factor": LN2, "empty_lse": -math.inf,
            "may_split": int(self.plan.split_begin[-1] > 0),
        }  # fmt: skip
        kernel(*abi.ordered(kernel.names.arguments, values))
        return out, lse

    def _planned(self) -> PlanTables:
        """The plan's tables, by the kernel or the reference."""
        if self.planner is None:
            return PlanTables.of(self.plan)
        tables = PlanTables.empty(len(self.lengths), self.parts, self.queries)
        capacity = self.table.shape[1] * self.spec.page_size
        tables.fill(
            self.planner, self.seqlens, self.queries, (capacity, self.spec.token_tile, 1, 0)
        )
        return tables

    def errors(self, result: tuple[torch.Tensor, torch.Tensor]) -> DecodeErrors:
        """What ``run`` returned against the reference."""
        out, lse = result
        exact = os.environ.get("SOFTGPU_ACCUMULATE") == "exact"
        mimic = rounding.MIMIC if exact else MIMIC_OF[self.spec.arch]
        return decode_errors(
            out, lse, self.q, self.cache, self.table, self.seqlens, HEAD_SCALE,
            config=replace(mimic, p_terms=self.spec.p_terms),
        )  # fmt: skip


def merge_reference(
    o_accum: torch.Tensor,
    lse_accum: torch.Tensor,
    split_begin: list[int],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """What the merge kernel does, in torch, in place on ``out`` and ``lse`` (natural log)."""
    partial_rows = partials.decode(o_accum).double()
    _, s_q, heads, _ = out.shape
    for i, (first, end) in enumerate(itertools.pairwise(split_begin)):
        if first == end:
            continue
        part_lse = lse_accum[first:end, : s_q * heads].double()
        top = part_lse.amax(0)
        weight = torch.exp2(part_lse - torch.where(torch.isneginf(top), 0.0, top))
        total = weight.sum(0)
        o = (weight[..., None] * partial_rows[first:end, : s_q * heads]).sum(0)
        o = torch.where(total[:, None] == 0, 0.0, o / total[:, None])
        out[i] = o.view(s_q, heads, -1).to(out.dtype)
        lse[i] = ((top + torch.log2(total)) * LN2).view(s_q, heads).T.float()


def check_merge(spec: VariantSpec, kernel: runtime.Kernel) -> Result:
    # few slots and none; so many that warps share a unit, with two units a CTA and with one
    s_q, heads, split_begin = 2, 5, [0, 3, 3, 12, 40]
    rows = torch.randn(41, 16, KV_LORA_RANK)
    lse_accum = 4.0 * torch.randn(41, 16)
    lse_accum[3:12, 4] = -math.inf  # a row that no split saw
    rows[3:12, 4] = 0.0
    o_accum = partials.encode(rows)
    out = torch.full((4, s_q, heads, KV_LORA_RANK), 7.0).to(DTYPES[spec.out_dtype])
    lse = torch.full((4, heads, s_q), 7.0)
    want_out, want_lse = out.float().clone(), lse.clone()
    alone = torch.zeros((0, 2), dtype=torch.int32)  # a unit is a sequence
    begin = torch.tensor(split_begin).int()
    kernel(o_accum, lse_accum, begin, alone, out, lse, LN2, -math.inf)
    merge_reference(o_accum, lse_accum, split_begin, want_out, want_lse)
    error = metrics.relative_l2(out, want_out)
    lse_error = metrics.lse_error(lse, want_lse)
    allowed = 3e-3 if spec.out_dtype == "bf16" else 1e-5
    return Result(
        error <= allowed and lse_error <= 1e-4,
        f"relative L2 {error:.1e} (allowed {allowed:.0e}), LSE {lse_error:.1e} (allowed 1e-4)",
    )


def check_merge_states(spec: VariantSpec, kernel: softgpu.LoadedKernel) -> Result:
    """Over a part where the dtype allows it, and over its LSE; then a merge of what that left."""
    from codegen import abi

    n, b, s_q, heads = {"pair": 2, "list": 5, "stack": 11}[spec.mode], 2, 3, 5
    rows = torch.randn(n, b, s_q, heads, KV_LORA_RANK + 8).to(DTYPES[spec.in_dtype])
    outs, lses = rows[..., :KV_LORA_RANK], 4.0 * torch.randn(n, b, s_q, heads).mT
    lses[0, 0, 1], lses[1, 0, 2], lses[:, 1, 3] = -math.inf, math.inf, math.inf
    outs[0, 0, :, 1], outs[1, 0, :, 2], outs[:, 1, :, 3] = math.nan, math.nan, math.nan
    values: dict[str, Any] = {"o": outs, "lses": lses, "parts": n, "lse_factor": LN2}
    for i in range(8):
        values |= {f"o_{i}": outs[min(i, n - 1)], f"lse_{i}": lses[min(i, n - 1)]}
    names = kernel.names.arguments
    error, lse_error, allowed = 0.0, 0.0, 0.0
    for in_place in (True, False):
        want, want_lse = reference.merge_states_reference(outs, lses)
        out = torch.full((b, s_q, heads, KV_LORA_RANK), 7.0).to(DTYPES[spec.out_dtype])
        lse = torch.full((b, heads, s_q), 7.0)
        if in_place:
            out, lse = outs[1] if out.dtype == outs.dtype else out, lses[1]
        values |= {"out": out, "lse": lse}
        kernel(*abi.ordered(names, {name: values[name] for name in names}))
        rounded = metrics.relative_l2(want.to(out.dtype), want)
        error, allowed = max(error, metrics.relative_l2(out, want)), max(allowed, rounded)
        lse_error = max(lse_error, metrics.lse_error(lse, want_lse))
    allowed = MIMIC_FACTOR * allowed + 5e-7
    return Result(
        error <= allowed and lse_error <= 2e-6,
        f"relative L2 {error:.1e} (allowed {allowed:.1e}), LSE {lse_error:.1e} (allowed 2e-6)",
    )


def check_plan(spec: VariantSpec, kernel: runtime.Kernel) -> Result:
    lengths, parts, overhead, capacity = (3000, 0, 64, 1, 900), 5, 3, 2048
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    row_seqlens = [(7 * t * t) % 2500 - 3 for t in range(12)]
    bad, counts = [], []
    for queries, token_tile, split_tiles in (
        (Queries(16, 1, 16), 64, 0),
        (Queries(5, 70, 16, causal=True), 128, 4),
        (Queries(5, 12, 16, causal=True, begins=[0, 3, 3, 4, 11, 11]), 64, 0),
        (Queries(5, 12, 16, begins=[1, 5, 5, 9, 9, 12], row_seqlens=row_seqlens), 64, 4),
    ):
        want = plan_reference(lengths, parts, token_tile, overhead, capacity, split_tiles, queries)
        pieces = -(-capacity // token_tile // split_tiles) if split_tiles else 0
        tables = PlanTables.empty(len(lengths), parts, queries, pieces)
        tables.fill(kernel, seqlens, queries, (capacity, token_tile, overhead, split_tiles))
        bad += tables.differs(want, lengths)
        counts.append(str(len(want.work_items)))
    summary = f"{', '.join(counts)} items in {parts} parts, entry for entry"
    return Result(not bad, f"{summary} but for {', '.join(bad)}" if bad else summary)


def check_records_to_plan(spec: VariantSpec, kernel: runtime.Kernel) -> Result:
    """Records that are FlashMLA's own, out of order, out of range; more requests and parts than
    threads, which then take turns; one KV head and three."""
    few, capacity, rows = (3000, 0, 64, 1, 900), 2048, 16
    many = tuple(7 * i % 200 for i in range(600))
    stale = [(0, 0, 1, 2, 0, 0, 0, 0), (3, 0) * 4, (0, 40) * 4, (2**31 - 1, -5) * 4]
    tables: dict[str, tuple[tuple[int, ...], Sequence[Sequence[int]], tuple[int, ...]]] = {
        "fresh": (few, records_of(plan_reference(few, 5, 64, 3, capacity))[0], (1, 3)),
        "one part": (few, [(0, 0, 4, 9999, 0, 0, 0, 0)], (1, 3)),
        "stale": (few, stale, (1, 3)),
        "many": (many, [(i + i // 90, i % 3, 0, 0, 0, 0, 0, 0) for i in range(580)], (1,)),
    }
    bad = []
    for name, (lengths, records, kv_heads) in tables.items():
        b, seqlens = len(lengths), torch.tensor(lengths, dtype=torch.int32)
        for heads in kv_heads:
            want = records_reference(records, lengths, capacity, 64, rows, heads)
            given = torch.tensor(records, dtype=torch.int32)
            made = [
                torch.full(shape, -7, dtype=torch.int32)
                for shape in (
                    (len(want.work_items), ITEM_WORDS), (len(want.part_begin),),
                    (len(want.split_begin),), (b * heads,),
                )
            ]  # fmt: skip
            scratch = torch.empty(b + 1, dtype=torch.int32)
            kernel(given, seqlens, scratch, *made, capacity, 64, rows, heads)
            wanted = ([list(x) for x in want.work_items], want.part_begin, want.split_begin)
            if any(x.tolist() != y for x, y in zip(made, wanted)):
                bad.append(f"{name}, {heads} heads")
    summary = f"{', '.join(tables)}: entry for entry"
    return Result(not bad, f"{summary} but for {'; '.join(bad)}" if bad else summary)


def check_plan_to_records(spec: VariantSpec, kernel: runtime.Kernel) -> Result:
    """Parts that share requests, that have several, and that have none."""
    bad = []
    for lengths, parts in (((3000, 0, 64, 1, 900), 5), ((64,) * 3, 7), ((1,) * 600, 3)):
        plan = plan_reference(lengths, parts, 64, 3)
        records, num_splits = records_of(plan)
        tables = PlanTables.of(plan)
        made = torch.full((parts, 8), -7, dtype=torch.int32)
        splits = torch.full((len(lengths) + 1,), -7, dtype=torch.int32)
        kernel(tables.work_items, tables.part_begin, tables.split_begin, made, splits)
        if made.tolist() != list(map(list, records)) or splits.tolist() != num_splits:
            bad.append(f"{len(lengths)} sequences in {parts} parts")
    return Result(not bad, "; ".join(bad) or "records and num_splits, entry for entry")


def sample_angles(
    n: int, dtype: torch.dtype, positions: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions (n,), cos_sin (50, 64)); the last position is past the table."""
    frequency = 10000.0 ** -(torch.arange(32) / 32)
    angle = torch.arange(50.0)[:, None] * frequency
    at = torch.randint(0, 50, (n,))
    at[-1] = 50
    return at.to(positions), torch.cat([angle.cos(), angle.sin()], -1).to(dtype)


def _check_append_rows(spec: VariantSpec, kernel: runtime.Kernel) -> Result:
    """One KV head, and three that lie apart; values as they are, NaN and infinity too."""
    n, own, pairs = 9, DTYPES[spec.cache_dtype], {}
    for heads in (1, 3):
        tokens = torch.cat(sample_tokens(n * heads), -1).to(DTYPES[spec.in_dtype])
        tokens[3, 7], tokens[4, 520] = math.nan, math.inf
        slots = torch.randperm(48)[:n].to(INDEX[spec.index_dtype])
        slots[5], slots[6] = -1, 48
        want = poisoned_rows(3, 16, own, heads).named_tensors["kv"]
        kept = (slots >= 0) & (slots < 48)
        want.view(48, heads, -1)[slots[kept].long()] = tokens.view(n, heads, -1)[kept].to(own)
        got = poisoned_rows(3, 16, own, heads, strided=heads > 1).named_tensors["kv"]
        kernel(got, tokens[:, :KV_LORA_RANK], tokens[:, KV_LORA_RANK:], slots)
        pairs[f"rows of {heads} heads"] = got, want
    return _same_bits(pairs)


def check_append(spec: VariantSpec, kernel: runtime.Kernel) -> Result:
    if spec.cache_dtype != "fp8":
        return _check_append_rows(spec, kernel)
    n = 9
    dtype = DTYPES[spec.in_dtype]
    c_kv, k_rope = (t.to(dtype) for t in sample_tokens(n))
    c_kv[2], k_rope[2] = 0.0, 1e3  # an all-zero latent with a large RoPE
    c_kv[3, 7] = math.nan
    slots = torch.randperm(48)[:n].to(INDEX[spec.index_dtype])
    slots[5] = -1
    given: tuple[Any, ...] = (c_kv, k_rope, slots)
    stored = (c_kv, k_rope)
    if spec.rope_style != "applied":
        angles = sample_angles(n, DTYPES[spec.cos_sin_dtype], INDEX[spec.position_dtype])
        given += angles
        stored = (c_kv, rope.rotate_rows(k_rope, *angles, spec.rope_style == "neox"))
    if spec.norm == "rms":
        weight = (1 + 0.2 * torch.randn(KV_LORA_RANK)).to(dtype)
        given += (weight, 1e-6)
        stored = (rope.rms_norm_rows(c_kv, weight, 1e-6), stored[1])
    kept = slots >= 0
    rows = slots[kept].long()
    content, rope_channels, scale = rounding.quantize_rows(*(x[kept] for x in stored), slots=rows)
    want = poisoned_cache(3, 16)
    want.content_u8.view(-1, KV_LORA_RANK)[rows] = content.view(torch.uint8)
    want.rope.view(-1, QK_ROPE_HEAD_DIM)[rows] = rope_channels
    want.named_tensors["scale"].view(-1)[rows] = scale
    caches = [poisoned_cache(3, 16, layout) for layout in layouts.LAYOUTS]
    for cache in caches:
        kernel(cache.content_u8, cache.rope, cache.scale, *given)
    pairs = {}
    for name, part in (("content", "content_u8"), ("rope", "rope"), ("scale", "scale")):
        got = torch.stack([getattr(cache, part) for cache in caches])
        pairs[name] = got, getattr(want, part).expand_as(got)
    return _same_bits(pairs)


def check_quantize(spec: VariantSpec, kernel: runtime.Kernel) -> Result:
    b, s_q, heads = 2, 2, 5
    joint = torch.randn(b, s_q, heads, 576).to(DTYPES[spec.in_dtype])
    nope, rope_channels = joint[..., :KV_LORA_RANK], joint[..., KV_LORA_RANK:]
    angles: tuple[torch.Tensor, ...] = ()
    turned = rope_channels
    if spec.rope_style != "applied":
        angles = sample_angles(b * s_q, DTYPES[spec.cos_sin_dtype], INDEX[spec.position_dtype])
        positions = angles[0].view(b, s_q)
        turned = rope.rotate_rows(rope_channels, positions, angles[1], spec.rope_style == "neox")
    want = rounding.quantize_rows(nope, turned, shared=1 if spec.mode == "token" else 0)
    got = (
        torch.zeros(nope.shape, dtype=torch.uint8),
        torch.zeros(rope_channels.shape, dtype=torch.bfloat16),
        torch.zeros(want[2].shape),
    )
    kernel(nope, rope_channels, *angles, *got)
    return _same_bits(
        {
            "nope": (got[0], want[0].view(torch.uint8)),
            "rope": (got[1], want[1]),
            "scale": (got[2], want[2]),
        }
    )


def check_fetch(spec: VariantSpec, kernel: runtime.Kernel) -> Result:
    """In every layout, where pages that nobody asks for are NaN; rows joint or apart."""
    dtype, pairs, lengths = DTYPES[spec.in_dtype], {}, (20, 0, 33)
    made: dict[str, tuple[PagedKVCache, torch.Tensor, torch.Tensor]] = {}
    if spec.cache_dtype == "fp8":
        made = {layout: filled_cache(lengths, 16, layout) for layout in layouts.LAYOUTS}
    else:
        own = DTYPES[spec.cache_dtype]
        made["rows"] = filled_rows(lengths, 16, own)
        made["3 heads"] = filled_rows(lengths, 16, own, 3, strided=True)
    for i, (name, (cache, table, seqlens)) in enumerate(made.items()):
        selector, slots = _fetch_selector(spec, cache, table, seqlens, from_start=i == 1)
        heads = (cache.num_kv_heads,) if FORMATS[cache.format].rows else ()
        got = fetched.outputs((*slots.shape, *heads), dtype, 7.0, joint=i == len(made) - 1)
        kernel(*cache.arguments, *selector, *got)
        want = fetched.rows_at(cache, slots, dtype, 7.0)
        pairs[f"nope of {name}"], pairs[f"rope of {name}"] = zip(got, want, strict=True)
    return _same_bits(pairs)


def _fetch_selector(
    spec: VariantSpec,
    cache: PagedKVCache,
    table: torch.Tensor,
    seqlens: torch.Tensor,
    *,
    from_start: bool,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """(what a fetch is told, the slots that it means) for the mode of ``spec``."""
    if spec.mode == "pages":
        return (table, seqlens), fetched.padded_slots(table, seqlens, 16, 40)
    if spec.mode == "indices":
        at = [places(table[i], n, 16) for i, n in enumerate(seqlens.tolist())]
        used = torch.cat([page * 16 + offset for page, offset in at])
        used = used[torch.randperm(len(used))[:7]]
        slots = torch.cat([used, torch.tensor([fetched.ZEROS] * 3)])
        indices = slots.clone()
        # outside of the pool; beyond 32 bits what would be a token, were it cut
        indices[8:] = torch.tensor([cache.num_slots, 2**31 - 1])
        if spec.index_dtype == "i64":
            indices[8:] = torch.stack([used[0] + 2**32, used[1] - 2**32])
        return (indices.to(INDEX[spec.index_dtype]),), slots
    # a start in mid-page, a sequence without pages, one without rows, the end of a page
    table = torch.cat([table, table[:1]])
    table[3] = table[2]
    begins = torch.tensor([0, 17, 19, 19, 38], dtype=torch.int32)
    none, starts = torch.zeros(0).int(), torch.tensor([3, 1, 5, 14], dtype=torch.int32)
    given = None if from_start else starts
    slots = fetched.packed_slots(table, begins, given, cache, 41)
    return (table, begins, none if given is None else given), slots


def _same_bits(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Result:
    """Bit-for-bit comparison; any NaN equals any NaN."""
    bad = {}
    for name, (got, want) in pairs.items():
        same = got == want
        if got.is_floating_point():
            same |= torch.isnan(got) & torch.isnan(want)
        if not bool(same.all()):
            bad[name] = f"{int((~same).sum())} of {same.numel()} values of {name} differ"
    return Result(not bad, "; ".join(bad.values()) or f"{', '.join(pairs)} bit for bit")

"""Correctness of the whole decode path on a GPU, against the references, with gates.

    python tests/gpu/check_decode.py --out DIR [--parts correctness sweep ...] [--pipelines ...]

Parts:
    quant        append_kv, quantize_q, fetch_dequant: all dtypes, strided input, special rows, bits
    correctness  heads x s_q x ragged lengths x layouts x page sizes x input distributions, poisoned
                 pools, one pool beyond 4 GiB: append_kv and quantize_q bit for bit, then decode
                 against fp64 and against the mimic with modelled accumulation
    sweep        L from 64 to 1M: fp32-output kernel against the mimic with modelled Q.K and exact
                 P.V, with and without splits; the error must not grow with L.  If SNAPMLA_PEERS
                 names a folder with FlashMLA's library, its FP8 kernel's error (to fp64 on its own
                 quantised inputs) stands beside
    sink         a sink of weight 1 with a tail of 1e-5 weights; block maxima that swing by 200

Everything goes through the public API (append_kv, quantize_q, plan_decode, decode).  Results: one
line per group, ``check_decode*.json`` with every case, ``check_decode*.md`` with the tables.  Exit
status 1 if a gate fails, 2 if time ran out before all cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from profiles.device import require_cuda  # noqa: E402

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import snapmla  # noqa: E402
from codegen.artifacts import write_atomic  # noqa: E402
from dsl_kernels.families.fp8_decode import DEFAULT_PAGES  # noqa: E402
from profiles.page import command_line, commit  # noqa: E402
from profiles.timing import Nvml  # noqa: E402
from snapmla.testing import metrics  # noqa: E402
from snapmla.testing.comparison import FP32_SLACK, MIMIC_FACTOR  # noqa: E402
from snapmla.testing.reference import mla_decode_reference  # noqa: E402
from snapmla.testing.rounding import (  # noqa: E402
    FP8,
    FP64,
    MIMIC,
    MIMIC_HW,
    MIMIC_HW_FULL,
    QuantConfig,
    dequantize_rows,
    quantize_rows,
    to_e4m3,
)
from tests.support import cases  # noqa: E402
from tests.support.cases import DecodeCase, DecodeInputs  # noqa: E402

PARTS = ("quant", "correctness", "sweep", "sink")
# A P at a tie may round the other way in a kernel than in the model, by 2^-3.5 of itself: 4e-6 of
# them did on an H200 (2e-4 of the output), and among few values a few do by chance.
FLIP, FLIP_RATE, FLIPS_BY_CHANCE = 2.0**-3.5, 1e-5, 4
FLIPS_RAGGED = 2e-3  # two of them in a sequence of 64 tokens, where that is one row of one
LSE_SLACK, LSE_FACTOR = 2e-4, 1e-3  # |LSE - fp64| <= slack + factor * max|content logit|
SWEEP_GROWTH = 1.3
SWEEP_SEEDS = 8  # draws of the 1K batch, against which growth is judged
SWEEP_LENGTHS = (64, 1024, 16384, 131072)
SWEEP_BATCH, SWEEP_LONGEST = 32, 1 << 20
TAIL_GATE = 0.02
BUDGET, FULL_BUDGET = 540.0, 900.0  # seconds
BIG_POOL_TOKENS = 8_650_752  # 512 bytes each: content alone is beyond 4 GiB


@dataclass
class Result:
    """One checked case: figures and gates; it passes if every figure is within its gate."""

    part: str
    group: str
    case: str
    pipeline: str
    figures: dict[str, float]
    gates: dict[str, float]
    note: str = ""

    @property
    def ratios(self) -> dict[str, float]:
        """Figure over gate; a NaN counts as infinite."""
        ratios = {}
        for name, gate in self.gates.items():
            value = self.figures[name]
            bad = math.isnan(value) or (gate == 0 and value > 0)
            ratios[name] = math.inf if bad else (value / gate if gate else 0.0)
        return ratios

    @property
    def passed(self) -> bool:
        return all(r <= 1 for r in self.ratios.values())


@dataclass
class Run:
    """What a run needs to know and what it has found."""

    device: torch.device
    pipelines: tuple[str, ...]
    deadline: float
    all_pages: bool = False
    results: list[Result] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)

    def takes(self, pipeline: str, page_size: int) -> bool:
        """Whether a correctness case of this page size is one of the pipeline's."""
        return self.all_pages or page_size in DEFAULT_PAGES[pipeline]

    def out_of_time(self, what: str) -> bool:
        if time.monotonic() < self.deadline:
            return False
        self.unfinished.append(what)
        return True

    def add(self, result: Result) -> None:
        self.results.append(result)
        if not result.passed:
            worst = max(result.ratios, key=result.ratios.__getitem__)
            print(
                f"FAIL {result.part} {result.pipeline} {result.case}: {worst} ="
                f" {result.figures[worst]:.3e} > {result.gates[worst]:.3e} {result.note}",
                flush=True,
            )


def reference(
    inputs: DecodeInputs, config: QuantConfig, batches: Iterable[int] | None = None
) -> tuple[Tensor, Tensor]:
    return mla_decode_reference(
        *inputs.stored,
        inputs.softmax_scale,
        causal=inputs.case.causal,
        config=config,
        batches=None if batches is None else list(batches),
    )


def truth_gate(model: Tensor, truth: Tensor, dtype: torch.dtype) -> float:
    """Allowed relative L2 to fp64: what the model of the kernel makes, in the output's dtype."""
    return MIMIC_FACTOR * metrics.relative_l2(model.to(dtype), truth) + FP32_SLACK


def model_gate(model: Tensor, other: Tensor, flips: float) -> float:
    """Allowed relative L2 of a kernel to ``other``: that of the model, and flips of P."""
    return MIMIC_FACTOR * math.hypot(metrics.relative_l2(model, other), flips)


def flips_of(count: int) -> float:
    """Relative L2 that flips cost an output of ``count`` values of P, all as likely."""
    return FLIP * math.sqrt(FLIP_RATE + FLIPS_BY_CHANCE / count)


def largest_content_logit(inputs: DecodeInputs) -> float:
    """max |softmax_scale * sigma_q * sigma_k * q8.k8| over all rows and tokens."""
    case, top = inputs.case, 0.0
    raw = inputs.content.view(torch.uint8)
    for i, length in enumerate(case.lengths):
        pages = inputs.block_table[i, : -(-length // case.page_size)].long()
        q = inputs.q8[i].float().reshape(-1, cases.D_V)
        scale = inputs.q_scale[i].reshape(case.s_q, -1).expand(case.s_q, case.heads).reshape(-1, 1)
        for part in pages.split(max(1, 65536 // case.page_size)):
            k = raw[part].flatten(0, 1).view(FP8).float()
            logits = (q @ k.T) * scale * inputs.scale[part].flatten()
            if logits.numel():
                top = max(top, float(logits.abs().nan_to_num(0.0).max()))
    return top * inputs.softmax_scale


# ---------------------------------------------------------------------------- running the kernels


@dataclass(frozen=True)
class Prepared:
    """A case's inputs as the public API made them, and how many bytes differ from the oracle."""

    q: snapmla.QuantizedQuery
    cache: snapmla.PagedKVCache
    wrong_q: int
    wrong_kv: int


def _differing(actual: Tensor, expected: Tensor) -> int:
    """Elements whose bits differ; NaNs of a float tensor are alike."""
    if actual.dtype in (torch.float32, torch.bfloat16):
        same = (actual == expected) | (torch.isnan(actual) & torch.isnan(expected))
        return int((~same).sum())
    return int((actual.view(torch.uint8) != expected.view(torch.uint8)).sum())


def prepare(inputs: DecodeInputs, append: bool) -> Prepared:
    """Quantises the query, and appends all tokens to a fresh pool (or wraps the stored one)."""
    case = inputs.case
    q = snapmla.quantize_q(inputs.q_nope, inputs.q_rope, granularity=case.granularity)
    wrong_q = (
        _differing(q.nope, inputs.q8)
        + _differing(q.rope, inputs.q_rope_scaled)
        + _differing(q.scale, inputs.q_scale)
    )
    if not append:
        cache = snapmla.PagedKVCache.from_tensors(inputs.content, inputs.rope, inputs.scale)
        return Prepared(q, cache, wrong_q, 0)
    fill = 255 if case.poison else 0
    pages = inputs.content.shape[0]
    pool = cases.allocate_pool(pages, case.page_size, case.layout, inputs.content.device, fill)
    cache = snapmla.PagedKVCache.from_tensors(*pool)
    assert inputs.c_kv is not None and inputs.k_rope is not None and inputs.slot_mapping is not None
    # every 17th token is announced as skipped first, and appended by a second call
    slots = inputs.slot_mapping.clone()
    slots[::17] = -1
    snapmla.append_kv(cache, inputs.c_kv, inputs.k_rope, slots)
    late = slice(None, None, 17)
    snapmla.append_kv(
        cache, inputs.c_kv[late], inputs.k_rope[late], inputs.slot_mapping[late].long().contiguous()
    )
    wrong_kv = sum(
        _differing(a, e)
        for a, e in zip(pool, (inputs.content, inputs.rope, inputs.scale), strict=True)
    )
    return Prepared(q, cache, wrong_q, wrong_kv)


def run_decode(
    inputs: DecodeInputs,
    prepared: Prepared,
    pipeline: str,
    *,
    num_parts: int | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """decode() with a plan, into outputs that hold NaN before."""
    case = inputs.case
    plan = snapmla.plan_decode(
        inputs.cache_seqlens,
        case.heads,
        case.s_q,
        page_size=case.page_size,
        max_pages=inputs.block_table.shape[1],
        num_parts=num_parts,
        pipeline=pipeline,
        causal=case.causal,
    )
    out = torch.full(inputs.q_nope.shape, math.nan, dtype=out_dtype, device=inputs.q_nope.device)
    lse = torch.full((case.b, case.heads, case.s_q), math.nan, device=inputs.q_nope.device)
    snapmla.decode(
        prepared.q,
        prepared.cache,
        inputs.block_table,
        inputs.cache_seqlens,
        softmax_scale=inputs.softmax_scale,
        plan=plan,
        causal=case.causal,
        out=out,
        lse=lse,
    )
    return out, lse


# ---------------------------------------------------------------------------- part: quant


def special_rows(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """c (n, 512), rope (n, 64) as slices of one joint tensor: magnitudes 1e-3..1e3, odd rows."""
    generator = torch.Generator(device).manual_seed(n)
    joint = torch.randn(n, 640, generator=generator, device=device)
    joint *= torch.logspace(-3, 3, n, device=device)[:, None]
    c, rope = joint[:, :512], joint[:, 512:576]
    c[0], rope[0, 3] = 0, 1e3
    c[1], rope[1] = 0, 0
    c[2, 100], c[3, 511], rope[4, 63] = math.nan, math.inf, -math.inf
    c[5] *= 1e-4 if dtype == torch.float16 else 1e-30
    c[6] *= 10 if dtype == torch.float16 else 1e30
    rope[7] = -1e3
    joint = joint.to(dtype)
    return joint[:, :512], joint[:, 512:576]


def quant(run: Run) -> None:
    """The three quantisation kernels, bit for bit against the oracles."""
    for index, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        for layout, page_size in zip(cases.LAYOUTS, (16, 64, 128), strict=True):
            n = 4099 if run.device.type == "cuda" else 67
            figures = quant_figures(run.device, dtype, layout, page_size, n, bool(index % 2))
            name = f"{str(dtype).removeprefix('torch.')} {layout} p{page_size}"
            gates = dict.fromkeys(figures, 0.0)
            run.add(Result("quant", str(dtype)[6:], name, "helpers", figures, gates))


def quant_figures(
    device: torch.device, dtype: torch.dtype, layout: str, page_size: int, n: int, wide: bool
) -> dict[str, float]:
    """Differing elements of append_kv, quantize_q and fetch_dequant, each in all its modes."""
    c, rope = special_rows(n, dtype, device)
    pages = -(-n // page_size) + 3
    slots = torch.randperm(pages * page_size, device=device)[:n]
    slots[::11] = -1
    pool = cases.allocate_pool(pages, page_size, layout, device, 255)
    cache = snapmla.PagedKVCache.from_tensors(*pool)
    snapmla.append_kv(cache, c, rope, slots if wide else slots.int())
    want = cases.allocate_pool(pages, page_size, layout, device, 255)
    kept = slots >= 0
    k8, k_rope, sigma = quantize_rows(c[kept], rope[kept], slots=slots[kept])
    where = (slots[kept] // page_size, slots[kept] % page_size)
    want[0].view(torch.uint8)[where] = k8.view(torch.uint8)
    want[1][where], want[2][where] = k_rope, sigma
    return {
        "append_kv": float(sum(_differing(a, e) for a, e in zip(pool, want, strict=True))),
        **query_figures(c[: 8 * (n // 8)], rope[: 8 * (n // 8)]),
        **fetch_figures(cache, want, slots if wide else slots.int(), dtype),
    }


def query_figures(c: Tensor, rope: Tensor) -> dict[str, float]:
    figures = {}
    q, q_rope = c.unflatten(0, (-1, 2, 4)), rope.unflatten(0, (-1, 2, 4))
    for mode in ("token_head", "token"):
        got = snapmla.quantize_q(q, q_rope, granularity=mode)
        expected = quantize_rows(q, q_rope, shared=int(mode == "token"))
        pairs = zip((got.nope, got.rope, got.scale), expected, strict=True)
        figures[f"quantize_q {mode}"] = float(sum(_differing(*pair) for pair in pairs))
    return figures


def fetch_figures(
    cache: snapmla.PagedKVCache, pool: tuple[Tensor, Tensor, Tensor], slots: Tensor,
    dtype: torch.dtype,
) -> dict[str, float]:  # fmt: skip
    size, device = cache.page_size, cache.device
    absurd = [-1, 2**31 - 1] if slots.dtype == torch.int32 else [2**32, -(2**32)]
    indices = torch.cat((slots, slots.new_tensor(absurd)))
    fetched = snapmla.fetch_dequant(cache, indices, dtype=dtype)
    valid = (indices >= 0) & (indices < cache.num_slots)
    figures = {"fetch indices": _fetch_differences(fetched, pool, indices, valid, size)}
    table = torch.randperm(cache.num_pages, device=device).int().view(1, -1)
    length = torch.tensor([cache.num_slots - 5], dtype=torch.int32, device=device)
    c_kv, k_rope = snapmla.fetch_dequant(cache, table, length, dtype=dtype)
    position = torch.arange(cache.num_slots, device=device)
    flat = table[0][position // size] * size + position % size
    figures["fetch pages"] = _fetch_differences(
        (c_kv[0], k_rope[0]), pool, flat, position < length, size
    )
    figures["fetch ragged"] = _ragged_differences(cache, pool, table, flat, dtype)
    return figures


def _ragged_differences(
    cache: snapmla.PagedKVCache, pool: tuple[Tensor, Tensor, Tensor], table: Tensor, flat: Tensor,
    dtype: torch.dtype,
) -> float:  # fmt: skip
    """Differing elements of packed chunks: ``flat`` cut at odd places, 9 tokens past its end."""
    tokens, device = cache.num_slots, cache.device
    cuts = [0, 0, 3, tokens // 3 + 1, tokens // 3 + 1, tokens - 7, tokens + 9]
    begins = torch.tensor(cuts, dtype=torch.int32, device=device)
    fetched = snapmla.fetch_dequant(
        cache, table.expand(len(cuts) - 1, -1), cu_seqlens=begins, seq_starts=begins[:-1],
        total=tokens + 20, dtype=dtype,
    )  # fmt: skip
    valid = torch.arange(tokens + 20, device=device) < tokens
    return _fetch_differences(fetched, pool, torch.cat((flat, flat[:20])), valid, cache.page_size)


def _fetch_differences(
    fetched: tuple[Tensor, Tensor],
    pool: tuple[Tensor, Tensor, Tensor],
    flat: Tensor,
    valid: Tensor,
    page_size: int,
) -> float:
    """Differing elements; what is not valid must be zero (fetch_dequant allocated zeros)."""
    index = torch.where(valid, flat, 0).long()
    where = (index // page_size, index % page_size)
    nope = pool[0].view(torch.uint8)[where].view(FP8)
    expected = dequantize_rows(nope, pool[1][where], pool[2][where], fetched[0].dtype)
    wrong = 0
    for got, want in zip(fetched, expected, strict=True):
        want = torch.where(valid[:, None], want, 0.0).to(want.dtype)
        wrong += _differing(got.float(), want.float())
    return float(wrong)


# ---------------------------------------------------------------------------- part: correctness


def distribution_name(case: DecodeCase) -> str:
    extra = " sink" if case.sink else " rope1e3" if case.rope_outlier else ""
    return f"std {case.logit_std:g} mean {case.latent_mean:g}{extra}"


def check_case(run: Run, case: DecodeCase, index: int, group: str = "") -> None:
    """All pipelines on one case; the references are computed once."""
    inputs = cases.build(case, run.device, keep_source=True)
    truth, true_lse = reference(inputs, FP64)
    floor = metrics.relative_l2(reference(inputs, MIMIC)[0], truth)
    model = reference(inputs, MIMIC_HW_FULL)[0]
    top = largest_content_logit(inputs)
    prepared = prepare(inputs, append=True)
    empty = torch.isneginf(true_lse)
    num_parts = (None, 1, 5, 264)[index % 4]
    for pipeline in (p for p in run.pipelines if run.takes(p, case.page_size)):
        out, lse = run_decode(
            inputs, prepared, pipeline, num_parts=num_parts, out_dtype=torch.bfloat16
        )
        rows = out.transpose(1, 2)  # (b, h, s_q, 512), as lse
        wrong_empty = int((rows[empty] != 0).sum() + (~torch.isneginf(lse[empty])).sum())
        run.add(
            Result(
                "correctness", group or distribution_name(case), case.id, pipeline,
                {
                    "to fp64": metrics.relative_l2(out, truth),
                    "to model": metrics.relative_l2(out, model),
                    "lse": metrics.lse_error(lse, true_lse),
                    "not finite": int((~torch.isfinite(out)).sum()),
                    "empty rows": wrong_empty,
                    "append_kv": prepared.wrong_kv,
                    "quantize_q": prepared.wrong_q,
                    "mimic to fp64": floor,
                },
                {
                    "to fp64": truth_gate(model, truth, torch.bfloat16),
                    "to model": model_gate(model.bfloat16(), model, FLIPS_RAGGED),
                    "lse": LSE_SLACK + LSE_FACTOR * top,
                    "not finite": 0, "empty rows": 0, "append_kv": 0, "quantize_q": 0,
                },
                f"num_parts {num_parts}",
            )
        )  # fmt: skip


def correctness(run: Run, full: bool, limit: int | None) -> None:
    on_gpu = run.device.type == "cuda"
    todo = list(cases.correctness_cases(full)) if on_gpu else list(cases.SMALL)
    if limit is not None:  # a spread-out sample
        todo = todo[:: max(1, len(todo) // limit)][:limit]
    elif on_gpu:
        for layout in cases.LAYOUTS:
            big = DecodeCase(
                lengths=(4097, 65, 0, 20000), heads=16, layout=layout, seed=77,
                pool_tokens=BIG_POOL_TOKENS,
            )  # fmt: skip
            check_case(run, big, 0, "pool > 4 GiB")
            torch.cuda.empty_cache()
    for i, case in enumerate(todo):
        if run.out_of_time(f"correctness: {len(todo) - i} of {len(todo)} cases"):
            return
        check_case(run, case, i)


# ---------------------------------------------------------------------------- part: sweep


def sweep_points(longest: int) -> Iterator[tuple[int, int]]:
    """(length, batch)."""
    for length in SWEEP_LENGTHS:
        if length <= longest:
            yield length, SWEEP_BATCH
    if longest >= SWEEP_LONGEST:
        yield SWEEP_LONGEST, 1


def compared_batches(length: int, batch: int) -> list[int]:
    """Sequences that the reference computes: all of the short ones, first and last of the long."""
    if length <= 1024:
        return list(range(batch))
    return sorted({0, batch // 2, batch - 1} if length <= 16384 else {0, batch - 1})


class Peer:
    """FlashMLA's dense FP8 decode kernel: one scale per tensor, everything in e4m3.

    Measured, never linked: it is loaded from a folder of the user's, if there.
    """

    NAME = "flashmla_fp8"
    PAGE = 64

    def __init__(self, folder: str) -> None:
        torch.ops.load_library(
            str(Path(folder) / "vllm_flashmla" / "_flashmla_extension_C.abi3.so")
        )
        self.ops = torch.ops._flashmla_extension_C

    @classmethod
    def find(cls) -> Peer | None:
        folder = os.environ.get("SNAPMLA_PEERS")
        if not folder or not torch.cuda.is_available():
            return None
        try:
            return cls(folder)
        except Exception as error:
            print(f"peer {cls.NAME}: cannot be loaded: {error}")
            return None

    def error(self, inputs: DecodeInputs, picked: list[int]) -> float:
        """Relative L2 to fp64 on the peer's own quantised inputs, over the sequences ``picked``."""
        case, device = inputs.case, inputs.content.device
        keys, k_scale = self.keys(inputs)
        q = torch.cat((inputs.q_nope, inputs.q_rope), -1).float()
        q_scale = q.abs().max().view(1) / 448
        q8 = to_e4m3(q / q_scale)
        table = torch.arange(len(keys), dtype=torch.int32, device=device).view(case.b, -1)
        meta, splits = self.ops.get_mla_decoding_metadata_dense_fp8(
            inputs.cache_seqlens, case.rows, 1
        )
        out = self.ops.fwd_kvcache_mla_fp8(
            q8, keys[:, :, None], 512, inputs.cache_seqlens, table, inputs.softmax_scale, True,
            meta, splits, q_scale, k_scale,
        )[0]  # fmt: skip
        truth = mla_decode_reference(
            q8[..., :512].contiguous(), q8[..., 512:].bfloat16(),
            q_scale.expand(case.b, case.s_q, case.heads), keys[..., :512],
            keys[..., 512:].bfloat16(), k_scale.expand(len(keys), self.PAGE), table,
            inputs.cache_seqlens, inputs.softmax_scale, config=FP64, batches=picked,
        )[0]  # fmt: skip
        return metrics.relative_l2(out[picked], truth)

    def keys(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        """The cache as the peer wants it: e4m3 (pages, 64, 576), and the one scale (1,)."""
        pages = inputs.case.lengths[0] // self.PAGE
        used = inputs.block_table[:, :pages].flatten().long()
        raw = inputs.content.view(torch.uint8)

        def plain(part: Tensor) -> Tensor:
            sigma = inputs.scale[part][..., None]
            content = raw[part].view(FP8).float() * sigma
            return torch.cat((content, inputs.rope[part].float() * sigma), -1)

        parts = used.split(8192)  # bounds the fp32 temporaries
        top = max(float(plain(part).abs().max()) for part in parts)
        scale = torch.tensor([top / 448], device=used.device)
        quantised = [to_e4m3(plain(part) / scale).view(torch.uint8) for part in parts]
        return torch.cat(quantised).view(FP8), scale


def sweep(run: Run, heads: tuple[int, ...], longest: int) -> None:
    at_1k: dict[tuple[object, ...], float] = {}
    peer = Peer.find()
    for num_heads in heads:
        for logit_std in (0.1, 1.0):
            for mean in (0.0, 0.5, 2.0):
                for length, batch in sweep_points(longest):
                    label = f"h{num_heads} std {logit_std:g} mean {mean:g} L {length}"
                    if run.out_of_time(f"sweep: {label}"):
                        return
                    case = cases.sweep_case(length, batch, logit_std, mean, num_heads)
                    inputs = sweep_point(run, case, label, at_1k)
                    if peer is not None:
                        add_peer(run, peer, inputs, label)
                    del inputs
                    if run.device.type == "cuda":
                        torch.cuda.empty_cache()


def sweep_point(
    run: Run, case: DecodeCase, label: str, at_1k: dict[tuple[object, ...], float]
) -> DecodeInputs:
    """One (heads, std, mean, L) for all pipelines, with splits and with one split a sequence."""
    inputs = cases.build(case, run.device)
    length = case.lengths[0]
    picked = compared_batches(length, case.b)
    truth = reference(inputs, FP64, picked)[0]
    mimic = reference(inputs, MIMIC_HW, picked)[0]
    model = reference(inputs, MIMIC_HW_FULL, picked)[0]
    flips = flips_of(len(picked) * case.rows * length)
    prepared = prepare(inputs, append=False)
    for pipeline in run.pipelines:
        for mode, num_parts in (("split", None), ("one", case.b)):
            out = run_decode(
                inputs, prepared, pipeline, num_parts=num_parts, out_dtype=torch.float32
            )[0][picked]
            error = metrics.relative_l2(out, mimic)
            key = (pipeline, mode, case.heads, case.logit_std, case.latent_mean)
            gates = {"to mimic": model_gate(model, mimic, flips), "to model": flips}
            if length == 1024:
                error = at_1k[key] = pooled_error(run, case, pipeline, num_parts, out, mimic)
            elif length > 1024:
                gates["growth"] = SWEEP_GROWTH  # without a figure at 1K it is NaN, which fails
            figures = {
                "to mimic": error,
                "to model": metrics.relative_l2(out, model),
                "to fp64": metrics.relative_l2(out, truth),
                "growth": error / at_1k[key] if key in at_1k else math.nan,
            }
            run.add(Result("sweep", label, f"{label} {mode}", pipeline, figures, gates, mode))
    return inputs


def pooled_error(
    run: Run, case: DecodeCase, pipeline: str, num_parts: int | None, out: Tensor,
    mimic: Tensor,
) -> float:  # fmt: skip
    """Relative L2 over the batch at hand and SWEEP_SEEDS - 1 more draws of it.

    What separates kernel and mimic is a P that rounds the other way once in some 10^5; a batch of
    1K tokens holds so few of them that one draw of it says little about the error there.
    """
    squares = [float((out.double() - mimic.double()).square().sum())]
    norms = [float(mimic.double().square().sum())]
    for seed in range(1, SWEEP_SEEDS):
        inputs = cases.build(dataclasses.replace(case, seed=case.seed + seed), run.device)
        more = run_decode(
            inputs, prepare(inputs, append=False), pipeline, num_parts=num_parts,
            out_dtype=torch.float32,
        )[0].double()  # fmt: skip
        expected = reference(inputs, MIMIC_HW, list(range(case.b)))[0].double()
        squares.append(float((more - expected).square().sum()))
        norms.append(float(expected.square().sum()))
    return math.sqrt(sum(squares) / sum(norms))


def add_peer(run: Run, peer: Peer, inputs: DecodeInputs, label: str) -> None:
    """The peer's figure, which has no gate."""
    picked = compared_batches(inputs.case.lengths[0], inputs.case.b)
    try:
        figures = {"to mimic": math.nan, "to fp64": peer.error(inputs, picked)}
    except Exception as error:
        print(f"peer {peer.NAME}, {label}: {error}")
        return
    run.add(Result("sweep", label, label, peer.NAME, figures, {}, "own"))


# ---------------------------------------------------------------------------- part: sink


def sink(run: Run, length: int) -> None:
    places = [(at, parts) for at in (0.0, 0.7) for parts in (None, 1)]
    for at, num_parts in places:
        if run.out_of_time(f"sink at {at:g}"):
            return
        inputs = cases.build(cases.sink_case(length, at), run.device)
        truth = reference(inputs, FP64)[0][..., 1]
        prepared = prepare(inputs, append=False)
        for pipeline in run.pipelines:
            out, _ = run_decode(
                inputs, prepared, pipeline, num_parts=num_parts, out_dtype=torch.float32
            )
            error = float((out[..., 1].double() / truth - 1).abs().max())
            run.add(
                Result(
                    "sink", "tail mass", f"sink at {at:g} L {length} parts {num_parts}", pipeline,
                    {"tail": error, "not finite": int((~torch.isfinite(out)).sum())},
                    {"tail": TAIL_GATE, "not finite": 0},
                    f"tail mass {float(truth.mean()):.3f}",
                )
            )  # fmt: skip
    for swing in cases.SWINGS:
        for num_parts in (None, 1):
            lengths = (512, 4096, 700) if length >= 4096 else (330,)
            case = DecodeCase(lengths=lengths, heads=20, logits=swing, seed=5)
            check_swing(run, case, num_parts)


def check_swing(run: Run, case: DecodeCase, num_parts: int | None) -> None:
    """Block maxima that rise and fall by 200 nats: finite and right."""
    assert case.logits is not None
    inputs = cases.build(case, run.device)
    truth, true_lse = reference(inputs, FP64)
    model = reference(inputs, MIMIC_HW_FULL)[0]
    prepared = prepare(inputs, append=False)
    for pipeline in run.pipelines:
        out, lse = run_decode(
            inputs, prepared, pipeline, num_parts=num_parts, out_dtype=torch.float32
        )
        run.add(
            Result(
                "sink", "swings", f"{case.logits.__name__} parts {num_parts}", pipeline,
                {
                    "to fp64": metrics.relative_l2(out, truth),
                    "lse": metrics.lse_error(lse, true_lse),
                    "not finite": int((~torch.isfinite(out)).sum()),
                },
                # fp32 logits of 200 carry an error of some 1e-5
                {"to fp64": truth_gate(model, truth, out.dtype), "lse": 1e-3, "not finite": 0},
            )
        )  # fmt: skip


# ---------------------------------------------------------------------------- report


def grouped(run: Run) -> dict[tuple[str, str, str], list[Result]]:
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in run.results:
        groups.setdefault((result.part, result.group, result.pipeline), []).append(result)
    return groups


def summary_lines(run: Run) -> list[str]:
    """Per group: cases, failures, and each gated figure's worst case beside its gate."""
    lines = []
    for (part, group, pipeline), results in grouped(run).items():
        failed = sum(not r.passed for r in results)
        names = dict.fromkeys(name for r in results for name in r.gates)
        cells = []
        for name in names:
            gated = [r for r in results if name in r.gates]
            worst = max(gated, key=lambda r, n=name: r.ratios[n])
            if worst.gates[name]:
                cells.append(f"{name} {worst.figures[name]:.2e}/{worst.gates[name]:.1e}")
            elif worst.ratios[name]:
                cells.append(f"{name} {worst.figures[name]:g}")
        state = "ok  " if not failed else "FAIL"
        lines.append(
            f"{state} {part:11} {pipeline:8} {group:28} {len(results):4} cases {failed:3} failed  "
            + "  ".join(cells)
        )
    return lines


def sweep_table(run: Run) -> list[str]:
    """Markdown: one row per (heads, std, mean, pipeline, mode), one column per length."""
    rows: dict[tuple[str, str, str], dict[int, Result]] = {}
    for r in run.results:
        if r.part == "sweep":
            label, _, length = r.group.rpartition(" L ")
            rows.setdefault((label, r.pipeline, r.note), {})[int(length)] = r
    if not rows:
        return []
    lengths = sorted({length for row in rows.values() for length in row})
    head = ["inputs", "pipeline", "splits", *(f"L {n}" for n in lengths)]
    lines = [
        "## Length sweep: relative L2 to the mimic with exact P.V accumulation (to fp64)",
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    for (label, pipeline, mode), row in rows.items():
        cells = [
            _pair_text(row[n].figures["to mimic"], row[n].figures["to fp64"]) if n in row else ""
            for n in lengths
        ]
        lines.append("| " + " | ".join([label, pipeline, mode, *cells]) + " |")
    return lines


def _pair_text(to_mimic: float, to_fp64: float) -> str:
    first = "" if math.isnan(to_mimic) else f"{to_mimic:.1e} "
    return f"{first}({to_fp64:.1e})"


def write_report(run: Run, folder: Path, stem: str, seconds: float) -> None:
    name = torch.cuda.get_device_name() if run.device.type == "cuda" else "software GPU"
    facts = {
        "commit": commit(),
        "device": name,
        **(Nvml().describe() if run.device.type == "cuda" else {}),
        "torch": torch.__version__,
        "snapmla": snapmla.__version__,
        "command": command_line(sys.argv[1:], "tests/gpu/check_decode.py"),
        "seconds": round(seconds, 1),
        "unfinished": run.unfinished,
    }
    results = [{**dataclasses.asdict(r), "passed": r.passed} for r in run.results]
    text = json.dumps({**facts, "results": results}, indent=1)
    write_atomic(folder / f"{stem}.json", text)
    lines = [
        "# Decode correctness",
        "",
        *(f"- {key}: {value}" for key, value in facts.items()),
        "",
        "```",
        *summary_lines(run),
        "```",
        "",
        *sweep_table(run),
    ]
    write_atomic(folder / f"{stem}.md", "\n".join(lines) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Correctness of decode on a GPU, with gates.")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), help=f"some of {PARTS}")
    parser.add_argument("--pipelines", nargs="+", default=["etap"])
    folder = Path(os.environ.get("OUT", "build/check"))
    parser.add_argument("--out", type=Path, default=folder, help="folder of results ($OUT)")
    parser.add_argument(
        "--budget",
        type=float,
        help=f"seconds for everything ({BUDGET:g}, {FULL_BUDGET:g} if --full)",
    )
    parser.add_argument("--full", action="store_true", help="correctness: multiply all layouts")
    parser.add_argument(
        "--all-pages",
        action="store_true",
        help="correctness: every pipeline with every page size; what is not built by default must "
        "be there, where nothing compiles",
    )
    parser.add_argument("--limit", type=int, help="correctness: a sample of this many cases")
    parser.add_argument("--sweep-heads", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--longest", type=int, default=SWEEP_LONGEST, help="of sweep and sink")
    parser.add_argument(
        "--device", default="cuda", help="cuda; cpu runs small cases on the software GPU"
    )
    args = parser.parse_args()
    if args.budget is None:
        args.budget = FULL_BUDGET if args.full else BUDGET
    args.parts = [part for word in args.parts for part in word.split(",")]
    args.pipelines = [name for word in args.pipelines for name in word.split(",")]
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts: expected some of {PARTS}, got {sorted(unknown)}")
    return args


def main() -> int:
    args = parse()
    start = time.monotonic()
    run = Run(torch.device(args.device), tuple(args.pipelines), start + args.budget, args.all_pages)
    work: dict[str, Callable[[], None]] = {
        "quant": lambda: quant(run),
        "correctness": lambda: correctness(run, args.full, args.limit),
        "sweep": lambda: sweep(run, tuple(args.sweep_heads), args.longest),
        "sink": lambda: sink(run, min(1 << 17, args.longest)),
    }
    crashed = False
    for part in args.parts:
        begin = time.monotonic()
        try:
            work[part]()
        except Exception:  # a crash must not cost the other parts' results
            crashed = True
            traceback.print_exc()
        print(f"{part}: {time.monotonic() - begin:.1f} s", flush=True)
    stem = "_".join(["check_decode", *(args.parts if args.parts != list(PARTS) else [])])
    write_report(run, args.out, stem, time.monotonic() - start)
    print("\n".join(summary_lines(run)))
    failed = sum(not r.passed for r in run.results)
    for what in run.unfinished:
        print(f"out of time: {what}")
    print(f"{len(run.results)} checks, {failed} failed; results in {args.out}")
    return 1 if failed or crashed else (2 if run.unfinished else 0)


if __name__ == "__main__":
    sys.exit(main())

"""Which decode kernel serves a call, why, and what the others would take.

A *candidate* is a pipeline with a row tile.  It gets a reason why it cannot or should not be used,
or it is the chosen one.  ``plan_decode`` asks ``choose``, people ask ``explain``; both walk one
list.  Two data files feed the cost model:

* ``data/cards.json``: ceilings of GPU models, each marked as measured or from a datasheet.
* ``data/decode_costs.json``: fitted to the committed H200 tables by ``python -m
  profiles.dispatch_data``, together with the measured points, which override the model.

Time of a decode = fixed + tiles of a part * max(issue time, tensor-core time) of a tile, and never
less than the cache's bytes at the read rate that the tables reach.  The choice looks at shapes that
fix the kernel's efficiency (rows, card), not at batch or lengths: a sequence meets the same kernel
whatever else is in the batch, and the host does not know lengths anyway.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any, NoReturn

import torch

from dsl_kernels import registry
from dsl_kernels.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.families.family import OUT_DTYPE
from dsl_kernels.families.fp8_decode import PAGE_SIZES, PIPELINES, ROW_TILES, cluster_of
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla import checks, runtime
from snapmla.errors import VariantError

TOKEN_BYTES = 644  # content, RoPE and scale of one cached token
REFERENCE_BATCH, REFERENCE_SEQLEN = 32, 16384  # the size at which candidates are compared
BF16_TILES, FP8_TILES = 1, 16  # of the 17 64-channel tiles a token costs (SnapMLA, Eq. 7)
# Tensor-core cycles of one 64-token tile and 64 rows: Q.K 16 x 32 FP8 + 4 x 32 BF16, P.V 512.
TENSOR_CYCLES_64_ROWS = 1152
TENSOR_RATE = 989.0 / (132 * 1980)  # TFLOP/s of one H100-class SM and MHz, BF16
OTHER_FORMS = ("pcie", "nvl", "mig")  # the same chip with other clocks, memory or fewer SMs
TIE = 0.03  # relative times that the model cannot tell apart
OUT_BYTES = {"bf16": 2, "f32": 4}
NAMES_OF_OUT = {torch.bfloat16: "bf16", torch.float32: "f32"}


@dataclass(frozen=True)
class Card:
    """A GPU model: what bounds a kernel there.

    Attributes:
        name: as people call it.
        match: lower-case word of the driver's device name.
        arch: compilation target.
        sms: streaming multiprocessors.
        boost_mhz: nominal clock; ``load_mhz``: the clock seen while decoding, None if not measured.
        nominal_bf16_tflops: datasheet, dense.
        read_gbs, bf16_tflops, fp8_tflops: ceilings.
        source: ``measured`` or ``datasheet``; of the ceilings.
    """

    name: str
    match: str
    arch: str
    sms: int
    boost_mhz: float
    load_mhz: float | None
    nominal_bf16_tflops: float
    read_gbs: float
    bf16_tflops: float
    fp8_tflops: float
    source: str

    @property
    def mhz(self) -> float:
        """Clock that the cost model uses."""
        return self.load_mhz or self.boost_mhz

    @property
    def effective_tflops(self) -> float:
        """Attainable MLA rate: 16 FP8 tiles and 1 BF16 tile, each at its own ceiling."""
        tiles = FP8_TILES + BF16_TILES
        return tiles / (FP8_TILES / self.fp8_tflops + BF16_TILES / self.bf16_tflops)

    @property
    def tensor_slowdown(self) -> float:
        """How many times slower an SM's tensor core is than an H100's at the same clock."""
        return TENSOR_RATE / (self.nominal_bf16_tflops / (self.sms * self.boost_mhz))


@dataclass(frozen=True)
class Features:
    """What a decode pipeline declares.

    Attributes:
        row_tiles, page_sizes, out_dtypes: the variants that can be built.
        why_tiles: the reason behind ``row_tiles``, for messages.
        about: one line for people.
    """

    row_tiles: tuple[int, ...]
    why_tiles: str
    about: str
    page_sizes: tuple[int, ...] = PAGE_SIZES
    out_dtypes: tuple[str, ...] = OUT_DTYPE.values


FEATURES: dict[str, Features] = {
    "etap": Features(
        ROW_TILES, "any row tile", "V^T as register operand; up to 32 rows as S^T = K Q^T"
    ),
    "dual_wg": Features(
        (64, 128), "it puts rows on the MMA's M = 64", "Algorithm 1 of the SnapMLA paper"
    ),
}


@dataclass(frozen=True)
class Problem:
    """What the host knows of a decode call.

    Attributes:
        num_heads, s_q, page_size, out_dtype (``bf16``, ``f32``): of the call.
        card: where it runs.
        pipeline, row_tile: what the caller insists on, None for no wish.
    """

    num_heads: int
    s_q: int
    page_size: int
    out_dtype: str
    card: Card
    pipeline: str | None = None
    row_tile: int | None = None

    @property
    def rows(self) -> int:
        """Query rows of a sequence."""
        return self.num_heads * self.s_q


@dataclass(frozen=True)
class Verdict:
    """One candidate's fate.

    Attributes:
        pipeline, row_tile: the candidate; ``variant`` is its kernel's name.
        us: predicted time in microseconds, None if nothing is known.
        source: ``measured`` (a committed table) or ``model``; ``none``.
        built: whether the kernel is built on this machine (else its first use compiles it, or fails
            where that is forbidden).
        reason: why it is not used, None for the chosen one.
    """

    pipeline: str
    row_tile: int
    variant: str
    us: float | None
    source: str
    built: bool
    reason: str | None

    @property
    def chosen(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Explanation:
    """Every candidate for one problem at one size; ``print`` it.

    Attributes:
        problem: what was asked.
        batch, seqlen: the size that times and roof are for.
        roof_us: max(bytes / read rate, FLOP / effective peak) of the card.
        verdicts: all candidates, the chosen one first, then by time.
    """

    problem: Problem
    batch: int
    seqlen: int
    roof_us: float
    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict | None:
        return next((v for v in self.verdicts if v.chosen), None)

    def __str__(self) -> str:
        p, card = self.problem, self.problem.card
        head = (
            f"decode: batch {self.batch} x {self.seqlen} tokens, {p.num_heads} heads, s_q {p.s_q} "
            f"({p.rows} rows), pages of {p.page_size}, {p.out_dtype} out, on {card.name}"
        )
        roof = (
            f"roof {self.roof_us:.1f} us: {card.read_gbs:.0f} GB/s, "
            f"{card.effective_tflops:.0f} TFLOP/s ({card.source})"
        )
        lines = [head, roof]
        for v in self.verdicts:
            time = "      ?" if v.us is None else f"{v.us:7.1f}"
            share = "" if v.us is None else f"{100 * self.roof_us / v.us:3.0f} % of roof"
            what = "chosen" if v.reason is None else f"rejected: {v.reason}"
            what += "" if v.built or v.us is None else " (not built here)"
            name = f"{v.pipeline} row_tile {v.row_tile}"
            lines.append(f"  {name:<22} {time} us {v.source:<9}{share:<15} {what}")
        return "\n".join(lines)


def _load(name: str) -> dict[str, Any]:
    return json.loads(resources.files("snapmla").joinpath("data", name).read_text("utf-8"))


@functools.lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """All cards on file."""
    return tuple(Card(**entry) for entry in _load("cards.json")["cards"])


def card_named(name: str) -> Card | None:
    """The card whose ``match`` is a word of a device name (a GH200 is no H200), or None."""
    return next((c for c in cards() if c.match in _words(name)), None)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


@functools.lru_cache(maxsize=1)
def _costs() -> dict[str, Any]:
    """The cost file: ``tiles`` and ``measured`` by key."""
    data = _load("decode_costs.json")
    tiles = {(t["pipeline"], t["row_tile"]): t for t in data["tiles"]}
    points: dict[tuple[str, int, int, int], list[tuple[int, float]]] = {}
    for m in data["measured"]:
        key = (m["pipeline"], m["row_tile"], m["rows"], m["batch"])
        points.setdefault(key, []).append((m["seqlen"], m["us"]))
    for curve in points.values():
        curve.sort()
    return {**data, "tiles": tiles, "measured": points}


@functools.lru_cache(maxsize=64)
def card_of(device: torch.device) -> Card:
    """The card behind a device.

    The software GPU decides as an H200 would.  A CUDA device that is not on file takes the
    datasheet of an H100 (sm_90a) or B200 (sm_100a), another form (PCIe, NVL, MIG) of a card on file
    that card's, with its own SM count, and says ``assumed``.
    """
    arch = runtime.arch_of(device)
    if device.type != "cuda":
        return next(c for c in cards() if c.arch == arch)
    properties = torch.cuda.get_device_properties(device)
    known = card_named(properties.name)
    form = set(OTHER_FORMS) & set(_words(properties.name))
    if known is not None and known.arch == arch and not form:
        return dataclasses.replace(known, sms=properties.multi_processor_count)
    near = known if known is not None and known.arch == arch else None
    near = near or card_named("h100" if arch == "sm_90a" else "b200")
    assert near is not None
    return dataclasses.replace(
        near, name=properties.name, sms=properties.multi_processor_count,
        source=f"assumed from {near.name}",
    )  # fmt: skip


def rejection(problem: Problem, pipeline: str, row_tile: int) -> str | None:
    """Reason that a candidate cannot serve ``problem``, or None."""
    features = FEATURES.get(pipeline)
    if features is None:
        return f"{pipeline} declares no features yet"
    if not _has_kernel(pipeline, problem.card.arch):
        return f"no {problem.card.arch} decode kernel of pipeline {pipeline} exists yet"
    if row_tile not in features.row_tiles:
        return f"{pipeline} has no row tile of {row_tile}: {features.why_tiles}"
    if problem.page_size not in features.page_sizes:
        return f"{pipeline} has no page size of {problem.page_size}"
    if problem.out_dtype not in features.out_dtypes:
        return f"{pipeline} writes {' or '.join(features.out_dtypes)}, not {problem.out_dtype}"
    if problem.pipeline not in (None, pipeline):
        return f"pipeline={problem.pipeline!r} was asked for"
    if problem.row_tile not in (None, row_tile):
        return f"row_tile={problem.row_tile} was asked for"
    return None


def parts_of(sms: int, rows: int, row_tile: int) -> int:
    """CTAs (or clusters) that share the tokens of each row block so that they fill the SMs."""
    return max(1, sms // (-(-rows // row_tile) * cluster_of(row_tile)))


def roof_us(card: Card, batch: int, seqlen: int, rows: int, out_bytes: int = 2) -> float:
    """The least time that ``card`` allows: max(bytes / read rate, FLOP / effective peak)."""
    tokens = batch * seqlen
    per_row = TOKEN_BYTES + KV_LORA_RANK * out_bytes + 4  # quantised query, out, lse
    nbytes = tokens * TOKEN_BYTES + batch * rows * per_row
    flops = 2.0 * tokens * rows * (HEAD_DIM_QK + KV_LORA_RANK)
    return max(nbytes / card.read_gbs * 1e-3, flops / card.effective_tflops * 1e-6)


def predict(
    problem: Problem, pipeline: str, row_tile: int, batch: int, seqlen: int
) -> tuple[float | None, str]:
    """(microseconds, ``measured`` or ``model``) of a candidate; (None, ``none``) if unknown."""
    costs, card = _costs(), problem.card
    entry = costs["tiles"].get((pipeline, row_tile))
    if entry is None:
        return None, "none"
    if card.name == costs["card"] and problem.out_dtype == "bf16":
        curve = costs["measured"].get((pipeline, row_tile, problem.rows, batch), [])
        us = _interpolate(curve, seqlen)
        if us is not None:
            return us, "measured"
    home = card_named(costs["card"])
    assert home is not None
    issue_us = entry["tile_us"] * home.mhz / card.mhz
    tensor_cycles = TENSOR_CYCLES_64_ROWS * min(row_tile, 64) / 64
    tile_us = max(issue_us, tensor_cycles * card.tensor_slowdown / card.mhz)
    blocks = -(-problem.rows // row_tile)
    parts = parts_of(card.sms, problem.rows, row_tile)
    waves = -(-blocks * parts * cluster_of(row_tile) // card.sms)
    spec = decode_spec(pipeline, row_tile, problem.page_size, problem.out_dtype, card.arch)
    work = waves * batch * -(-seqlen // spec.token_tile) / parts
    read_us = batch * seqlen * TOKEN_BYTES / (costs["read_fraction"] * card.read_gbs) * 1e-3
    return entry["fixed_us"] + max(work * tile_us, read_us), "model"


def _interpolate(curve: list[tuple[int, float]], seqlen: int) -> float | None:
    """Time at ``seqlen`` between two measured lengths, None outside of them."""
    for (low, us_low), (high, us_high) in itertools.pairwise(curve):
        if low <= seqlen <= high:
            return us_low + (us_high - us_low) * (seqlen - low) / (high - low)
    return next((us for length, us in curve if length == seqlen), None)


@functools.lru_cache(maxsize=1024)
def judge(problem: Problem) -> tuple[tuple[str, int] | None, dict[tuple[str, int], str]]:
    """(the candidate to use, why each other one cannot serve).

    Among those that can, the one with the least predicted time at the reference size (32 x 16384
    tokens) wins, by the model alone: it knows every candidate, measured points only some.  Within
    ``TIE`` of the best the pipeline that ``PIPELINES`` names first wins: the model is no finer.
    """
    reasons: dict[tuple[str, int], str] = {}
    times: dict[tuple[str, int], float] = {}
    unmeasured = dataclasses.replace(problem.card, name="")
    plain = dataclasses.replace(problem, card=unmeasured)
    for pipeline in PIPELINES:
        for row_tile in ROW_TILES:
            reason = rejection(problem, pipeline, row_tile)
            if reason is not None:
                reasons[pipeline, row_tile] = reason
                continue
            us, _ = predict(plain, pipeline, row_tile, REFERENCE_BATCH, REFERENCE_SEQLEN)
            times[pipeline, row_tile] = float("inf") if us is None else us
    if not times:
        return None, reasons
    limit = (1 + TIE) * min(times.values())
    close = [key for key, us in times.items() if us <= limit]
    return min(close, key=lambda k: (PIPELINES.index(k[0]), times[k])), reasons


def choose(
    device: torch.device,
    num_heads: int,
    s_q: int,
    page_size: int,
    *,
    out_dtype: str = "bf16",
    pipeline: str | None = None,
    row_tile: int | None = None,
) -> VariantSpec:
    """The decode kernel for a call.

    Depends on rows, page size and card only, never on batch or lengths (see the module).

    Args:
        device: where it runs; ``cpu`` is the software GPU, which decides as an H200 would.
        num_heads, s_q, page_size: checked already.
        out_dtype: ``bf16`` or ``f32``.
        pipeline, row_tile: the caller's wish, None for the best.

    Raises:
        ValueError: the wishes do not go together; names the argument and the nearest choice.
        VariantError: no decode kernel exists for the device's architecture.
    """
    if pipeline is not None:
        checks.choice("pipeline", pipeline, PIPELINES)
    if row_tile is not None:
        checks.choice("row_tile", row_tile, ROW_TILES)
    problem = Problem(num_heads, s_q, page_size, out_dtype, card_of(device), pipeline, row_tile)
    best, reasons = judge(problem)
    if best is None:
        _refuse(problem, reasons)
    return decode_spec(*best, page_size, out_dtype, problem.card.arch)


def _refuse(problem: Problem, reasons: dict[tuple[str, int], str]) -> NoReturn:
    """Raises what tells the caller how to change the call."""
    archs = sorted({c.arch for c in cards() for p in PIPELINES if _has_kernel(p, c.arch)})
    if problem.card.arch not in archs:
        raise VariantError(
            f"{problem.card.arch}: no decode kernel exists for this architecture yet; decode runs "
            f"on {', '.join(archs)} (H100, H200, H800, H20) and on cpu tensors (software GPU); "
            "snapmla.reference.mla_decode_reference runs anywhere"
        )
    pipeline, row_tile = problem.pipeline, problem.row_tile
    if pipeline is not None and row_tile is not None:
        features = FEATURES[pipeline]
        near = min(features.row_tiles, key=lambda t: abs(t - row_tile))
        tiles = " or ".join(map(str, features.row_tiles))
        checks.value_error(
            "row_tile", f"{tiles} with pipeline {pipeline!r}", row_tile,
            f"{features.why_tiles}; the nearest is row_tile={near}, or leave row_tile out",
        )  # fmt: skip
    first = next(iter(reasons.values()), "no pipeline is registered")
    raise VariantError(f"no decode kernel fits: {first}")


def _has_kernel(pipeline: str, arch: str) -> bool:
    return registry.module_name(decode_spec(pipeline, 64, 64, "bf16", arch)) is not None


def explain(
    num_heads: int,
    s_q: int = 1,
    *,
    page_size: int = 64,
    batch: int = REFERENCE_BATCH,
    seqlen: int = REFERENCE_SEQLEN,
    out_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    card: str | None = None,
    pipeline: str | None = None,
    row_tile: int | None = None,
) -> Explanation:
    """Every candidate for a decode call: predicted time, roof, and why it is used or not.

    Args:
        num_heads: 1 to 128.
        s_q: query tokens of a sequence, 1 to 8.
        page_size: 16, 32, 64 or 128 tokens.
        batch, seqlen: the size that times are for (sequences, tokens each); they do not change the
            choice.
        out_dtype: torch.bfloat16 or torch.float32.
        device: whose card to ask about; None takes the current CUDA device, or an H200 without one.
        card: a card on file instead, such as ``H200``, ``H100``, ``H800``, ``H20``.
        pipeline, row_tile: as given to ``plan_decode``.

    Returns:
        An ``Explanation``; print it.

    Raises:
        TypeError, ValueError: naming the argument.
        UnsupportedDeviceError: no kernels are built for the device.

    Source: roof and tile counts follow the SnapMLA paper's Eq. 7.
    """
    checks.num_heads(num_heads)
    checks.s_q(s_q)
    checks.page_size(page_size)
    checks.integer("batch", batch, 1)
    checks.integer("seqlen", seqlen, 1)
    if out_dtype not in NAMES_OF_OUT:
        checks.type_error("out_dtype", "torch.bfloat16 or torch.float32", out_dtype)
    if pipeline is not None:
        checks.choice("pipeline", pipeline, PIPELINES)
    if row_tile is not None:
        checks.choice("row_tile", row_tile, ROW_TILES)
    where = _find_card(device, card)
    out = NAMES_OF_OUT[out_dtype]
    problem = Problem(num_heads, s_q, page_size, out, where, pipeline, row_tile)
    best, reasons = judge(problem)
    times: dict[tuple[str, int], tuple[float | None, str]] = {
        (p, t): (None, "") if (p, t) in reasons else predict(problem, p, t, batch, seqlen)
        for p in PIPELINES
        for t in ROW_TILES
    }
    best_us = times[best][0] if best is not None else None
    there = {spec.name for spec in runtime.available()}
    verdicts = []
    for key, (us, source) in times.items():
        reason = reasons.get(key)
        if reason is None and key != best:
            reason = _slower(us, best_us, best)
        name = decode_spec(key[0], key[1], page_size, out, where.arch).name
        verdicts.append(Verdict(key[0], key[1], name, us, source, name in there, reason))
    verdicts.sort(key=lambda v: (not v.chosen, v.us is None, v.us or 0.0))
    roof = roof_us(where, batch, seqlen, problem.rows, OUT_BYTES[out])
    return Explanation(problem, batch, seqlen, roof, tuple(verdicts))


def _slower(us: float | None, best_us: float | None, best: tuple[str, int] | None) -> str:
    """Why a candidate that could serve is not used."""
    assert best is not None
    name = f"{best[0]} row_tile {best[1]}"
    if us is None or best_us is None:
        return "nothing is known of its time"
    if us >= best_us:
        return f"{us / best_us:.2f}x the time of {name}"
    if best_us <= (1 + TIE) * us:
        return f"within {100 * TIE:.0f} % of {name}, nearer than the model can tell"
    return (
        f"{name} is chosen by times at {REFERENCE_BATCH} x {REFERENCE_SEQLEN} tokens; at this size "
        f"this one is predicted {best_us / us:.2f}x as fast: ask for it by row_tile and pipeline"
    )


def _find_card(device: torch.device | str | None, card: str | None) -> Card:
    if card is not None:
        if not isinstance(card, str):
            checks.type_error("card", "a name such as 'H200'", type(card).__name__)
        found = card_named(card)
        if found is None:
            checks.choice("card", card, [c.name for c in cards()])
        assert found is not None
        return found
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = checks.device("device", device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return card_of(device)

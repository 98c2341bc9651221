"""Byte and FLOP models of every operation, ceilings of every card, and what follows from the two.

Nothing here touches a GPU or imports torch.  Units: bytes, FLOP, microseconds, GB/s (1e9 bytes),
TFLOP/s (1e12).

Roof of a decode = max(bytes / read rate, FLOP / effective peak); the power roof is a figure of its
own (``Energies``).  *Bytes* count what has to cross the memory bus once: cached tokens, queries,
``out`` and ``lse``; workspaces of a split do not count, because a better kernel would not need
them.  *FLOP* follow the convention of all MLA kernels, ``2 * b * s_q * h * L * (576 + 512)``, with
the causal triangle not subtracted.

The effective peak follows the SnapMLA paper's Eq. 7: a token costs 17 tiles of 64 channels
(8 content Q.K, 1 RoPE Q.K, 8 P.V); with a BF16 RoPE 16 of them run at the FP8 rate and one at the
BF16 rate.  Eq. 7 itself puts FP8 at twice the nominal BF16 rate, hence 17/9; the roof here uses the
rates that matrix multiplications reach on the card.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from dsl_kernels.formats import registered

CONTENT_DIM = 512
ROPE_DIM = 64
HEAD_DIM_QK = CONTENT_DIM + ROPE_DIM
HEAD_DIM_V = CONTENT_DIM
TILES_PER_TOKEN = 17
EQ7_FACTOR = 17 / 9


@dataclass(frozen=True)
class CacheFormat:
    """What one cached token and one query row occupy, and which tensor-core rate they use.

    Attributes:
        name: label in reports.
        token_bytes: bytes of one cached token.
        query_bytes: bytes of one query row (one token, one head).
        fp8_tiles: how many of the 17 tiles of a token run at the FP8 rate; the rest run at BF16's.
    """

    name: str
    token_bytes: int
    query_bytes: int
    fp8_tiles: int


_SNAPMLA, _BF16 = registered.FORMATS["fp8"], registered.FORMATS["bf16"]
FORMATS: dict[str, CacheFormat] = {
    f.name: f
    for f in (
        CacheFormat("snapmla", _SNAPMLA.token_bytes, _SNAPMLA.token_bytes, 16),
        CacheFormat("fp8_tensor", 576, 576, 17),
        CacheFormat("bf16", _BF16.token_bytes, _BF16.token_bytes, 0),
    )
}


@dataclass(frozen=True)
class Ceilings:
    """Rates that a card reached in its committed table, or its datasheet's where nobody measured.

    Attributes:
        read_gbs: read-only stream from device memory, GB/s.
        bf16_tflops, fp8_tflops: dense matrix multiplication.
        source: ``measured``, ``datasheet`` or ``probe`` (this run).
    """

    read_gbs: float
    bf16_tflops: float
    fp8_tflops: float
    source: str

    def effective_tflops(self, fmt: CacheFormat) -> float:
        """Attainable MLA rate: 17 tiles, each at its own precision's rate."""
        bf16_tiles = TILES_PER_TOKEN - fmt.fp8_tiles
        return TILES_PER_TOKEN / (fmt.fp8_tiles / self.fp8_tflops + bf16_tiles / self.bf16_tflops)

    def raised_by(self, probe: Ceilings | None) -> Ceilings:
        """Each ceiling is the larger of the figure on file and this run's probe."""
        if probe is None:
            return self
        return replace(
            self,
            read_gbs=max(self.read_gbs, probe.read_gbs),
            bf16_tflops=max(self.bf16_tflops, probe.bf16_tflops),
            fp8_tflops=max(self.fp8_tflops, probe.fp8_tflops),
            source=f"{self.source}, raised by probe",
        )


@dataclass(frozen=True)
class Energies:
    """What work costs above a card that only waits: the *power roof*.

    The cap holds for the whole board.  ``floor_w`` of it are spent while every SM holds a CTA and
    nothing is done, so what a row needs on top has to fit into cap - floor, and
    time >= energy / (cap - floor).  A probe's energy is its power above the floor, alone on the
    card, at the clock and voltage that it then has.

    A matrix product pays for its operands' way out of the L2 cache, about as many bytes a FLOP as
    a decode of 64 rows (a 128 x 256 tile 1/170, decode 1/216), so that way must not count twice:
    the energy of a row is FLOP at the products' cost plus what a byte from memory costs more than
    one from L2; of few rows, which read more a FLOP, at least bytes at the stream's cost.

    Attributes:
        cap_w: enforced power limit of the board, W.
        floor_w: power while every SM waits, W.
        dram_pj, l2_pj: one byte read from device memory, from the L2 cache, pJ.
        bf16_pj, fp8_pj: one FLOP of a dense product, pJ.
    """

    cap_w: float
    floor_w: float
    dram_pj: float
    l2_pj: float
    bf16_pj: float
    fp8_pj: float

    def row_uj(self, nbytes: float, flops: float, fmt: CacheFormat) -> float:
        """Least energy of a decode above the floor, microjoules."""
        bf16_tiles = TILES_PER_TOKEN - fmt.fp8_tiles
        flop_pj = (fmt.fp8_tiles * self.fp8_pj + bf16_tiles * self.bf16_pj) / TILES_PER_TOKEN
        both = flops * flop_pj + nbytes * (self.dram_pj - self.l2_pj)
        return max(both, nbytes * self.dram_pj) * 1e-6

    def row_us(self, nbytes: float, flops: float, fmt: CacheFormat) -> float:
        """Time in which the cap allows that energy."""
        return self.row_uj(nbytes, flops, fmt) / (self.cap_w - self.floor_w)


@dataclass(frozen=True)
class Card:
    """A GPU model.

    Attributes:
        name: as reports print it.
        match: lower-case substring of the driver's device name.
        sms: streaming multiprocessors.
        boost_mhz: nominal boost clock.
        nominal_bf16_tflops: datasheet, dense; what Eq. 7 starts from.
        ceilings: figures on file.
    """

    name: str
    match: str
    sms: int
    boost_mhz: int
    nominal_bf16_tflops: float
    ceilings: Ceilings

    @property
    def eq7_tflops(self) -> float:
        """SnapMLA paper, Eq. 7: 17/9 of the nominal BF16 peak."""
        return EQ7_FACTOR * self.nominal_bf16_tflops


def _cards() -> tuple[Card, ...]:
    """The cards of the dispatcher's data file, read without importing the package (and torch)."""
    path = Path(__file__).resolve().parent.parent / "snapmla" / "data" / "cards.json"
    return tuple(
        Card(
            c["name"], c["match"], c["sms"], c["boost_mhz"], c["nominal_bf16_tflops"],
            Ceilings(c["read_gbs"], c["bf16_tflops"], c["fp8_tflops"], c["source"]),
        )
        for c in json.loads(path.read_text())["cards"]
    )  # fmt: skip


# What was measured: medians of CUDA-graph replays of a read-only stream, and of 8192^3 products in
# bf16 and in fp8 with fast accumulation (profiles/ceilings.py), from the card's committed table.
CARDS: tuple[Card, ...] = _cards()


def card_by_name(name: str) -> Card:
    """The card whose ``match`` (or name) occurs in ``name``; the longest match wins.

    Raises:
        ValueError: no card on file fits.
    """
    text = name.lower()
    fits = [c for c in CARDS if c.match in text or c.name.lower() == text]
    if not fits:
        known = ", ".join(c.name for c in CARDS)
        raise ValueError(f"card: expected a name containing one of {known}; got {name!r}")
    return max(fits, key=lambda c: len(c.match))


def decode_flops(tokens: int, num_heads: int, s_q: int) -> float:
    """FLOP of a decode over ``tokens`` cached tokens in all (sum of the lengths of the batch)."""
    return 2.0 * tokens * num_heads * s_q * (HEAD_DIM_QK + HEAD_DIM_V)


def decode_bytes(
    fmt: CacheFormat, tokens: int, batch: int, num_heads: int, s_q: int, out_bytes: int = 2
) -> float:
    """Bytes of a decode: cache, queries, ``out`` (``out_bytes`` an element) and fp32 ``lse``."""
    rows = batch * s_q * num_heads
    per_row = fmt.query_bytes + HEAD_DIM_V * out_bytes + 4
    return float(tokens) * fmt.token_bytes + float(rows) * per_row


def append_bytes(
    tokens: int, in_bytes: int = 2, slot_bytes: int = 4, fmt: str = "snapmla"
) -> float:
    """append_kv: reads ``tokens`` rows of 576 and a slot each, writes 644 bytes a token, or those
    of another of ``FORMATS``."""
    stored = FORMATS[fmt].token_bytes
    return float(tokens) * (HEAD_DIM_QK * in_bytes + slot_bytes + stored)


def quantize_q_bytes(rows: int, scales: int, in_bytes: int = 2) -> float:
    """quantize_q over ``rows`` = b*s_q*h query rows that share ``scales`` fp32 scales."""
    return float(rows) * (HEAD_DIM_QK * in_bytes + CONTENT_DIM + 2 * ROPE_DIM) + 4.0 * scales


def angle_bytes(tokens: int) -> float:
    """What rotates tokens: a 64-bit position and 64 fp32 cosines and sines each."""
    return float(tokens) * (8 + 4 * ROPE_DIM)


def fetch_dequant_bytes(tokens: int, out_bytes: int = 2, fmt: str = "snapmla") -> float:
    """fetch_dequant: reads 644 bytes a token, or those of another of ``FORMATS``, writes 576
    elements."""
    return float(tokens) * (FORMATS[fmt].token_bytes + HEAD_DIM_QK * out_bytes)


def merge_states_bytes(parts: int, rows: int, element_bytes: int = 2) -> float:
    """merge_states: reads ``parts`` results of ``rows`` = b*s_q*h rows and LSE, writes one."""
    return float(parts + 1) * rows * (HEAD_DIM_V * element_bytes + 4)


def memory_us(nbytes: float, gbs: float) -> float:
    """Time to move ``nbytes`` at ``gbs`` GB/s."""
    return nbytes / gbs * 1e-3


def compute_us(flops: float, tflops: float) -> float:
    """Time to do ``flops`` at ``tflops`` TFLOP/s."""
    return flops / tflops * 1e-6


def roof_us(nbytes: float, flops: float, ceilings: Ceilings, fmt: CacheFormat) -> float:
    """The least time the card allows: the larger of the memory time and the tensor-core time."""
    return max(
        memory_us(nbytes, ceilings.read_gbs), compute_us(flops, ceilings.effective_tflops(fmt))
    )


def helper_us(nbytes: float, flops: float, ceilings: Ceilings) -> float:
    """The same of an operation whose products, if it has any, are all FP8."""
    return max(memory_us(nbytes, ceilings.read_gbs), compute_us(flops, ceilings.fp8_tflops))


def power_roof_us(
    nbytes: float, flops: float, ceilings: Ceilings, energies: Energies, fmt: CacheFormat
) -> float:
    """``roof_us``, or the time that the power cap asks for where that is longer."""
    return max(roof_us(nbytes, flops, ceilings, fmt), energies.row_us(nbytes, flops, fmt))


def ridge_rows(ceilings: Ceilings, fmt: CacheFormat) -> float:
    """Query rows (heads * s_q) at which a long decode turns from memory- to tensor-bound."""
    flops_per_row = 2.0 * (HEAD_DIM_QK + HEAD_DIM_V)
    return (
        ceilings.effective_tflops(fmt) * 1e3 / ceilings.read_gbs * fmt.token_bytes / flops_per_row
    )


# ---------------------------------------------------------------------------------- dequantisation

# MMA FLOP of one Hopper SM in a cycle at BF16: 989e12 / 1830e6 / 132.
MMA_FLOP_PER_CYCLE = 4096
# Results per cycle and SM of the four steps from e4m3 to a scaled bf16: e4m3 -> half, half ->
# float, float -> bf16 and the multiplication, as FlashMLA's deep-dive counts them.
DEQUANT_STEP_RATES = (64, 64, 16, 256)


@dataclass(frozen=True)
class DequantCost:
    """The deep-dive's cycle model: SM cycles per cached token, for one CTA of ``rows`` rows.

    Attributes:
        rows: query rows of the CTA.
        shared_by: CTAs that share one dequantised token (2 is the deep-dive's crossover).
        mma_bf16: tensor-core cycles if everything is BF16.
        dequant: CUDA-core cycles to dequantise 512 channels, divided among ``shared_by``.
        mma_native: tensor-core cycles of the RoPE-aware FP8 form, which dequantises nothing.
    """

    rows: int
    shared_by: int
    mma_bf16: float
    dequant: float
    mma_native: float

    @property
    def bound(self) -> float:
        """Cycles per token of a kernel that dequantises: the two pipes overlap perfectly."""
        return max(self.mma_bf16, self.dequant)

    def floor_us(self, row_blocks: int, tokens: int, sms: int, mhz: float) -> float:
        """Time of ``row_blocks`` such CTAs' passes over ``tokens`` tokens, spread over all SMs."""
        return self.bound * row_blocks * tokens / sms / mhz


def dequant_cost(rows: int = 64, shared_by: int = 1) -> DequantCost:
    """Cycle model of dequantising decode (FlashMLA deep-dive, "Theoretical Analysis")."""
    mma = 2.0 * rows * (HEAD_DIM_QK + HEAD_DIM_V) / MMA_FLOP_PER_CYCLE
    steps = sum(CONTENT_DIM / rate for rate in DEQUANT_STEP_RATES)
    native_share = (FORMATS["snapmla"].fp8_tiles / 2 + 1) / TILES_PER_TOKEN
    return DequantCost(rows, shared_by, mma, steps / shared_by, mma * native_share)


def dequant_lines(card: Card) -> list[str]:
    """The cost model in words, for the head of a report."""
    lines = []
    for shared_by, label in ((1, "alone"), (2, "crossover of 2 CTAs")):
        cost = dequant_cost(64, shared_by)
        what = "dequantisation" if cost.dequant > cost.mma_bf16 else "the tensor core"
        peak = 2.0 * 64 * (HEAD_DIM_QK + HEAD_DIM_V) / cost.bound * card.sms * card.boost_mhz * 1e-6
        lines.append(
            f"64 rows, {label}: MMA {cost.mma_bf16:.0f} cycles/token, dequantisation "
            f"{cost.dequant:.0f}: bound by {what}, at most {peak:.0f} TFLOP/s "
            f"at {card.boost_mhz} MHz; native FP8 needs {cost.mma_native:.0f} cycles"
        )
    return lines

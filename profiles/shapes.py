"""Workloads: what a benchmark row computes, and the presets that name sets of them."""

from __future__ import annotations

import difflib
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsl_kernels.families import DECODE, FAMILIES
from dsl_kernels.spec import VariantSpec
from profiles import roofline

if TYPE_CHECKING:
    from snapmla.testing.workloads.call import Sizes

_DECODE = re.compile(r"b(\d+)_L(\d+)_h(\d+)_q(\d+)(_ragged|_skewed)?(_ragged_q)?")
SHORT = 1024  # tokens of the short requests of a skewed batch
_FIELD = re.compile(r"([a-z]+)(\d+)")


def is_decode(op: str) -> bool:
    """True if rows of an operation are of decode, over whatever cache."""
    return op in FAMILIES and FAMILIES[op].kind == DECODE


@dataclass(frozen=True, order=True)
class DecodeShape:
    """One decode step: ``batch`` requests, ``num_heads`` heads, ``s_q`` query tokens each.

    Attributes:
        seqlen: cached tokens of a request; with ``ragged`` the longest, the others are uniform
            in [seqlen/2, seqlen].
        skewed: one request has ``seqlen`` tokens, the others SHORT each.
        ragged_q: the first request has ``s_q`` query tokens, the others 1 to ``s_q``, uniform.
    """

    batch: int
    seqlen: int
    num_heads: int
    s_q: int = 1
    ragged: bool = False
    skewed: bool = False
    ragged_q: bool = False

    op = "decode"

    @property
    def label(self) -> str:
        """Short name; ``parse`` reads it back."""
        tail = "_ragged" if self.ragged else "_skewed" if self.skewed else ""
        tail += "_ragged_q" if self.ragged_q else ""
        return f"b{self.batch}_L{self.seqlen}_h{self.num_heads}_q{self.s_q}{tail}"

    def lengths(self) -> list[int]:
        """Length of each request; the same list every time."""
        if self.skewed:
            return [self.seqlen] + [SHORT] * (self.batch - 1)
        if not self.ragged:
            return [self.seqlen] * self.batch
        rng = random.Random(f"{self.batch}/{self.seqlen}")
        short = [rng.randint(self.seqlen // 2, self.seqlen) for _ in range(self.batch - 1)]
        return [self.seqlen, *short]

    def query_tokens(self) -> list[int]:
        """Query tokens of each request; the same list every time."""
        if not self.ragged_q:
            return [self.s_q] * self.batch
        rng = random.Random(f"{self.batch}/{self.s_q}/queries")
        return [self.s_q] + [rng.randint(1, self.s_q) for _ in range(self.batch - 1)]

    @property
    def uneven(self) -> bool:
        """True if requests differ in length."""
        return self.ragged or self.skewed

    def levelled(self) -> DecodeShape:
        """Same number of requests and (rounded) tokens, all of one length."""
        mean = round(self.tokens / self.batch)
        return DecodeShape(self.batch, mean, self.num_heads, self.s_q)

    @property
    def tokens(self) -> int:
        """Cached tokens of all requests."""
        return sum(self.lengths())

    @property
    def flops(self) -> float:
        """By the convention of ``roofline.decode_flops``."""
        seen = sum(n * q for n, q in zip(self.lengths(), self.query_tokens(), strict=True))
        return roofline.decode_flops(seen, self.num_heads, 1)

    def bytes(self, fmt: roofline.CacheFormat, out_bytes: int = 2) -> float:
        """Bytes that must cross the bus with cache format ``fmt``."""
        return roofline.decode_bytes(
            fmt, self.tokens, sum(self.query_tokens()), self.num_heads, 1, out_bytes
        )


@dataclass(frozen=True, order=True)
class HelperShape:
    """One call of a helper kernel.

    Attributes:
        op: ``append_kv``, ``quantize_q`` (with ``rope_``: behind a rotary embedding),
            ``fetch_dequant``, ``merge_states`` or ``plan_decode``.
        tokens: tokens appended or fetched, parts merged; 0 for the others.
        batch, num_heads, s_q: shape of the queries (quantize_q, merge_states, plan_decode);
            fetch_dequant by pages or ragged splits ``tokens`` over ``batch`` requests.
        mode: ``norm`` (rope_append_kv that also normalises), ``token_head``/``token`` (quantize_q),
            ``pages``/``indices``/``ragged`` (fetch_dequant; ``ragged``: chunks that begin in
            mid-page, in uneven lengths),
            ``pair``/``list``/``stack`` (merge_states), of bfloat16 or with ``_f32``.  ``bf16``,
            alone or behind a mode: a cache of 16 bits (append_kv, fetch_dequant).
    """

    op: str
    tokens: int = 0
    batch: int = 1
    num_heads: int = 1
    s_q: int = 1
    mode: str = ""

    @property
    def label(self) -> str:
        """Short name; ``parse`` reads it back."""
        parts = [f"n{self.tokens}"] if self.tokens else []
        if not self.op.endswith("append_kv"):
            parts.append(f"b{self.batch}")
        if self.op.endswith("quantize_q") or self.op in ("merge_states", "plan_decode"):
            parts += [f"h{self.num_heads}", f"q{self.s_q}"]
        return "_".join([self.op, *parts] + ([self.mode] if self.mode else []))

    @property
    def spec(self) -> VariantSpec:
        """The variant that is called."""
        from snapmla.testing import workloads  # here: who only lists decodes needs no torch

        work = workloads.benched()[self.op]
        name = next(op for op in FAMILIES if workloads.of(op) is work)
        return VariantSpec(op=name, **work.bench[self.op][self.mode])

    @property
    def sizes(self) -> Sizes:
        """Sizes as its workload takes them."""
        from snapmla.testing.workloads.call import Sizes

        each = self.tokens // self.batch if self.spec.op == "fetch_dequant" else self.tokens
        return Sizes(self.batch, each, self.s_q, self.num_heads, self.tokens)

    @property
    def bytes(self) -> float:
        """Bytes read plus bytes written."""
        from snapmla.testing import workloads

        moved = workloads.of(self.spec.op).moved
        assert moved is not None  # of all that are benched
        return moved(self.spec, self.sizes)


Shape = DecodeShape | HelperShape


def helper_modes() -> dict[str, tuple[str, ...]]:
    """Name of a helper row -> its modes."""
    from snapmla.testing import workloads

    return {name: tuple(work.bench[name]) for name, work in workloads.benched().items()}


def parse(label: str) -> Shape:
    """Inverse of ``label``.

    Raises:
        ValueError: ``label`` is no shape.
    """
    found = _DECODE.fullmatch(label)
    if found:
        b, length, h, q = (int(x) for x in found.groups()[:4])
        if min(b, length, h, q) < 1:
            raise ValueError(f"shape: expected positive sizes; got {label!r}")
        tail = found.group(5)
        return DecodeShape(
            b, length, h, q, tail == "_ragged", tail == "_skewed", bool(found.group(6))
        )
    modes = helper_modes()
    op = next((o for o in modes if label == o or label.startswith(o + "_")), None)
    if op is None:
        raise ValueError(
            "shape: expected b<batch>_L<tokens>_h<heads>_q<s_q>[_ragged|_skewed][_ragged_q] or "
            f"<{'|'.join(modes)}>_...; got {label!r}"
        )
    rest = label[len(op) + 1 :]
    mode = next((m for m in sorted(modes[op], key=len, reverse=True) if rest.endswith(m)), None)
    if mode is None:
        raise ValueError(f"shape: {label!r} must end in one of {modes[op]}")
    fields = {"n": 0, "b": 1, "h": 1, "q": 1}
    for part in filter(None, rest[: len(rest) - len(mode)].split("_")):
        item = _FIELD.fullmatch(part)
        if item is None or item.group(1) not in fields:
            raise ValueError(f"shape: {part!r} in {label!r} is not one of n<..> b<..> h<..> q<..>")
        fields[item.group(1)] = int(item.group(2))
    return HelperShape(op, fields["n"], fields["b"], fields["h"], fields["q"], mode)


def _h200_table() -> list[Shape]:
    rows = [DecodeShape(32, 16384, h, q) for h in (16, 32, 64, 128) for q in (1, 2)]
    rows += [DecodeShape(32, n, 128) for n in (4096, 8192, 32768, 65536)]
    rows += [DecodeShape(16, n, 16) for n in (1024, 4096, 16384, 65536)]
    rows += [DecodeShape(1, 131072, h) for h in (16, 128)]
    return list(rows)


def _fig5() -> list[Shape]:
    lengths = (16384, 32768, 65536, 131072)
    return [DecodeShape(32, n, h) for h in (16, 64, 128) for n in lengths]


def _rows16() -> list[Shape]:
    fetches = [("pages_bf16", 8), ("indices_bf16", 1), ("ragged_bf16", 8)]
    return [
        HelperShape("append_kv", tokens=4096, mode="bf16"),
        *(HelperShape("fetch_dequant", tokens=131072, batch=b, mode=mode) for mode, b in fetches),
    ]


def _flashmla_dense() -> list[Shape]:
    """Of FlashMLA's own tests and benchmark of its dense decode."""
    rows = [DecodeShape(128, n, 128, q, ragged=True) for q in (1, 2) for n in (4096, 8192, 16384)]
    rows += [DecodeShape(128, 1024 << i, 128) for i in range(6)]
    rows += [DecodeShape(b, n, 128, q) for b in (1, 2, 6, 64) for n in (140, 4096) for q in (1, 4)]
    return [*rows, *(DecodeShape(64, 4096, h) for h in (1, 9, 16, 63, 64))]


def _helpers() -> list[Shape]:
    return [
        HelperShape("append_kv", tokens=4096),
        HelperShape("rope_append_kv", tokens=4096),
        HelperShape("rope_append_kv", tokens=4096, mode="norm"),
        HelperShape("quantize_q", batch=128, num_heads=128, mode="token_head"),
        HelperShape("rope_quantize_q", batch=128, num_heads=128, mode="token_head"),
        HelperShape("quantize_q", batch=128, num_heads=128, mode="token"),
        HelperShape("fetch_dequant", tokens=131072, batch=8, mode="pages"),
        HelperShape("fetch_dequant", tokens=131072, mode="indices"),
        HelperShape("fetch_dequant", tokens=131072, batch=8, mode="ragged"),
        HelperShape("fetch_dequant", tokens=131072, batch=256, mode="ragged"),
        HelperShape("merge_states", tokens=2, batch=32, num_heads=128, mode="pair"),
        HelperShape("merge_states", tokens=2, batch=1024, num_heads=128, mode="pair"),
        HelperShape("merge_states", tokens=2, batch=1024, num_heads=128, mode="pair_f32"),
        HelperShape("merge_states", tokens=4, batch=512, num_heads=128, mode="list"),
        HelperShape("merge_states", tokens=8, batch=256, num_heads=128, mode="stack"),
        HelperShape("plan_decode", batch=32, num_heads=128),
        HelperShape("plan_decode", batch=256, num_heads=16, s_q=2),
    ]


def _ragged_cost() -> list[Shape]:
    """Uneven batches, each followed by an even one of as many requests and tokens."""
    rows: list[Shape] = []
    for heads in (16, 64, 128):
        for uneven in (
            DecodeShape(32, 16384, heads, ragged=True),
            DecodeShape(32, 131072, heads, skewed=True),
        ):
            rows += [uneven, uneven.levelled()]
    return rows


PRESETS: dict[str, list[Shape]] = {
    # SnapMLA paper, Figure 5: DP1/TP8, DP4/TP2 and DP8/TP1 leave 16, 64 and 128 heads a GPU.
    "snapmla-fig5": _fig5(),
    # SnapMLA paper, Figure 6: batch 32, heads times MTP.
    "snapmla-fig6": [DecodeShape(32, 16384, h, q) for h in (16, 32, 64, 128) for q in (1, 2)],
    # FlashMLA-ETAP paper, Figure 1: 16 heads, batch 16 and 32, 512 to 64K tokens.  In BF16, as
    # there: --backends snapmla:cache=bf16,etap,flashmla_bf16,fa3 --name etap-fig1-bf16.
    "etap-fig1": [DecodeShape(b, 512 << i, 16) for b in (16, 32) for i in range(8)],
    "h200-table": _h200_table(),
    # FlashMLA's shapes of 16 bits (--backends snapmla:cache=bf16,flashmla_bf16,fa3).
    "flashmla-dense": _flashmla_dense(),
    # What a cache of 16 bits is compared on, with the same backends.
    "dense-table": [
        *(DecodeShape(32, 16384, h) for h in (16, 32, 64, 128)), DecodeShape(32, 16384, 128, 2),
        DecodeShape(16, 1024, 16), DecodeShape(1, 131072, 16),
    ],
    "helpers": _helpers(),
    "rows16": _rows16(),  # the helpers of a cache of 16 bits
    "ragged": [
        DecodeShape(32, 32768, 16, 1, True), DecodeShape(32, 32768, 128, 1, True),
        DecodeShape(64, 8192, 64, 2, True), DecodeShape(128, 4096, 128, 1, True),
    ],
    # What unequal lengths cost: our scheduling alone.
    "ragged-cost": _ragged_cost(),
    # Speculative steps and short prefills: more and more query tokens.
    "mtp": [DecodeShape(8, 8192, h, q) for h in (16, 128) for q in (1, 2, 4, 8, 16, 33, 128)],
    # Different numbers of query tokens (backends snapmla,snapmla:padded: packed, or each padded).
    "ragged-q": [
        DecodeShape(b, n, h, q, ragged_q=True)
        for b, n, q in ((32, 8192, 8), (64, 4096, 4), (8, 8192, 128)) for h in (16, 128)
    ],
    # What docs/plots.py draws: even batches of 32, one query token.
    "lengths": [DecodeShape(32, 1024 << i, h) for h in (16, 64, 128) for i in range(8)],
    # Where the time goes at the power cap (--power): split and unsplit, both well filled.
    "power": [
        *(DecodeShape(32, 16384, h) for h in (16, 64, 128)),
        DecodeShape(132, 8192, 16), DecodeShape(132, 8192, 64), DecodeShape(66, 8192, 128),
    ],
    # Quantise and decode of one layer beside decode alone (--backends snapmla,snapmla:quantise).
    "layer": [
        DecodeShape(32, 1024, 16), DecodeShape(32, 1024, 128), DecodeShape(32, 16384, 16),
    ],
    # Small enough for the software GPU; also what `--device cpu` runs by default.
    "tiny": [DecodeShape(2, 96, 16), HelperShape("append_kv", tokens=32)],
}  # fmt: skip


def preset(name: str) -> list[Shape]:
    """Shapes of a preset, in order.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        known = ", ".join(PRESETS)
        raise ValueError(f"preset (make's BENCH=): expected one of {known}, got {name!r}{hint}")
    return list(PRESETS[name])

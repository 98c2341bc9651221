"""Sparse decode: what its pipelines can do, what a named token costs, and its problems.

Every query token is a sequence of its own here, as long as its row of ``indices``: no two share the
tokens that they read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsl_kernels import registry
from dsl_kernels.families import ARCHS
from dsl_kernels.families.sparse_decode import (
    FAMILY,
    ON_REQUEST,
    ROW_TILES,
    TWO_TERMS,
    module_of,
)
from dsl_kernels.formats.registered import SPARSE, Format
from dsl_kernels.formats.rows16 import F16
from dsl_kernels.spec import VariantSpec
from snapmla.rank import dense_decode, fp8_decode
from snapmla.rank.cards import Card
from snapmla.rank.costs import Costs, Tile, costs_of, parts_of
from snapmla.rank.decode import FAST, STANDARD, Features, OfFormats, OneFormat, Problem
from snapmla.rank.load import Load, Share
from snapmla.rank.verdicts import Size, judge

REFERENCE = Size(128, 2048)  # query tokens and entries of each, of a call that names none
# Query tokens of several row blocks, up to so many blocks in all, run on fewer parts: more of them
# make more partial rows than their tiles save (a token of 2048, 128 heads in blocks of 64: 44 parts
# 12.2 us, 66 parts 14.4 us on an H200).
FEW_BLOCKS, PARTS_OF_FEW = 4, 44
# By what share reading takes longer for each further row block of a token: 32 heads in blocks of 16
# beside one of 32, where memory bounds both (``sparse_tiles-h100``).
AGAIN = 0.06
# By what share ``mix8`` takes less time than ``mix16`` with 64 rows: alone 1.155 to 1.195 times as
# fast with 64 and 128 heads of 128 sequences on an H200, fewer 1.10 to 1.13 (docs/lab-book.md).
FASTER = 0.13
ANY_PAGE = 64  # stands for the cache's page size, which no kernel is made for


@dataclass(frozen=True, eq=False)
class SparseOp(OneFormat):
    """Sparse decode; kernels of one cache are one pipeline an architecture, beside one that is
    asked for.

    Attributes:
        measured: whether the times on file are its own, and not of another cache of the pipeline.
    """

    measured: bool = True

    def exists(self, pipeline: str, arch: str) -> bool:
        """True if a kernel module builds the pipeline for this cache."""
        spec = VariantSpec(
            op=self.family.op, arch=arch, pipeline=pipeline, cache_dtype=self.cache_dtype
        )
        return registry.module_name(spec) is not None

    def ns_of_tile(self, spec: VariantSpec, card: str) -> int:
        """Time as on file; of a kernel that is not, what ``tile_ns`` has of the one over pages."""
        costs = costs_of(self.family.op, spec.arch, card)
        entry = None if costs is None else costs.tiles.get((spec.pipeline, spec.row_tile))
        return super().ns_of_tile(spec, card) if entry is None else round(1e3 * entry.tile_us)


@dataclass(frozen=True)
class SparseProblem(Problem):
    """A sparse decode, as the host knows it.

    ``s_q`` is 1.  A ``Size`` counts query tokens, and entries of each one's list.

    Attributes:
        size: the call's, at which candidates are compared.
    """

    op: SparseOp
    size: Size = REFERENCE

    @property
    def _fast(self) -> str | None:
        """The pipeline that rounds the query."""
        return self.op.fast.get(self.card.arch)

    def _costs(self) -> tuple[Costs | None, bool]:
        """Costs of this card if it was measured, else of another one of its architecture."""
        found = costs_of(self.op.family.op, self.card.arch, self.card.name)
        return found, found is not None and self.op.measured

    def model_us(self, spec: VariantSpec, size: Size) -> float | None:
        """Microseconds by the cost model.

        No table has the kernel that rounds the query: its time is that of the kernel which does
        not, less the share ``FASTER``.
        """
        if spec.pipeline != self._fast:
            return super().model_us(spec, size)
        us = super().model_us(spec.replace(pipeline=PIPELINES[self.op.cache_dtype]), size)
        return None if us is None else us * (1 - FASTER)

    def measured_us(self, spec: VariantSpec, size: Size) -> float | None:
        return super().measured_us(spec, size) if self.op.measured else None

    @property
    def reference(self) -> Size:
        return self.size

    def _shares(self, spec: VariantSpec, size: Size) -> tuple[Share, ...]:
        """Shares as a plan of full lists has them."""
        parts = parts_of_lists(self.card.sms, self.request.num_heads, size.batch, spec)
        return Load(size.batch, parts, -(-size.seqlen // spec.token_tile)).shares()

    def _read_bytes(self, spec: VariantSpec) -> float:
        blocks = -(-self.request.num_heads // spec.row_tile)
        return self.op.token_bytes * (1 + AGAIN * (blocks - 1))

    def rejection(self, spec: VariantSpec) -> str | None:
        """Reason as for other problems; also if a smaller row tile would hold all heads, and, of
        accuracy ``fast``, if what rounds the query has another row tile than ``standard``."""
        reason, asked = super().rejection(spec), self.request
        if reason is None and asked.pipeline is None and spec.pipeline == self._fast:
            usual, _ = judge(replace(self, request=asked._replace(accuracy=STANDARD)))
            if usual is not None and usual.row_tile != spec.row_tile:
                return f"{usual.pipeline} with a row tile of {usual.row_tile} is faster here"
        if reason is not None or asked.row_tile is not None:
            return reason
        tiles = self.op.features[spec.pipeline].tiles(self.p_terms)
        half = next((tile for tile in tiles if asked.num_heads <= tile < spec.row_tile), None)
        return None if half is None else f"a row tile of {half} holds all heads"

    def order(self, spec: VariantSpec, us: float) -> tuple[float, ...]:
        """Tie-break, the smallest wins: (rows of padding, us), so least padding, then least time.

        Only candidates whose predicted times tie come here (``judge``).  If no time is known, (row
        blocks, row tile): fewer blocks win, then the smaller tile.
        """
        if us == float("inf"):
            return -(-self.request.num_heads // spec.row_tile), spec.row_tile
        return -self.request.num_heads % spec.row_tile, us

    def remarks(self, size: Size) -> list[str]:
        """Lines as for other problems, what accuracy ``fast`` is, and whose times those are."""
        lines = super().remarks(size)
        if self.request.accuracy == FAST and self._fast:
            lines.append(
                f"{self._fast} rounds the query to e4m3 (docs/numerics.md); its time is that of "
                f"{PIPELINES[self.op.cache_dtype]} less {100 * FASTER:.0f} %, as measured once"
            )
        return lines

    def describe(self, size: Size) -> tuple[str, str]:
        asked = self.request
        text = (
            f"sparse decode: {size.batch} query tokens x topk {size.seqlen}, {asked.num_heads} "
            f"heads, {self.op.about}, {asked.out_dtype} out, on {self.card.name}"
        )
        text += "" if self.p_terms == 1 else f", {self.p_terms} terms of P"
        text += f", accuracy {asked.accuracy}" if self.exactly or asked.accuracy == FAST else ""
        peak = self.op.effective_tflops(self.card)
        return text, f"{self.card.read_gbs:.0f} GB/s, {peak:.0f} TFLOP/s"


def parts_of_lists(sms: int, num_heads: int, tokens: int, spec: VariantSpec) -> int:
    """Parts of so many query tokens' lists: as many as fill the SMs with a token's row blocks side
    by side, fewer for a few tokens of several."""
    most, blocks = parts_of(sms, num_heads, spec), -(-num_heads // spec.row_tile)
    few = blocks > 1 and tokens * blocks <= FEW_BLOCKS
    return min(most, PARTS_OF_FEW) if few else most


def _tile_of(card: Card, spec: VariantSpec) -> Tile | None:
    costs = costs_of(spec.op, spec.arch, card.name)
    return None if costs is None else costs.tiles.get((spec.pipeline, spec.row_tile))


def stays_whole(card: Card, spec: VariantSpec, load: Load) -> bool:
    """True if full lists take least if none is cut; not of a kernel that nobody measured."""
    tile = _tile_of(card, spec)
    return tile is not None and not min(load.shares(), key=tile.us).cut


def is_never_cut(card: Card, spec: VariantSpec, tiles: int) -> bool:
    """True if cutting lists takes as long as a list of at most so many tiles does.

    Parts of whole lists take less than one list longer than equal parts.  What a list takes beside
    its tiles (``load.ITEM_TILES``) is not counted: with few more lists than parts a cut may win.
    """
    tile = _tile_of(card, spec)
    return tile is not None and tiles * tile.tile_us <= tile.cut_us


def _op(record: Format, **attributes: Any) -> SparseOp:
    return SparseOp(
        FAMILY, token_bytes=record.token_bytes, about=record.about,
        reference="snapmla.testing.sparse_reference.sparse_decode_reference",
        kernels="kernel for sparse decode", cache_dtype=record.name,
        elsewhere={"sm_100a": record.elsewhere} if record.elsewhere else {}, **attributes,
    )  # fmt: skip


def _over_bytes(record: Format) -> SparseOp:
    """Over a cache of bytes."""
    about = {
        "mix16": "16-bit products, the cache in registers",
        "mix8": "mix16 with FP8 products of content and a rounded query",
    }
    features = {
        name: Features(
            ROW_TILES[name], "it has these", text, (ANY_PAGE,), record.results,
            why_two_terms="its P has 16 bits", asked=name in ON_REQUEST,
        )
        for name, text in about.items()
        if any(module_of(arch, name, record) for arch in ARCHS)
    }  # fmt: skip
    rounding = [name for name in ON_REQUEST if name in features]
    return _op(
        record, features=features, tensor_cycles=dense_decode.tensor_cycles,
        effective_tflops=lambda card: card.bf16_tflops, measured=record.timed,
        fast={arch: p for p in rounding for arch in ARCHS if module_of(arch, p, record)},
    )  # fmt: skip


def _over_planes(record: Format) -> SparseOp:
    """Over the FP8 cache, content and RoPE in planes of their own."""
    return _op(
        record,
        features={
            "etap": Features(
                ROW_TILES["etap"], "it has these", "etap behind a loader that gathers", (ANY_PAGE,),
                two_terms=TWO_TERMS, why_two_terms="the softmax of 64 rows has no registers",
            ),
            "f16": Features(
                ROW_TILES["f16"], "it has these", "f16 behind a loader that gathers", (ANY_PAGE,),
                why_two_terms="its P has 16 bits", asked=True, longest_item=F16.longest_item,
            ),
            "ws": Features(
                ROW_TILES["ws"], "it puts heads on the MMA's M = 64",
                "ws behind a loader that gathers, so far on the software GPU only", (ANY_PAGE,),
                why_two_terms=fp8_decode.ONE_TERM,
            ),
        },
        exact={"sm_90a": "f16"},
        tensor_cycles=fp8_decode.tensor_cycles,
        effective_tflops=fp8_decode.effective_tflops,
        tile_ns=fp8_decode.FP8_DECODE.tile_ns,
    )  # fmt: skip


SPARSE_OPS = OfFormats(
    SPARSE, lambda record: _over_bytes(record) if record.named else _over_planes(record)
)
# Of the caches that sparse attention reads, by format: the pipeline that does on SM90.
PIPELINES = OfFormats(SPARSE, lambda record: record.sparse)


def pipeline_of(arch: str, fmt: str) -> str | None:
    """The pipeline that reads a cache on an architecture where none is named: SM90's where it has
    none, None of a format that sparse attention does not read."""
    op = SPARSE_OPS.get(fmt)
    own = [] if op is None else op.pipelines(arch)
    return own[0] if own else PIPELINES.get(fmt)

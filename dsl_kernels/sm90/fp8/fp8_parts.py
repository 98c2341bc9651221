"""``Parts`` and sizes that the FP8 pipelines of SM90 (fp8/transposed.py, fp8/dual_wg.py) share.

Roles           in wg 0 (decode.py): warp 2 of the loader's makes scale triples, if the pipeline
                asks for it (scale_triples.py)
Shared memory   Q tile(s) of rows x 640 bytes | K ring, a stage: 64 x 512 content in four column
                blocks of 64 tokens x 128 B (128-byte swizzle), 64 x 128 RoPE, 64 scales | scale
                triples (sigma, log2, 1/) of 960 bytes a stage | what the pipeline adds
Timeline        a work tile: Q tile | a tile: wait empty, TMA content and RoPE, bulk scales -> full
                -> scale warp -> sigma ring -> softmax
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute

from ...blocks import budget as bud
from ...blocks.smem import array
from ...blocks.stamps import Stamps
from ...blocks.types import BF16, F8
from ...formats.dims import TOKEN_TILE as TILE
from ...load.fp8_per_token import FORMAT, TokenScales
from ...load.gather import GatherRows, TokenLists
from ...load.loader import Cache, Loader, Readers
from ...load.paged_tma import START_TILES, PagedTma
from ...load.q_tiles import QTiles
from ...load.work_list import WorkList
from ..qk import ScoreMma
from ..roles import ROWS_OF_CTA, Layouts
from ..scale_triples import ScaleTriples

if TYPE_CHECKING:
    from ...entry.entries import Fp8Gmem
    from ...entry.launch import Tma
    from ...spec import VariantSpec

STAGE_BYTES = TILE * FORMAT.token_bytes
SMALL_BYTES = 8192  # scale triples, factors, barriers, alignment: an upper bound


class Parts:
    """Components that the pipelines are made of, a ``decode.Parts``.

    Attributes:
        rows, cluster: query rows of a CTA; CTAs that share their K tiles.
        stages, q_stages: KV tiles, Q tiles in flight.
        work, q_tiles, loads, scales, triples, score: work list, Q, KV tiles, scales in the ring,
            their triples, Q.K.
        gathers: whether lists name tokens, instead of tables pages.
        stamps: recorder of events, off in ordinary builds.
        p_terms: e4m3 terms of P (p_terms.py).
    """

    def __init__(
        self, spec: VariantSpec, *, stages: int, q_stages: int, q_readers: Readers,
        k_readers: Readers, swap_ab: bool = False, scale_warp: bool = True, gathers: bool = False,
    ):  # fmt: skip
        self.rows, self.cluster = min(spec.row_tile, ROWS_OF_CTA), spec.cluster
        self.stages, self.q_stages = stages, q_stages
        self.spec, self.p_terms = spec, spec.p_terms
        self.swap_ab = swap_ab  # S^T = K Q^T instead of S = Q K^T
        self.gathers = gathers
        self.work = TokenLists(TILE) if gathers else WorkList(spec.page_size, TILE)
        self.scales = TokenScales(TILE, stages, self.work.box)
        self.q_tiles = QTiles(FORMAT, self.work, rows=self.rows, stages=q_stages, readers=q_readers)
        self.loads = (self.gathered if gathers else self.paged)(k_readers)
        self.triples = ScaleTriples(self.scales, scale_warp)
        self.score = ScoreMma(self.rows, swap_ab)
        self.stamps = Stamps(bool(spec.stamps))

    def gathered(self, readers: Readers) -> Loader:
        """Loader of lists of tokens, by ``cp.async``; ``readers`` free a stage."""
        return GatherRows(
            self.work, stages=self.stages, q_stages=self.q_stages, readers=readers,
            by_lines=bool(self.spec.lines),
        )  # fmt: skip

    def paged(self, readers: Readers) -> Loader:
        """Loader of pages, by TMA; ``readers`` free a stage."""
        return PagedTma(
            FORMAT, self.work, rows=self.rows, stages=self.stages, readers=readers,
            q_stages=self.q_stages, cluster=self.cluster, scales=self.scales,
            start_tiles=START_TILES,
        )  # fmt: skip

    def cache(self, tma: Tma, gmem: Fp8Gmem) -> Cache:
        """The cache, with its scales, as the loader's warps read it."""
        return Cache(tma.kv, gmem.scale.shape[0], gmem.scale)

    def on_full(self, st):
        """Function by which the scale warp makes the triples of a full stage; None without a scale
        warp."""
        return self.triples.maker(st)

    @property
    def barrier_fields(self) -> dict:
        """Barriers of Q, the ring and the triples."""
        return {**self.q_tiles.fields, **self.loads.fields, **self.triples.ready.field}

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """The same in a budget."""
        return (
            *self.q_tiles.barriers(), *self.loads.barriers(), *self.triples.ready.budget()
        )  # fmt: skip

    def tile_fields(self, layouts: Layouts) -> dict:
        """Scales, Q, K ring and P; the tiles start at multiples of the 1024-byte swizzle period."""
        size = cute.cosize
        return dict(
            **self.triples.fields,
            **self.scales.fields,
            qc=array(F8, size(layouts.q[0]), 1024),
            kc=array(F8, size(layouts.k[0]), 1024),
            kr=array(BF16, size(layouts.k[1]), 1024),
            qr=array(BF16, size(layouts.q[1]), 1024),
            p=array(F8, size(layouts.p), 1024),
        )

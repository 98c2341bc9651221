"""Scale triples: sigma, log2 sigma, 1/sigma of each token, ordered as a thread of S reads them.

The loader's warp that sees every stage when it is full makes them: the scale warp.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..blocks.barriers import Ring
from ..blocks.smem import array
from ..load.fp8_per_token import TokenScales, safe_reciprocal
from .fragments import padded_size, row_position


class ScaleTriples:
    """Triples of the tokens in the KV ring, field ``sigma``.

    Attributes:
        scales: where the scales come from.
        wanted: False where a thread has so few tokens that it makes its own.
        ready: announces a stage's triples.
    """

    def __init__(self, scales: TokenScales, wanted: bool):
        self.scales, self.wanted = scales, wanted
        self.tile, self.stages = scales.tile, scales.stages
        self.ready = Ring("sigma", self.stages, {"scale warp": 1})

    @property
    def fields(self) -> dict:
        """Storage of the triples."""
        size = 3 * padded_size(self.tile) * self.stages if self.wanted else 4
        return dict(sigma=array(Float32, size, 128))

    def maker(self, st):
        """``on_full`` of a loader (load/loader.py), which makes a stage's triples; None where
        none are wanted."""
        return (lambda kst: self._make(st, kst.index)) if self.wanted else None

    @cute.jit
    def _make(self, st, stage):
        """Make the triples of a full stage and announce them; one warp calls this."""
        lane = cute.arch.lane_idx()
        s_ks = self.scales.of_stages(st)
        out = st.sigma.get_tensor(cute.make_layout((padded_size(self.tile), 3, self.stages)))
        for x in cutlass.range_constexpr(self.tile // 32):
            token = lane + 32 * x
            s = s_ks[token, stage]
            pos = row_position(token, self.tile)
            out[pos, 0, stage] = s
            out[pos, 1, stage] = cute.math.log2(s, fastmath=True)
            out[pos, 2, stage] = safe_reciprocal(s)
        cute.arch.sync_warp()
        if lane == 0:
            self.ready.arrive_full(st, stage)

    def view(self, st, quad, stage):
        """(16 tokens of quad lane ``quad``, 3) of one stage: sigma, log2 sigma, 1/sigma."""
        quarter = self.tile // 4
        view = st.sigma.get_tensor(
            cute.make_layout(
                (quarter, 4, 3, self.stages),
                stride=(1, quarter + 4, padded_size(self.tile), 3 * padded_size(self.tile)),
            )
        )
        return view[None, quad, None, stage]

"""The scale warp: sigma, log2 sigma, 1/sigma of each token, ordered as a thread of S reads them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32

from ..common.barriers import Ring
from ..common.fp8_per_token import TokenScales, safe_reciprocal
from ..common.smem import array
from ..common.work_list import WorkList
from .fragments import padded_size, row_position


class ScaleTriples:
    """Triples of the tokens in the KV ring, field ``sigma``.

    Attributes:
        scales: where the scales come from.
        work: reads the work list.
        wanted: False where a thread has so few tokens that it makes its own.
        ready: announces a stage's triples.
    """

    def __init__(self, scales: TokenScales, work: WorkList, wanted: bool):
        self.scales, self.work, self.wanted = scales, work, wanted
        self.tile, self.stages = scales.tile, scales.stages
        self.ready = Ring("sigma", self.stages, {"scale warp": 1})

    @property
    def fields(self) -> dict:
        """Storage of the triples."""
        size = 3 * padded_size(self.tile) * self.stages if self.wanted else 4
        return dict(sigma=array(Float32, size, 128))

    @cute.jit
    def prepare(self, st, k_pipe, work, span):
        """The scale warp's loop over items and tiles."""
        lane = cute.arch.lane_idx()
        s_ks = self.scales.of_stages(st)
        out = st.sigma.get_tensor(cute.make_layout((padded_size(self.tile), 3, self.stages)))
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, begin, end, _ = self.work.item_at(work, i)
            for _ in cutlass.range(begin, end, unroll=1):
                k_pipe.consumer_wait(kst)
                for x in cutlass.range_constexpr(self.tile // 32):
                    token = lane + 32 * x
                    s = s_ks[token, kst.index]
                    pos = row_position(token, self.tile)
                    out[pos, 0, kst.index] = s
                    out[pos, 1, kst.index] = cute.math.log2(s, fastmath=True)
                    out[pos, 2, kst.index] = safe_reciprocal(s)
                cute.arch.sync_warp()
                if lane == 0:
                    self.ready.arrive_full(st, kst.index)
                kst.advance()

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

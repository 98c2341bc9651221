"""Builds of sparse decode that do half of the work, for bounds of its time (axis ``only``).

    gather   the loader works as ever; who would compute frees what has landed, unread
    math     each stage of the KV ring is filled once, and then read again and again
             (common/gather.py, ``copies``)

Their results are none.  With spilled registers they would bound nothing: see what ptxas says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline

from .roles import Cta

if TYPE_CHECKING:
    from ..spec import VariantSpec

SPARSE = "sparse_decode"  # the op whose tokens are gathered


def only_of(spec: VariantSpec) -> str:
    """``all``, ``gather`` or ``math``; other ops have no such builds."""
    return spec.only if spec.op == SPARSE else "all"


class Drains:
    """The math roles of a build that gathers alone.

    Attributes:
        parts, stages: the pipeline's.
    """

    parts: Any
    stages: int

    def before_freed(self, st, kst, wg) -> None:
        """What a reading warp waits for, or frees apart, before it frees a stage: nothing."""

    @cute.jit
    def drain(self, cta: Cta, wg):
        """Frees what lands, unread; the first warpgroup Q's tiles, too."""
        span = self.parts.work.items_of(cta.gmem.work, cta.part)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.parts.q_stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.parts.work.item_at(cta.gmem.work, i)
            for _ in cutlass.range(first, last, unroll=1):
                cta.k_pipe.consumer_wait(kst)
                self.before_freed(cta.st, kst, wg)
                cta.k_pipe.consumer_release(kst)
                kst.advance()
            if wg == 0:
                cta.q_pipe.consumer_wait(qst)
                cta.q_pipe.consumer_release(qst)
                qst.advance()

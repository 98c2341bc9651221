"""Dense decode over caches of bytes: what its pipeline can do, and what a token costs."""

from __future__ import annotations

from dataclasses import dataclass

from dsl_kernels.families.record_decode import FAMILY, PIPELINE, module_of
from dsl_kernels.families.record_decode import FORMATS as DECODED
from dsl_kernels.families.sparse_decode import ROW_TILES
from dsl_kernels.formats.registered import FORMATS, Format
from snapmla.rank import dense_decode
from snapmla.rank.decode import Features, OfFormats, OneFormat
from snapmla.rank.sparse_decode import ANY_PAGE


@dataclass(frozen=True, eq=False)
class RecordOp(OneFormat):
    """Dense decode over a format of bytes."""

    def exists(self, pipeline: str, arch: str) -> bool:
        """True if a kernel module builds the pipeline for this cache."""
        return pipeline == PIPELINE and module_of(arch, FORMATS[self.cache_dtype]) is not None

    def page_size_seen(self, page_size: int) -> int:
        """``ANY_PAGE``, as one kernel serves all page sizes."""
        return ANY_PAGE


def _op(record: Format) -> RecordOp:
    features = Features(
        ROW_TILES[PIPELINE], "more rows are several blocks",
        "16-bit products, the cache in registers", (ANY_PAGE,), record.results,
        why_two_terms="its P has 16 bits",
    )  # fmt: skip
    return RecordOp(
        FAMILY, features={PIPELINE: features}, token_bytes=record.token_bytes,
        tensor_cycles=dense_decode.tensor_cycles,
        effective_tflops=lambda card: card.bf16_tflops, about=record.about,
        reference="snapmla.testing.dense_reference.dense_decode_reference",
        kernels=f"dense decode kernel for {record.about}", cache_dtype=record.name,
        elsewhere={"sm_100a": "there snapmla.convert_cache makes an FP8 cache of it"},
    )  # fmt: skip


RECORD_OPS = OfFormats(DECODED, _op)

"""The formats of a paged cache that there are: one record (``cache_records``) each.

Which attention takes a format is its family's to say (``Family.formats``).  What kernels make of
the bytes stands beside them (``common/fp8_per_token.py``, ``common/latent16.py``,
``smxx/stored.py``, ``smxx/byte_records.py``).  Standard library only.
"""

from __future__ import annotations

from ..cache_records import ds_mla, fp8, nope, rows16, v4, v41
from ..cache_records.record import Record

Format = Record  # as hosts know it
_FORMATS = (
    fp8.RECORD, rows16.BF16, rows16.F16, ds_mla.RECORD, v4.RECORD, v41.PLANAR, v41.ROWS,
    nope.RECORD,
)  # fmt: skip
FORMATS: dict[str, Format] = {each.name: each for each in _FORMATS}
DEFAULT = fp8.RECORD.name  # what calls mean that name no format
# ``model_type`` of models whose cache engines (vLLM, SGLang) keep in a format, where that is FP8.
ENGINES_KEEP: dict[str, str] = {
    "deepseek_v32": ds_mla.RECORD.name, "glm_moe_dsa": ds_mla.RECORD.name,
    "deepseek_v4": v4.RECORD.name,
}  # fmt: skip

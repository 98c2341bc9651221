"""``fp8_front``, a format that the library does not have: NoPE's token (nope.py) with its scales in
front, in rows of 544 bytes.

    [0, 16)      4 fp32 scales, one for each 128 channels
    [16, 528)    512 e4m3 channels
    [528, 544)   bytes that are any
"""

from __future__ import annotations

from dataclasses import replace

from dsl_kernels.formats import nope
from dsl_kernels.formats.format import Field
from dsl_kernels.formats.registered import FORMATS

_SCALES = Field("f32", 4)
FORMAT = replace(
    nope.FORMAT,
    name="fp8_front",
    module=__name__,
    planes=(544,),
    content=Field("e4m3", 512, at=_SCALES.nbytes),
    scale=_SCALES,
    about="a cache of format 'fp8_front'",
)


def register() -> None:
    """Makes the format one of the library's."""
    FORMATS[FORMAT.name] = FORMAT

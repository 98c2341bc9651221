"""The formats of a paged cache: one ``Format`` each.

Which attention takes a format follows from its fields: ``sparse``, ``arrangement``.  What
kernels make of the bytes stands beside them (``load/fp8_per_token.py``, ``load/latent16.py``,
``cache/stored.py``, ``cache/byte_formats.py``).  Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import ds_mla, fp8, nope, rows16, v4, v41
from .format import Format

_FORMATS = (
    fp8.FORMAT, rows16.BF16, rows16.F16, ds_mla.FORMAT, v4.FORMAT, v41.PLANAR, v41.ROWS,
    nope.FORMAT,
)  # fmt: skip
FORMATS: dict[str, Format] = {each.name: each for each in _FORMATS}
DEFAULT = fp8.FORMAT.name  # what calls mean that name no format
ROWS_OF_BYTES = ds_mla.FORMAT.name  # what kernels over bytes read unless another one is named
# ``model_type`` of models whose cache engines (vLLM, SGLang) keep in a format, where that is FP8.
ENGINES_KEEP: dict[str, str] = {
    "deepseek_v32": ds_mla.FORMAT.name, "glm_moe_dsa": ds_mla.FORMAT.name,
    "deepseek_v4": v4.FORMAT.name,
}  # fmt: skip


class Names(Sequence[str]):
    """Names of the formats that a rule takes, as many as there are by now: values of an axis that
    knows a format as soon as ``FORMATS`` has it."""

    def __init__(self, takes: Callable[[Format], Any]) -> None:
        self._takes = takes

    def _now(self) -> tuple[str, ...]:
        return tuple([name for name, each in FORMATS.items() if self._takes(each)])

    def __getitem__(self, at: Any) -> Any:
        return self._now()[at]

    def __len__(self) -> int:
        return len(self._now())

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __contains__(self, name: object) -> bool:
        return name in self._now()

    def __eq__(self, other: object) -> bool:
        return self is other or self._now() == other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return repr(self._now())


EVERY = Names(lambda _: True)
IN_16_BITS = Names(lambda each: each.rows)
SPARSE = Names(lambda each: each.sparse)  # what sparse decode reads
BYTES = Names(lambda each: each.named)

"""``PlanVariant``: the decode kernels that a plan may launch, one by each result's dtype."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsl_kernels.formats.registered import DEFAULT, FORMATS
from snapmla import checks, rank
from snapmla.runtime import variants

FP8 = DEFAULT  # format of a cache, by name
DTYPES = checks.DTYPES
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class PlanVariant:
    """Values that choose the decode kernel, all but the dtype of results.

    Equal values share one object (``of``), which remembers its kernels by that dtype.
    """

    device: torch.device
    pipeline: str
    row_tile: int
    page_size: int
    kernels: dict[torch.dtype, variants.Kernel] = field(default_factory=dict, repr=False)
    p_terms: int = 1
    format: str = FP8

    @staticmethod
    def of(
        device: torch.device,
        pipeline: str,
        row_tile: int,
        page_size: int,
        p_terms: int = 1,
        format: str = FP8,
    ) -> PlanVariant:
        """The object of these values, made at their first use."""
        values = (device, pipeline, row_tile, page_size)
        made = PlanVariant(*values, p_terms=p_terms, format=format)
        return _variants.setdefault((*values, p_terms, format), made)

    @property
    def out_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that its kernels write; the first is that of an allocated ``out``."""
        return tuple(DTYPES[name] for name in FORMATS[self.format].results)

    def kernel(self, out_dtype: torch.dtype) -> variants.Kernel:
        """The exported function that writes ``out_dtype``, loaded once."""
        if out_dtype not in self.out_dtypes:
            wanted = " or ".join(checks.dtype_name(d) for d in self.out_dtypes)
            checks.type_error("out", f"dtype {wanted}", checks.dtype_name(out_dtype))
        arch, name = variants.arch_of(self.device), NAMES[out_dtype]
        choices = arch, self.pipeline, self.row_tile, self.page_size, name, self.p_terms
        spec = rank.op_of(self.format).spec(*choices)
        self.kernels[out_dtype] = variants.kernel(spec, self.device.type)
        return self.kernels[out_dtype]

    @staticmethod
    def forget() -> None:
        """Drops the kernels of all variants."""
        for variant in _variants.values():
            variant.kernels.clear()


_variants: dict[tuple[torch.device, str, int, int, int, str], PlanVariant] = {}
variants.on_forget(PlanVariant.forget)

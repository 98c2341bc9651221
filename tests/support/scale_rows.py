"""Host side of a small op: out = x * scale of rows; its kernel is scale_rows_kernel.py's."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsl_kernels.families.family import Family
from snapmla import checks
from snapmla.cache import quant
from snapmla.call import memo, op

F32 = (torch.float32,)
FAMILY = Family(
    "scale_rows", (), module=lambda _arch, _values: "tests.support.scale_rows_kernel",
    points=lambda _arch: iter(()), shown=("x",), results=("out",),
)  # fmt: skip


def scale_rows(x: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiplies each row of x, float32 (n, width), by its scale, float32 (n,)."""
    return memo.run(SCALE.op, SCALE.op, Scaled(x, scale, out))


class Scaled(NamedTuple):
    """A call of ``scale_rows``."""

    x: Tensor
    scale: Tensor
    out: Tensor | None = None


def _check_rows(call: Scaled) -> None:
    for name in ("x", "out"):
        if (value := getattr(call, name)) is not None:
            checks.aligned_rows(name, value, align=4)


def _launch(call: Scaled, kernel: Any) -> tuple[Tensor, Any]:
    out = torch.empty_like(call.x) if call.out is None else call.out
    kernel = kernel or quant.variant_kernel(call.x.device, "scale_rows")
    if len(out):
        kernel(call.x, call.scale, out)
    return out, kernel


SCALE = op.Declared(
    "scale_rows", Scaled, ("out",),
    (op.TensorArg("x", F32, "n width", "rows of numbers"),
     op.TensorArg("scale", F32, "n", contiguous=True), op.TensorArg("out", F32, "n width")),
    _launch, memory=_check_rows,
)  # fmt: skip

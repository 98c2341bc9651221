"""An eager call between two compiled graphs.  Imported while Dynamo traces, never without it:
``torch.compiler.disable`` loads Dynamo, which takes longer than everything else of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


@torch.compiler.disable(
    reason="call snapmla.plan_decode outside of the compiled function (or PlanCache.get), once; in "
    "it plan.update_ and snapmla.decode with that plan are operators"
)
def call(function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Breaks the graph; where it must not break (``fullgraph=True``), the error says the reason."""
    return function(*arguments, **options)

"""The small calls of an op by one kernel on a real GPU, as ``selfcheck`` makes them without one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck


def on_the_card(kernel: Callable[..., Any]) -> Callable[..., None]:
    """The kernel on CPU tensors: their memory is moved as it lies, shared or not, and back."""

    def run(*given: Any) -> None:
        here: dict[int, torch.Tensor] = {}  # bytes of each storage
        for x in given:
            if isinstance(x, torch.Tensor):
                whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                here.setdefault(x.untyped_storage().data_ptr(), whole)
        card = {start: whole.cuda() for start, whole in here.items()}

        def moved(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            memory = card[x.untyped_storage().data_ptr()]
            empty = torch.empty(0, dtype=x.dtype, device=memory.device)
            return empty.set_(memory.untyped_storage(), x.storage_offset(), x.shape, x.stride())

        kernel(*map(moved, given))
        torch.cuda.synchronize()
        for start, whole in here.items():
            whole.copy_(card[start])

    return run


def check(spec: VariantSpec) -> selfcheck.Result:
    """Runs the variant of ``spec`` on the small calls of its op, on the current GPU.

    Raises:
        VariantError: it is not built, and nothing compiles here.
    """
    artifact = variants.find_or_build(spec, need_library=True)
    record = json.loads((artifact.directory / f"{spec.name}.json").read_text("utf-8"))
    names = [argument["name"] for argument in record["arguments"]]
    return selfcheck.check_kernel(spec, on_the_card(variants.kernel(spec, "cuda")), names)

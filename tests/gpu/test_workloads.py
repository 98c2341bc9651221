"""Every kernel that is there runs the small calls of its op on a real GPU.

The calls, their poison and their judges are those of the software GPU's self-check
(``snapmla.testing.workloads``); only the memory is the card's.  What is wider than that (lengths,
layouts, distributions, graphs) has files of its own here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsl_kernels.spec import VariantSpec
from snapmla import env, runtime
from snapmla.testing import selfcheck

pytestmark = pytest.mark.gpu


def there() -> list[str]:
    """Names of the variants that were built and linked, of all architectures."""
    folders = env.variant_dirs()
    return sorted({path.stem for folder in folders for path in folder.glob("*_sm*a.so")})


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


def test_small_calls_of_every_kernel() -> None:
    arch, wrong, seen = runtime.arch_of(torch.device("cuda")), {}, 0
    for name in there():
        spec = VariantSpec.from_name(name)
        if spec.arch != arch:
            continue
        artifact = runtime.find_or_build(spec, need_library=True)
        record = json.loads((artifact.directory / f"{name}.json").read_text("utf-8"))
        names = [argument["name"] for argument in record["arguments"]]
        kernel = on_the_card(runtime.kernel(spec, "cuda"))
        result = selfcheck.check_kernel(spec, kernel, names)
        seen += 1
        if not result.passed:
            wrong[name] = result.summary
    assert seen and not wrong, wrong

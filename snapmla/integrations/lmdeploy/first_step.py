"""A warning where a process of LMDeploy decodes and calls nothing of ours.

A step begins where LMDeploy makes its metadata, ``CudaOpsBackend.update_step_context``; at the
second one that decodes, the first is over.  Steps of its warm-up count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from snapmla.integrations.lmdeploy import names

METHOD = "update_step_context"
SENTENCE = (
    "SNAPMLA_AS_FLASH_MLA is set, and this process's first decode step had no call of flash_mla "
    "that snapmla computed: its layers have another attention (LMDEPLOY_SPARSE_MLA_BACKEND, or a "
    "model that asked for flash_mla and does not call it)"
)


def watch() -> None:
    """Looks at this process's first decode step.  May be called again."""
    from lmdeploy.pytorch.backends.cuda import op_backend

    owner = op_backend.CudaOpsBackend
    there = vars(owner)[METHOD].__func__
    if not isinstance(there, _Watched):
        setattr(owner, METHOD, classmethod(_Watched(there)))


class _Watched:
    """LMDeploy's method, and which of its calls are decode steps."""

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self.theirs = theirs
        self.steps = 0
        functools.update_wrapper(self, theirs)

    def __call__(self, owner: Any, step_context: Any, *given: Any, **named: Any) -> Any:
        if self.steps < 2 and step_context.is_decoding:
            self.steps += 1
            if self.steps == 2 and not names.calls():
                names.Name.log.warning("snapmla: %s", SENTENCE)
        return self.theirs(owner, step_context, *given, **named)

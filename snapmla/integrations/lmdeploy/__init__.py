"""LMDeploy's calls of FlashMLA on snapmla's kernels: ``SNAPMLA_AS_FLASH_MLA=1``.

LMDeploy's layers of DeepSeek-V2, V3, V3.2, V4, Kimi-K2 and GLM-5 say ``import flash_mla``.  With
the variable set and the wheel ``snapmla-as-flash-mla`` installed (``python -m codegen name-wheel``)
that name is ours, in every process that the engine starts::

    SNAPMLA_AS_FLASH_MLA=1 lmdeploy serve api_server MODEL --backend pytorch --log-level INFO

Bytes, pages, lists and schedules stay as LMDeploy has them: the object that it keeps a schedule in
is ours, planned by its first call, inside of a graph where that is captured.  What ours does not
serve raises a sentence.  Where another package has the name, the import says so and takes nothing.

``python -m snapmla.integrations.lmdeploy check`` says whether this installation will work.
"""

from __future__ import annotations

import sys
import types

__all__ = ["install"]


def install(*, tensors: bool = False) -> types.ModuleType:
    """Makes ``flash_mla`` for who imports it: LMDeploy, or another engine of that name's.

    As ``snapmla.install_as_flash_mla``, with a line in the log at the first call of each kind; if
    LMDeploy is there, its first step is looked at, too (``first_step.py``).  May be called again.

    Args:
        tensors: as there.

    Raises:
        SnapMLAError: as there.
    """
    from snapmla.integrations.lmdeploy import first_step, names

    module = names.install(tensors)
    if "lmdeploy" in sys.modules:
        try:
            first_step.watch()
        except Exception as reason:  # another release: its calls are ours all the same
            names.Name.log.warning("snapmla: the first step is not looked at: %s", reason)
    return module

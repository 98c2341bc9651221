"""What a call of each op looks like: one file an op, for everyone who makes such calls.

``of(op)`` is the ``WORKLOAD`` of ``workloads/<op>.py``; that file is all that a new op adds.  It is
used by

* the self-check (``snapmla.testing.selfcheck``), also under the hazard check, as mutants, and on a
  GPU (``tests/gpu/test_workloads.py``): ``small`` calls with their truth, ``judge`` of the results;
* the record of an H200 (``profiles.vectors``): ``recorded``;
* ncu (``profiles.ncu``): ``sized`` arguments;
* bench rows (``profiles.helper_rows``) and ``tests/gpu/check_decode.py``: ``sized`` arguments,
  ``public`` calls, ``truth``, and ``moved`` bytes.

Who runs a call knows its arguments by name only; their order is the record's
(``codegen.abi.ordered``).  A workload is data and functions: ``call.py`` has the types,
``samples.py`` what torch draws, ``exact.py`` what is the same bits on every machine, ``rotary.py``
what append_kv and quantize_q share.
"""

from __future__ import annotations

import importlib

from dsl_kernels.families import FAMILIES
from snapmla.testing.workloads.call import Workload


def of(op: str) -> Workload:
    """The workload of an op.

    Raises:
        ValueError: there is no such op, or it has no workload.
    """
    if op not in FAMILIES:
        raise ValueError(f"op: expected one of {', '.join(FAMILIES)}, got {op!r}")
    try:
        found: Workload = importlib.import_module(f"{__name__}.{op}").WORKLOAD
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{op}":
            raise
        raise ValueError(f"op {op!r} has no workload: snapmla/testing/workloads/{op}.py") from None
    return found


def benched() -> dict[str, Workload]:
    """Name of a bench row -> its workload, in the order of the ops."""
    return {name: of(op) for op in FAMILIES for name in of(op).bench}

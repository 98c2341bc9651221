"""Calls of each op, one file an op, shared by every tool that makes such calls.

``of(op)`` is the ``WORKLOAD`` of ``workloads/<op>.py``, unless the op's family names another.  It
is used by

* the self-check (``snapmla.testing.selfcheck``): ``small`` calls with their truth, ``judge`` of the
  results; the hazard check and the mutation study run these too, or a ``job`` where there is one;
* the record of an H200 (``profiles.vectors``): ``recorded``;
* ncu (``profiles.ncu``): ``sized`` arguments;
* bench rows of helpers (``profiles.helper_rows``, ``profiles.shapes``): ``sized`` arguments,
  ``public`` calls, ``truth``, ``moved`` bytes, and the modes that ``bench`` names.

Checks of decodes on a GPU (``tests/gpu``) and bench rows of decodes have inputs of their own.

Tools pass a call's arguments by name only; their order is the variant record's
(``dsl_kernels.arguments.ordered``).  A workload is data and functions: ``call.py`` has the types.

An op's arguments are laid out once, by ``arguments(spec, problem, draw)``, and ``problem.py`` makes
small, recorded and sized calls of it.  Its problems are data: extents, lengths, what is planted.
``draw.py`` says where numbers come from: ``samples.py`` has those that torch draws, ``exact.py``
those that are the same bits on every machine.  ``rotary.py`` has what the appends and quantize_q
share.  Decodes write the three builders themselves: a small call is a job that a planner may plan
anew, and recorded ones keep partial rows, of ``decode`` between two kernels.  So do
``index_logits`` and the backward of dense prefill; ``plan_decode`` asks the library for its sized
call.
"""

from __future__ import annotations

from dsl_kernels import registry
from dsl_kernels.families import FAMILIES
from snapmla.testing.workloads.call import Workload


def of(op: str) -> Workload:
    """The workload of an op.

    Raises:
        ValueError: there is no such op, or it has no workload.
    """
    if op not in FAMILIES:
        raise ValueError(f"op: expected one of {', '.join(FAMILIES)}, got {op!r}")
    own = f"{__name__}.{op}"
    try:
        found: Workload = registry.named(FAMILIES[op].workload or f"{own}:WORKLOAD")
    except ModuleNotFoundError as error:
        if error.name != own:
            raise
        raise ValueError(f"op {op!r} has no workload: snapmla/testing/workloads/{op}.py") from None
    return found


def benched() -> dict[str, Workload]:
    """Name of a bench row -> its workload, in the order of the ops."""
    return {name: of(op) for op in FAMILIES for name in of(op).bench}

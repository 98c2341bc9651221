"""Plans of a decode step: ``DecodePlan``, and what it is made of.

    plan.py       who computes what, as device tensors
    variant.py    which decode kernels that is for
    workspace.py  the memory that it takes
    launching.py  the planning kernel's scalars and launch
    stale.py      comparison of a plan with the tensors of a step
    witness.py    what a call itself says of its query tokens

``snapmla.plan`` makes plans.
"""

from snapmla.decode_plan.launching import PlanNumbers, launch_plan
from snapmla.decode_plan.plan import STATIC, TENSORS, DecodePlan
from snapmla.decode_plan.stale import STALE_SHOWN
from snapmla.decode_plan.variant import DTYPES, FP8, NAMES, PlanVariant
from snapmla.decode_plan.workspace import new_workspace, partial_rows, unit_capacity

__all__ = [
    "DTYPES",
    "FP8",
    "NAMES",
    "STALE_SHOWN",
    "STATIC",
    "TENSORS",
    "DecodePlan",
    "PlanNumbers",
    "PlanVariant",
    "launch_plan",
    "new_workspace",
    "partial_rows",
    "unit_capacity",
]

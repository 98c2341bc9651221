"""Dense decode and the plans of a step; sparse decode shares the plans and the merge.

decode.py       a decode with its plan: launches, and the operator that tracers record
call_checks.py  the checks of its arguments; choices.py its options as kernels take them
plan_decode.py  ``plan_decode``: which parts compute what
plan_cache.py   ``PlanCache``: an engine's plans by shape of step
plan.py         ``DecodePlan``: the tables of a plan, as device tensors
plan_text.py    a plan as a sentence; stale.py a plan beside the tensors of a step
variant.py      the decode kernels that a plan is for
workspace.py    the memory of a plan; launching.py the launch of the planning kernel
witness.py      what a call itself says of its query tokens
kv_heads.py     several KV heads, and large pages, as kernels see them
merge.py        ``merge_states``: attention over parts of the tokens, put together
"""

from snapmla.dense.launching import PlanNumbers, launch_plan
from snapmla.dense.plan import STATIC, TENSORS, DecodePlan
from snapmla.dense.stale import STALE_SHOWN
from snapmla.dense.variant import DTYPES, FP8, NAMES, PlanVariant
from snapmla.dense.workspace import new_workspace, partial_rows, unit_capacity

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

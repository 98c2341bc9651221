"""``mha_dkv``: gradients of keys and values of dense prefill."""

from typing import Any

from torch import Tensor

from snapmla.testing.workloads.call import Call
from snapmla.testing.workloads.mha_backward import keys_behind, workload


def grads(call: Call) -> dict[str, Tensor]:
    """Gradients of a call by name; adds the partial sums of RoPE channels, in fp64."""
    given: dict[str, Any] = call.arguments
    found = {name: given[name] for name in ("dk_nope", "dv")}
    if "parts" in given:
        heads = call.job.forward.ks[1].shape[1]
        found["dk_rope"] = given["parts"].double().unflatten(1, (heads, -1)).sum(2)
    return found


WORKLOAD = workload(
    lambda job, stats: job.of_dkv(stats), grads, ("dk_nope", "dv"), keys_behind
)  # fmt: skip

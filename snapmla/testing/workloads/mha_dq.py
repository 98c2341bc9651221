"""``mha_dq``: gradient of queries of dense prefill."""

from snapmla.testing.workloads.mha_backward import queries_behind, workload

WORKLOAD = workload(
    lambda job, stats: job.of_dq(stats), lambda call: {"dq": call.arguments["dq"]}, ("dq",),
    queries_behind,
)  # fmt: skip

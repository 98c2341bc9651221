"""``mha_dq``: gradient of queries of dense prefill."""

from snapmla.testing.workloads.mha_backward import workload

WORKLOAD = workload(
    lambda job, stats: job.of_dq(stats), lambda call: {"dq": call.arguments["dq"]}, ("dq",)
)

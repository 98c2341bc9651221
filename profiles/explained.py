"""Mutants that may survive ``make prove``: instructions whose absence no schedule can notice."""

from __future__ import annotations

# What no schedule can miss, an instruction and the role of its code where that decides
# (snapmla.testing.explanations): docs/software-gpu.md says why.
EXPLAINED = (
    "griddepcontrol.launch_dependents", "bar.warp.sync", "tcgen05.relinquish_alloc_permit",
    "mbarrier.try_wait.parity.shared.b64 @ producer, a part's first tile",
    "wgmma.fence.sync.aligned @ second chain of Q.K",
)  # fmt: skip
# The same of SM100's decode, where of barriers of a warp but one may be missing.
EXPLAINED_SM100 = (
    "griddepcontrol.launch_dependents", "tcgen05.relinquish_alloc_permit",
    "bar.warp.sync @ S freed by one lane",
)  # fmt: skip
# Of kernels whose products take what they convert as register operands.
CONVERTED = (
    "7 x wgmma.commit_group.sync.aligned @ P.V over bytes", "wgmma.wait_group.sync.aligned 1",
)  # fmt: skip
# Of kernels over tokens without RoPE, lists and pages.
WITHOUT_ROPE = ("fence.proxy.async.shared::cta @ announcer of gathered rows",)
# And of some kernels alone, by globs over their names.
EXPLAINED_OF = {
    "plan_decode_*": ("1 x bar.sync @ sums that may still be read",),
    "dense_decode_*_sm100a": ("bar.sync @ clearing of V",),
    "sparse_decode_etap_*": ("fence.proxy.async.shared::cta @ clearing of V",),
    "sparse_decode_*_r64_*": ("1 x mbarrier.try_wait.parity.shared.b64 @ producer of Q",),
    "*_decode_mix16_r32_*": ("8 x wgmma.commit_group.sync.aligned @ Q.K over bytes",),
    "*_decode_mix16_r16_*": ("4 x wgmma.commit_group.sync.aligned @ Q.K over bytes",),
    "*_decode_mix16_r64_*": ("7 x wgmma.commit_group.sync.aligned @ Q.K over bytes",),
    "*_decode_mix16_r[36]*": (
        "1 x mbarrier.try_wait.parity.shared.b64 @ P.V, an item without tiles",
    ),
    # whose second P.V warpgroup has code of its own, and no rows of Q to convert
    "record_decode_mix16_r[13]*": (
        "1 x mbarrier.try_wait.parity.shared.b64 @ P.V, its wait for Q",
        "7 x wgmma.commit_group.sync.aligned @ P.V over bytes",
    ),
    "*_kvfp8_nope_*": WITHOUT_ROPE,
    "*_decode_mix16_*_kvfp8_v41_*": WITHOUT_ROPE,
    # 64 channels at once: eight groups
    "record_decode_mix16_r16_*_kvfp8_v41_*": (
        "3 x wgmma.commit_group.sync.aligned @ Q.K over bytes",
    ),
    # whose P.V has a file of its own, and RoPE's product in front of the second warpgroup's others
    "*_decode_mix16_*_kvfp8_v4_*": (
        "13 x wgmma.commit_group.sync.aligned @ P.V over V4's tokens",
        "1 x wgmma.fence.sync.aligned @ P.V over V4's tokens",
    ),
    "*_decode_mix16_*": CONVERTED,
    # the second group's fence stands behind the first's, which orders both accumulators; the last
    # chain's wait, among CONVERTED, before products that the compiler puts behind the wait for all
    "*_decode_mix8_*": (
        *CONVERTED,
        "1 x wgmma.fence.sync.aligned @ products of e4m3",
        "1 x mbarrier.try_wait.parity.shared.b64 @ P.V, an item without tiles",
        "1 x fence.proxy.async.shared::cta @ clearing of groups with scale 0",
    ),
    "mha_delta_*": ("1 x bar.sync @ statistics, a CTA counts itself",),
    "mha_dq_*": (
        "2 x mbarrier.try_wait.parity.shared.b64 @ gradients, a tile that is there",
        "1 x mbarrier.try_wait.parity.shared.b64 @ gradients, a tile that is clean",
        "1 x mbarrier.try_wait.parity.shared.b64 @ gradients, a slot that is free",
        "1 x fence.proxy.async.shared::cta @ gradients of queries, hidden keys",
        "1 x bar.sync @ gradients, a turn",
    ),
    "mha_dkv_*": (
        "1 x griddepcontrol.wait @ gradients of keys, at the end",
        "1 x fence.proxy.async.global @ gradients of keys, behind the acquire",
        "2 x mbarrier.try_wait.parity.shared.b64 @ gradients, a tile that is there",
        "1 x mbarrier.try_wait.parity.shared.b64 @ gradients of keys, a note again",
    ),
    "sparse_prefill_*_split_*": ("1 x griddepcontrol.wait @ split lists, the grid before",),
    # a wait that ends a phase, whose votes nobody needs: a card's checker asks for it
    "*_decode_mix*_r64_*": ("mbarrier.try_wait.parity.shared.b64 @ votes that nobody needs",),
    # where a row is one CTA's, nobody reads the total that `emit` meets for
    "select_topk_*_c1_*": ("2 x bar.sync @ threshold of top-k",),
    "select_topk_*_c2_*": ("1 x bar.sync @ threshold of top-k",),
    "*decode_f16_*": CONVERTED,
    "*decode_f16_r16_*": (
        "3 x wgmma.commit_group.sync.aligned @ Q.K over bytes",
        "1 x wgmma.commit_group.sync.aligned @ Q.K over FP8 in 16 bits",
    ),
    "*decode_f16_r32_*": (
        "7 x wgmma.commit_group.sync.aligned @ Q.K over bytes",
        "1 x wgmma.commit_group.sync.aligned @ Q.K over FP8 in 16 bits",
    ),
    "sparse_decode_f16_r32_*": ("1 x mbarrier.try_wait.parity.shared.b64 @ producer of Q",),
    "*decode_f16_r64_*": ("8 x wgmma.commit_group.sync.aligned @ Q.K over bytes",),
    "mha_fwd_*_sm90a": (
        "5 x mbarrier.try_wait.parity.shared.b64 @ producer of K and V of MHA",
        "2 x wgmma.fence.sync.aligned @ products of MHA",
    ),
    # whose producer and clearing warp are SM90's
    "mha_fwd_*_turns_sm100a": (
        "6 x mbarrier.try_wait.parity.shared.b64 @ producer of K and V of MHA",
        "2 x bar.warp.sync @ producer of K and V of MHA",
        "mbarrier.try_wait.parity.shared.b64 @ softmax of MHA, its wait for the notes",
        "bar.warp.sync @ P handed over by one lane",
        "bar.warp.sync @ O freed by one lane",
    ),
}

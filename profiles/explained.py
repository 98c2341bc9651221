"""Mutants that may survive ``make prove``: instructions whose absence no schedule can notice."""

from __future__ import annotations

# What no schedule can miss, opcodes or text of source lines: docs/software-gpu.md says why.
EXPLAINED = (
    "griddepcontrol.launch_dependents", "bar.warp.sync", "tcgen05.relinquish_alloc_permit",
    "k_pipe.consumer_wait(landed)", "# orders nothing new",
)  # fmt: skip
# The same of SM100's decode, where of barriers of a warp but one may be missing.
EXPLAINED_SM100 = (
    "griddepcontrol.launch_dependents", "tcgen05.relinquish_alloc_permit",
    "# one lane frees S for all",
)  # fmt: skip
# Of kernels whose products take what they convert as register operands.
CONVERTED = (
    "7 x wgmma.commit_group.sync.aligned in mix16_pv.py", "wgmma.wait_group.sync.aligned 1",
)  # fmt: skip
# Of kernels over tokens without RoPE, lists and pages.
WITHOUT_ROPE = (
    "fence.proxy.async.shared::cta in gather_records.py",
    "fence.proxy.async.shared::cta in gather_pages.py",
)
# And of some kernels alone, by globs over their names.
EXPLAINED_OF = {
    "dense_decode_*_sm100a": ("barrier_id=barrier_id, number_of_threads=128",),
    "sparse_decode_etap_*": ("fence.proxy.async.shared::cta in fp8_per_token.py",),
    "sparse_decode_*_r64_*": ("1 x mbarrier.try_wait.parity.shared.b64 in q_tiles.py",),
    "*_decode_mix16_r32_*": ("8 x wgmma.commit_group.sync.aligned in mix16_softmax.py",),
    "*_decode_mix16_r16_*": ("4 x wgmma.commit_group.sync.aligned in mix16_softmax.py",),
    "*_decode_mix16_r64_*": ("7 x wgmma.commit_group.sync.aligned in mix16_softmax.py",),
    "*_decode_mix16_r[36]*": ("1 x INV_RING.wait_full(cta.st, 0, items & 1)",),
    # whose second P.V warpgroup has code of its own, and no rows of Q to convert
    "record_decode_mix16_r[13]*": (
        "1 x cta.q_pipe.consumer_wait(qst)",
        "7 x wgmma.commit_group.sync.aligned in mix16_pv.py:",
    ),
    "*_kvfp8_nope_*": WITHOUT_ROPE,
    "*_decode_mix16_*_kvfp8_v41_*": WITHOUT_ROPE,
    # 64 channels at once: eight groups
    "record_decode_mix16_r16_*_kvfp8_v41_*": (
        "3 x wgmma.commit_group.sync.aligned in mix16_softmax.py",
    ),
    # whose P.V has a file of its own, and RoPE's product in front of the second warpgroup's others
    "*_decode_mix16_*_kvfp8_v4_*": (
        "13 x wgmma.commit_group.sync.aligned in mix16_v4_pv.py",
        "1 x wgmma.fence.sync.aligned in mix16_v4_pv.py",
    ),
    "*_decode_mix16_*": CONVERTED,
    "*decode_f16_*": CONVERTED,
    "*decode_f16_r16_*": (
        "3 x wgmma.commit_group.sync.aligned in mix16_softmax.py",
        "1 x wgmma.commit_group.sync.aligned in f16_softmax.py",
    ),
    "*decode_f16_r32_*": (
        "7 x wgmma.commit_group.sync.aligned in mix16_softmax.py",
        "1 x wgmma.commit_group.sync.aligned in f16_softmax.py",
    ),
    "sparse_decode_f16_r32_*": ("1 x mbarrier.try_wait.parity.shared.b64 in q_tiles.py",),
    "*decode_f16_r64_*": ("8 x wgmma.commit_group.sync.aligned in mix16_softmax.py",),
    "mha_fwd_*_sm90a": (
        "5 x mbarrier.try_wait.parity.shared.b64 in mha_parts.py",
        "2 x wgmma.fence.sync.aligned in mha_fwd.py",
    ),
    # whose producer and clearing warp are SM90's
    "mha_fwd_*_turns_sm100a": (
        "6 x mbarrier.try_wait.parity.shared.b64 in mha_parts.py",
        "bar.warp.sync in mha_parts.py",
        "self.loads.found.wait_full",
        "# one lane hands P over for all",
        "# one lane frees O for all",
    ),
}

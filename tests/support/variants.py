"""The variants of a run of the tests."""

from __future__ import annotations

from codegen import matrix, toolchain
from dsl_kernels.families import ARCHS
from dsl_kernels.spec import VariantSpec

# What everyday tests call for beside the test set.  Compiled before the tests, where the compiler
# is imported once for all of them, one costs 4 CPU seconds less than on demand.
CALLED_FOR = (
    "append_index_k_xbf16_ii64_hd1_sm90a", "append_kv_xf16_ii32_interleaved_rms_csf16_sm90a",
    "append_kv_xf32_ii32_kvbf16_sm90a", "fetch_dequant_xf32_indices_kvf16_sm90a",
    "fetch_index_k_xfp8_ragged_sm90a", "mha_items_split_sm90a", "mha_merge_obf16_sm90a",
    "mha_items_backward_sm90a", "mha_delta_dbf16_sm90a", "mha_dq_d192_dbf16_sm90a",
    "mha_dkv_d192_dbf16_sm90a", "mha_rope_sum_dbf16_sm90a",
    "select_topk_t64_e8_c2_sm90a", "select_topk_t64_e0_c2_sm90a",
    "sparse_prefill_r16_d576_sm90a",
    "decode_pair_r128_p64_of32_sm100a", "dense_decode_pair_r128_p64_dbf16_sm100a",
    "append_kv_xbf16_ii64_interleaved_rms_kvfp8_ds_mla_sm90a",
    "append_kv_xbf16_ii64_interleaved_rms_sm90a", "append_kv_xbf16_ii64_interleaved_sm90a",
    "append_kv_xbf16_ii64_neox_rms_csbf16_sm90a", "fetch_dequant_xbf16_indices_kvbf16_sm90a",
    "decode_dual_wg_r64_p64_obf16_sm90a", "decode_dual_wg_r64_p64_of32_sm90a",
    "decode_etap_r16_p16_of32_sm90a",
    "decode_f16_r16_p64_of32_sm90a", "decode_etap_r32_p64_of32_sm90a",
    "sparse_decode_mix16_r16_obf16_kvfp8_v41_rows_sm90a",
    "sparse_decode_mix16_r16_obf16_kvfp8_nope_sm90a",
    "sparse_decode_mix16_r16_obf16_kvfp8_v4_sm90a", "record_decode_mix16_r16_obf16_sm90a",
    "append_kv_xbf16_ii32_kvfp8_v41_rows_sm90a", "append_kv_xbf16_ii32_kvfp8_nope_sm90a",
    "fetch_dequant_xbf16_pages_kvfp8_v41_rows_sm90a",
    "fetch_dequant_xbf16_pages_kvfp8_nope_sm90a", "append_kv_xbf16_ii64_kvfp8_ds_mla_sm90a",
    "decode_etap_r64_p64_of32_sm90a", "dense_decode_split_r16_p64_dbf16_sm90a",
    "dense_decode_split_r16_p64_df16_sm90a", "merge_of32_sm100a",
    "sparse_decode_ws_r64_obf16_sm100a",
)  # fmt: skip

# Of the test set, left to ``--whole-matrix``: SM100 has never run, and built and run one of its
# decodes takes as long as 25 CPU seconds.  SM90's pages of 16, 32 and 128 tokens stand for SM100's,
# the pair with fp32 results (test_fp8_pair.py) for that with bf16, whose epilogue ``ws`` shows; a
# thousand threads run SM90's source for each row of scores, and the prologue is SM90's, too; sparse
# decode there has one small problem of its own every day (test_sparse_blackwell.py).
RARELY = (
    "decode_ws_r64_p16_obf16_sm100a", "decode_ws_r64_p32_obf16_sm100a",
    "decode_ws_r64_p128_obf16_sm100a", "decode_pair_r128_p64_obf16_sm100a",
    "select_topk_t1024_e8_c1_sm100a", "sparse_decode_ws_r64_obf16_sm100a",
    "dsa_prologue_xbf16_ii64_sm100a",
)  # fmt: skip


def shipped(*, whole: bool) -> list[VariantSpec]:
    """Variants of both architectures: all of them, or the test set without ``RARELY``."""
    if not toolchain.have_compiler():  # without it nothing is known of the matrix
        return []
    pick = matrix.default_specs if whole else matrix.sample_specs
    found = [spec for arch in ARCHS for spec in pick(arch)]
    return [spec for spec in found if whole or spec.name not in RARELY]


def called_for(specs: list[VariantSpec]) -> list[VariantSpec]:
    """``specs``, and what tests call for beside them."""
    return [*dict.fromkeys([*specs, *map(VariantSpec.from_name, CALLED_FOR)])]

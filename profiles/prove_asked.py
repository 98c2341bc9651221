"""Variants that ``prove`` studies beside the matrix, or beside the one that stands for a kernel."""

# Variants that are built when they are asked for, not by default: studied all the same.
ASKED = (
    "decode_dual_wg_r64_p64_obf16_sm90a",
    "mha_items_split_sm90a", "mha_fwd_d192_dbf16_split_sm90a", "mha_merge_obf16_sm90a",
    "mha_merge_obf16_v256_sm90a", "mha_items_backward_sm90a", "mha_delta_dbf16_sm90a",
    "mha_dq_d192_dbf16_sm90a", "mha_dkv_d192_dbf16_sm90a", "mha_dq_d128_dbf16_sm90a",
    "mha_dkv_d128_dbf16_sm90a", "mha_rope_sum_dbf16_sm90a",
    "select_topk_t64_e8_c2_sm90a", "select_topk_t64_e0_c1_sm90a", "select_topk_t64_e0_c2_sm90a",
    "append_index_k_xbf16_ii64_hd1_sm90a", "sparse_prefill_r64_d576_indexer_sm90a",
    "fetch_index_k_xfp8_ragged_sm90a", "fetch_index_k_xbf16_indices_sm90a",
    "append_kv_xbf16_ii32_kvfp8_v41_planar_sm90a", "append_kv_xbf16_ii32_kvfp8_v41_rows_sm90a",
    "append_kv_xbf16_ii32_kvfp8_nope_sm90a", "fetch_dequant_xbf16_pages_kvfp8_v41_planar_sm90a",
    "fetch_dequant_xbf16_pages_kvfp8_v41_rows_sm90a", "fetch_dequant_xbf16_pages_kvfp8_nope_sm90a",
    "decode_etap_r16_p64_obf16_pt2_sm90a", "sparse_decode_etap_r16_obf16_pt2_sm90a",
    "record_decode_mix16_r16_obf16_sm90a", "record_decode_mix16_r16_obf16_kvfp8_v4_sm90a",
    "record_decode_mix16_r16_obf16_kvfp8_nope_sm90a",
    "record_decode_mix16_r16_obf16_kvfp8_v41_planar_sm90a",
    "record_decode_mix16_r64_obf16_sm90a", "sparse_decode_mix16_r16_obf16_kvfp8_nope_sm90a",
    "sparse_decode_mix16_r16_obf16_kvfp8_v41_planar_sm90a",
    "sparse_decode_mix16_r16_obf16_kvfp8_v41_rows_sm90a", "sparse_decode_mix8_r64_obf16_sm90a",
)  # fmt: skip
# Of the same with fp16, which differ from them in conversions alone: under few schedules.
ASKED_FEW = (
    "mha_delta_df16_sm90a", "mha_dq_d192_df16_sm90a", "mha_dkv_d192_df16_sm90a",
    "mha_dq_d128_df16_sm90a", "mha_dkv_d128_df16_sm90a", "mha_rope_sum_df16_sm90a",
)  # fmt: skip
# Likewise of SM100: kernels that wait for a card's clock.
ASKED_BLACKWELL = (
    "sparse_decode_ws_r64_obf16_gather4_sm100a", "mha_fwd_d192_dbf16_turns_sm100a",
)  # fmt: skip
# Of the matrix, studied beside the variant that stands for their kernel, which differs.
BESIDE = (
    "mha_fwd_d128_df16_sm90a", "sparse_decode_mix16_r64_obf16_kvfp8_v4_sm90a",
    "sparse_prefill_r64_d576_split_sm90a",
)  # fmt: skip

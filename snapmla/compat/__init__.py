"""Other libraries' names over the kernels here: a caller changes an import and no call.

flash_mla/          FlashMLA's, as ``snapmla.flash_mla``
flash_mla_fp8.py    SnapMLA's own, as ``snapmla.flash_mla_fp8``
flash_attention.py  FlashAttention's, as ``snapmla.mha.flash_attention_names``
deep_gemm.py        DeepGEMM's, as ``snapmla.dsa.deep_gemm_names``
vllm.py             vLLM's of the indexer, as ``snapmla.dsa.vllm_names``
metadata_pair.py    FlashMLA's older scheduling metadata: two tensors
sched_meta.py       its newer one: records of 8 integers
"""

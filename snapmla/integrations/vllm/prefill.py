"""vLLM's slot for attention of prompts in the MHA form, on ``mha_prefill`` (0.26 to 0.33).

Not chosen unless it is asked for, as it has not been run on a GPU yet::

    --attention-config '{"mla_prefill_backend": "CUSTOM"}'       # 0.26
    --attention-config '{"mla_prefill_backend": "SNAPMLA"}'      # 0.33

Beside our attention backend, whose layers hand K over as it comes from kv_b_proj and the cache
(``KeyParts``), nothing is concatenated: vLLM's own layers copy both into one tensor of 192 channels
first, and this class takes that as well.

New tokens see each other, causally; a chunk of a cached prefix is seen by all.  A sequence without
keys in a chunk has output 0 and LSE -inf, which is what merging by LSE wants.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend

from snapmla.integrations import vllm as plugin
from snapmla.mha import mha_prefill


class KeyParts(NamedTuple):
    """K as a model has it.

    Attributes:
        nope: (tokens, h, 128), which may be a view of kv_b_proj's output.
        rope: (tokens, 1, 64), one head that all share.
    """

    nope: torch.Tensor
    rope: torch.Tensor


class SnapMLAPrefillBackend(MLAPrefillBackend):
    """Prefill for vLLM's MLA layer: attention to new tokens, and to chunks of the cached ones."""

    supported_dtypes: ClassVar = [torch.bfloat16, torch.float16]
    supported_mla_dimensions: ClassVar = [
        MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    ]

    @staticmethod
    def get_name() -> str:
        return plugin.BACKEND

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major == 9

    def supports_out(self) -> bool:
        return True

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor | KeyParts,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """q (tokens, h, 192), k, v (tokens, h, 128) -> out, or (out, LSE (h, tokens))."""
        if output_scale is not None:  # supports_quant_output says no
            raise NotImplementedError("snapmla: prefill does not quantise its output")
        step = self._prefill_metadata
        begin, longest = step.query_start_loc, step.max_query_len
        found = self._attend(q, k, v, (begin, begin, longest, longest), True, out)
        return found if return_softmax_lse else found[0]

    def run_prefill_context_chunk(
        self, *, q: torch.Tensor, k: torch.Tensor | KeyParts, v: torch.Tensor, **of_release: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Same as above without a mask -> (out, LSE (h, tokens)).

        A release says ``chunk``, of whose requests q has the tokens, and perhaps ``out`` (0.33), or
        ``chunk_idx``, and q has all tokens of the step (0.26).
        """
        chunk = of_release.get("chunk")
        if chunk is not None:
            where = chunk.query_start_loc, chunk.cu_seq_lens, chunk.max_query_len, chunk.max_seq_len
        else:
            step, chunk_idx = self._prefill_metadata, of_release["chunk_idx"]
            cached = step.chunked_context
            where = (
                step.query_start_loc, cached.cu_seq_lens[chunk_idx], step.max_query_len,
                cached.max_seq_lens[chunk_idx],
            )  # fmt: skip
        return self._attend(q, k, v, where, False, of_release.get("out"))

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor | KeyParts, v: torch.Tensor,
        where: tuple[Any, ...], causal: bool, out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        begin, cached, longest, most_keys = where
        nope, rope = k if isinstance(k, KeyParts) else (k, None)
        return mha_prefill(
            q, nope, v, begin, cached, int(longest), int(most_keys), softmax_scale=self.scale,
            causal=causal, k_rope=rope, out=out,
        )  # fmt: skip

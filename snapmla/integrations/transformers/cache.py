"""``SnapMLACache``: what a patched model is given as its cache."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import snapmla
from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla import checks
from snapmla.integrations.transformers import prefill as prompts
from snapmla.integrations.transformers.attention import TAG
from snapmla.integrations.transformers.pool import Pool

Tensor = torch.Tensor


def refuse(what: str) -> NoReturn:
    """Raises for what would copy or move pages."""
    raise NotImplementedError(
        f"snapmla: {what} would copy the pages of a SnapMLACache, which is not supported: use a "
        "DynamicCache on a model that is not patched"
    )


class Layer(CacheLayerMixin):
    """The cache of one layer: a ``PagedKVCache``, and index keys where the model has an indexer."""

    is_compileable = False  # generate would wrap the model in torch.compile; see ``DecodeGraph``
    is_croppable = True
    is_sliding = False

    def __init__(self, pool: Pool, cache: snapmla.PagedKVCache, prefill: str) -> None:
        super().__init__()
        self.pool, self.cache, self.prefill = pool, cache, prefill
        self.keys, self.values = cache.content, cache.rope  # as transformers names what is held
        self.device, self.is_initialized = cache.device, True
        self.index_keys: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: memory is there from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends latents (b, 1, n, 512) and RoPE parts (b, 1, n, 64) of the step's tokens.

        Returns:
            The same, the first of them knowing this layer.

        Raises:
            ValueError: no patched model has begun a step, or these are no latents.
        """
        pool = self.pool
        if not pool.new:
            raise ValueError("snapmla: a SnapMLACache belongs to a model that is patched")
        want = (pool.batch, 1, pool.new, KV_LORA_RANK), (pool.batch, 1, pool.new, QK_ROPE_HEAD_DIM)
        got = tuple(key_states.shape), tuple(value_states.shape)
        if got != want:
            raise ValueError(
                f"snapmla: this layer caches {got[0]} and {got[1]}, not latents {want[0]} and RoPE "
                f"parts {want[1]}: transformers below 5.18 expands those of DeepSeek-V3.2 and GLM "
                "before they are cached"
            )
        if key_states.device != self.device:
            hint = "a model on several devices is not served"
            checks.value_error("cache", f"a model on {self.device}", key_states.device, hint)
        snapmla.append_kv(
            self.cache, key_states.reshape(-1, KV_LORA_RANK),
            value_states.reshape(-1, QK_ROPE_HEAD_DIM), pool.slots,
        )  # fmt: skip
        tagged = key_states.view(key_states.shape)  # a tensor of our own
        setattr(tagged, TAG, self)
        return tagged, value_states

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Index keys (b, n, d) of the step's tokens -> (b, positions, d) of all, in their dtype."""
        pool, new = self.pool, indexer_key_states
        if self.index_keys is None:
            self.index_keys = new.new_zeros(pool.batch, pool.max_tokens, new.shape[-1])
        self.index_keys.index_copy_(1, pool.query_positions(), new)
        return self.index_keys[:, : pool.extent]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(positions, offset) of a mask; transformers asks while the step is on its way."""
        pool = self.pool
        if pool.fixed:
            return pool.max_tokens, 0
        return (pool.seen if pool.new else pool.seen + query_length), 0

    def get_seq_length(self) -> Any:
        """Positions before the step; while extents are fixed they are on the device."""
        pool = self.pool
        return pool.position - pool.new if pool.fixed else pool.seen - pool.new

    def get_max_length(self) -> int:
        return self.pool.max_tokens

    def reset(self) -> None:
        self.pool.reset()

    def offload(self) -> None:
        refuse("offloading")

    def prefetch(self) -> None:
        refuse("offloading")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        refuse("beam search")

    def batch_repeat_interleave(self, repeats: int) -> None:
        refuse("repeating sequences")

    def batch_select_indices(self, indices: Tensor) -> None:
        refuse("selecting sequences")


class SnapMLACache(Cache):
    """Latents of all layers in pages of FP8: the cache of a model that ``patch`` was called on.

    A token takes 644 bytes a layer, where a ``DynamicCache`` in bfloat16 takes 1152.  Memory for
    ``batch_size`` sequences of ``max_tokens`` positions is allocated at once.  Pads, wherever
    ``attention_mask`` has them, are positions that are not cached.

    Where a model has an indexer (DSA), its index keys are kept as it makes them.

    Args:
        config: the model's: ``num_hidden_layers`` layers of ``num_attention_heads`` heads.
        batch_size: sequences; of ``generate`` with ``num_return_sequences`` that many times more.
        max_tokens: positions of each sequence, pads included.
        page_size: tokens of a page: 16, 32, 64 or 128.
        layout: of the pages, as in ``PagedKVCache.allocate``.
        accuracy: ``standard`` or ``high``, as in ``plan_decode``.
        prefill: what computes more than 8 query tokens a sequence: ``kernels``, ``torch``, or
            ``auto``, which takes the kernels where there are any.
        num_heads: query heads of this process, where that is not ``num_attention_heads``.
        device: where the model is; None: the current GPU, or ``cpu`` without one.

    Attributes:
        lengths: int32 (batch_size,) on the device: tokens that are cached, without pads.

    Raises:
        TypeError, ValueError: naming the argument.

    Source: our own, behind transformers' ``Cache``.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        max_tokens: int,
        *,
        page_size: int = 64,
        layout: str = "split",
        accuracy: str = "standard",
        prefill: str = "auto",
        num_heads: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        checks.choice("prefill", prefill, prompts.WAYS)
        config = config.get_text_config(decoder=True)
        if prefill == "kernels" and not prompts.dense_heads(config):
            got = f"{config.qk_nope_head_dim} + 64 and {config.v_head_dim} channels a head"
            hint = "prefill='auto' takes kernels where there are any"
            wanted = f"'auto' or 'torch' for heads of other channels than {prompts.NOPE} + 64"
            checks.value_error("prefill", wanted, f"'kernels', {got}", hint)
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        nothing = torch.empty(0, device=checks.device("device", where))  # knows the GPU's number
        heads = config.num_attention_heads if num_heads is None else num_heads
        pool = Pool(
            batch_size, max_tokens, heads, checks.page_size(page_size), nothing.device, accuracy
        )
        pages = pool.batch * pool.width
        caches = [
            snapmla.PagedKVCache.allocate(pages, page_size, layout=layout, device=nothing.device)
            for _ in range(config.num_hidden_layers)
        ]
        super().__init__(layers=[Layer(pool, cache, prefill) for cache in caches])
        self.pool = pool

    @property
    def lengths(self) -> Tensor:
        return self.pool.lengths

    def reset(self) -> None:
        """Forgets all tokens; memory stays."""
        self.pool.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last positions of each sequence.

        Args:
            tokens_to_remove: how many, as a negative number.

        Raises:
            ValueError: it is positive, or more than there are.
        """
        if tokens_to_remove > 0:
            checks.value_error(
                "tokens_to_remove", "a negative number", tokens_to_remove,
                "crop(-n) forgets the last n positions",
            )  # fmt: skip
        self.pool.crop(-tokens_to_remove)

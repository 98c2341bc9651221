"""The cache: SGLang's pool of latents, in rows of 640 bytes and a scale beside each.

``kv_buffer[layer]`` uint8 (slots, 1, 640) and ``kv_scale_buffer[layer]`` float32 (slots, 1) are
layout ``row640``: what moves a token moves one row of each.  A slot is SGLang's token index; a page
is 64 of them.  As in SGLang's own pools the first page is where padded tokens are written.

Nothing but this class and the backend knows the format: ``get_key_buffer`` and ``get_value_buffer``
raise, so that no other backend reads rows as if they were plain e4m3.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc

from dsl_kernels.formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla.cache import fetch, layouts, paged, quant
from snapmla.integrations.sglang.refuse import MOVES, PAGE

Rows = tuple[torch.Tensor, torch.Tensor]


class SnapMLATokenToKVPool(MLATokenToKVPool):
    """Pool in the place of ``MLATokenToKVPool``, which see for arguments.

    Raises:
        ValueError: at construction, for pages or dtypes that are not served.
    """

    def _create_buffers(self) -> None:
        if self.page_size != PAGE or self.dtype != torch.float8_e4m3fn or self.use_dsa:
            raise ValueError(
                f"snapmla: a pool with pages of {self.page_size} tokens of {self.dtype} is not "
                f"served: set --page-size {PAGE} --kv-cache-dtype fp8_e4m3"
            )
        self.kv_cache_dim, self.store_dtype = layouts.ROW_BYTES, torch.uint8
        pages = -(-self.size // PAGE) + 1
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), self._memory():
            zeros = lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=self.device)
            buffers = [
                (
                    zeros(pages * PAGE, 1, layouts.ROW_BYTES, dtype=torch.uint8),
                    zeros(pages * PAGE, 1, dtype=torch.float32),
                )
                for _ in range(self.layer_num)
            ]
        self.kv_buffer, self.kv_scale_buffer = map(list, zip(*buffers, strict=True))
        self.caches = [self._cache(*each) for each in buffers]

    def _memory(self) -> Any:
        """Pool that SGLang's allocations come from."""
        pool = self.custom_mem_pool
        return torch.cuda.use_mem_pool(pool) if pool else nullcontext()

    @staticmethod
    def _cache(rows: torch.Tensor, scale: torch.Tensor) -> paged.PagedKVCache:
        views = layouts.rows640_views(rows.view(-1, PAGE, layouts.ROW_BYTES), scale.view(-1, PAGE))
        return paged.PagedKVCache.from_tensors(*views)

    def _clear_buffers(self) -> None:
        del self.kv_buffer, self.kv_scale_buffer, self.caches

    def get_kv_size_bytes(self) -> int:
        """Bytes of all layers, with the scales: 644 a token and layer."""
        return sum(each.nbytes for each in (*self.kv_buffer, *self.kv_scale_buffer))

    def cache_of(self, layer_id: int) -> paged.PagedKVCache:
        """A layer's cache, as snapmla's functions take it."""
        at = layer_id - self.start_layer
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(at)
        return self.caches[at]

    # ------------------------------------------------------------------------- tokens in and out

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """Quantises new tokens, (tokens, 1, 512) and (tokens, 1, 64), and writes them."""
        slots, _, _ = unwrap_write_loc(loc_info)
        self._check_physical_write_loc(loc_info, "set_mla_kv_buffer (snapmla)")
        layer_id = layer.layer_id if layer_id_override is None else layer_id_override
        content, rope = cache_k_nope.flatten(0, -2), cache_k_rope.flatten(0, -2)
        quant.append_kv(self.caches[layer_id - self.start_layer], content, rope, slots)

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None = None,
        layer_id_override: int | None = None,
    ) -> None:
        """The same of joint rows (tokens, 1, 576)."""
        content, rope = cache_k.split([KV_LORA_RANK, QK_ROPE_HEAD_DIM], -1)
        self.set_mla_kv_buffer(layer, loc_info, content, rope, layer_id_override)

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> Rows:
        """Tokens back, dequantised: (tokens, 1, 512) and (tokens, 1, 64)."""
        dtype = torch.bfloat16 if dst_dtype is None else dst_dtype
        content, rope = fetch.fetch_dequant(self.cache_of(layer.layer_id), loc, dtype=dtype)
        return content.unsqueeze(1), rope.unsqueeze(1)

    # ------------------------------------------------------------------- what moves whole tokens

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copies tokens to other slots: rows and scales."""
        super().move_kv_cache(tgt_loc, src_loc)
        to, of = tgt_loc.view(-1).long(), src_loc.view(-1).long()
        for scale in self.kv_scale_buffer:
            scale[to] = scale[of]

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> Any:
        """Tokens of a request that is set aside, on the CPU: (rows, scales)."""
        rows = super().get_cpu_copy(indices, mamba_indices, req_pool_index)
        return rows, [scale[indices].cpu() for scale in self.kv_scale_buffer]

    def load_cpu_copy(
        self,
        kv_cache_cpu: Any,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Restores what ``get_cpu_copy`` returned, to the same slots or others."""
        rows, scales = kv_cache_cpu
        super().load_cpu_copy(rows, indices, mamba_indices, req_pool_index)
        for scale, saved in zip(self.kv_scale_buffer, scales, strict=True):
            scale[indices] = saved.to(scale.device)

    # -------------------------------------------------------------------------- not for others

    def get_key_buffer(self, layer_id: int) -> NoReturn:
        """Raises: rows are not plain e4m3."""
        raise NotImplementedError(
            "snapmla: no other backend can read this cache: its rows have a format of their own"
        )

    get_value_buffer = get_key_buffer

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        return self.kv_buffer[0].shape, self.kv_buffer[0].shape

    def get_contiguous_buf_infos(self) -> NoReturn:
        """Raises: a transfer would leave the scales behind."""
        raise NotImplementedError(f"snapmla: disaggregation is not served: it {MOVES}")

    def get_device_pool_infos(self) -> NoReturn:
        """Raises: a transfer would leave the scales behind."""
        raise NotImplementedError(f"snapmla: HiCache is not served: it {MOVES}")

    host_pool_decls = get_device_pool_infos

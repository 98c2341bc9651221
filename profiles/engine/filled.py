"""A connector of vLLM whose prompts need not be read: their rows are random and already there.

vLLM asks a connector how many tokens of a prompt another machine has computed.  Its own
``DecodeBenchConnector`` answers: all but the last one, and writes one number into their pages.
Bytes of DSA caches need more than a number (FP8, scales, BF16 in one row), and equal index keys
would tie in top-k.  So all pages are filled once, when the engine makes its caches, and a step
finds what it would find behind prompts of random text.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
)

from profiles.engine import rows


class RandomRows(DecodeBenchConnector):  # type: ignore[misc]
    """Random rows in all pages of all layers."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Fill vLLM's caches, by layer."""
        for cache in kv_caches.values():
            rows.fill(cache)
        print(f"{len(kv_caches)} caches hold random rows", flush=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load nothing: the rows are there."""

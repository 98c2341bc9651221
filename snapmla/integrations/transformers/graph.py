"""``DecodeGraph``: one decode step of a patched model, captured once and replayed."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from snapmla.integrations.transformers.cache import SnapMLACache

Tensor = torch.Tensor
WARMUP = 2  # steps before the capture: they load kernels, make plans and warm the allocator


class DecodeGraph:
    """A step of one token a sequence as a CUDA graph: a launch instead of a model's thousands.

        logits = model(**prompt, past_key_values=cache).logits[:, -1:]
        step = DecodeGraph(model, cache)
        for _ in range(100):
            logits = step(logits.argmax(-1))

    Positions, slots, plan and mask are made by the graph itself from what is on the device, so one
    graph serves every step that the cache has room for.  Where the model has an indexer, it scores
    all ``max_tokens`` positions each time.

    The model's step must be one that can be captured: transformers' ``eager`` experts, which count
    on the host, cannot; ``grouped_mm`` and ``batched_mm`` can.

    On ``cpu`` the same step runs eagerly.

    Args:
        model: that ``patch`` was called on, on one device, as ``...ForCausalLM``.
        cache: with the tokens of a prompt, and room for more.

    Raises:
        TypeError, ValueError: naming the argument; there is no room for a token.

    Source: our own.
    """

    def __init__(self, model: Any, cache: SnapMLACache) -> None:
        if not isinstance(cache, SnapMLACache):
            raise TypeError(f"snapmla: cache is a {type(cache).__name__}, a SnapMLACache is wanted")
        self._model, self._cache, self._pool = model, cache, cache.pool
        names = inspect.signature(type(model).forward).parameters
        self._name = "cache" if "cache" in names else "past_key_values"
        device = self._pool.device
        self._ids = torch.zeros(self._pool.batch, 1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor
        if device.type == "cuda":
            self._capture()

    def __call__(self, input_ids: Tensor) -> Tensor:
        """The next token of each sequence: int64 (b, 1) -> logits (b, 1, vocabulary).

        Returns:
            Memory of the graph's, which the next call overwrites.

        Raises:
            ValueError: of another shape, or the cache is full; nothing is changed.
        """
        if tuple(input_ids.shape) != tuple(self._ids.shape):
            raise ValueError(
                f"snapmla: input_ids {tuple(input_ids.shape)}, {tuple(self._ids.shape)} is wanted"
            )
        self._ids.copy_(input_ids)
        if self._graph is None:
            return self._eager()
        self._pool.check_room(1)
        self._graph.replay()
        self._pool.seen += 1
        return self._logits

    def _eager(self) -> Tensor:
        """The step as Python runs it; what is captured."""
        pool = self._pool
        pool.check_room(1)
        pool.fixed = True
        try:
            with torch.no_grad():
                places = pool.lengths[:, None].long()  # of tokens: pads have none
                result = self._model(
                    input_ids=self._ids, position_ids=places, attention_mask=self._mask(),
                    use_cache=True, **{self._name: self._cache},
                )  # fmt: skip
        finally:
            pool.fixed = False
        return result.logits

    def _mask(self) -> Tensor | None:
        """(b, 1, 1, max_tokens), additive: what is cached, and the token of the step.

        Of a model without an indexer None: nothing reads it.
        """
        pool = self._pool
        if all(layer.index_keys is None for layer in self._cache.layers):
            return None
        columns = torch.arange(pool.max_tokens, device=pool.device)
        seen = (pool.slot_of >= 0) | (columns == pool.position)
        dtype = self._model.dtype
        zero = torch.zeros((), dtype=dtype, device=pool.device)
        return torch.where(seen, zero, torch.finfo(dtype).min)[:, None, None]

    def _capture(self) -> None:
        pool, stream = self._pool, torch.cuda.Stream(self._pool.device)
        stream.wait_stream(torch.cuda.current_stream(pool.device))
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self._eager()
                pool.crop(1)
        torch.cuda.current_stream(pool.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._eager()
        pool.seen -= 1  # nothing has run: only the host has counted
        self._graph = graph

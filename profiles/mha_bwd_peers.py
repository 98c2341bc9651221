"""Contenders of ``profiles.mha_bwd_cost``: cuDNN by way of torch, and FlashAttention-4's kernels.

FlashAttention-4 is a Python package that compiles at its first call.  Its kernels for SM90 were
compiled without a card, from fake tensors: ``cute.compile`` as its interface calls it, the function
exported as an object, ``codegen.link`` makes a library of it.  They are in a folder of your own, as
``fa4_d<d_qk>_128_<how>_<class>.so``: how is ``c`` (causal) or ``n``, then ``v`` of ragged batches,
``D`` of the deterministic mode.  What was not built is left out of a table; a backward of several
query heads a KV head is refused by the package where d_qk is not d_v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiles.tables.mha_cost import Shape

Call = Callable[[], Any]
BACKWARD = "FlashAttentionBackward"


@dataclass(frozen=True)
class Given:
    """Tensors for a peer: K as one tensor, each head's own channels.

    Attributes:
        q, k, v, out, dout: (tokens, heads, channels), of all sequences.
        lse: (heads, tokens).
        cu_q, cu_k: offsets of sequences.
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor
    lse: Tensor
    cu_q: Tensor
    cu_k: Tensor

    @property
    def even(self) -> bool:
        return len(set(self.shape.lq)) == 1 and self.shape.lq == self.shape.lk

    def batched(self, x: Tensor) -> Tensor:
        """(b, tokens, heads, channels) of an even batch, else as it is."""
        return x.view(len(self.shape.lq), -1, *x.shape[1:]) if self.even else x

    @cached_property
    def cudnn_out(self) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Output of cuDNN's forward and the leaves that it depends on; None if it takes no such
        call."""
        if not self.even:
            return None
        leaves = [
            self.batched(x).transpose(1, 2).detach().requires_grad_()
            for x in (self.q, self.k, self.v)
        ]
        try:
            return cudnn_forward(self.shape, *leaves), tuple(leaves)
        except RuntimeError as error:
            print("cuDNN:", str(error)[:200])
            return None

    def cudnn(self) -> Call | None:
        """Backward of torch's SDPA by cuDNN, by autograd."""
        if self.cudnn_out is None:
            return None
        out, leaves = self.cudnn_out
        dout = self.batched(self.dout).transpose(1, 2)
        return lambda: [
            x.transpose(1, 2).flatten(0, 1)
            for x in torch.autograd.grad(out, leaves, dout, retain_graph=True)
        ]

    def cudnn_replay(self, calls: int) -> Call | None:
        """A graph of so many, as few tokens want it; None if torch cannot capture it."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):  # on which autograd calls the backward, too
                q, k, v = (
                    self.batched(x).transpose(1, 2).detach().requires_grad_()
                    for x in (self.q, self.k, self.v)
                )
                out = cudnn_forward(self.shape, q, k, v)
                dout = self.batched(self.dout).transpose(1, 2)
                torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(calls):
                    held = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        except RuntimeError as error:
            print("cuDNN in a graph:", str(error)[:200])
            return None

        def replay() -> None:
            _ = held, out, q, k, v, dout  # a graph knows addresses alone
            graph.replay()

        return replay


def cudnn_forward(shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """torch's SDPA by cuDNN; (b, heads, tokens, channels)."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, enable_gqa=shape.group > 1
        )


class FlashAttention4:
    """Kernels in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def kernel(self, how: str, kind: str) -> Callable[..., Any] | None:
        """A kernel of a configuration, None if it was not built."""
        name = f"{how}_{kind}"
        path = self.folder / f"fa4_{name}.so" if self.folder else None
        if path is None or not path.exists():
            return None
        import tvm_ffi

        function: Callable[..., Any] = getattr(tvm_ffi.load_module(str(path)), name)
        return function

    def backward(self, given: Given, deterministic: bool = False) -> Call | None:
        """All its launches: statistics, gradients, dQ to 16 bits.

        Returns:
            a call whose result is (dq, dk, dv), (tokens, heads, channels) each; None if a kernel
            is not there.
        """
        shape, batch = given.shape, len(given.shape.lq)
        how = f"d{shape.d_qk}_128_{'c' if shape.causal else 'n'}"
        how += "" if given.even else "v"
        main = self.kernel(how + ("D" if deterministic else ""), BACKWARD + "Sm90")
        before, after = (self.kernel(how, BACKWARD + x) for x in ("Preprocess", "Postprocess"))
        if main is None or before is None or after is None or shape.group > 1:
            return None
        rows = 80 if shape.d_qk == 128 and not shape.causal else 64
        heads, device = shape.heads, given.q.device
        q, k, v, out, dout = map(
            given.batched, (given.q, given.k, given.v, given.out, given.dout)
        )  # fmt: skip

        def blank(*size: int) -> Tensor:
            return torch.empty(*size, device=device)

        lead: tuple[int, ...]
        if given.even:
            padded = -(-shape.lq[0] // rows) * rows
            lead, cu = (batch, heads), None
            lse = given.lse.view(heads, batch, -1).transpose(0, 1).contiguous()
        else:
            padded = (len(given.q) + (batch + 1) * rows - 1) // rows * rows
            lead, cu, lse = (heads,), given.cu_q, given.lse
        tables = (cu, None if cu is None else given.cu_k)
        summed = blank(*lead, padded * shape.d_qk)
        delta, lse2 = blank(*lead, padded), blank(*lead, padded)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        order = None
        if deterministic:
            order = torch.zeros(batch, heads, padded // rows, 1, dtype=torch.int32, device=device)
        scale = shape.d_qk**-0.5
        nothing = (None, None)

        def call() -> list[Tensor]:
            if order is not None:
                order.zero_()
            before(out, dout, delta, lse, lse2, summed, cu, *[None] * 4, 1.0, None, None)
            main(q, k, v, dout, lse2, delta, summed, *grads[1:], scale, *tables, *[None] * 4, order,
                 None, None, nothing, None, None)  # fmt: skip
            after(summed, grads[0], scale, cu, None, None, None)
            return [x.flatten(0, 1) if given.even else x for x in grads]

        return call

    def forward(self, given: Given) -> Call | None:
        """Prepares an even batch; the call's result is (out, LSE), (b, tokens, heads, 128) and
        (b, heads, tokens)."""
        shape = given.shape
        how = f"d{shape.d_qk}_128_{'c' if shape.causal else 'n'}"
        kernel = self.kernel(how, "FlashAttentionForwardSm90")
        if kernel is None or not given.even or shape.group > 1:
            return None
        q, k, v, out = map(given.batched, (given.q, given.k, given.v, given.out))
        lse = torch.empty(len(q), shape.heads, q.shape[1], device=q.device)

        def call() -> tuple[Tensor, Tensor]:
            kernel(q, k, v, out, lse, shape.d_qk**-0.5, *[None] * 9, (None, None), None, None)
            return out, lse

        return call

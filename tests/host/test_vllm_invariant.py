"""``snapmla.integrations.vllm.invariant``: a norm whose rows do not depend on their number."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from snapmla.integrations.vllm import invariant

CPU = torch.device("cpu")


def summed(squares: torch.Tensor, threads: int) -> torch.Tensor:
    """As a block of so many threads sums a row: every ``threads``-th element, then the threads."""
    own = squares.unflatten(1, (-1, threads))
    total = own[:, 0].clone()
    for i in range(1, own.shape[1]):
        total += own[:, i]
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return total


def kernel(few: int, many: int) -> invariant.Norm:
    """What vLLM's kernel computes, with so many threads below and from 256 rows on."""

    def fused(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> None:
        residual.add_(x)
        squares = summed(residual.float() ** 2, few if len(x) < 256 else many)
        x.copy_(residual.float() * torch.rsqrt(squares / x.shape[1] + epsilon) * weight)

    return fused


def test_a_kernel_whose_order_depends_on_rows_is_found() -> None:
    assert invariant.depends_on_rows(kernel(512, 256), CPU)
    assert not invariant.depends_on_rows(kernel(256, 256), CPU)


def by_rows(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6,
    residual: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """In the place of vLLM's: with a residual it is the kernel."""
    if residual is not None:
        kernel(512, 256)(x, residual, weight, eps)
        return x, residual
    scale = torch.rsqrt(summed(x.float() ** 2, 256) / x.shape[1] + eps)
    return (x.float() * scale * weight).to(x.dtype)


def test_rows_have_the_same_bits_alone() -> None:
    """Which vLLM's have not; residuals are added in place, and rounded as the kernel does."""
    torch.manual_seed(0)
    x, residual = torch.randn(4096, 512).bfloat16(), torch.randn(4096, 512).bfloat16()
    weight = torch.randn(512).bfloat16()

    def alone_and_together(norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sums = residual.clone()
        together, returned = norm(x.clone(), weight, 1e-5, residual=sums)
        assert returned is sums and torch.equal(sums, residual + x)
        rows = zip(x.clone().split(64), residual.clone().split(64), strict=True)
        return together, torch.cat([norm(a, weight, 1e-5, residual=b)[0] for a, b in rows])

    whole, parts = alone_and_together(by_rows)
    assert not torch.equal(whole, parts)
    ours = invariant.RowByRow(by_rows)
    whole, parts = alone_and_together(ours)
    assert torch.equal(whole, parts)
    assert torch.equal(whole, by_rows(residual + x, weight, 1e-5))
    assert torch.equal(ours(x, weight), by_rows(x, weight))


@pytest.fixture
def layernorm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """vLLM's module of norms, without vLLM."""
    found = {}
    for name in ("vllm", "vllm._custom_ops", "vllm.model_executor", "vllm.model_executor.layers",
                 "vllm.model_executor.layers.layernorm"):  # fmt: skip
        found[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, found[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(found[parent], child, found[name])
    norms = found["vllm.model_executor.layers.layernorm"]
    vars(found["vllm._custom_ops"])["fused_add_rms_norm"] = "the kernel"
    vars(norms)[invariant.NAME] = by_rows
    yield norms


def test_it_is_put_where_it_is_needed(
    layernorm: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and never where the kernel is right or there is no GPU."""
    asked, cuda, found = [], torch.device("cuda", 0), [False, True]
    monkeypatch.setattr(
        invariant, "depends_on_rows", lambda *given: asked.append(given) or found.pop(0)
    )
    current = lambda: getattr(layernorm, invariant.NAME)
    assert not invariant.serve(CPU) and not asked and current() is by_rows
    assert not invariant.serve(cuda) and current() is by_rows
    assert invariant.serve(cuda)
    assert isinstance(current(), invariant.RowByRow) and current().theirs is by_rows
    served = current()
    assert invariant.serve(cuda) and current() is served
    assert asked == [("the kernel", cuda)] * 2

"""Engines' own calls of FlashMLA: their text, bytes of caches by hand, and fp64 of those bytes.

A method's text is read from an unpacked release and run with the one name replaced, so what it
passes is what the engine passes.  Nothing of the engine is imported.  Caches and their values are
made here, without snapmla's formats, of a tenth of a standard deviation, as FlashMLA's tests have
them, whose gates are these.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapmla.testing.dense_job import COSINE_GATE, LSE_GATE, OUT_GATE


def methods(
    file: Path, owner: str, names: tuple[str, ...], known: dict[str, Any]
) -> dict[str, Any]:
    """Methods of a class in a file, as functions over the names that they are given."""
    body = ast.parse(file.read_text()).body
    (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    space = {"torch": torch, **known}
    for node in found.body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.returns, node.decorator_list = None, []
            for given in (*node.args.args, *node.args.kwonlyargs):
                given.annotation = None
            exec(compile(ast.Module([node], []), file.name, "exec"), space)
    return {name: space[name] for name in names}


class Pages(NamedTuple):
    """A cache.

    Attributes:
        raw: uint8 (pages, size, bytes of a token).
        values: float64 (pages * size, channels).
    """

    raw: Tensor
    values: Tensor


def pages_656(count: int, size: int, seed: int) -> Pages:
    """V3.2's: 512 e4m3, 4 fp32 scales, 64 bf16."""
    r = torch.Generator().manual_seed(seed)
    latent = torch.randn(count, size, 512, generator=r).to(torch.float8_e4m3fn)
    scale = (torch.rand(count, size, 4, generator=r) + 0.5) / 10
    rope = (torch.randn(count, size, 64, generator=r) / 10).bfloat16()
    raw = torch.cat([part.view(torch.uint8) for part in (latent, scale, rope)], -1)
    content = latent.double() * scale.double().repeat_interleave(128, -1)
    return Pages(raw, torch.cat([content, rope.double()], -1).flatten(0, 1))


def pages_584(count: int, size: int, seed: int) -> Pages:
    """V4's: a page has rows of 448 e4m3 and 64 bf16, behind them 7 exponents a token and a byte."""
    r = torch.Generator().manual_seed(seed)
    stride = -(-size * 584 // 576) * 576
    raw = torch.zeros(count, stride, dtype=torch.uint8)
    latent = torch.randn(count, size, 448, generator=r).to(torch.float8_e4m3fn)
    rope = (torch.randn(count, size, 64, generator=r) / 10).bfloat16()
    exponent = torch.randint(121, 126, (count, size, 7), generator=r).to(torch.uint8)
    data = raw[:, : size * 576].view(count, size, 576)
    data[..., :448], data[..., 448:] = latent.view(torch.uint8), rope.view(torch.uint8)
    raw[:, size * 576 : size * 584].view(count, size, 8)[..., :7] = exponent
    scale = torch.exp2(exponent.double() - 127).repeat_interleave(64, -1)
    values = torch.cat([latent.double() * scale, rope.double()], -1).flatten(0, 1)
    return Pages(raw.as_strided((count, size, 584), (stride, 584, 1)), values)


Listed = tuple[Tensor, Tensor, Tensor | None]  # values, lists (tokens, topk), how many count


def truth(q: Tensor, lists: list[Listed], scale: float, sink: Tensor | None = None) -> Any:
    """(out (tokens, h, 512), natural LSE (tokens, h)) in float64; a sink weighs in out alone."""
    outs, lses = [], []
    for t, row in enumerate(q.double()):
        seen = []
        for values, indices, lengths in lists:
            named = indices[t] if lengths is None else indices[t, : int(lengths[t])]
            seen.append(values[named[named >= 0].long()])
        k = torch.cat(seen)
        logits = row @ k.T * scale
        lse = logits.logsumexp(1)
        whole = lse if sink is None else torch.logaddexp(lse, sink.double())
        outs.append((logits - whole[:, None]).exp() @ k[:, :512])
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def outside(got: Tensor, want: Tensor, gate: tuple[float, float]) -> int:
    """Elements that neither gate lets pass, absolute nor relative."""
    error = (got.double() - want).abs()
    return int(((error > gate[0]) & (error > gate[1] * want.abs())).sum())


def check(out: Tensor, want: Tensor, lse: Tensor | None = None, lses: Any = None) -> None:
    """Asserts that results are finite and pass FlashMLA's gates."""
    assert out.isfinite().all() and outside(out, want, OUT_GATE) == 0
    a, b = out.double().flatten(), want.flatten()
    assert 1 - 2 * (a @ b) / (a @ a + b @ b) <= COSINE_GATE
    if lse is not None:
        assert outside(lse, lses, LSE_GATE) == 0


def lists_of(tokens: int, topk: int, count: int, seed: int) -> Tensor:
    """int32 (tokens, topk) of distinct slots in any order, some of them -1."""
    r = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(max(count, topk), generator=r)[:topk] for _ in range(tokens)]
    found = torch.stack(rows).int()
    return found.where((found < count) & (torch.rand(found.shape, generator=r) > 0.05), -1)

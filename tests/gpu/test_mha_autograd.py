"""Gradients of ``mha_prefill`` on a real GPU: fp64 at 4096 tokens, FlashMLA's shapes and gates,
bits, graphs, compiled code.

Variants may come from elsewhere, no compiler is needed; those that are not there are skipped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsl_kernels.spec import VariantSpec
from snapmla.compat.flash_mla import mha
from snapmla.mha import backward_workspace_size, mha_prefill, mha_prefill_backward
from snapmla.runtime import variants as runtime
from snapmla.testing import metrics
from snapmla.testing.dense_job import out_of_gate
from snapmla.testing.mha_grad_job import GradJob, variants
from snapmla.testing.mha_job import COSINE_GATE, OUT_GATE, MhaJob, offsets
from snapmla.testing.workloads.mha_backward import forward_spec

pytestmark = pytest.mark.gpu
DEVICE, RUNS = "cuda", 5
REST = 9  # rows of no sequence that a drawn job has behind its last


def spec_of(d_qk: int) -> VariantSpec:
    """A variant of mha_dq, if all kernels are there or can be built here."""
    spec = VariantSpec(op="mha_dq", d_qk=d_qk, dtype="bf16")
    lists = VariantSpec(op="mha_items", lists="backward")
    for needed in (forward_spec(spec), lists, *variants(spec).values()):
        if runtime.jit_refusal() and runtime.find(needed) is None:
            pytest.skip(f"{needed.name} is not built, and nothing compiles here")
    return spec


def drawn(d_qk: int, lengths: Any, heads: tuple[int, int], **options: Any) -> MhaJob:
    """Inputs, if all kernels are there or can be built here."""
    spec = spec_of(d_qk)
    torch.manual_seed(1)
    given = (*lengths, *heads)
    return MhaJob.draw(forward_spec(spec), *given, device=DEVICE, **options)


def call_of(job: MhaJob) -> dict[str, Any]:
    """Arguments of ``mha_prefill``; rows are leaves."""
    rows = {"q": job.q, **dict(zip(("k_nope", "k_rope"), job.ks)), "v": job.v}
    return {
        **{n: x.clone().requires_grad_() for n, x in rows.items()},
        "cu_seqlens_q": offsets(job.lq).to(DEVICE), "cu_seqlens_k": offsets(job.lk).to(DEVICE),
        "max_seqlen_q": max(job.lq), "max_seqlen_k": max(job.lk), "causal": job.causal,
    }  # fmt: skip


def gradients(call: dict[str, Any], dout: Tensor, dlse: Tensor | None) -> Any:
    """((out, lse), gradients by name)."""
    made = mha_prefill(**call)
    names = [n for n in ("q", "k_nope", "k_rope", "v") if n in call]
    pairs = [(x, g) for x, g in zip(made, (dout, dlse)) if g is not None]
    found = torch.autograd.grad(
        [x for x, _ in pairs], [call[n] for n in names], [g for _, g in pairs]
    )
    return made, {f"d{n}": g for n, g in zip(names, found)}


@pytest.mark.parametrize(("lengths", "heads"), [
    (((4096, 4096), (4096, 4096)), (4, 4)), (((4096,), (4096,)), (8, 2)),
    (((512, 0, 1300, 1), (700, 40, 1300, 0)), (64, 64)),  # RoPE channels of four heads a sum
    (((0, 1, 127, 128, 129, 300, 4096), (5, 1, 300, 128, 64, 300, 4096)), (4, 2)),
])  # fmt: skip
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("d_qk", [192, 128])
def test_gradients(d_qk: int, causal: bool, lengths: Any, heads: tuple[int, int]) -> None:
    """NaN behind the last sequence, whose rows get 0; an LSE's gradient with the causal rule."""
    job = drawn(d_qk, lengths, heads, causal=causal)
    given = GradJob.of(job, lse_too=causal)
    (out, lse), grads = gradients(call_of(job), given.dout, given.dlse)
    for name, x in grads.items():
        assert not x[-REST:].any(), name
        x[-REST:] = math.nan
    errors = replace(given, out=out.detach(), lse=lse.detach()).errors(grads)
    assert errors.right, str(errors)


def as_flash_mla(d_qk: int, tokens: int, varlen: bool) -> tuple[list[Tensor], Tensor, Any]:
    """((q, k, v), dO, (lengths of queries, of keys)): 2 sequences and 128 heads as FlashMLA's test
    of separate heads has them, a tenth of normal numbers.

    Lengths that vary are drawn around ``tokens``, half of it the standard deviation; no sequence
    has fewer keys than queries.
    """
    torch.manual_seed(0)
    draw = random.Random(0)
    lq, lk = [tokens] * 2, [tokens] * 2
    if varlen:
        lq = [max(int(draw.normalvariate(tokens, tokens / 2)), 1) for _ in lq]
        lk = [max(int(draw.normalvariate(tokens, tokens / 2)), n) for n in lq]

    def rows(lengths: list[int], width: int) -> Tensor:
        return (torch.randn(sum(lengths), 128, width, device=DEVICE) / 10).bfloat16()

    return [rows(lq, d_qk), rows(lk, d_qk), rows(lk, 128)], rows(lq, 128), (lq, lk)


def by_its_name(inputs: list[Tensor], dout: Tensor, lengths: Any, causal: bool) -> list[Tensor]:
    """dq, dk, dv by FlashMLA's name and its test's scale."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
    lq, lk = lengths
    out, _ = mha.flash_attn_varlen_func(
        q, k, v, offsets(lq).to(DEVICE), offsets(lk).to(DEVICE), max(lq), max(lk),
        softmax_scale=(inputs[0].shape[-1] + 100) ** -0.5, causal=causal,
    )  # fmt: skip
    return list(torch.autograd.grad(out, leaves, dout))


def truths(inputs: list[Tensor], dout: Tensor, lengths: Any, causal: bool) -> list[Tensor]:
    """dq, dk, dv by autograd in fp64, of a sequence and two heads at a time."""
    grads = [torch.empty_like(x, dtype=torch.float64) for x in inputs]
    q0 = k0 = 0
    for s_q, s_k in zip(*lengths):
        places = slice(q0, q0 + s_q), slice(k0, k0 + s_k), slice(k0, k0 + s_k)
        q0, k0 = q0 + s_q, k0 + s_k
        hidden = torch.ones(s_q, s_k, dtype=torch.bool, device=DEVICE).triu(s_k - s_q + 1)
        for first in range(0, dout.shape[1], 2):
            heads = slice(first, first + 2)
            parts = [x[at, heads].transpose(0, 1).double() for x, at in zip(inputs, places)]
            q, k, v = leaves = [x.requires_grad_() for x in parts]
            s = q @ k.mT * (q.shape[-1] + 100) ** -0.5
            p = (s.masked_fill(hidden, -math.inf) if causal else s).softmax(-1)
            found = torch.autograd.grad(
                p @ v, leaves, dout[places[0], heads].transpose(0, 1).double()
            )  # fmt: skip
            for into, at, x in zip(grads, places, found):
                into[at, heads] = x.transpose(0, 1)
    return grads


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("d_qk", [128, 192])
def test_flash_mla_s_shapes_and_gates(d_qk: int, varlen: bool, causal: bool) -> None:
    """2 x 4096 with 128 heads; an element is right by either of its gates, the cosine is of all."""
    spec_of(d_qk)
    inputs, dout, lengths = as_flash_mla(d_qk, 4096, varlen)
    got = by_its_name(inputs, dout, lengths, causal)
    for name, x, want in zip(("dq", "dk", "dv"), got, truths(inputs, dout, lengths, causal)):
        assert not out_of_gate(x, want, OUT_GATE).any(), name
        assert metrics.one_minus_cosine(x, want) <= COSINE_GATE, name


@pytest.mark.parametrize("d_qk", [128, 192])
def test_flash_mla_s_longer_shapes_repeat(d_qk: int) -> None:
    """2 x 8192 with 128 heads, which its test compares with itself alone: the same bits, of dQ
    too."""
    spec_of(d_qk)
    given = as_flash_mla(d_qk, 8192, False)
    first = by_its_name(*given, True)
    for _ in range(RUNS - 1):
        again = by_its_name(*given, True)
        assert all(torch.equal(x, y) for x, y in zip(first, again))


def test_bits() -> None:
    """Five runs, and the second of two sequences alone."""
    job = drawn(192, ((3000, 2048), (3000, 2500)), (16, 16))
    dout = torch.randn(len(job.q), 16, 128, device=DEVICE).bfloat16()
    found = [gradients(call_of(job), dout, None)[1] for _ in range(RUNS)]
    for each in found[1:]:
        assert all(torch.equal(x, found[0][name]) for name, x in each.items())
    rows, keys = slice(3000, 5048), slice(3000, 5500)
    alone = replace(
        job, q=job.q[rows], ks=tuple(k[keys] for k in job.ks), v=job.v[keys], lq=(2048,), lk=(2500,)
    )
    for name, x in gradients(call_of(alone), dout[rows], None)[1].items():
        assert torch.equal(x, found[0][name][rows if name == "dq" else keys]), name


def loss_of(job: MhaJob) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """(a scalar of q, k_nope, k_rope and v, these)."""
    call = call_of(job)
    names = ("q", "k_nope", "k_rope", "v")
    where = {n: x for n, x in call.items() if n not in names}

    def of(q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor) -> Tensor:
        out, lse = mha_prefill(q, k_nope, v, k_rope=k_rope, **where)
        return (out[:-REST].float() ** 2).sum() + lse[:, :-REST].sum()

    return of, [call[n] for n in names]


def grads_of(function: Callable[..., Tensor], rows: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(function(*rows), rows)


def accumulated(function: Callable[..., Tensor], rows: list[Tensor]) -> list[Tensor | None]:
    """By ``backward``, which a reentrant checkpoint insists on."""
    leaves = [x.detach().clone().requires_grad_() for x in rows]
    function(*leaves).backward()
    return [x.grad for x in leaves]


def test_compiled_and_checkpointed() -> None:
    """One graph, or a forward again: the same bits."""
    function, rows = loss_of(drawn(192, ((700, 300), (700, 300)), (8, 8)))
    want = grads_of(function, rows)

    def again(reentrant: bool) -> Callable[..., Tensor]:
        return lambda *given: checkpoint(function, *given, use_reentrant=reentrant)

    for way in (torch.compile(function, fullgraph=True), again(True), again(False)):
        for x, y in zip(accumulated(way, rows), want):
            assert x is not None and torch.equal(x, y)


def test_a_graph_holds_forward_and_backward() -> None:
    """Replayed over other numbers: the bits of eager calls."""
    function, rows = loss_of(drawn(192, ((700, 300), (700, 300)), (8, 8)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        grads_of(function, rows)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = grads_of(function, rows)
    for _ in range(2):
        with torch.no_grad():
            for x in rows:
                x[:-REST].normal_()
        graph.replay()
        got = [x.clone() for x in held]
        assert all(torch.equal(x, y) for x, y in zip(got, grads_of(function, rows)))


def test_memory_is_what_is_counted() -> None:
    """Gradients and the workspace, nothing else."""
    job = drawn(192, ((2048, 2048), (2048, 2048)), (64, 64))
    call: dict[str, Any] = {
        n: x.detach() if isinstance(x, Tensor) else x for n, x in call_of(job).items()
    }
    out, lse = mha_prefill(**call)
    dout = torch.randn_like(out)
    for _ in range(2):  # kernels are loaded by the first
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        grads = mha_prefill_backward(dout, out=out, lse=lse, **call)
        took = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        results = sum(x.nbytes for x in grads if x is not None)
        del grads
    assert took == results + 4 * backward_workspace_size(len(job.q), len(job.v), 2, 64, 64)


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("d_qk", [192, 128])
def test_calls_behind_each_other_in_one_workspace(d_qk: int, graphed: bool) -> None:
    """Few tokens, so that dK and dV begin beside dQ: lists and counts of the call before, of other
    lengths, lie in the same words, and no call waits for the host.  Bits as of calls alone."""
    lengths = (((512,), (512,)), ((70, 300, 1), (130, 290, 5)), ((1024,), (1000,)))
    calls: list[dict[str, Any]] = []
    for each in lengths:
        job = drawn(d_qk, each, (16, 16))
        call = {n: x.detach() if isinstance(x, Tensor) else x for n, x in call_of(job).items()}
        out, lse = mha_prefill(**call)
        calls.append({**call, "dout": torch.randn_like(out), "out": out, "lse": lse})

    def size(call: dict[str, Any]) -> int:
        batch = len(call["cu_seqlens_q"]) - 1
        return backward_workspace_size(len(call["q"]), len(call["v"]), batch, 16, 16, d_qk)

    workspace = torch.empty(max(map(size, calls)), dtype=torch.int32, device=DEVICE)

    def ends(call: dict[str, Any]) -> list[Tensor]:
        """Gradients of rows of sequences."""
        grads = mha_prefill_backward(**call, workspace=workspace)
        return [x[: len(x) - REST] for x in grads if x is not None]

    want = []
    for call in calls:
        want.append([x.clone() for x in ends(call)])
        torch.cuda.synchronize()
    turns = [i % 3 for i in range(60)]
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [ends(calls[i]) for i in turns]
        for _ in range(3):
            graph.replay()
    else:
        found = [ends(calls[i]) for i in turns]
    for i, each in zip(turns, found):
        assert all(torch.equal(x, y) for x, y in zip(each, want[i], strict=True)), i

"""Operators, fakes, pytrees and ``torch.compile``, on the software GPU (on the real one: gpu)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import io
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils import _pytree as pytree

import snapmla
from snapmla import dsa
from snapmla.cache import layouts
from snapmla.indexer import shapes
from snapmla.runtime import launch
from snapmla.sparse import rows_plan
from snapmla.testing import selfcheck
from snapmla.torch_ops import pytrees
from tests.support.bits import same_bits
from tests.support.dense_steps import DenseStep
from tests.support.needs import DEVICES, needs_kernels

pytestmark = needs_kernels
SCALE = 192**-0.5
HEADS, PAGE, WIDTH = 8, 64, 3
LENGTHS = (130, 5)


class Layer:
    """One layer's step: seven new tokens, two sequences; everything random but fixed."""

    def __init__(self, device: str, layout: str = "split") -> None:
        torch.manual_seed(1)
        if layout == "strided":  # a pool whose pages hold this layer and two others
            pool = torch.empty((2 * WIDTH, 3, PAGE * 644), dtype=torch.uint8, device=device)
            views = layouts.views_of(pool[:, 1], None, None)
            self.cache = snapmla.PagedKVCache.from_tensors(*views)
        else:
            self.cache = snapmla.PagedKVCache.allocate(2 * WIDTH, PAGE, layout, device)
        c, r = self.tokens(6 * PAGE, device)
        snapmla.append_kv(self.cache, c, r, torch.arange(6 * PAGE, device=device))
        self.table = torch.arange(2 * WIDTH, dtype=torch.int32, device=device).view(2, WIDTH)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        self.new = (*self.tokens(7, device), torch.arange(123, 130, device=device))
        self.q_nope = torch.randn(2, 1, HEADS, 512, device=device).bfloat16()
        self.q_rope = torch.randn(2, 1, HEADS, 64, device=device).bfloat16()
        self.plan = snapmla.plan_decode(
            self.lengths, HEADS, 1, page_size=PAGE, max_pages=WIDTH, num_parts=3, fixed_overhead=0
        )

    @staticmethod
    def tokens(n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        c, r = selfcheck.sample_tokens(n)
        return c.bfloat16().to(device), r.bfloat16().to(device)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            self.cache, *self.new, self.q_nope, self.q_rope, self.table, self.lengths, self.plan,
        )  # fmt: skip


@functools.cache
def _layer(device: str, layout: str) -> Layer:
    return Layer(device, layout)


def fresh_layer(device: str, layout: str = "split") -> Layer:
    """The layer, every time in fresh memory."""
    return copy.deepcopy(_layer(device, layout))


def step(
    cache: snapmla.PagedKVCache,
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    slots: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    plan: snapmla.DecodePlan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append, quantise, decode: what an engine compiles."""
    snapmla.append_kv(cache, c_kv, k_rope, slots)
    q = snapmla.quantize_q(q_nope * 1.5, q_rope)
    out, lse = snapmla.decode(q, cache, table, lengths, softmax_scale=SCALE, plan=plan)
    return out + 1, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        pytest.param("aot_eager", "split", marks=pytest.mark.whole_matrix),
        pytest.param("aot_eager", "paged", marks=pytest.mark.whole_matrix),
        pytest.param("aot_eager", "row640", marks=pytest.mark.whole_matrix),
        ("aot_eager", "strided"),
        ("inductor", "split"),
        ("inductor", "paged"),
    ],
)
def test_compiled_layer_equals_eager(backend: str, layout: str, device: str) -> None:
    eager, compiled = fresh_layer(device, layout), fresh_layer(device, layout)
    assert compiled.cache.layout == layout
    want = step(*eager.arguments)
    before = compiled.cache.content_u8.clone()
    torch._dynamo.reset()
    function = torch.compile(step, fullgraph=True, backend=backend)
    got = function(*compiled.arguments)
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)
    assert not torch.equal(compiled.cache.content_u8, before), "nothing was appended"
    for name in ("content", "rope", "scale"):
        a, b = getattr(compiled.cache, name), getattr(eager.cache, name)
        assert same_bits(a, b), name
    # a later step: other lengths, same graph
    for layer in (eager, compiled):
        layer.lengths.copy_(torch.tensor([64, 66]))
        layer.plan.update_(layer.lengths)
    want, got = step(*eager.arguments), function(*compiled.arguments)
    assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])


def test_compiled_update_out_and_fetch() -> None:
    """update_, preallocated results and fetch_dequant inside one graph."""
    layer, other = fresh_layer("cpu"), fresh_layer("cpu")

    def body(layer: Layer, lengths: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layer.plan.update_(lengths)
        q = snapmla.quantize_q(layer.q_nope, layer.q_rope, granularity="token")
        _, lse = snapmla.decode(
            q, layer.cache, layer.table, lengths, softmax_scale=SCALE, plan=layer.plan, out=out,
            lse_base="2",
        )  # fmt: skip
        c, r = snapmla.fetch_dequant(layer.cache, layer.table, lengths)
        begins = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        packed, _ = snapmla.fetch_dequant(layer.cache, layer.table, cu_seqlens=begins, total=250)
        return lse, c[0, :60], r[0, :60], packed

    lengths = torch.tensor([60, 190], dtype=torch.int32)
    out, want_out = (torch.zeros(2, 1, HEADS, 512) for _ in range(2))
    want = body(other, lengths, want_out)
    torch._dynamo.reset()
    got = torch.compile(body, fullgraph=True, backend="aot_eager")(layer, lengths, out)
    assert torch.equal(out, want_out) and out.abs().sum() > 0
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(layer.plan.planned_seqlens, lengths)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("result", "backend"), [("out_b", "aot_eager"), ("none", "aot_eager"), ("both", "inductor")]
)
def test_compiled_merge(result: str, backend: str, device: str) -> None:
    """Over a part, whose memory a tracer replaces by a new value; packed rows."""
    parts = {
        "out_a": torch.randn(3, HEADS, 512), "lse_a": torch.randn(HEADS, 3),
        "out_b": torch.randn(3, HEADS, 512), "lse_b": torch.randn(HEADS, 3),
    }  # fmt: skip
    parts = {name: value.to(device) for name, value in parts.items()}

    def body(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given = {
            "out_b": {"out": parts["out_b"]},
            "both": {"out": parts["out_a"], "lse": parts["lse_a"]},
            "none": {},
        }[result]
        out, lse = snapmla.merge_state(**parts, lse_base="2", **given)
        return out * 2, lse

    other = {name: value.clone() for name, value in parts.items()}
    want = body(other)
    torch._dynamo.reset()
    got = torch.compile(body, fullgraph=True, backend=backend)(parts)
    for a, b in zip((*got, *parts.values()), (*want, *other.values()), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lse_base": "10"}, "lse_base: expected one of 'e', '2', got '10'"),
        ({"causal": None}, "causal: expected True or False, got NoneType"),
        ({"wider": True}, "block_table: expected a width of"),
    ],
)
def test_a_traced_decode_says_what_is_wrong(changes: dict, said: str) -> None:
    layer = fresh_layer("cpu")
    table = layer.table
    if changes.pop("wider", False):
        table = torch.cat([table, table], 1)
    q = snapmla.quantize_q(layer.q_nope, layer.q_rope)

    def body() -> torch.Tensor:
        return snapmla.decode(
            q, layer.cache, table, layer.lengths, softmax_scale=SCALE, plan=layer.plan, **changes
        )[0]

    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(said)):
        torch.compile(body, fullgraph=True, backend="eager")()


class Attention(torch.nn.Module):
    def forward(
        self, q: snapmla.QuantizedQuery | torch.Tensor, cache: snapmla.PagedKVCache,
        plan: snapmla.DecodePlan, table: torch.Tensor, lengths: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return snapmla.decode(q, cache, table, lengths, softmax_scale=SCALE, plan=plan)[0]


@pytest.mark.parametrize(("dtype", "strict"), [("fp8", False), ("fp8", True), ("bf16", False)])
def test_export(dtype: str, strict: bool) -> None:
    """Caches, plans and queries are arguments of an exported program, and of one from a file."""
    if dtype == "fp8":
        layer = fresh_layer("cpu", "paged")
        q = snapmla.quantize_q(layer.q_nope, layer.q_rope)
        inputs: tuple[Any, ...] = (q, layer.cache, layer.plan, layer.table, layer.lengths)
    else:
        step = DenseStep.make((70, 0), 4)
        inputs = (step.q, step.cache, step.plan(num_parts=2), step.block_table, step.cache_seqlens)
    program = torch.export.export(Attention(), inputs, strict=strict)
    called = [str(node.target) for node in program.graph.nodes]
    assert any("snapmla.decode" in name or "snapmla.dense_decode" in name for name in called)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    want = Attention()(*inputs)
    for module in (program.module(), torch.export.load(file).module()):
        assert torch.equal(module(*inputs), want) and want.abs().sum() > 0


def test_a_traced_decode_wants_a_plan() -> None:
    layer = fresh_layer("cpu")

    def body(layer: Layer) -> torch.Tensor:
        q = snapmla.quantize_q(layer.q_nope, layer.q_rope)
        return snapmla.decode(q, layer.cache, layer.table, layer.lengths, softmax_scale=SCALE)[0]

    torch._dynamo.reset()
    with pytest.raises(Exception, match="plan_decode outside"):
        torch.compile(body, fullgraph=True, backend="aot_eager")(layer)


@pytest.mark.parametrize("layout", ["split", "paged", "row640"])
def test_the_pool_is_not_copied(layout: str) -> None:
    """Inductor's code hands the very arguments to append and to decode."""
    layer = fresh_layer("cpu", layout)
    torch._dynamo.reset()
    _, codes = run_and_get_code(torch.compile(step, fullgraph=True), *layer.arguments)
    (written,) = re.findall(r"snapmla\.append_kv\.default\((\w+), ", codes[-1])
    (read,) = re.findall(r"snapmla\.decode\.default\(\w+, \w+, \w+, (\w+), ", codes[-1])
    assert written == read and written.startswith("arg")


def test_memory_that_tracers_cannot_follow_is_refused() -> None:
    """One arena for three tensors: no layout of ours, though strides look like ``split``."""
    layer, tokens = fresh_layer("cpu"), 2 * WIDTH * PAGE
    arena = torch.zeros(tokens * 644, dtype=torch.uint8)
    content, rope, scale = arena.split((512 * tokens, 128 * tokens, 4 * tokens))
    layer.cache = snapmla.PagedKVCache.from_tensors(
        content.view(-1, PAGE, 512), rope.view(torch.bfloat16).view(-1, PAGE, 64),
        scale.view(torch.float32).view(-1, PAGE),
    )  # fmt: skip
    assert layer.cache.layout == "split" and not layer.cache.traceable
    snapmla.append_kv(layer.cache, *layer.new)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="cache: expected layout .*append outside"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(*layer.arguments)

    def decode_only(layer: Layer) -> torch.Tensor:
        q = snapmla.quantize_q(layer.q_nope, layer.q_rope)
        return snapmla.decode(
            q, layer.cache, layer.table, layer.lengths, softmax_scale=SCALE, plan=layer.plan
        )[0]

    torch._dynamo.reset()
    got = torch.compile(decode_only, fullgraph=True, backend="aot_eager")(layer)
    assert torch.equal(got, decode_only(layer))


@pytest.mark.parametrize("heads", [1, 2])
def test_compiled_append_and_fetch_of_16_bits(heads: int) -> None:
    """Pages of another layer lie between; a cache made inside of the graph, one that is given."""
    own = () if heads == 1 else (heads,)

    def body(
        cache: snapmla.PagedKVCache, pool: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        snapmla.append_kv(cache, tokens[..., :512], tokens[..., 512:], slots)
        other = snapmla.PagedKVCache.from_tensors(pool)
        snapmla.append_kv(other, tokens[..., :512] * 2, tokens[..., 512:], slots)
        c_kv, k_rope = snapmla.fetch_dequant(cache, slots)
        return c_kv + 1, k_rope, snapmla.fetch_dequant(other, slots)[0]

    results = []
    for compiled in (False, True):
        torch.manual_seed(3)
        memory = torch.zeros((3, 2, 16, heads, 576), dtype=torch.bfloat16)
        pool = torch.zeros((3, 16, heads, 576), dtype=torch.bfloat16)
        cache = snapmla.PagedKVCache.from_tensors(memory[:, 1])
        tokens = torch.randn(5, *own, 576).bfloat16()
        slots = torch.tensor([3, 40, -1, 17, 0], dtype=torch.int32)
        torch._dynamo.reset()
        run = torch.compile(body, fullgraph=True, backend="aot_eager") if compiled else body
        results.append((*run(cache, pool, tokens, slots), memory, pool))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.any()


# ---------------------------------------------------------------------------- opcheck


def operator_call(name: str, device: str, layout: str = "split") -> tuple[Any, ...]:
    """The sample call of an operator, every time in fresh memory."""
    return copy.deepcopy(operator_calls(device, layout)[name])


@functools.cache
def operator_calls(device: str, layout: str = "split") -> dict[str, tuple[Any, ...]]:
    """One sample call of every operator: not to be run, see ``operator_call``."""
    layer = fresh_layer(device, layout)
    torch.manual_seed(2)
    cache = layer.cache.memory
    q = snapmla.quantize_q(layer.q_nope, layer.q_rope)
    token = snapmla.quantize_q(layer.q_nope, layer.q_rope, "token")
    plan = layer.plan
    decode = (
        q.nope_u8, q.rope, token.scale, *cache, layer.table, layer.lengths, plan.work_items,
        plan.part_begin, plan.split_begin, plan.units, plan.row_limits, plan.o_accum.zero_(),
        plan.lse_accum.zero_(), plan.pipeline, plan.row_tile, True, SCALE, True, 1.0, 0.0,
    )  # fmt: skip
    kv = torch.ones(4, 16, 2, 576, dtype=torch.float16, device=device)
    dense_plan = snapmla.plan_decode(
        torch.tensor([3, 0], dtype=torch.int32, device=device), HEADS, 1, page_size=16,
        max_pages=2, num_parts=2, cache_dtype=torch.float16,
    )  # fmt: skip
    dense = (
        torch.ones(2, 1, HEADS, 576, dtype=torch.float16, device=device), kv,
        torch.zeros(2, 2, dtype=torch.int32, device=device), dense_plan.planned_seqlens.clone(),
        dense_plan.work_items, dense_plan.part_begin, dense_plan.split_begin, dense_plan.units,
        dense_plan.row_limits, dense_plan.o_accum.zero_(), dense_plan.lse_accum.zero_(),
        dense_plan.pipeline, dense_plan.row_tile, True, SCALE, True, 1.0, 0.0,
    )  # fmt: skip
    dense_out = torch.zeros(2, 1, HEADS, 512, dtype=torch.float16, device=device)
    out = torch.zeros(2, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
    lse = torch.zeros(2, HEADS, 1, device=device)
    fetched = torch.zeros(2, PAGE, 512, device=device), torch.zeros(2, PAGE, 64, device=device)
    angles = torch.rand(9, 64, device=device).bfloat16()
    rotation = (torch.tensor([[8], [0]], device=device), angles, True)
    weight = torch.ones(512, dtype=torch.bfloat16, device=device)
    short = torch.tensor([60, 3], dtype=torch.int32, device=device)
    tables = (
        plan.work_items, plan.part_begin, plan.split_begin, plan.planned_seqlens, plan.units,
        plan.unit_begin, plan.row_limits,
    )  # fmt: skip
    records = torch.zeros(len(plan.part_begin) - 1, 8, dtype=torch.int32, device=device)
    splits = torch.zeros_like(plan.split_begin)
    numbers = (WIDTH * PAGE, plan.token_tile, 4, 0, 0, 1, 0, 0, HEADS, 1, plan.unit_rows, True)
    return {
        "append_kv": (*cache, *layer.new),
        "rope_append_kv": (
            *cache, *layer.new, torch.arange(7, device=device), angles, True, weight, 1e-6
        ),
        "quantize_q": (layer.q_nope, layer.q_rope, "token_head"),
        "quantize_q_out": (
            layer.q_nope, layer.q_rope, "token_head", q.nope_u8.clone(), q.rope.clone(),
            q.scale.clone(),
        ),
        "rope_quantize_q": (layer.q_nope, layer.q_rope, *rotation, "token_head"),
        "rope_quantize_q_out": (
            layer.q_nope, layer.q_rope, *rotation, "token_head", q.nope_u8.clone(), q.rope.clone(),
            q.scale.clone(),
        ),
        "plan_update": (layer.lengths, None, None, *tables, *numbers),
        "plan_to_records": (*tables[:3], records, splits),
        "records_to_plan": (records, layer.lengths, splits.clone(), *tables[:4], 99, 64, HEADS, 1),
        "decode": (*decode, torch.float32),
        "decode_out": (*decode, out, lse),
        "dense_decode": dense,
        "dense_decode_out": (*dense, dense_out, lse.clone()),
        **sparse_calls(device),
        "fetch_dequant": (*cache, layer.table, short, torch.float32),
        "fetch_dequant_out": (*cache, layer.table, short, *fetched),
        "merge_states": ([out + 1, out + 2], [lse, lse + 1], False, 1.0),
        "merge_states_out": (
            [torch.stack([out, out + 1, out + 2])], [torch.stack([lse] * 3)], True, 1.0,
            out.clone(), lse.clone(),
        ),
        **index_calls(device),
        **byte_calls(device),
        **select_calls(device),
        **prefill_calls(device),
    }  # fmt: skip


def select_calls(device: str) -> dict[str, tuple[Any, ...]]:
    """Of rows that begin anywhere, to slots."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 40, generator=draw).to(device)
    lengths, starts = (torch.tensor(x).int().to(device) for x in ((33, 3, 0, 9), (1, 0, 2, 7)))
    table = torch.tensor([[4, 2, 7], [5, 9, 3]], dtype=torch.int32, device=device)
    given = (logits, lengths, 8, table, 16, starts, 2)
    out, counts = (torch.zeros(x, dtype=torch.int32, device=device) for x in ((4, 8), (4,)))
    return {"select_topk": given, "select_topk_out": (*given, out, counts)}


def byte_calls(device: str) -> dict[str, tuple[Any, ...]]:
    """Of operators that are told the format, with pages of another layer between."""
    kv = torch.zeros((4, 2, 5, 656), dtype=torch.uint8, device=device)[:, 1]
    tokens = (*Layer.tokens(3, device), torch.tensor([11, -1, 6], device=device))
    append = (kv, "fp8_ds_mla", "ue8m0", *tokens[:2], tokens[2].int())
    table = torch.tensor([[2, 1], [0, 3]], dtype=torch.int32, device=device)
    lengths = torch.tensor([7, 0], dtype=torch.int32, device=device)
    angles = torch.rand(9, 64, device=device)
    weight = torch.ones(512, dtype=torch.bfloat16, device=device)
    given = (kv.unsqueeze(2), "fp8_ds_mla", table, lengths)
    results = torch.zeros(2, 7, 512, device=device), torch.zeros(2, 7, 64, device=device)
    return {
        "append_bytes": append,
        "rope_append_bytes": (
            kv, "fp8_ds_mla", None, *tokens, torch.arange(3, device=device), angles, False, weight,
            1e-6,
        ),
        "fetch_bytes": (*given, torch.bfloat16),
        "fetch_bytes_out": (*given, *(x.bfloat16() for x in results)),
    }  # fmt: skip


def index_calls(device: str) -> dict[str, tuple[Any, ...]]:
    """Of the operators over an index cache."""
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8, device=device)
    ints = {"dtype": torch.int32, "device": device}
    keys = torch.ones(3, 128, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([0, -1, 127], device=device)
    q = torch.full((2, 64, 128), 0x38, dtype=torch.uint8, device=device)
    return {
        "append_index_k": (cache, keys, slots, *[None] * 4, "ue8m0", True, True, 1e-6),
        "dsa_prologue": prologue_call(device),
        "index_logits_out": (
            q, torch.ones(2, 64, device=device), cache, torch.tensor([[1, 0]], **ints),
            torch.tensor([3], **ints),
            torch.tensor([0, 2], **ints), torch.zeros(2, 70, device=device), 2,
        ),
        **step_calls(device),
    }  # fmt: skip


def prologue_call(device: str) -> tuple[Any, ...]:
    """Of a layer's projections."""
    ones = lambda *shape: torch.ones(shape, dtype=torch.bfloat16, device=device)
    wide = {"dtype": torch.float32, "device": device}
    slots = torch.tensor([127, -1], device=device)
    return (
        torch.zeros(2, 64, 1, 656, dtype=torch.uint8, device=device), None, None, "fp8_ds_mla",
        None, ones(2, 512), ones(2, 64), slots,
        torch.zeros(2, 64, 132, dtype=torch.uint8, device=device), ones(2, 128), slots.clone(),
        ones(2, 32, 128), ones(2, 32), ones(2, 2, 64), torch.arange(2, device=device),
        torch.rand(9, 64, device=device), ones(512), torch.ones(128, **wide),
        torch.ones(128, **wide), 1e-6, 1e-6, 0.1, False, True, "ue8m0", False,
        torch.zeros(2, 32, 128, dtype=torch.uint8, device=device), torch.zeros(2, 32, **wide),
        ones(2, 2, 64),
    )  # fmt: skip


def step_calls(device: str) -> dict[str, tuple[Any, ...]]:
    """Of a step's choice of tokens, drafts and ragged; of keys read back."""
    cache = torch.zeros(2, 64, 132, dtype=torch.uint8, device=device)
    ints = {"dtype": torch.int32, "device": device}
    q = torch.full((2, 64, 128), 0x38, dtype=torch.uint8, device=device)
    w, table = torch.ones(2, 64, device=device), torch.tensor([[1, 0]], **ints)
    rest = cache, table, torch.tensor([70], **ints)
    out, counts = torch.zeros(2, 8, **ints), torch.zeros(2, **ints)
    memory = torch.zeros(dsa.index_topk_workspace(2, 128), dtype=torch.uint8, device=device)
    keys = torch.zeros(3, 128, dtype=torch.uint8, device=device), torch.zeros(3, device=device)
    return {
        "index_topk": (q[None], w[None], *rest, None, 8, True, None, None),
        "index_topk_out": (
            q, w, *rest, torch.tensor([0, 2], **ints), 8, True, 100, 2, out, counts, memory
        ),
        "fetch_index_k_out": (cache, table, torch.tensor([0, 2], **ints), None, *keys),
    }  # fmt: skip


def sparse_calls(device: str) -> dict[str, tuple[Any, ...]]:
    """Of the operators over lists of tokens, one of them none."""
    ones = {"device": device, "dtype": torch.bfloat16}
    indices = torch.tensor([[0, -1, 5], [2, 1, 2]], dtype=torch.int32, device=device)
    results = torch.zeros(2, 1, HEADS, 512, **ones), torch.zeros(2, HEADS, 1, device=device)

    def lists(fmt: str) -> tuple[Any, ...]:
        plan = snapmla.plan_sparse_decode(
            HEADS, 1, topk=3, batch=2, device=device, num_parts=2, cache_dtype=fmt
        )
        return (
            indices, plan.planned_seqlens.clone(), torch.zeros(HEADS, device=device),
            plan.work_items, plan.part_begin, plan.split_begin, plan.units, plan.row_limits,
            plan.o_accum.zero_(), plan.lse_accum.zero_(), plan.pipeline, plan.row_tile, False,
            SCALE, 1.0, 0.0,
        )  # fmt: skip

    planes = (
        torch.full((2, 1, HEADS, 512), 0x38, dtype=torch.uint8, device=device),
        torch.ones(2, 1, HEADS, 64, **ones), torch.ones(2, 1, HEADS, device=device),
        torch.full((2, PAGE, 512), 0x38, dtype=torch.uint8, device=device),
        torch.ones(2, PAGE, 64, **ones), torch.ones(2, PAGE, device=device), *lists("fp8"),
    )  # fmt: skip
    rows = (
        torch.ones(2, 1, HEADS, 576, **ones),
        torch.zeros(2, PAGE, 1, 656, dtype=torch.uint8, device=device), *lists("fp8_ds_mla"),
    )  # fmt: skip
    plan_of_rows = snapmla.plan_sparse_decode(
        HEADS, 1, topk=3, batch=2, device=device, cache_dtype="bf16"
    )
    tables = [getattr(plan_of_rows, name) for name in rows_plan.TENSORS]
    of_rows = (
        rows[0], torch.ones(2, PAGE, 1, 576, **ones), indices[:, None],
        torch.tensor([3, 2], dtype=torch.int32, device=device), torch.zeros(HEADS, device=device),
        *tables[:3], tables[3].zero_(), tables[4].zero_(), 3, 64, 16, SCALE, 1.0, 0.0,
    )  # fmt: skip
    return {
        "sparse_decode": (*planes, torch.bfloat16),
        "sparse_decode_out": (*planes, *results),
        "sparse_decode_rows": (*rows, torch.bfloat16),
        "sparse_decode_rows_out": (*rows, *(x.clone() for x in results)),
        "sparse_decode_bf16": of_rows,
        "sparse_decode_bf16_out": (*of_rows, *(x.clone() for x in results)),
    }


def prefill_calls(device: str) -> dict[str, tuple[Any, ...]]:
    """Of sparse prefill, with every option."""
    ones = {"device": device, "dtype": torch.bfloat16}
    given = (
        torch.ones(2, HEADS, 576, **ones), torch.ones(5, 1, 576, **ones),
        torch.tensor([[[0, -1, 9]], [[2, 2, 4]]], dtype=torch.int32, device=device), SCALE, 512,
        torch.zeros(HEADS, device=device), torch.tensor([3, 2], dtype=torch.int32, device=device),
    )  # fmt: skip
    figures = [torch.zeros(2, HEADS, device=device) for _ in range(2)]
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32, device=device)
    heads = (
        torch.ones(2, 1, 192, **ones), torch.ones(2, 1, 128, **ones), torch.ones(2, 1, 64, **ones),
        torch.ones(2, 1, 128, **ones), cu_seqlens, cu_seqlens.clone(), 2, 2, SCALE, True, False,
    )  # fmt: skip
    results = torch.zeros(2, 1, 128, **ones), torch.zeros(1, 2, device=device)
    logs = torch.ones(1, 2, device=device)
    gradients = (
        torch.ones(2, 1, 128, **ones), logs, *heads[:4], torch.ones(2, 1, 128, **ones),
        torch.ones(1, 2, device=device), *heads[4:10], True,
    )  # fmt: skip
    return {
        "sparse_prefill": given,
        "sparse_prefill_out": (*given, torch.zeros(2, HEADS, 512, **ones), *figures),
        "mha_prefill": heads,
        "mha_prefill_out": (*heads, *results, None),
        "mha_prefill_backward": gradients,
        "mha_prefill_backward_out": (*gradients, *map(torch.zeros_like, heads[:4]), None),
    }


@pytest.mark.parametrize("name", ["PagedKVCache", "QuantizedQuery", "DecodePlan"])
def test_what_an_older_release_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names classes by the modules of that release, which this one does not have."""
    layer, file = fresh_layer("cpu"), io.BytesIO()
    value = {
        "PagedKVCache": layer.cache, "DecodePlan": layer.plan,
        "QuantizedQuery": snapmla.quantize_q(layer.q_nope, layer.q_rope),
    }[name]  # fmt: skip
    with monkeypatch.context() as older:
        for known in (type(value), *launch.PICKLED_WITH):
            module = pytrees.OLDER[known.__name__][-1]
            there = types.SimpleNamespace(**vars(sys.modules.get(module, types)))
            setattr(there, known.__name__, known)
            older.setitem(sys.modules, module, there)
            older.setattr(known, "__module__", module)
        torch.save(value, file)
    assert f"{module}\n".encode() in file.getvalue()
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert type(found) is type(value)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(value), strict=True):
        assert same_bits(a, b)


NAMES = (
    "append_kv", "rope_append_kv", "quantize_q", "quantize_q_out", "rope_quantize_q",
    "rope_quantize_q_out", "plan_update", "plan_to_records", "records_to_plan", "decode",
    "decode_out", "dense_decode", "dense_decode_out", "sparse_decode", "sparse_decode_out",
    "sparse_decode_rows", "sparse_decode_rows_out", "sparse_decode_bf16",
    "sparse_decode_bf16_out", "fetch_dequant", "fetch_dequant_out",
    "merge_states", "merge_states_out", "append_index_k", "dsa_prologue", "index_logits_out",
    "index_topk",
    "index_topk_out", "fetch_index_k_out", "append_bytes", "rope_append_bytes", "fetch_bytes",
    "fetch_bytes_out", "select_topk", "select_topk_out",
    "sparse_prefill", "sparse_prefill_out", "mha_prefill", "mha_prefill_out",
    "mha_prefill_backward", "mha_prefill_backward_out",
)  # fmt: skip


def test_every_operator_is_checked() -> None:
    from snapmla import torch_ops

    assert tuple(s.split("(")[0] for s in torch_ops.SCHEMAS) == NAMES
    assert tuple(operator_calls("cpu")) == NAMES


def test_the_docstring_lists_the_schemas() -> None:
    from snapmla import torch_ops

    text = torch_ops.__doc__ or ""
    assert tuple(re.findall(r"^    (\w+)\(", text, re.MULTILINE)) == NAMES
    for line in (
        "append_kv(content!, rope?!, scale?!, c_kv, k_rope, slot_mapping)\n",
        "quantize_q(q_nope, q_rope, granularity) -> (nope, rope, scale)\n",
        "merge_states_out(outs[], lses[], stacked, lse_factor, out!, lse!)\n",
    ):
        assert line in text
    flat = " ".join(text.split())
    assert " dtype, *, cu_seqlens?=None, seq_starts?=None, total?=None) -> (c_kv, k_rope)" in flat


# operators that take results, beside ``decode_out``, ``merge_out``, ... of the same code
RARELY = (
    "sparse_decode_bf16_out", "sparse_decode_rows_out", "sparse_prefill_out", "dense_decode_out",
    "index_topk_out", "mha_prefill_backward", "mha_prefill_backward_out",
)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.whole_matrix if n in RARELY else ()) for n in NAMES]
)
def test_opcheck(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":  # a variant of fewer threads, which other tests compile too
        monkeypatch.setattr(shapes, "choose", lambda *_: shapes.TopkShape(64, 8, 2))
        scoring = importlib.import_module("snapmla.indexer.index_logits")  # a function has its name
        monkeypatch.setattr(scoring, "sm_count", lambda _: 3)
    operator = getattr(torch.ops.snapmla, name).default
    torch.library.opcheck(operator, operator_call(name, device))


@pytest.mark.parametrize("layout", ["paged", "row640"])
@pytest.mark.parametrize("name", ["append_kv", "decode", "fetch_dequant"])
def test_opcheck_of_shared_memory(name: str, layout: str) -> None:
    operator = getattr(torch.ops.snapmla, name).default
    torch.library.opcheck(operator, operator_call(name, "cpu", layout))


@pytest.mark.parametrize("name", ["append_kv", "fetch_dequant"])
def test_opcheck_of_16_bits(name: str) -> None:
    kv = torch.zeros((3, 16, 2, 576), dtype=torch.float16)
    c_kv, k_rope = torch.ones((5, 2, 512)).half(), torch.ones((5, 2, 64)).half()
    rest: dict[str, tuple[Any, ...]] = {
        "append_kv": (c_kv, k_rope, torch.arange(5).int()),
        "fetch_dequant": (torch.zeros(1, 2).int(), torch.tensor([5]).int(), torch.float16),
    }
    operator = getattr(torch.ops.snapmla, name).default
    torch.library.opcheck(operator, (kv, None, None, *rest[name]))


def test_operators_are_told_the_format() -> None:
    """Bytes of its width are of no format by themselves."""
    kv, _, *rest = byte_calls("cpu")["fetch_bytes"]
    with pytest.raises(ValueError, match="format: expected one of None, 'fp8_ds_mla'.*, got 'fp8'"):
        torch.ops.snapmla.fetch_bytes(kv, "fp8", *rest)
    with pytest.raises(ValueError, match="content: expected content beside rope and scale"):
        torch.ops.snapmla.fetch_dequant(kv, None, None, *rest)
    kv, _, _, *tokens = byte_calls("cpu")["append_bytes"]
    with pytest.raises(ValueError, match="scale_fmt: expected one of None, 'ue8m0', got 'free'"):
        torch.ops.snapmla.append_bytes(kv, "fp8_ds_mla", "free", *tokens)
    with pytest.raises(TypeError, match="c_kv: expected dtype"):
        torch.ops.snapmla.append_bytes(kv, "fp8_ds_mla", None, tokens[0].double(), *tokens[1:])


def test_compiled_append_and_fetch_of_bytes() -> None:
    """A cache that is given, whose scales are powers of two, and one made inside of the graph."""

    def body(
        cache: snapmla.PagedKVCache, pool: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor,
        table: torch.Tensor, lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        snapmla.append_kv(cache, tokens[..., :512], tokens[..., 512:], slots)
        other = snapmla.PagedKVCache.from_tensors(pool, format="fp8_ds_mla")
        snapmla.append_kv(other, tokens[..., :512] * 2, tokens[..., 512:], slots)
        c_kv, k_rope = snapmla.fetch_dequant(cache, table, lengths)
        return c_kv + 1, k_rope, snapmla.fetch_dequant(other, table, lengths)[0]

    results = []
    for compiled in (False, True):
        torch.manual_seed(3)
        memory = torch.zeros((3, 2, 5, 1, 656), dtype=torch.uint8)
        pool = torch.zeros((3, 5, 656), dtype=torch.uint8)
        cache = snapmla.PagedKVCache.from_tensors(
            memory[:, 1], format="fp8_ds_mla", scale_fmt="ue8m0"
        )
        tokens = torch.randn(5, 576).bfloat16()
        slots = torch.tensor([3, 14, -1, 6, 0], dtype=torch.int32)
        given = torch.tensor([[0, 2], [1, 0]]).int(), torch.tensor([10, 4]).int()
        torch._dynamo.reset()
        run = torch.compile(body, fullgraph=True, backend="aot_eager") if compiled else body
        results.append((*run(cache, pool, tokens, slots, *given), memory, pool))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.any()


def test_opcheck_can_fail() -> None:
    """The fakes matter: one that returns another shape is noticed."""
    library = torch.library.Library("snapmla_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    torch.library.register_fake(
        "snapmla_test::twice", lambda x: x.new_empty(x.shape[0] + 1), lib=library
    )
    with pytest.raises(Exception, match="Shapes .* are not equal"):
        torch.library.opcheck(torch.ops.snapmla_test.twice.default, (torch.ones(3),))


def test_operators_check_their_arguments() -> None:
    wrong = list(operator_call("append_kv", "cpu"))
    wrong[3] = wrong[3].double()
    with pytest.raises(TypeError, match="c_kv: expected dtype"):
        torch.ops.snapmla.append_kv(*wrong)
    with pytest.raises(ValueError, match="granularity"):
        torch.ops.snapmla.quantize_q(*operator_call("quantize_q", "cpu")[:2], "channel")
    wrong = list(operator_call("decode_out", "cpu"))
    wrong[-1] = wrong[-1].transpose(0, 1)
    with pytest.raises(ValueError, match="lse: expected shape"):
        torch.ops.snapmla.decode_out(*wrong)


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (0, lambda t: torch.cat([t, t], 1)[:, :1], "q_nope: .*contiguous"),
        (1, lambda t: torch.cat([t, t], 1)[:, :1], "q_rope: .*contiguous"),
        (0, lambda t: t.repeat(1, 1, 17, 1), "num_heads: expected 1 to 128, got 136"),
        (7, lambda t: t.repeat_interleave(2)[::2], "cache_seqlens: .*contiguous"),
        (7, lambda t: t[:1], "cache_seqlens: expected shape"),
        (6, lambda t: t.long(), "block_table: .*int64"),
        (
            8,
            lambda t: t[:1],
            r"work_items: expected shape \(at least 2, 8\), got \(1, 8\) .* another",
        ),
        (8, lambda t: t[:, :3].contiguous(), r"work_items: expected shape \(at least 2, 8\)"),
        (9, lambda t: t[:1], r"part_begin: expected shape \(at least 2\), got \(1,\)"),
        (10, lambda t: t[:2], r"split_begin: expected shape \(3,\), got .* another batch"),
        (11, lambda t: t.new_zeros(4, 2), r"split_begin: expected shape \(5,\), got .* another"),
        (12, lambda t: t.new_zeros(3), r"row_limits: expected shape \(2,\), got \(3,\)"),
        (13, lambda t: t.repeat(1, 2, 1), r"o_accum: expected shape \(6, 16, 528\), got .*32"),
        (14, lambda t: t[1:], "lse_accum: expected shape"),
    ],
)
def test_a_traced_decode_checks_what_no_python_did(
    at: int, change: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    """Under a tracer nothing is checked before the operator runs on real tensors."""
    call = list(operator_call("decode_out", "cpu"))
    call[at] = change(call[at])
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        torch.ops.snapmla.decode_out(*call)
    assert not call[-2].any()


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (0, lambda t: torch.cat([t, t], 1)[:, :1], "q: .*contiguous"),
        (0, lambda t: t.bfloat16(), "q: expected dtype float16"),
        (0, lambda t: t.repeat(3, 1, 1, 1), "kv: .*|work_items: .*another batch"),
        (1, lambda t: t[..., :512], r"content: expected shape"),
        (1, lambda t: t.repeat(1, 3, 1, 1), "page_size: expected one of 16, .*got 48"),
        (1, lambda t: t.repeat(1, 1, 2, 1), "kv: expected a divisor of 2 sequences as KV heads"),
        (2, lambda t: t.long(), "block_table: .*int64"),
        (3, lambda t: t[:1], "cache_seqlens: expected shape"),
        (9, lambda t: t.repeat(1, 2, 1), "o_accum: expected shape"),
        (-2, lambda t: t.bfloat16(), "out: expected dtype float16"),
    ],
)
def test_a_traced_decode_of_rows_checks_its_arguments(
    at: int, change: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    call = list(operator_call("dense_decode_out", "cpu"))
    call[at] = change(call[at])
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        torch.ops.snapmla.dense_decode_out(*call)
    assert not call[-2].any()


# ---------------------------------------------------------------------------- pytrees


def test_pytree_round_trip() -> None:
    layer = fresh_layer("cpu")
    q = snapmla.quantize_q(layer.q_nope, layer.q_rope, "token")
    value = {"cache": layer.cache, "q": [q], "plan": layer.plan}
    leaves, spec = pytree.tree_flatten(value)
    assert len(leaves) == 3 + 3 + 9 and all(isinstance(t, torch.Tensor) for t in leaves)
    again = pytree.tree_unflatten(leaves, spec)
    assert again["cache"].content is layer.cache.content
    assert again["cache"].layout == "split" and again["q"][0].granularity == "token"
    for field in dataclasses.fields(snapmla.DecodePlan):
        a, b = getattr(again["plan"], field.name), getattr(layer.plan, field.name)
        assert a is b or a == b, field.name
    out, _ = snapmla.decode(
        again["q"][0], again["cache"], layer.table, layer.lengths, softmax_scale=SCALE,
        plan=again["plan"],
    )  # fmt: skip
    want, _ = snapmla.decode(
        q, layer.cache, layer.table, layer.lengths, softmax_scale=SCALE, plan=layer.plan
    )
    assert torch.equal(out, want)


def test_pytree_leaves_may_be_anything() -> None:
    layer = fresh_layer("cpu")
    shapes = pytree.tree_map(lambda t: tuple(t.shape), (layer.cache, layer.plan))
    assert shapes[0].content == (6, PAGE, 512) and shapes[1].part_begin == (4,)
    keys = [pytree.keystr(k) for k, _ in pytree.tree_flatten_with_path(layer.cache)[0]]
    assert keys == [".content", ".rope", ".scale"]


def test_a_cache_of_16_bits_is_one_leaf() -> None:
    cache = snapmla.PagedKVCache.allocate(2, 64, device="cpu", dtype=torch.float16, num_kv_heads=3)
    leaves, spec = pytree.tree_flatten({"cache": cache})
    assert len(leaves) == 1 and leaves[0] is cache.kv
    again = pytree.tree_unflatten(leaves, spec)["cache"]
    assert again.num_kv_heads == 3 and again.place == cache.place and again.scale is None
    assert pytree.tree_map(lambda t: tuple(t.shape), cache).kv == (2, 64, 3, 576)
    assert spec != pytree.tree_structure({"cache": fresh_layer("cpu").cache})


def test_plans_of_other_shapes_have_other_structure() -> None:
    lengths = torch.ones(2, dtype=torch.int32)
    specs = [
        pytree.tree_structure(snapmla.plan_decode(lengths, h, 1, page_size=64, max_pages=2))
        for h in (16, 16, 32)
    ]
    assert specs[0] == specs[1] and specs[0] != specs[2]


class _Twice(torch.autograd.Function):
    """Has a gradient, above an operator that has none."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.snapmla_graded.twice(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return 2 * grads[0]


def test_gradients_are_an_operators_own() -> None:
    """One that brings its autograd kernel has gradients beside one that falls through."""
    from snapmla import torch_ops

    with torch.library._scoped_library("snapmla_graded", "DEF") as library:

        def double(x: torch.Tensor) -> torch.Tensor:
            return x.detach() * 2  # as kernels, which no gradient sees through

        for name, autograd in (("twice", _Twice.apply), ("plain", None)):
            schema = f"{name}(Tensor x) -> Tensor"
            torch_ops.define(library, schema, double, torch.empty_like, autograd)
        x = torch.ones(3, requires_grad=True)
        torch.ops.snapmla_graded.twice(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]
        assert not torch.ops.snapmla_graded.plain(x).requires_grad

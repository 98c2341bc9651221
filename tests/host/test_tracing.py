"""Every public operation under everything that traces, watches or stands in for tensors.

Either the operator of ``torch.ops.snapmla`` is recorded, and what was recorded gives the eager bits
on other data, or the call is refused in one sentence of ours.  Nothing launches on an address that
is not there.  Operators themselves: tests/host/test_torch_ops.py.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla.cache import layouts, quant
from snapmla.call import tracing
from snapmla.compat import flash_mla
from snapmla.compat import flash_mla_fp8 as names
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from softgpu import MemoryFault
from tests.support.bits import assert_same_bits
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
HEADS, PAGE, WIDTH, PAGES = 4, 64, 2, 4
LENGTHS = {1: (70, 5), 2: (3, 128)}
ROWS = 3  # tokens that are appended or fetched
SCALE = 192**-0.5


# ------------------------------------------------------------------------------ data


def tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    c, r = selfcheck.sample_tokens(n)
    return c.bfloat16(), r.bfloat16()


def cache(layout: str) -> snapmla.PagedKVCache:
    if layout == "rows":  # of 16 bits, of which another layer's lie between
        return snapmla.PagedKVCache.from_tensors(torch.randn(PAGES, 2, PAGE, 576).bfloat16()[:, 1])
    if layout in ("ds_mla", "ue8m0"):
        pool = torch.empty((PAGES, 2, PAGE, 656), dtype=torch.uint8)
        told = {"format": "fp8_ds_mla", "scale_fmt": None if layout == "ds_mla" else layout}
        made = snapmla.PagedKVCache.from_tensors(pool[:, 1], **told)
        snapmla.append_kv(made, *tokens(PAGES * PAGE), torch.arange(PAGES * PAGE).int())
        return made
    if layout == "strided":  # pages of another layer lie between
        pool = torch.empty((PAGES, 2, PAGE * 644), dtype=torch.uint8)
        made = snapmla.PagedKVCache.from_tensors(*layouts.views_of(pool[:, 1], None, None))
    else:
        made = snapmla.PagedKVCache.allocate(PAGES, PAGE, layout, "cpu")
    snapmla.append_kv(made, *tokens(PAGES * PAGE), torch.arange(PAGES * PAGE))
    return made


def queries() -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(2, 1, HEADS, 576).bfloat16()
    return q[..., :512].contiguous(), q[..., 512:].contiguous()


def lengths(seed: int) -> torch.Tensor:
    return torch.tensor(LENGTHS[seed], dtype=torch.int32)


def plan(seed: int) -> snapmla.DecodePlan:
    return snapmla.plan_decode(
        lengths(seed), HEADS, 1, page_size=PAGE, max_pages=WIDTH, num_parts=2, fixed_overhead=0
    )


def table(seed: int) -> torch.Tensor:
    return torch.roll(torch.arange(PAGES, dtype=torch.int32), seed).view(2, WIDTH).clone()


def results() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 1, HEADS, 512, dtype=torch.bfloat16), torch.zeros(2, HEADS, 1)


def step(seed: int) -> tuple[Any, ...]:
    return snapmla.quantize_q(*queries()), cache("split"), table(seed), lengths(seed)


def ragged_queries() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(x.flatten(0, 1).contiguous() for x in queries())  # type: ignore[return-value]


def ragged_lengths(seed: int) -> tuple[torch.Tensor, ...]:
    """cache_seqlens, cu_seqlens_q, row_seqlens of two query tokens."""
    begins, seen = ([0, 0, 2], [0, 2, 2])[seed - 1], ([3, 4], [2, 100])[seed - 1]
    ints = (torch.tensor(x, dtype=torch.int32) for x in (begins, seen))
    return lengths(seed), *ints


def ragged_plan(seed: int) -> snapmla.DecodePlan:
    seqlens, begins, seen = ragged_lengths(seed)
    return snapmla.plan_decode(
        seqlens, HEADS, page_size=PAGE, max_pages=WIDTH, cu_seqlens_q=begins, total_q=2,
        row_seqlens=seen, num_parts=2, fixed_overhead=0,
    )  # fmt: skip


def ragged_step(*a: Any, **options: Any) -> Any:
    """All that an engine does with ragged queries."""
    planned = a[0].update_(*a[1:4])
    q = snapmla.quantize_q(*a[4:6])
    return snapmla.decode(q, *a[6:8], a[1], softmax_scale=SCALE, plan=planned, **options)


def ragged_arguments(seed: int) -> tuple[Any, ...]:
    return (
        ragged_plan(3 - seed), *ragged_lengths(seed), *ragged_queries(), cache("split"),
        table(seed),
    )  # fmt: skip


def rows_step(seed: int, kv_heads: int, ragged: bool) -> tuple[Any, ...]:
    """Over a 16-bit cache: plan and lengths for ``update_``, then what decode takes."""
    torch.manual_seed(seed)
    seqlens = torch.tensor([(20, 5), (3, 40)][seed - 1], dtype=torch.int32)
    begins = torch.tensor([[0, 1, 3], [0, 3, 3]][seed - 1], dtype=torch.int32)
    kv = torch.randn(7, 16, kv_heads, 576).half()
    pages = torch.randperm(7, dtype=torch.int32)[:6].view(2, 3).clone()
    shape: dict[str, Any] = {"cu_seqlens_q": begins, "total_q": 4} if ragged else {"s_q": 2}
    made = snapmla.plan_decode(
        seqlens.flip(0), 2 * kv_heads, page_size=16, max_pages=3, cache_dtype=torch.float16,
        num_kv_heads=kv_heads, num_parts=2, fixed_overhead=0, **shape,
    )  # fmt: skip
    q = torch.randn(*((4,) if ragged else (2, 2)), 2 * kv_heads, 576).half()
    updates = (seqlens, begins) if ragged else (seqlens,)
    return made, updates, q, snapmla.PagedKVCache.from_tensors(kv), pages


def dense_call(seed: int) -> tuple[torch.Tensor, ...]:
    """q, pool, block table, lengths and records, as FlashMLA's names take them."""
    _, (seqlens,), q, held, pages = rows_step(seed, 1, False)
    records = torch.tensor([[0, 0] + [0] * 6, [seed - 1, 1] + [0] * 6], dtype=torch.int32)
    return q, held.kv, pages, seqlens, records


def rows_decode(
    made: Any, updates: Any, q: Any, cache: Any, pages: Any, out: Any = None, lse: Any = None
) -> Any:
    planned = made.update_(*updates)
    return snapmla.decode(
        q, cache, pages, updates[0], softmax_scale=SCALE, plan=planned, out=out, lse=lse
    )


def states(n: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """n results to be merged, one of which has an empty row."""
    outs = [torch.randn(2, 1, HEADS, 512).bfloat16() for _ in range(n)]
    lses = [torch.randn(2, HEADS, 1) for _ in range(n)]
    lses[0][0, 0] = -torch.inf
    return outs, lses


def two_states() -> tuple[torch.Tensor, ...]:
    (out_a, out_b), (lse_a, lse_b) = states(2)
    return out_a, lse_a, out_b, lse_b


def slots(seed: int) -> torch.Tensor:
    return torch.arange(seed, seed + ROWS, dtype=torch.int32)


def chunks(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(cu_seqlens, seq_starts) of two sequences, and room for a row more."""
    made = [0, seed, 5], [seed, 3]
    return torch.tensor(made[0], dtype=torch.int32), torch.tensor(made[1], dtype=torch.int32)


def pool() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A flat pool as the names take it: latent, RoPE, scale."""
    made = cache("split")
    return (
        made.content.view(-1, 1, 512), made.rope.view(-1, 1, 64), made.scale.view(-1, 1, 1)
    )  # fmt: skip


def named_decode(seed: int) -> tuple[Any, ...]:
    q, made, blocks, seqlens = step(seed)
    pair = names.get_mla_metadata(seqlens, HEADS, 1, max_batch=2)
    return (
        q.nope, q.rope, made.content[:, :, None], made.rope[:, :, None], q.scale[..., None],
        made.scale[:, :, None, None], blocks, seqlens, *pair,
    )  # fmt: skip


# ------------------------------------------------------------------------------ operations


@dataclass(frozen=True)
class Operation:
    """A call, its arguments by seed, the operators it becomes."""

    call: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    operators: tuple[str, ...]
    breaks: bool = False  # under torch.compile: between two graphs


def fields(q: snapmla.QuantizedQuery) -> tuple[torch.Tensor, ...]:
    return q.nope, q.rope, q.scale


def quantized(*a: Any) -> tuple[torch.Tensor, ...]:
    return fields(snapmla.quantize_q(*a))


def decode(*a: Any, **options: Any) -> Any:
    return snapmla.decode(*a[:4], softmax_scale=SCALE, **options)


def planned(*shape: Any) -> list[torch.Tensor]:
    made = snapmla.plan_decode(*shape, HEADS, 1, page_size=PAGE, max_pages=WIDTH)
    return [made.work_items, made.part_begin, made.split_begin, made.planned_seqlens]


def appended(layout: str) -> Callable[[int], tuple[Any, ...]]:
    return lambda seed: (cache(layout), *tokens(ROWS), slots(seed))


def angles() -> torch.Tensor:
    return torch.rand(12, 64).bfloat16()


def rotated(seed: int) -> tuple[Any, ...]:
    """Tokens to be appended to 64-bit slots, their positions, angles, the weight of the norm."""
    return (
        cache("split"), *tokens(ROWS), slots(seed).long(), torch.arange(seed, seed + ROWS),
        angles(), torch.randn(512).bfloat16(),
    )  # fmt: skip


def listed(layout: str) -> Callable[[int], tuple[Any, ...]]:
    """Query, cache, indices and plan of sparse decode; an entry names no token."""

    def given(seed: int) -> tuple[Any, ...]:
        q, fmt = torch.cat(queries(), -1), "fp8_ds_mla" if layout == "ds_mla" else "fp8"
        query = q if layout == "ds_mla" else snapmla.quantize_q(q[..., :512], q[..., 512:])
        plan = snapmla.plan_sparse_decode(
            HEADS, 1, topk=3, batch=2, device="cpu", num_parts=1, cache_dtype=fmt
        )
        indices = torch.tensor([[[seed, -1, 5]], [[2, 0, seed]]], dtype=torch.int32)
        return query, cache(layout), indices, plan

    return given


def sparse(q: Any, cache: Any, indices: Any, plan: Any) -> Any:
    return snapmla.decode(q, cache, indices=indices, softmax_scale=SCALE, plan=plan)


def planned_lists(length: torch.Tensor) -> list[torch.Tensor]:
    made = snapmla.plan_sparse_decode(HEADS, 1, topk=WIDTH * PAGE, topk_length=length)
    return [made.work_items, made.part_begin, made.split_begin, made.planned_seqlens]


OPERATIONS = {
    **{
        f"append_kv {layout}": Operation(snapmla.append_kv, appended(layout), ("append_kv",))
        for layout in ("split", "paged", "row640", "strided", "rows")
    },
    "append_kv ue8m0": Operation(snapmla.append_kv, appended("ue8m0"), ("append_bytes",)),
    "rope_append_kv": Operation(
        lambda *a: snapmla.rope_append_kv(*a[:6], is_neox=True, norm_weight=a[6]), rotated,
        ("rope_append_kv",),
    ),
    "rope_quantize_q": Operation(
        lambda *a: fields(snapmla.rope_quantize_q(*a)),
        lambda s: (*queries(), torch.tensor([[s], [9]]), angles().float()), ("rope_quantize_q",),
    ),
    "rope_quantize_q out": Operation(
        lambda *a: fields(snapmla.rope_quantize_q(*a[:4], is_neox=True, out=a[4])),
        lambda s: (
            *queries(), torch.tensor([s, 9]), angles(), snapmla.quantize_q(*queries())
        ),
        ("rope_quantize_q_out",),
    ),
    "quantize_q token_head": Operation(quantized, lambda _: queries(), ("quantize_q",)),
    "quantize_q token": Operation(
        lambda n, r: quantized(n, r, "token"), lambda _: queries(), ("quantize_q",)
    ),
    "quantize_q out": Operation(
        lambda n, r, out: quantized(n, r, "token_head", out),
        lambda _: (*queries(), snapmla.quantize_q(*queries())),
        ("quantize_q_out",),
    ),
    "plan.update_": Operation(
        lambda p, n: p.update_(n).planned_seqlens, lambda s: (plan(3 - s), lengths(s)),
        ("plan_update",),
    ),
    "plan_decode": Operation(planned, lambda s: (lengths(s),), ("plan_update",), breaks=True),
    "decode": Operation(
        lambda *a: decode(*a, plan=a[4]), lambda s: (*step(s), plan(s)), ("decode",)
    ),
    "decode out": Operation(
        lambda *a: decode(*a, plan=a[4], out=a[5], lse=a[6]),
        lambda s: (*step(s), plan(s), *results()),
        ("decode_out",),
    ),
    "decode ragged": Operation(
        lambda *a: ragged_step(*a), ragged_arguments, ("plan_update", "quantize_q", "decode")
    ),
    "decode ragged out": Operation(
        lambda *a: ragged_step(*a[:8], out=a[8]),
        lambda s: (*ragged_arguments(s), torch.zeros(2, HEADS, 512, dtype=torch.bfloat16)),
        ("plan_update", "quantize_q", "decode_out"),
    ),
    "decode rows": Operation(
        lambda *a: rows_decode(*a), lambda s: rows_step(s, 1, False),
        ("plan_update", "dense_decode"),
    ),
    "decode rows ragged": Operation(
        lambda *a: rows_decode(*a),
        lambda s: (*rows_step(s, 2, True), torch.ones(4, 4, 512).half(), torch.ones(4, 4)),
        ("plan_update", "dense_decode_out"),
    ),
    "plan_sparse_decode": Operation(
        planned_lists, lambda s: (lengths(s),), ("plan_update",), breaks=True
    ),
    "decode indices": Operation(sparse, listed("split"), ("sparse_decode",)),
    "decode indices of rows": Operation(sparse, listed("ds_mla"), ("sparse_decode_rows",)),
    "decode without a plan": Operation(decode, step, ("plan_update", "decode"), breaks=True),
    "fetch_dequant pages": Operation(
        lambda c, where, n: snapmla.fetch_dequant(c, where, n),
        lambda s: (cache("split"), table(s), lengths(s)),
        ("fetch_dequant",),
    ),
    "fetch_dequant indices": Operation(
        lambda c, where: snapmla.fetch_dequant(c, where),
        lambda s: (cache("paged"), slots(s)),
        ("fetch_dequant",),
    ),
    "fetch_dequant wide indices": Operation(
        lambda c, where: snapmla.fetch_dequant(c, where),
        lambda s: (cache("split"), slots(s).long()),
        ("fetch_dequant",),
    ),
    "fetch_dequant chunks": Operation(
        lambda c, where, begins: snapmla.fetch_dequant(c, where, cu_seqlens=begins, total=7),
        lambda s: (cache("split"), table(s), chunks(s)[0]),
        ("fetch_dequant",),
    ),
    "fetch_dequant chunks out": Operation(
        lambda c, where, begins, starts, out: snapmla.fetch_dequant(
            c, where, cu_seqlens=begins, seq_starts=starts, out=out
        ),
        lambda s: (cache("paged"), table(s), *chunks(s), torch.zeros(7, 576)),
        ("fetch_dequant_out",),
    ),
    "fetch_dequant rows": Operation(
        lambda c, where, begins, starts, out: snapmla.fetch_dequant(
            c, where, cu_seqlens=begins, seq_starts=starts, out=out
        ),
        lambda s: (
            cache("rows"), table(s), *chunks(s), torch.zeros(7, 576, dtype=torch.bfloat16)
        ),
        ("fetch_dequant_out",),
    ),
    "fetch_dequant ds_mla": Operation(
        lambda c, where, n: snapmla.fetch_dequant(c, where, n),
        lambda s: (cache("ds_mla"), table(s), lengths(s)),
        ("fetch_bytes",),
    ),
    "fetch_dequant ds_mla out": Operation(
        lambda c, where, n, out: snapmla.fetch_dequant(c, where, n, out=out),
        lambda s: (
            cache("ue8m0"), table(s), lengths(s), torch.zeros(2, 90, 576, dtype=torch.bfloat16)
        ),
        ("fetch_bytes_out",),
    ),
    "fetch_dequant out": Operation(
        lambda c, where, out: snapmla.fetch_dequant(c, where, out=out),
        lambda s: (cache("row640"), slots(s), torch.zeros(ROWS, 576)),
        ("fetch_dequant_out",),
    ),
    "merge_state": Operation(
        lambda *a: snapmla.merge_state(*a), lambda _: two_states(), ("merge_states",)
    ),
    "merge_state in place": Operation(
        lambda *a: snapmla.merge_state(*a, lse_base="2", out=a[0], lse=a[1]),
        lambda _: two_states(), ("merge_states_out",),
    ),
    "merge_states list": Operation(
        lambda outs, lses, lse: snapmla.merge_states(outs, lses, lse=lse),
        lambda _: (*states(3), torch.zeros(2, HEADS, 1)), ("merge_states_out",),
    ),
    "merge_states packed": Operation(
        lambda outs, lses: snapmla.merge_states(outs, lses),
        lambda _: (torch.randn(3, 5, HEADS, 512), torch.randn(3, HEADS, 5)), ("merge_states",),
    ),
    "get_mla_metadata": Operation(
        lambda n: names.get_mla_metadata(n, HEADS, 1, max_batch=2), lambda s: (lengths(s),),
        ("plan_update",), breaks=True,
    ),
    "flash_mla_ckv_fp8_per_token": Operation(
        lambda *a: names.flash_mla_ckv_fp8_per_token(*a[:8], 512, *a[8:], SCALE),
        named_decode, ("decode",), breaks=True,
    ),
    "flash_mla.get_mla_metadata_tensors": Operation(
        lambda n: flash_mla.get_mla_metadata_tensors(n, HEADS, 1), lambda s: (lengths(s),),
        ("plan_update", "plan_to_records"), breaks=True,
    ),
    "flash_mla_with_kvcache of records": Operation(
        lambda *a: flash_mla.flash_mla_with_kvcache(*a[:4], 512, a[4]), lambda s: dense_call(s),
        ("records_to_plan", "dense_decode"), breaks=True,
    ),
    "flash_mla_with_kvcache of an object": Operation(
        lambda *a: flash_mla.flash_mla_with_kvcache(
            *a[:4], 512, flash_mla.FlashMLASchedMeta(), causal=True
        ),
        lambda s: dense_call(s), ("plan_update", "dense_decode"), breaks=True,
    ),
    "quantize_ckv_per_token_head": Operation(
        lambda q: names.quantize_ckv_per_token_head(q, 512),
        lambda _: (torch.cat(queries(), -1),), ("quantize_q",),
    ),
    "quantize_and_cache_k": Operation(
        lambda key, lora, scale, rope, at: names.quantize_and_cache_k(
            key, lora, scale, rope, at, 512
        ),
        lambda s: (torch.cat(tokens(ROWS), 1), *(pool()[i] for i in (0, 2, 1)), slots(s)),
        ("append_kv",),
    ),
    "dequantize_ckv_fused_indexed": Operation(
        lambda *a: names.dequantize_ckv_fused_indexed(*a),
        lambda s: (*pool(), slots(s)),
        ("fetch_dequant",),
    ),
}  # fmt: skip
everywhere = pytest.mark.parametrize("name", OPERATIONS)


@functools.cache
def _arguments(name: str, seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    return OPERATIONS[name].arguments(seed)


def arguments(name: str, seed: int) -> tuple[Any, ...]:
    """The same arguments for the same seed; every time in fresh memory."""
    return copy.deepcopy(_arguments(name, seed))


def observed(*values: Any) -> list[torch.Tensor]:
    """All tensors in results and arguments, but for partial results, which hold anything."""
    leaves = []
    for path, leaf in pytree.tree_flatten_with_path(values)[0]:
        if isinstance(leaf, torch.Tensor) and not pytree.keystr(path).endswith("_accum"):
            leaves.append(leaf)
    return leaves


@functools.cache
def eager(name: str, seed: int) -> list[torch.Tensor]:
    given = arguments(name, seed)
    return observed(OPERATIONS[name].call(*given), given)


def ours(graph: torch.fx.Graph) -> list[str]:
    """Names of our operators in a graph."""
    called = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return [c.split(".")[1] for c in called if c.startswith("snapmla.")]


def test_the_table_has_every_public_call() -> None:
    covered = {name.split()[0] for name in OPERATIONS}
    public = {n for n in snapmla.__all__ if n.islower() and not n.startswith("_")}
    public -= {"explain", "explain_prefill", "convert_cache"}  # of which the second refuses tracers
    public -= {"install_as_flash_mla"}  # no tensors
    # traced by test_mha.py, test_mha_gradients.py and test_sparse_prefill.py; the plan is
    # plan_sparse_decode's
    public -= {"mha_prefill", "mha_prefill_backward", "sparse_prefill", "plan_sparse_prefill"}
    fronts = {"flash_mla.get_mla_metadata_tensors", "flash_mla_with_kvcache"}
    assert covered == public | set(names.__all__) | fronts | {"plan.update_"}


# ------------------------------------------------------------------------------ recorders


# memory that functionalisation, which is in an export, cannot follow
NOT_EXPORTED = ("append_kv paged", "append_kv row640", "append_kv strided")


def recordings() -> Iterator[Any]:
    """(mode, call): every day two modes record each operator without options, one of them those
    too that ``test_export``, which records all calls in that mode, finds refused, the others one
    call."""
    for mode in ("real", "fake", "symbolic", "pre_dispatch"):
        for name in OPERATIONS:
            often = name == "quantize_q token" or (mode == "symbolic" and " " not in name)
            if mode == "pre_dispatch":
                often |= " " not in name or name in NOT_EXPORTED
            marks = () if often else (pytest.mark.whole_matrix,)
            yield pytest.param(name, mode, marks=marks, id=f"{mode}-{name}")


@pytest.mark.parametrize(("name", "mode"), list(recordings()))
def test_make_fx(name: str, mode: str) -> None:
    operation = OPERATIONS[name]
    options = {"pre_dispatch": True} if mode == "pre_dispatch" else {"tracing_mode": mode}
    traced = make_fx(operation.call, **options)(*arguments(name, 1))
    assert tuple(ours(traced.graph)) == operation.operators
    given = arguments(name, 2)
    assert_same_bits(observed(traced(*given), given), eager(name, 2))


@everywhere
def test_export(name: str) -> None:
    operation = OPERATIONS[name]

    class Module(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return operation.call(*given)

    given = arguments(name, 1)
    if name in NOT_EXPORTED:
        with pytest.raises(ValueError, match="^cache: expected layout .*append outside"):
            torch.export.export(Module(), given)
        return
    program = torch.export.export(Module(), given)
    assert tuple(ours(program.graph)) == operation.operators
    given = arguments(name, 2)
    assert_same_bits(observed(program.module()(*given), given), eager(name, 2))


@everywhere
def test_compiled(name: str) -> None:
    """One graph with the operator in it, or none and an eager call between graphs."""
    operation, graphs = OPERATIONS[name], []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.extend(ours(module.graph))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(operation.call, backend=backend)
    for seed in (1, 2):
        given = arguments(name, seed)
        assert_same_bits(observed(compiled(*given), given), eager(name, seed))
    assert set(graphs) == (set() if operation.breaks else set(operation.operators))
    if operation.breaks:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"call snapmla\.plan_decode outside"):
            torch.compile(operation.call, backend=backend, fullgraph=True)(*arguments(name, 1))


def test_the_software_gpu_is_not_traced() -> None:
    """Dynamo looks into whatever runs between two graphs; an interpreter is not for it."""
    kernel = variants.kernel(VariantSpec.from_name("fetch_dequant_xf32_indices_sm90a"), "cpu")
    c, r = torch.zeros(ROWS, 512), torch.zeros(ROWS, 64)

    def body(x: torch.Tensor, where: torch.Tensor, *views: torch.Tensor) -> torch.Tensor:
        x = x + 1
        kernel(*views, where, c, r)
        return x + c.sum()

    made = cache("split")
    views = (made.content_u8, made.rope, made.scale)
    want = snapmla.fetch_dequant(made, slots(1), dtype=torch.float32)
    torch._dynamo.reset()
    got = torch.compile(body, backend="eager")(torch.zeros(1), slots(1), *views)
    assert_same_bits([c, r], list(want))
    assert got == 1 + c.sum()


# ------------------------------------------------------------------------------ stand-ins


@everywhere
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_fake_tensors(name: str, inside: bool) -> None:
    """Results are fakes of the eager ones, made in the mode or, from its tensors, outside of it."""
    mode = FakeTensorMode()
    fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments(name, 1))
    if inside:
        with mode:
            got = observed(OPERATIONS[name].call(*fakes), fakes)
    else:
        got = observed(OPERATIONS[name].call(*fakes), fakes)
    assert all(isinstance(t, FakeTensor) for t in got)
    for a, b in zip(got, eager(name, 1), strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_caches_are_made_of_fake_tensors() -> None:
    """Memory is recognised without addresses."""
    for layout in layouts.LAYOUTS:
        real = snapmla.PagedKVCache.allocate(PAGES, PAGE, layout, "cpu")
        with FakeTensorMode():
            made = snapmla.PagedKVCache.allocate(PAGES, PAGE, layout, "cpu")
            snapmla.append_kv(made, torch.empty(3, 512), torch.empty(3, 64), torch.empty(3).long())
        assert isinstance(made.content, FakeTensor) and made.layout == layout and made.traceable
        shapes = [t if t is None else t.shape for t in real.memory]
        assert [t if t is None else t.shape for t in made.memory] == shapes


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_memory_that_was_freed_is_no_memory(layout: str) -> None:
    made, given = cache(layout), (*tokens(ROWS), slots(1))
    snapmla.append_kv(made, *given)  # what is known by now must not be taken for granted
    held = made.content.untyped_storage().nbytes()
    made.content.untyped_storage().resize_(held - 8)
    shrunk = rf"^\w+ \w+\[4, 64\b.*reaches .* that has {held - 8}"
    moved = "cache: expected memory where it was, got a storage that was moved"
    # whether it moves is the allocator's to say
    noticed, said = (MemoryFault, shrunk) if made.stays else (ValueError, moved)
    with pytest.raises(noticed, match=said):
        snapmla.append_kv(made, *given)
    with pytest.raises(MemoryFault, match=shrunk):
        quant.launch_append(made.arguments, *given)
    made.content.untyped_storage().resize_(0)
    with pytest.raises(MemoryFault, match=r"^\w+ \w+\[4, 64\b.*reaches .* that has 0"):
        quant.launch_append(made.arguments, *given)
    with pytest.raises(ValueError, match="cache: expected memory, got a storage that was freed"):
        snapmla.append_kv(made, *given)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own that notes what is called with it."""

    inner: torch.Tensor
    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        self = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=inner.device,
        )  # fmt: skip
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        args, kwargs = pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


class Named(torch.Tensor):
    """A subclass with memory, as torch makes it by default."""


def seen_operators(seen: list[str]) -> tuple[str, ...]:
    return tuple(s.split(".")[1] for s in seen if s.startswith("snapmla."))


@everywhere
def test_wrapper_subclass(name: str) -> None:
    Wrapped.seen.clear()
    given = arguments(name, 1)
    wrapped = pytree.tree_map_only(torch.Tensor, Wrapped, given)
    got = observed(OPERATIONS[name].call(*wrapped), wrapped)
    assert seen_operators(Wrapped.seen) == OPERATIONS[name].operators
    assert_same_bits([t.inner if isinstance(t, Wrapped) else t for t in got], eager(name, 1))


@everywhere
def test_subclass_with_memory(name: str) -> None:
    given = pytree.tree_map_only(torch.Tensor, lambda t: t.as_subclass(Named), arguments(name, 1))
    got = observed(OPERATIONS[name].call(*given), given)
    assert_same_bits([t.as_subclass(torch.Tensor) for t in got], eager(name, 1))


# ------------------------------------------------------------------------------ watchers


class Logging(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@everywhere
def test_a_dispatch_mode_sees_the_operators(name: str) -> None:
    given = arguments(name, 1)
    with Logging() as log:
        got = OPERATIONS[name].call(*given)
    assert seen_operators(log.seen) == OPERATIONS[name].operators
    assert_same_bits(observed(got, given), eager(name, 1))


@everywhere
def test_eager_calls_are_no_operators(name: str) -> None:
    """Seen by the profiler, which dispatch modes are not."""
    given = arguments(name, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        OPERATIONS[name].call(*given)
    assert not [e.name for e in profile.events() if e.name.startswith("snapmla::")]


def test_a_disabled_dispatch_mode_does_not_recurse() -> None:
    """Operators that a mode cannot see go to the kernels, not back to the operators."""
    given = arguments("quantize_q token", 1)
    with Logging() as log, torch._C._DisableTorchDispatch():
        got = OPERATIONS["quantize_q token"].call(*given)
    assert not log.seen
    assert_same_bits(observed(got, given), eager("quantize_q token", 1))


# ------------------------------------------------------------------------------ refusals


@contextmanager
def refused(text: str) -> Iterator[None]:
    with pytest.raises(ValueError) as caught:
        yield
    assert str(caught.value).startswith("snapmla: expected a call outside of torch.func, got one")
    assert text in str(caught.value) and "\n" not in str(caught.value)


@everywhere
def test_vmap_is_refused(name: str) -> None:
    given = arguments(name, 1)
    many = torch.zeros(2, 3)

    def body(x: torch.Tensor) -> torch.Tensor:
        OPERATIONS[name].call(*given)
        return x

    with refused("vmap (sequences are dimension b of every argument"):
        torch.vmap(body)(many)
    leaves, structure = pytree.tree_flatten(given)

    def batched(*parts: torch.Tensor) -> torch.Tensor:
        OPERATIONS[name].call(*pytree.tree_unflatten(parts, structure))
        return parts[0]

    with refused("vmap"):
        torch.vmap(batched)(*(torch.stack([leaf, leaf]) for leaf in leaves))


def gradient(f: Any, x: torch.Tensor) -> Any:
    return torch.func.grad(lambda x: f(x).sum())(x)


def forward_gradient(f: Any, x: torch.Tensor) -> Any:
    return torch.func.jvp(f, (x,), (x,))


def without_mutation(f: Any, x: torch.Tensor) -> Any:
    return torch.func.functionalize(f)(x)


@pytest.mark.parametrize(
    ("transform", "said"),
    [(gradient, "grad"), (forward_gradient, "jvp"), (without_mutation, "functionalize")],
)
def test_other_transforms_are_refused(transform: Callable[..., Any], said: str) -> None:
    q_nope, q_rope = queries()
    with refused(f"inside of {said} (there are no gradients"):
        transform(lambda q: snapmla.quantize_q(q, q_rope).scale, q_nope)


def test_results_have_no_gradients() -> None:
    """Inference only, recorded or not: results do not require grad, whatever arguments do."""
    q_nope, q_rope = (torch.nn.Parameter(q) for q in queries())
    for mode in (Logging, torch.enable_grad, torch.no_grad):
        with mode():
            q = snapmla.quantize_q(q_nope, q_rope)
        assert not (q.rope.requires_grad or q.scale.requires_grad or q.nope.requires_grad)
        _, made, blocks, seqlens = step(1)
        with mode():
            out, lse = decode(q, made, blocks, seqlens, plan=plan(1))
        assert not (out.requires_grad or lse.requires_grad)


# ------------------------------------------------------------------------------ the switch


def test_nothing_is_active_here() -> None:
    assert not tracing.active()
    assert tracing.plain(
        torch.zeros(1), torch.nn.Parameter(torch.zeros(1)), None, "x", cache("split")
    )
    assert not tracing.plain(Named([1.0]))


def test_one_thread_s_mode_is_not_another_s() -> None:
    import threading

    found: list[bool] = []
    with Logging():
        assert tracing.active()
        thread = threading.Thread(target=lambda: found.append(tracing.active()))
        thread.start()
        thread.join()
    assert found == [False]


def test_names_of_pytorch_are_there() -> None:
    """The quick queries, not their slower stand-ins."""
    assert tracing._modes is torch._C._len_torch_dispatch_stack
    assert tracing._transforms is torch._C._are_functorch_transforms_active


@pytest.mark.parametrize("tracing_now", [False, True])
@pytest.mark.parametrize("of_module", [False, True])
def test_the_flag_of_fx(
    monkeypatch: pytest.MonkeyPatch, of_module: bool, tracing_now: bool
) -> None:
    """A module's before torch 2.14, a thread's since."""
    told = {"_is_fx_tracing_flag": tracing_now, "_get_is_fx_tracing": lambda: tracing_now}
    name = "_is_fx_tracing_flag" if of_module else "_get_is_fx_tracing"
    monkeypatch.setattr(tracing, "_fx", SimpleNamespace(**{name: told[name]}))
    monkeypatch.setattr(tracing, "_FX_FLAG", of_module)
    assert tracing.active() == tracing_now

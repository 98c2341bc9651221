"""The order of arguments: written down once, in the kernel, and kept by all callers by position."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import snapmla
from codegen import abi
from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec
from snapmla.compat import flash_mla
from snapmla.compat import sched_meta as scheduling
from snapmla.runtime import variants
from tests.support.needs import needs_compiler

B, S_Q, HEADS, PAGES, PAGE, WIDTH = 2, 2, 3, 7, 16, 20
INTS = {"dtype": torch.int32}


def names_of(spec: VariantSpec) -> list[str]:
    return [argument["name"] for argument in abi.describe(*registry.build(spec))]


@needs_compiler
@pytest.mark.variants("*_sm90a")
def test_fakes_are_the_parameters_in_order(spec: VariantSpec) -> None:
    function, fakes = registry.build(spec)
    assert names_of(spec) == list(fakes)
    swapped = dict([*list(fakes.items())[1:], next(iter(fakes.items()))])
    for wrong in (swapped, dict(list(fakes.items())[:-1])):
        with pytest.raises(ValueError, match="^fakes: expected those of "):
            abi.describe(function, wrong)


def test_values_are_ordered_by_name() -> None:
    assert abi.ordered(["a", "b"], {"b": 2, "a": 1}) == [1, 2]
    with pytest.raises(TypeError, match="expected a, b, got no b"):
        abi.ordered(["a", "b"], {"a": 1})
    with pytest.raises(TypeError, match="expected a, b, got c too"):
        abi.ordered(["a", "b"], {"a": 1, "b": 2, "c": 3})


# ---------------------------------------------------------------------------- who calls by position


class Calls(dict[str, tuple[VariantSpec, tuple[Any, ...]]]):
    """op -> what was called last, and with what; nothing runs."""

    def kernel(self, spec: VariantSpec, device_type: str) -> Callable[..., None]:
        return lambda *arguments: self.__setitem__(spec.op, (spec, arguments))

    def by_name(self, op: str) -> dict[str, Any]:
        spec, arguments = self[op]
        return dict(zip(names_of(spec), arguments, strict=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    seen = Calls()
    variants.forget()
    monkeypatch.setattr(variants, "kernel", seen.kernel)
    yield seen
    variants.forget()


def same(got: Any, want: Any) -> bool:
    """The very memory, or the very number."""
    if not isinstance(want, torch.Tensor):
        return type(got) is type(want) and got == want
    flat = (got.data_ptr(), got.shape, got.stride(), got.element_size())
    return flat == (want.data_ptr(), want.shape, want.stride(), want.element_size())


def check(calls: Calls, op: str, **want: Any) -> None:
    got = calls.by_name(op)
    assert got.keys() == want.keys()
    assert [name for name in want if not same(got[name], want[name])] == []


def cache_of(layout: str = "split") -> tuple[snapmla.PagedKVCache, dict[str, torch.Tensor]]:
    cache = snapmla.PagedKVCache.allocate(PAGES, PAGE, layout, "cpu")
    return cache, {"content": cache.content, "rope": cache.rope, "scale": cache.scale}


def query() -> snapmla.QuantizedQuery:
    return snapmla.QuantizedQuery(
        torch.zeros(B, S_Q, HEADS, 512, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.zeros(B, S_Q, HEADS, 64, dtype=torch.bfloat16),
        torch.ones(B, S_Q, HEADS),
    )


@needs_compiler
def test_planning(calls: Calls) -> None:
    lengths = torch.ones(B, **INTS)
    plan = snapmla.plan_decode(
        lengths, HEADS, S_Q, page_size=PAGE, max_pages=WIDTH, fixed_overhead=5,
        fixed_split_tokens=192,
    )  # fmt: skip
    numbers = {
        "max_tokens": PAGE * WIDTH, "token_tile": 64, "fixed_overhead": 5, "split_tiles": 3,
        "longest_item": 0, "max_stretches": 1, "tile_ns": 0, "read_ns": 0,
        "num_heads": HEADS, "s_q": S_Q, "unit_rows": plan.unit_rows, "causal": 1,
    }  # fmt: skip
    tables = {
        "work_items": plan.work_items, "part_begin": plan.part_begin,
        "split_begin": plan.split_begin, "planned_seqlens": plan.planned_seqlens,
        "units": plan.units, "unit_begin": plan.unit_begin, "row_limits": plan.row_limits,
        "cu_seqlens_q": torch.zeros(0, **INTS), "row_seqlens": torch.zeros(0, **INTS),
    }  # fmt: skip
    check(calls, "plan_decode", cache_seqlens=lengths, **tables, **numbers)
    later = torch.ones(B, **INTS)
    plan.update_(later)
    check(calls, "plan_decode", cache_seqlens=later, **tables, **numbers)


@needs_compiler
def test_records(calls: Calls) -> None:
    lengths, rows = torch.ones(B, **INTS), HEADS * S_Q
    records, num_splits = flash_mla.get_mla_metadata_tensors(lengths, rows, 1)
    assert isinstance(records, torch.Tensor)
    planned = calls.by_name("plan_decode")
    assert [planned[name] for name in ("token_tile", "num_heads", "s_q", "unit_rows")] == [
        64, 1, rows, rows,
    ]  # fmt: skip
    tables = {name: planned[name] for name in ("work_items", "part_begin", "split_begin")}
    check(calls, "plan_to_records", **tables, records=records, num_splits=num_splits)
    pool = torch.zeros(PAGES, PAGE, 1, 576, dtype=torch.bfloat16)
    q, table = torch.zeros(B, S_Q, HEADS, 576).bfloat16(), torch.zeros(B, WIDTH, **INTS)
    shape = scheduling.Shape(B, HEADS, S_Q, PAGE, WIDTH, "bf16", 1)
    reader = scheduling.kept_reader(records, shape)
    names = ("work_items", "part_begin", "split_begin", "planned_seqlens")
    want = {
        "records": records, "cache_seqlens": lengths, "tile_begin": reader.tile_begin,
        **{name: getattr(reader.plan, name) for name in names},
        "max_tokens": PAGE * WIDTH, "token_tile": 64, "rows": rows, "num_kv_heads": 1,
    }  # fmt: skip
    out, lse = flash_mla.flash_mla_with_kvcache(q, pool, table, lengths, 512, records, num_splits)
    check(calls, "records_to_plan", **want)
    got = calls.by_name("dense_decode")
    assert same(got["q"], q) and same(got["cache"], pool) and same(got["out"], out)
    assert same(got["lse"], lse) and (got["causal"], got["empty_lse"]) == (0, math.inf)
    del calls["records_to_plan"]
    reader.traced(records, lengths)  # the operator
    check(calls, "records_to_plan", **want)


@needs_compiler
def test_decode(calls: Calls) -> None:
    """The hot path, and the operator that stands for it."""
    q, (cache, planes), lengths = query(), cache_of(), torch.ones(B, **INTS)
    table = torch.zeros(B, WIDTH, **INTS)
    plan = snapmla.plan_decode(
        lengths, HEADS, S_Q, page_size=PAGE, max_pages=WIDTH, num_parts=5, causal=False
    )
    out, lse = torch.empty(B, S_Q, HEADS, 512), torch.empty(B, HEADS, S_Q)
    want = {
        "q_nope": q.nope, "q_rope": q.rope, "q_scale": q.scale, **planes,
        "block_table": table, "cache_seqlens": lengths, "work_items": plan.work_items,
        "part_begin": plan.part_begin, "split_begin": plan.split_begin, "units": plan.units,
        "row_limits": plan.row_limits, "out": out, "lse": lse,
        "o_accum": plan.o_accum, "lse_accum": plan.lse_accum, "softmax_scale": 0.3, "causal": 0,
        "lse_factor": math.log(2.0), "empty_lse": math.inf, "may_split": 1,
        "cu_seqlens_q": torch.zeros(0, **INTS), "witness": 0,
    }  # fmt: skip
    snapmla.decode(
        q, cache, table, lengths, softmax_scale=0.3, plan=plan, causal=False, out=out, lse=lse,
        empty_lse="+inf",
    )  # fmt: skip
    check(calls, "decode", **want)
    del calls["decode"]
    torch.ops.snapmla.decode_out(
        q.nope_u8, q.rope, q.scale, cache.content_u8, cache.rope, cache.scale, table, lengths,
        plan.work_items, plan.part_begin, plan.split_begin, plan.units, plan.row_limits,
        plan.o_accum, plan.lse_accum, plan.pipeline, plan.row_tile, True, 0.3, False,
        math.log(2.0), math.inf, out, lse,
    )  # fmt: skip
    check(calls, "decode", **want)


@needs_compiler
def test_merge_inside_decode() -> None:
    """Decode's host half launches it; what it hands over are parameters of its own, by name."""
    from dsl_kernels.entry import launch  # where the compiler is: it imports the DSL

    tree = ast.parse(inspect.getsource(launch))
    found = [
        [
            a.id if isinstance(a, ast.Name) else a.attr
            for a in node.args
            if not isinstance(a, ast.Call)
        ]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "merge.launch"
    ]
    assert found == [[*names_of(VariantSpec(op="merge")), "stream"]]


@needs_compiler
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_append(calls: Calls, index: torch.dtype) -> None:
    cache, planes = cache_of("paged")
    c_kv, k_rope = torch.zeros(4, 512), torch.zeros(4, 64)
    slots = torch.arange(4, dtype=index)
    snapmla.append_kv(cache, c_kv, k_rope, slots)
    check(calls, "append_kv", **planes, c_kv=c_kv, k_rope=k_rope, slot_mapping=slots)


@needs_compiler
@pytest.mark.parametrize("flag", [0, 1])
def test_rows_of_656_bytes(calls: Calls, flag: int) -> None:
    cache = snapmla.PagedKVCache.allocate(
        PAGES, 5, device="cpu", dtype="fp8_ds_mla", scale_fmt="ue8m0" if flag else None
    )
    c_kv, k_rope, slots = torch.zeros(4, 512), torch.zeros(4, 64), torch.arange(4)
    tokens = {"c_kv": c_kv, "k_rope": k_rope, "slot_mapping": slots}
    snapmla.append_kv(cache, *tokens.values())
    check(calls, "append_kv", kv=cache.kv, **tokens, power_of_two=flag)
    angles = {"positions": torch.zeros(4, **INTS), "cos_sin": torch.zeros(9, 64)}
    weight = torch.ones(512)
    for norm in ({}, {"norm_weight": weight, "norm_eps": 1e-5}):
        snapmla.rope_append_kv(cache, *tokens.values(), *angles.values(), **norm)
        check(calls, "append_kv", kv=cache.kv, **tokens, **angles, **norm, power_of_two=flag)
    table, lengths = torch.zeros(B, WIDTH, **INTS), torch.ones(B, **INTS)
    c_kv, k_rope = snapmla.fetch_dequant(cache, table, lengths)
    where = {"block_table": table, "cache_seqlens": lengths}
    check(calls, "fetch_dequant", kv=cache.kv, **where, out_nope=c_kv, out_rope=k_rope)


@needs_compiler
@pytest.mark.parametrize("granularity", ["token_head", "token"])
def test_quantize(calls: Calls, granularity: str) -> None:
    nope, rope = torch.zeros(B, S_Q, HEADS, 512), torch.zeros(B, S_Q, HEADS, 64)
    made = snapmla.quantize_q(nope, rope, granularity)
    check(
        calls, "quantize_q", q_nope=nope, q_rope=rope, out_nope=made.nope, out_rope=made.rope,
        out_scale=made.scale,
    )  # fmt: skip


@needs_compiler
def test_fetch(calls: Calls) -> None:
    cache, planes = cache_of("row640")
    table, lengths = torch.zeros(B, WIDTH, **INTS), torch.ones(B, **INTS)
    c_kv, k_rope = snapmla.fetch_dequant(cache, table, lengths)
    where = {"block_table": table, "cache_seqlens": lengths}
    check(calls, "fetch_dequant", **planes, **where, out_nope=c_kv, out_rope=k_rope)
    for dtype in (torch.int32, torch.int64):
        indices = torch.zeros(5, dtype=dtype)
        c_kv, k_rope = snapmla.fetch_dequant(cache, indices)
        check(calls, "fetch_dequant", **planes, indices=indices, out_nope=c_kv, out_rope=k_rope)
    begins, starts = torch.arange(B + 1, **INTS), torch.ones(B, **INTS)
    for given, passed in ((starts, starts), (None, torch.zeros(0, **INTS))):
        c_kv, k_rope = snapmla.fetch_dequant(
            cache, table, cu_seqlens=begins, seq_starts=given, total=4
        )
        where = {"block_table": table, "cu_seqlens": begins, "seq_starts": passed}
        check(calls, "fetch_dequant", **planes, **where, out_nope=c_kv, out_rope=k_rope)


@needs_compiler
def test_merge_states(calls: Calls) -> None:
    outs, lses = torch.zeros(5, B, S_Q, HEADS, 512), torch.zeros(5, B, HEADS, S_Q)
    out, lse = torch.zeros(B, S_Q, HEADS, 512), torch.zeros(B, HEADS, S_Q)
    results = {"out": out, "lse": lse, "lse_factor": math.log(2.0)}
    snapmla.merge_state(outs[0], lses[0], outs[1], lses[1], out=out, lse=lse)
    pair = {"o_0": outs[0], "o_1": outs[1], "lse_0": lses[0], "lse_1": lses[1]}
    check(calls, "merge_states", **pair, **results)
    snapmla.merge_states(outs, lses, out=out, lse=lse)
    check(calls, "merge_states", o=outs, lses=lses, **results)
    snapmla.merge_states(list(outs), list(lses), out=out, lse=lse)
    which = [i if i < 5 else 0 for i in range(8)]
    eight = {f"o_{k}": outs[i] for k, i in enumerate(which)}
    eight |= {f"lse_{k}": lses[i] for k, i in enumerate(which)}
    check(calls, "merge_states", **eight, parts=5, **results)

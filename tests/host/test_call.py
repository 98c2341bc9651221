"""``snapmla.call.memo``: what a known call has in common with the one that was checked.

Most kernels are stand-ins here, which do nothing: what is asked is how a call gets to one, and what
it says instead.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import snapmla
import softgpu
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import PagedKVCache, QuantizedQuery
from snapmla.cache import layouts
from snapmla.call import memo as calls
from snapmla.checks import overlap
from snapmla.compat import flash_mla
from snapmla.dense import TENSORS, DecodePlan
from snapmla.runtime import launch, variants
from tests.support.needs import needs_compiler
from tests.support.wrong_arguments import BF16, NESTED, RIGHT, call, fetch_arguments, query

OURS, THEIRS = (str(Path(module.__file__ or "").parent) for module in (snapmla, softgpu))
MOST_FUNCTIONS, MOST_FILES = 12, 5
MOST_FILES_OF_A_PLAN = 14
ROOM = 1 << 17  # bytes that each tensor has to itself
QUERY = ("nope", "rope", "scale")
PLANS = {"plan_decode", "records_to_plan"}  # ops that read lengths, whatever a decode is given


# ------------------------------------------------------------------------- calls of every op


def fetch_into_a_pair() -> dict[str, Any]:
    out = torch.zeros(6, 512, dtype=BF16), torch.zeros(6, 64, dtype=BF16)
    cache, where = fetch_arguments()["cache"], torch.zeros(6, dtype=torch.int32)
    return {"cache": cache, "where": where, "out": out}


def with_records() -> dict[str, Any]:
    return {**RIGHT["flash_mla_with_kvcache"](), "num_splits": None}  # which is not read


def with_an_object() -> dict[str, Any]:
    metadata, _ = flash_mla.get_mla_metadata()
    return {**with_records(), "tile_scheduler_metadata": metadata}


# name -> (what is called, its arguments)
CALLS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    **{name: (name, RIGHT[name]) for name in (
        "decode", "decode_rows", "append_kv", "append_rows", "rope_append_kv", "fetch_rows",
        "fetch_dequant_chunks", "merge_state", "merge_states", "flash_mla_ckv_fp8_per_token",
        "append_ds_mla", "fetch_ds_mla",
    )},
    "flash_mla_with_kvcache": ("flash_mla_with_kvcache", with_records),
    "decode_allocating": ("decode", lambda: {**RIGHT["decode"](), "out": None, "lse": None}),
    "decode_without_lse": ("decode", lambda: {**RIGHT["decode"](), "lse": None}),
    "quantize_q": ("quantize_q", lambda: {**RIGHT["quantize_q"](), "out": query()}),
    "quantize_q_allocating": ("quantize_q", RIGHT["quantize_q"]),
    "rope_quantize_q": ("rope_quantize_q", lambda: {**RIGHT["rope_quantize_q"](), "out": query()}),
    "fetch_dequant": ("fetch_dequant", RIGHT["fetch_dequant"]),
    "fetch_into_a_pair": ("fetch_dequant", fetch_into_a_pair),
    "flash_mla_object": ("flash_mla_with_kvcache", with_an_object),
    "flash_mla_allocating": (
        "flash_mla_with_kvcache", lambda: {**with_an_object(), "out": None, "lse": None}
    ),
}  # fmt: skip
every_call = pytest.mark.parametrize("name", CALLS)


def spread(value: Any, name: str, memory: dict[str, torch.Tensor]) -> Any:
    """A copy of a call's argument, each tensor at the beginning of memory of its own.

    Args:
        memory: gets that memory, by what messages call the tensor.
    """
    if isinstance(value, torch.Tensor):
        memory[name] = torch.zeros(max(ROOM, value.nbytes), dtype=torch.uint8)
        return at(memory[name], value).copy_(value)
    if isinstance(value, QuantizedQuery):
        return QuantizedQuery(*(spread(getattr(value, n), f"{name}.{n}", memory) for n in QUERY))
    if isinstance(value, PagedKVCache):
        views = (spread(t, f"{name}.{n}", memory) for n, t in value.named_tensors.items())
        told = {"format": value.format} if FORMATS[value.format].named else {}
        return PagedKVCache.from_tensors(*views, **told)
    if isinstance(value, DecodePlan):
        tables = {n: getattr(value, n) for n in TENSORS if getattr(value, n).numel()}
        return replace(value, **{n: spread(t, f"{name}.{n}", memory) for n, t in tables.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(spread(v, f"{name}[{i}]", memory) for i, v in enumerate(value))
    return value


def at(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor like another, over the first bytes of ``memory``."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def tensors_of(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values of a call's plain tensors."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value))


def with_another(arguments: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The same arguments but for the tensor of this name: ``out``, ``out[1]``, ``out.scale``."""
    name, bracket, index = name.partition("[")
    name, dot, part = name.partition(".")
    if bracket:
        values = list(arguments[name])
        values[int(index[:-1])] = value
        value = type(arguments[name])(values)
    elif dot:
        parts = {n: getattr(arguments[name], n) for n in QUERY}
        value = QuantizedQuery(**{**parts, part: value})
    return {**arguments, name: value}


class Known:
    """A call that was made right until it was known; ``made`` again with other arguments."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        function, right = CALLS[name]
        self.function, self.memory = call(function), dict[str, torch.Tensor]()
        self.arguments = {n: spread(v, n, self.memory) for n, v in right().items()}
        self.launched: list[tuple[str, tuple[Any, ...]]] = []  # op, what its kernel was given
        self.fails: Exception | None = None  # what kernels raise
        self.found: list[calls.Kind | None] = []
        self.last: tuple[calls.Memo, calls.Op, Any] | None = None  # asked, for what call
        find = calls.Memo.find

        def noted(memo: calls.Memo, op: calls.Op, given: Any) -> calls.Kind | None:
            self.last = memo, op, given
            self.found.append(find(memo, op, given))
            return self.found[-1]

        monkeypatch.setattr(calls.Memo, "find", noted)
        variants.forget()
        monkeypatch.setattr(variants, "kernel", self._kernel)
        for _ in range(3):
            self.made()
        assert self.found[-1] is not None, "three calls that are right are not known"
        self.launched.clear()

    def _kernel(self, spec: VariantSpec, _: str) -> Callable[..., None]:
        def stand_in(*given: Any) -> None:
            self.launched.append((spec.op, given))
            if self.fails is not None:
                raise self.fails

        return stand_in

    def made(self, **changes: Any) -> Any:
        return self.function(**{**self.arguments, **changes})

    def one_another(self, name: str, value: Any) -> Any:
        return self.function(**with_another(self.arguments, name, value))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Known]]:
    yield lambda name: Known(name, monkeypatch)
    variants.forget()  # the stand-ins


@every_call
def test_a_right_call_is_known(known: Callable[[str], Known], name: str) -> None:
    call = known(name)
    call.made()
    assert call.found[-1] is not None and call.launched


# -------------------------------------------- sentences that a call of a known kind must not miss


@every_call
def test_a_negative_view(known: Callable[[str], Known], name: str) -> None:
    """Of the very tensor that was right."""
    call = known(name)
    for argument, value in tensors_of(call.arguments):
        with pytest.raises(ValueError, match="expected values as memory holds them, got a view"):
            call.one_another(argument, torch._neg_view(value))
    assert not call.launched


@every_call
def test_a_stand_in_of_a_tensor(known: Callable[[str], Known], name: str) -> None:
    """It has no memory: operators are asked for it, no kernel; FakeTensors have the same sizes."""
    call, fake = known(name), FakeTensorMode(allow_non_fake_inputs=True)
    for argument, value in tensors_of(call.arguments):
        call.one_another(argument, fake.from_tensor(value))
        assert call.found[-1] is None and PLANS.issuperset(op for op, _ in call.launched)


class Named(torch.Tensor):
    """A subclass with memory."""


@every_call
def test_a_subclass_of_the_same_memory(known: Callable[[str], Known], name: str) -> None:
    call = known(name)
    for argument, value in tensors_of(call.arguments):
        call.one_another(argument, value.as_subclass(Named))
        assert call.found[-1] is None, argument


@every_call
@pytest.mark.parametrize("several", [False, True])
def test_a_tensor_elsewhere(
    known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch, name: str, several: bool
) -> None:
    """With several GPUs the exported functions see kinds of devices only."""
    call = known(name)
    monkeypatch.setattr(launch, "several_gpus", lambda: several)
    for argument, value in tensors_of(call.arguments):
        with pytest.raises(ValueError, match=r"expected (a tensor|tensors) on (cpu|meta)"):
            call.one_another(argument, value.to("meta"))
    assert not call.launched


@every_call
def test_a_nested_tensor(known: Callable[[str], Known], name: str) -> None:
    """Torch's guards, which known calls ask, end the process over one."""
    call = known(name)
    for argument, _ in tensors_of(call.arguments):
        with pytest.raises(TypeError, match="expected a tensor of one shape, got a nested tensor"):
            call.one_another(argument, NESTED)
    assert not call.launched


Q, CACHE = ("q.nope", "q.rope", "q.scale"), ("cache.content", "cache.rope", "cache.scale")
TABLES = ("block_table", "cache_seqlens")
PLAN = tuple(f"plan.{n}" for n in TENSORS if n not in ("units", "unit_begin", "row_limits"))
TOKENS = ("c_kv", "k_rope", "slot_mapping")


def results_over(*read: str) -> list[tuple[str, str]]:
    return [(result, other) for result in ("out", "lse") for other in read]


# call -> (argument that is moved, the one over whose memory it is moved)
ALIASED: dict[str, list[tuple[str, str]]] = {
    "decode": [*results_over(*Q, *CACHE, *TABLES, *PLAN), ("out", "lse")],
    "decode_without_lse": [("out", other) for other in (*Q, *CACHE, *TABLES, *PLAN)],
    "decode_rows": [*results_over("q", "cache.kv", *TABLES, *PLAN), ("out", "lse")],
    "append_kv": [(token, part) for token in TOKENS for part in CACHE],
    "append_rows": [(token, "cache.kv") for token in TOKENS],
    "append_ds_mla": [(token, "cache.kv") for token in TOKENS],
    "fetch_ds_mla": [("out", other) for other in ("cache.kv", "where", "cache_seqlens")],
    "rope_append_kv": [
        (token, part)
        for token in (*TOKENS, "positions", "cos_sin_cache", "norm_weight")
        for part in CACHE
    ],
    "quantize_q": [
        *((f"out.{part}", x) for part in ("nope", "rope", "scale") for x in ("q_nope", "q_rope")),
        ("out.rope", "out.nope"), ("out.scale", "out.nope"), ("out.scale", "out.rope"),
    ],
    "rope_quantize_q": [
        *((f"out.{part}", x) for part in ("nope", "rope", "scale")
          for x in ("q_nope", "q_rope", "positions", "cos_sin_cache")),
        ("out.rope", "out.nope"), ("out.scale", "out.nope"), ("out.scale", "out.rope"),
    ],
    "fetch_rows": [("out", other) for other in ("cache.kv", "where", "cache_seqlens")],
    "fetch_dequant_chunks": [
        ("out", other) for other in (*CACHE, "where", "cu_seqlens", "seq_starts")
    ],
    "fetch_into_a_pair": [
        *((f"out[{i}]", other) for i in range(2) for other in (*CACHE, "where")),
        ("out[1]", "out[0]"),
    ],
    "merge_state": [
        ("lse", "out"), *(("lse", x) for x in ("out_a", "out_b")),
        *(("out", x) for x in ("lse_a", "lse_b")),
    ],
    "flash_mla_ckv_fp8_per_token": [
        *results_over("q_nope", "q_rope", "q_scale", "k_cache_lora", "k_cache_rope", "k_scale",
                      *TABLES, "tile_scheduler_metadata", "num_splits"),
        ("out", "lse"),
    ],
    "flash_mla_with_kvcache": [*results_over("q", "k_cache", *TABLES), ("out", "lse")],
    "flash_mla_object": [*results_over("q", "k_cache", *TABLES), ("out", "lse")],
}  # fmt: skip


@pytest.mark.parametrize("name", ALIASED)
def test_memory_of_another_argument(known: Callable[[str], Known], name: str) -> None:
    """Everything is like the call that was right but for where one tensor begins."""
    call, values = known(name), dict[str, torch.Tensor]()
    for argument, value in call.arguments.items():
        parts = {"": value}
        if isinstance(value, QuantizedQuery):
            parts = {f".{n}": getattr(value, n) for n in ("nope", "rope", "scale")}
        elif isinstance(value, (list, tuple)):
            parts = {f"[{i}]": v for i, v in enumerate(value)}
        values |= {argument + part: v for part, v in parts.items()}
    for moved, other in ALIASED[name]:
        over = at(call.memory[other], values[moved])
        words = f"{moved}: expected memory apart from {other}, got tensors that overlap"
        with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
            call.one_another(moved, over)
    assert not call.launched
    call.made()
    assert call.found[-1] is not None, "the right call is not known any more"


def test_memory_of_a_part(known: Callable[[str], Known]) -> None:
    """A result may be a part of its kind, all of it; moved by a row it is refused."""
    call = known("merge_state")
    for name, row in (("out", 1024), ("lse", 64)):
        for part in ("a", "b"):
            moved, memory = call.arguments[name], call.memory[f"{name}_{part}"]
            call.made(**{name: call.arguments[f"{name}_{part}"]})
            with pytest.raises(ValueError, match=rf"^{name}: .* apart from {name}_{part}, got"):
                call.made(**{name: at(memory[row:], moved)})
    assert len(call.launched) == 4


@every_call
def test_memory_that_was_freed(known: Callable[[str], Known], name: str) -> None:
    """Since a call that was right, and with every other tensor where it was."""
    call = known(name)
    assert call.last is not None
    _, op, given = call.last
    parts = op.parts(given)
    if parts is None or parts[2] is None:
        pytest.skip("nothing is written that was given: no address is asked for")
    for argument, value in tensors_of(call.arguments):
        gone, size = value.clone(), value.nbytes
        call.one_another(argument, gone)
        launched = len(call.launched)
        gone.untyped_storage().resize_(0)
        try:
            with pytest.raises(ValueError, match="expected memory, got a storage that was freed"):
                call.one_another(argument, gone)
            assert len(call.launched) == launched
        finally:
            gone.untyped_storage().resize_(size)  # a report may show it


# ------------------------------------------------------------------------- what a memo knows


def test_other_options_are_another_kind(known: Callable[[str], Known]) -> None:
    call = known("decode")
    for scale, seen in ((0.2, False), (0.2, True), (0.1, True)):
        call.made(softmax_scale=scale)
        assert (call.found[-1] is not None) == seen
        assert next(x for x in call.launched[-1][1] if isinstance(x, float)) == scale


def test_other_strides_are_another_kind(known: Callable[[str], Known]) -> None:
    """The same addresses, shapes and dtypes."""
    call = known("merge_states")
    rows = call.arguments["outs"][0]
    strides = *(stride // 512 * 513 for stride in rows.stride()[:-1]), 1
    odd = call.memory["outs[0]"].view(rows.dtype).as_strided(rows.shape, strides)
    with pytest.raises(ValueError, match=r"^outs\[0\]: expected outer strides that are multiples"):
        call.one_another("outs[0]", odd)
    assert not call.launched


def test_addresses_are_compared_once(
    known: Callable[[str], Known], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, moved = known("decode"), torch.zeros_like(RIGHT["decode"]()["out"])
    call.made(out=moved)
    monkeypatch.setattr(overlap, "lie_apart", lambda *_: pytest.fail("compared anew"))
    call.made(out=moved)
    call.made()
    assert call.found[-1] is not None


def test_an_object_that_does_not_fit(known: Callable[[str], Known]) -> None:
    """The options are a known call's, and so are all plain tensors."""
    call = known("decode")
    pages, page, _ = call.arguments["cache"].content.shape
    smaller = PagedKVCache.allocate(2 * pages, page // 2, device="cpu")
    with pytest.raises(ValueError, match="^plan: expected one made for"):
        call.made(cache=smaller)
    assert not call.launched


def test_kinds_that_are_kept(known: Callable[[str], Known]) -> None:
    """As many as take turns; of more the longest unused goes."""
    call = known("quantize_q_allocating")
    assert call.last is not None
    memo, _, _ = call.last
    memo.forget()
    rows = {
        n: [torch.zeros(n, 1, 1, width, dtype=BF16) for width in (512, 64)]
        for n in range(1, calls.ROOM + 2)
    }

    def quantize(n: int) -> bool:
        call.function(*rows[n])
        return call.found[-1] is not None

    assert not any(quantize(n) for n in range(1, calls.ROOM + 1))
    assert all(quantize(n) for n in range(1, calls.ROOM + 1))
    assert len(memo.kinds) == calls.ROOM
    assert quantize(1) and not quantize(calls.ROOM + 1) and len(memo.kinds) == calls.ROOM
    assert quantize(1) and not quantize(2)


def test_a_kind_is_noted_once(known: Callable[[str], Known]) -> None:
    """Also of calls whose tensors lie between another's pages, which are checked every time."""
    call = known("append_kv")
    assert call.last is not None
    memo, pages, page, size = call.last[0], 4, 64, 64 * layouts.TOKEN_BYTES
    pool = torch.zeros(pages, size + 64, dtype=torch.uint8)
    cache = PagedKVCache.from_tensors(*layouts.paged_views(pool[:, :size], page))
    slots = call.arguments["slot_mapping"]
    between, count = pool[1, size:].view(slots.dtype)[: len(slots)], len(memo.kinds)
    for _ in range(3):
        call.made(cache=cache, slot_mapping=between)
        assert call.found[-1] is None
    assert len(memo.kinds) == count


def test_a_plan_of_the_same_workspace(known: Callable[[str], Known]) -> None:
    """Where one plan's tables lie says nothing of another's."""
    call = known("decode")
    plan, other = call.arguments["plan"], torch.zeros_like(call.arguments["out"])
    out = call.arguments["out"]
    items = at(out.view(-1).view(torch.uint8), plan.work_items)
    moved = replace(plan, work_items=items)
    for _ in range(2):
        call.made(plan=moved, out=other)
    assert call.found[-1] is not None
    with pytest.raises(ValueError, match=r"^out: expected memory apart from plan\.work_items"):
        call.made(plan=moved)


def test_more_of_the_same_address(known: Callable[[str], Known]) -> None:
    """More tokens at the address of fewer reach into what is written."""
    call = known("append_kv")
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    content = call.arguments["cache"].content
    cache = PagedKVCache.from_tensors(
        at(memory[8192:], content), call.arguments["cache"].rope, call.arguments["cache"].scale
    )

    def tokens(n: int) -> dict[str, Any]:
        slots = torch.zeros(n, dtype=torch.int32)
        rows = memory[: n * 1024].view(BF16).view(n, 512)
        return {"c_kv": rows, "k_rope": torch.zeros(n, 64, dtype=BF16), "slot_mapping": slots}

    few, many = tokens(8), tokens(9)
    for _ in range(2):
        call.made(cache=cache, **few)
        call.made(**{**many, "c_kv": many["c_kv"].clone()})
    assert call.found[-1] is not None
    call.made(cache=cache, **{**few, **{n: many[n][:8] for n in ("k_rope", "slot_mapping")}})
    with pytest.raises(ValueError, match=r"^c_kv: expected memory apart from cache\.content"):
        call.made(cache=cache, **many)


def test_a_kernel_that_refuses(known: Callable[[str], Known]) -> None:
    """The checks say why, if they know; a call is not made twice."""
    call = known("decode")
    call.fails = RuntimeError("refused")
    with pytest.raises(RuntimeError, match="^refused$"):
        call.made()
    assert call.found[-1] is not None and len(call.launched) == 1
    plan = call.arguments["plan"]
    plan.work_items.untyped_storage().resize_(0)  # which no call of a known kind asks for
    with pytest.raises(ValueError, match="^plan: expected memory"):
        call.made()
    assert call.found[-1] is not None and len(call.launched) == 2


class Recorder(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@every_call
def test_a_known_call_that_is_watched(known: Callable[[str], Known], name: str) -> None:
    call, recorder = known(name), Recorder()
    found = len(call.found)
    with recorder:
        call.made()
    assert any(op.startswith("snapmla.") for op in recorder.seen)
    assert not any(call.found[found:])


# ------------------------------------------------------------------- what a repeated call enters


def entered(made: Callable[[], object]) -> tuple[list[tuple[str, str]], bool]:
    """(file, function) of ours that a call enters before its kernel, the software GPU's or a
    stand-in, and whether it gets there."""
    found: list[tuple[str, str]] = []
    reached = False

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal reached
        file = frame.f_code.co_filename
        reached |= file.startswith(THEIRS) or frame.f_code.co_name == "stand_in"
        if event == "call" and not reached and file.startswith(OURS):
            found.append((file, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        made()
    finally:
        sys.setprofile(None)
    return found, reached


def assert_short(way: tuple[list[tuple[str, str]], bool], begin: str) -> None:
    found, reached = way
    assert reached and found[0][1] == begin
    assert len(found) <= MOST_FUNCTIONS, found
    assert len({file for file, _ in found}) <= MOST_FILES, found


@needs_compiler
def test_what_a_repeated_call_enters() -> None:
    """Between the public name and the software GPU."""
    arguments = {name: CALLS[name][1]() for name in ("decode_rows", "flash_mla_object")}
    lengths, rows = arguments["decode_rows"]["cache_seqlens"], arguments["decode_rows"]["q"]
    arguments["decode_rows"]["plan"] = snapmla.plan_decode(
        lengths, rows.shape[2], rows.shape[1], page_size=16,
        max_pages=arguments["decode_rows"]["block_table"].shape[1], cache_dtype=rows.dtype,
        row_tile=16,
    )  # fmt: skip
    arguments["append_kv"] = CALLS["append_kv"][1]()
    for name, given in arguments.items():
        function = call(CALLS[name][0])
        for _ in range(2):
            function(**given)
        assert_short(entered(functools.partial(function, **given)), function.__name__)


@needs_compiler
def test_what_a_plan_enters() -> None:
    """Plans are made on every step of some engines: nothing is looked up twice."""
    lengths = torch.tensor([300, 1000, 64, 5], dtype=torch.int32)
    made = functools.partial(
        snapmla.plan_decode, lengths, num_heads=16, s_q=1, page_size=64, max_pages=32
    )
    made()
    found, reached = entered(made)
    assert reached and len(found) <= 90, len(found)  # 94 if the choice of a kernel is made anew
    assert len({file for file, _ in found}) <= MOST_FILES_OF_A_PLAN


@pytest.mark.parametrize("name", ["decode", "decode_allocating", "quantize_q", "append_rows"])
def test_what_more_calls_enter(known: Callable[[str], Known], name: str) -> None:
    call = known(name)
    assert_short(entered(call.made), call.function.__name__)

"""Every public op with extents of 1: strides that reach nothing, and one tensor in two places."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla.call import memo as calls
from snapmla.compat import flash_mla, flash_mla_fp8
from snapmla.indexer import shapes
from snapmla.runtime import launch, variants
from tests.support.needs import needs_kernels
from tests.support.single_calls import CALLS, Tensors, mha_prefill, values_of

OURS = str(Path(snapmla.__file__ or "").parent)
scoring: Any = importlib.import_module("snapmla.indexer.index_logits")  # a function has its name
every_call = pytest.mark.parametrize("name", CALLS)
# whose kernels take seconds here, and whose strides go the way of another row of the table
COSTLY = {
    "context_group", "decode_bytes", "decode_witness", "flash_attention_varlen",
    "flash_mla_records", "flash_mla_varlen",
    "index_topk_ragged", "mha_prefill_backward", "mha_whole_keys", "plan_cache", "snapmla_names",
    "sparse_decode_apart", "sparse_decode_bytes", "sparse_prefill_fp8", "two_lists",
}  # fmt: skip
by_kernels = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.whole_matrix if n in COSTLY else ()) for n in CALLS],
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Variants that other tests take, too."""
    monkeypatch.setattr(shapes, "choose", lambda *_: shapes.TopkShape(64, 8, 2))
    monkeypatch.setattr(scoring, "sm_count", lambda _: 3)
    monkeypatch.setattr(scoring, "unit_of", lambda _: 2)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


# ---------------------------------------------------------------- strides over extents of 1


def odd(tensor: Tensor, strides: Iterator[int]) -> Tensor:
    """A copy whose dimensions of size 1 have strides that nobody would choose."""
    plain = launch.dense_strides(tuple(tensor.shape))
    given = [next(strides) if n == 1 else s for n, s in zip(tensor.shape, plain)]
    return tensor.clone(memory_format=torch.contiguous_format).as_strided(tensor.shape, given)


def dense(tensor: Tensor) -> Tensor:
    """Bytes of its elements."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return copy.view(-1).view(torch.uint8)


def outcome(function: Callable[..., Any], given: Tensors) -> list[Tensor]:
    """Bytes of all results, and of what was given, as some of it is written."""
    return [dense(x) for x in (*values_of(function(**given)), *given.values())]


@needs_kernels
@by_kernels
def test_strides_that_reach_nothing(name: str) -> None:
    """No multiples of 16 bytes, none at all, more than 32 bits: the bits of contiguous tensors."""
    torch.manual_seed(1)
    function, given = CALLS[name]()
    want = outcome(function, {n: x.clone() for n, x in given.items()})
    strides = itertools.cycle((3, 0, 1 << 33, 5))
    moved = {n: odd(x, strides) for n, x in given.items()}
    assert any(moved[n].stride() != x.stride() for n, x in given.items())
    for _ in range(2 if name in ("mha_prefill", "sparse_prefill") else 1):  # then it is known
        for n, x in moved.items():
            x.copy_(given[n])
        for mine, right in zip(outcome(function, moved), want, strict=True):
            assert torch.equal(mine, right)


def test_regular_strides() -> None:
    """Those that TMA takes, of the same elements; nothing is touched where all are right."""
    x = torch.arange(4 * 8 * 16.0).view(4, 8, 16)
    for right in (x, x[:1], x[:, :1], x[:, ::2], x[:0], x[..., :1][:1, :1], torch.zeros(())):
        assert launch.regular(right) is right
    for shape, strides, want in (
        ((1, 8, 16), (3, 16, 1), (128, 16, 1)),
        ((1, 8, 16), (0, 32, 1), (256, 32, 1)),
        ((4, 1, 16), (128, 5, 1), (128, 16, 1)),
        ((1, 1, 16), (1 << 31, 7, 1), (16, 16, 1)),
        ((1, 4, 1), (2, 16, 9), (64, 16, 1)),
    ):
        odd_one = x.as_strided(shape, strides)
        made = launch.regular(odd_one)
        assert made.stride() == want and torch.equal(made, odd_one)


# ---------------------------------------------------------------------- one tensor in two places


class Launches:
    """Stand-ins of all kernels, which note what they are given, and what memos find."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, tuple[Any, ...]]] = []
        self.found: list[tuple[str, bool]] = []
        find = calls.Memo.find

        def noted(memo: calls.Memo, op: calls.Op, given: Any) -> calls.Kind | None:
            kind = find(memo, op, given)
            self.found.append((op.name, kind is not None))
            return kind

        def kernel(spec: VariantSpec, _: str) -> Callable[..., None]:
            return lambda *given: self.made.append((spec.op, given))

        monkeypatch.setattr(calls.Memo, "find", noted)
        variants.forget()
        monkeypatch.setattr(variants, "kernel", kernel)
        for module, planner in (
            (snapmla, "plan_decode"), (snapmla, "plan_sparse_decode"),
            (snapmla, "plan_sparse_prefill"), (flash_mla, "get_mla_metadata"),
            (flash_mla_fp8, "get_mla_metadata"),
        ):  # fmt: skip
            monkeypatch.setattr(module, planner, self._once(getattr(module, planner)))

    @staticmethod
    def _once(function: Callable[..., Any]) -> Callable[..., Any]:
        """A plan is made once: memos live on plans."""
        kept: list[Any] = []

        def made(*given: Any, **named: Any) -> Any:
            if not kept:
                kept.append(function(*given, **named))
            return kept[0]

        return made

    def of(self, function: Callable[..., Any], given: Tensors) -> list[tuple[str, tuple[Any, ...]]]:
        """Launches of a call."""
        self.made, self.found = [], []
        function(**given)
        return self.made


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    yield Launches(monkeypatch)
    monkeypatch.undo()
    variants.forget()


def pairs(given: Tensors) -> Iterator[tuple[str, str]]:
    for a, b in itertools.combinations(given, 2):
        if given[a].dtype == given[b].dtype and given[a].shape == given[b].shape:
            yield a, b


def same(mine: Any, other: Any, given: list[int]) -> bool:
    """Compares what kernels get: numbers, shapes of tensors, and their values in given storages."""
    if not isinstance(other, Tensor):
        return bool(mine == other)
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return False
    fresh = other.untyped_storage().data_ptr() not in given
    return fresh or torch.equal(dense(mine), dense(other))


@needs_kernels
@every_call
def test_one_tensor_in_two_places(launches: Launches, name: str) -> None:
    """The next such call, where it is legal, is known, and launches what copies would."""
    function, given = CALLS[name]()
    for _ in range(3):
        launches.of(function, given)
    asked = launches.found
    legal = set()
    for a, b in pairs(given):
        apart = given | {b: given[a].clone()}
        try:
            want = launches.of(function, apart)
            launches.of(function, given | {b: given[a]})
        except (TypeError, ValueError):  # one of them is written
            continue
        legal.add((a, b))
        for _ in range(2):
            made = launches.of(function, given | {b: given[a]})
            assert launches.found == asked and all(known for _, known in asked), (a, b)
        assert [op for op, _ in made] == [op for op, _ in want]
        memory = [x.untyped_storage().data_ptr() for x in apart.values()]
        for (_, mine), (_, other) in zip(made, want, strict=True):
            assert all(same(x, y, memory) for x, y in zip(mine, other, strict=True)), (a, b)
    assert WITH_PAIRS.get(name, set()) <= legal


WITH_PAIRS = {
    "decode_witness": {
        ("cache_seqlens", "row_seqlens"), ("planned_offsets", "cu_seqlens_q"),
        ("planned_limits", "row_seqlens"), ("cache_seqlens", "planned_limits"),
    },
    "plan_cache": {("cache_seqlens", "row_seqlens")},
    "context_group": {("planned_offsets", "cu_seqlens_q")},
    "sparse_decode_apart": {("row_lengths", "row_seqlens")},
    "mha_prefill": {("cu_seqlens_q", "cu_seqlens_k")},
    "mha_prefill_backward": {
        ("cu_seqlens_q", "cu_seqlens_k"), ("k_nope", "v"), ("dout", "out"), ("lse", "dlse"),
    },
    "mha_whole_keys": {("q", "k_nope"), ("k_nope", "v"), ("cu_seqlens_q", "cu_seqlens_k")},
    "rope_append_kv": {("slot_mapping", "positions")},
    "select_topk": {("lengths", "row_starts")},
    "two_lists": {
        ("k_cache", "extra_k_cache"), ("indices", "extra_indices_in_kvcache"),
        ("topk_length", "extra_topk_length"),
    },
    "merge_state": {("out_a", "out_b"), ("lse_a", "lse_b"), ("out_a", "out")},
    "vllm_prefill": {("cu_seqlen_ks", "cu_seqlen_ke")},
}  # fmt: skip


@needs_kernels
@every_call
@pytest.mark.parametrize("stride", [0, 3, 1 << 33])
def test_no_check_asks_for_strides_that_reach_nothing(
    launches: Launches, name: str, stride: int
) -> None:
    """Takes any, of every tensor; a call that repeats is known as others are."""
    function, given = CALLS[name]()
    for _ in range(3):
        launches.of(function, given)
    asked, plain = launches.found, launches.made
    moved = {n: odd(x, itertools.repeat(stride)) for n, x in given.items()}
    for _ in range(2):
        launches.of(function, moved)
    assert [op for op, _ in launches.made] == [op for op, _ in plain]
    assert launches.found == asked


def test_what_lengths_that_are_one_tensor_enter(launches: Launches) -> None:
    """As many functions of ours as two tensors: every prompt without a prefix has one."""
    function, given = mha_prefill()
    ways = []
    for tables in (given, given | {"cu_seqlens_k": given["cu_seqlens_q"]}):
        for _ in range(2):
            function(**tables)
        entered: list[str] = []

        def note(frame: FrameType, event: str, _: object, entered: list[str] = entered) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(OURS):
                entered.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            function(**tables)
        finally:
            sys.setprofile(None)
        ways.append(entered)
    assert ways[0] == ways[1] and ways[0][0] == "mha_prefill"

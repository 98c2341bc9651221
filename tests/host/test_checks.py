"""Wrong input: every row must raise the right type and say the argument, expected, and got.

Arguments are checked before anything is looked up or launched; a call that is repeated leaves most
checks to the exported functions, and must say the same.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla import PagedKVCache, checks
from snapmla.compat import flash_mla, flash_mla_fp8
from snapmla.runtime import variants
from tests.support.needs import needs_compiler
from tests.support.wrong_arguments import (
    BF16,
    F32,
    I32,
    NO_LAUNCH,
    PAGES,
    QUICK,
    RIGHT,
    S_Q,
    WIDTH,
    WRONG,
    B,
    H,
    P,
    append_arguments,
    cache_arguments,
    call,
    decode_arguments,
    flash_mla_arguments,
    fp8,
    quantize_arguments,
    repeated,
    with_one_wrong,
)


def rows(functions: Iterable[str]) -> pytest.MarkDecorator:
    """The test runs for each row of these functions."""
    found = []
    for function in functions:
        count = Counter[str]()
        for row in WRONG[function]:
            found.append(pytest.param(function, *row, id=f"{function}-{row[0]}-{count[row[0]]}"))
            count[row[0]] += 1
    return pytest.mark.parametrize("function, name, value, error, words, advice", found)


@contextmanager
def refused(error: type[Exception], words: str, advice: str) -> Iterator[None]:
    """Type, argument, expected, got, and in parentheses what to change."""
    with pytest.raises(error, match=f"(?s)^{words}") as caught:
        yield
    text = str(caught.value)
    assert re.fullmatch(r"(?s)[^:]+: expected .+, got .+ \(.+\)", text), text
    assert advice in text[text.index(", got ") :], text


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(spec: VariantSpec, device_type: str) -> variants.Kernel:
        raise AssertionError(f"wrong input reached {spec.name}")

    variants.forget()
    monkeypatch.setattr(variants, "kernel", reached)


@rows(WRONG)
def test_wrong_argument(
    no_kernel: None,
    function: str,
    name: str,
    value: Any,
    error: type[Exception],
    words: str,
    advice: str,
) -> None:
    arguments = with_one_wrong(RIGHT[function](), name, value)
    with refused(error, words, advice):
        call(function)(**arguments)


@pytest.fixture(scope="module")
def worked() -> Callable[[str], dict[str, Any]]:
    """Arguments of a call that went through."""
    return functools.cache(repeated)


@needs_compiler
@rows(QUICK)
def test_one_wrong_argument_of_a_call_that_worked(
    worked: Callable[[str], dict[str, Any]],
    function: str,
    name: str,
    value: Any,
    error: type[Exception],
    words: str,
    advice: str,
) -> None:
    """What slips past both the quick way and the exported function would be run."""
    right = worked(function)
    for result in QUICK[function]:
        right[result].zero_()
    with refused(error, words, advice):
        call(function)(**with_one_wrong(right, name, value))
    for result in QUICK[function]:
        assert not right[result].any(), f"{result} was written"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", [(), ("cuda",), (torch.device("cuda", 0),), (0,)], ids=str)
def test_first_call_without_a_gpu(device: tuple[Any, ...]) -> None:
    """The default device is a GPU: who has none learns of the software GPU."""
    with pytest.raises(
        ValueError, match=r"^device: expected 'cpu' or a CUDA .*, got .*\("
    ) as caught:
        PagedKVCache.allocate(8, 64, "split", *device)
    assert str(caught.value).endswith("device='cpu' runs the software GPU)")
    assert "\n" not in str(caught.value)


def test_a_full_gpu_is_no_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError):
        checks.device("device", "cpu")


@pytest.mark.parametrize("function", [f for f in RIGHT if f not in ("allocate", "explain")])
def test_no_sign_is_lost(no_kernel: None, function: str) -> None:
    """Kernels read memory, where values of a view with the negative bit have the other sign."""
    good = RIGHT[function]()
    for name, value in good.items():
        views = [torch._neg_view(value)] if isinstance(value, torch.Tensor) else []
        if isinstance(value, torch.Tensor) and value.dtype == F32:
            pairs = torch.view_as_complex(torch.stack([value, value], -1).contiguous())
            views.append(pairs.conj().imag)  # as it comes about
        for view in views:
            assert view.is_neg()
            with pytest.raises(ValueError, match="negative bit|innermost stride 1|contiguous"):
                call(function)(**{**good, name: view})


@pytest.mark.parametrize("function", RIGHT)
def test_right_arguments_pass_the_checks(no_kernel: None, function: str) -> None:
    if function in NO_LAUNCH:
        call(function)(**RIGHT[function]())
        return
    with pytest.raises(AssertionError, match="wrong input reached"):
        call(function)(**RIGHT[function]())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"h": 129}, "q_nope, num_heads: expected 1 to 128, got 129"),
        ({"page": 48}, "k_cache_lora, page_size: expected one of 16, 32, 64, 128, got 48"),
        ({"pages": 0}, "k_cache_lora: expected 1 page or more, got 0"),
        ({"width": 0}, "block_table: expected a width of 1 or more pages, got 0"),
    ],
)
def test_wrong_in_all_arguments_alike(no_kernel: None, changes: dict[str, int], words: str) -> None:
    """Sizes that go together and are wrong all the same; nothing but the range tells."""
    size = {"h": H, "s_q": S_Q, "page": P, "pages": PAGES, "width": WIDTH, **changes}
    rows, pool = (B, size["s_q"], size["h"]), (size["pages"], size["page"], 1)
    arguments = {
        **flash_mla_arguments(),
        "q_nope": fp8(*rows, 512),
        "q_rope": torch.zeros((*rows, 64), dtype=BF16),
        "q_scale": torch.ones((*rows, 1)),
        "k_cache_lora": fp8(*pool, 512),
        "k_cache_rope": torch.zeros((*pool, 64), dtype=BF16),
        "k_scale": torch.ones((*pool, 1)),
        "block_table": torch.zeros((B, size["width"]), dtype=I32),
    }
    with pytest.raises(ValueError, match=f"^{words}"):
        flash_mla_fp8.flash_mla_ckv_fp8_per_token(**arguments)


def test_one_row_may_have_any_stride(no_kernel: None) -> None:
    """A dimension of extent 1 is never stepped over, so its stride says nothing."""
    one = append_arguments()
    one["c_kv"] = torch.zeros(1024, dtype=BF16).as_strided((1, 512), (513, 1))
    one["k_rope"] = torch.zeros(128, dtype=BF16).as_strided((1, 64), (7, 1))
    one["slot_mapping"] = torch.zeros(1, dtype=I32)
    with pytest.raises(AssertionError, match="wrong input reached"):
        snapmla.append_kv(**one)
    q = torch.zeros(4 * 512, dtype=BF16).as_strided((1, 1, 4, 512), (3, 5, 512, 1))
    rope = torch.zeros((1, 1, 4, 64), dtype=BF16)
    with pytest.raises(AssertionError, match="wrong input reached"):
        snapmla.quantize_q(q, rope)


def test_a_single_page_has_an_aligned_stride() -> None:
    """TMA descriptors hold the page stride of even a single page, where the caller's may be any."""
    fields = cache_arguments()
    for name, view in fields.items():
        fields[name] = view[:1]
    fields["rope"] = torch.zeros(P * 64, dtype=BF16).as_strided((1, P, 64), (P * 64 + 1, 64, 1))
    rope = PagedKVCache.from_tensors(**fields).rope
    assert rope is not None and rope.stride(0) * rope.element_size() % 16 == 0
    assert rope.data_ptr() == fields["rope"].data_ptr()
    two = {name: view[:2] for name, view in cache_arguments().items()}
    pages = torch.zeros(2 * P * 64 + 1, dtype=BF16).as_strided((2, P, 64), (P * 64 + 1, 64, 1))
    with pytest.raises(ValueError, match="rope: expected outer strides"):
        PagedKVCache.from_tensors(**two | {"rope": pages})


def test_table_is_long_enough() -> None:
    assert WRONG.keys() == RIGHT.keys() and sum(map(len, WRONG.values())) >= 230


def test_a_result_over_the_block_table(no_kernel: None) -> None:
    """By the full checks, and by the quick way."""
    arguments = decode_arguments()
    memory = torch.zeros(B * H * S_Q)
    arguments["block_table"] = memory.view(I32)[: B * WIDTH].view(B, WIDTH)
    arguments["lse"] = memory.view(B, H, S_Q)
    words = "lse: expected memory apart from block_table, got tensors that overlap"
    with refused(ValueError, words, "memory of its own"):
        snapmla.decode(**arguments, pipeline="etap")
    with refused(ValueError, words, "memory of its own"):
        snapmla.decode(**arguments)


def test_scalars_of_numpy_are_told_from_pythons() -> None:
    with refused(
        TypeError, "causal: expected True or False, got (numpy.bool|bool_)", "query token s"
    ):
        checks.flag("causal", np.True_)
    with refused(TypeError, "s_q: expected an int, got int64", "int(...)"):
        checks.s_q(np.int64(1))
    with refused(TypeError, "softmax_scale: expected a Python float, got float32", ""):
        checks.softmax_scale(np.float32(0.1))
    assert checks.softmax_scale(np.float64(0.1)) == 0.1  # a Python float


def test_softmax_scale_has_no_default() -> None:
    arguments = decode_arguments()
    del arguments["softmax_scale"]
    with pytest.raises(TypeError, match="softmax_scale"):
        snapmla.decode(**arguments)


def test_an_object_serves_any_kind_of_call() -> None:
    """What it is asked for with is a number, but the first call says what it is."""
    for asked in ({}, {"topk": 64, "is_fp8_kvcache": True}, {"is_fp8_kvcache": True}):
        assert flash_mla.get_mla_metadata(**asked)[1] is None  # type: ignore[arg-type]
    with refused(ValueError, "topk: expected 1 or more, got 0", "the width of indices"):
        flash_mla.get_mla_metadata(topk=0)


def test_a_float8_cache_by_its_dtype() -> None:
    """What ``cache.dtype`` says is taken where caches and their plans are made."""
    cache = PagedKVCache.allocate(PAGES, P, device="cpu", dtype=checks.FP8)
    assert cache.dtype is checks.FP8 and cache.scale is not None
    assert snapmla.explain(H, cache_dtype=cache.dtype, card="H200")
    plans = snapmla.PlanCache(H, page_size=P, device="cpu", cache_dtype=cache.dtype)
    assert plans._options == snapmla.PlanCache(H, page_size=P, device="cpu")._options


def older_tracers() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls under torch.jit.trace and torch.fx.symbolic_trace."""
    q, cache = quantize_arguments(), append_arguments()["cache"]
    lengths = torch.ones(B, dtype=I32)

    def plan(n: torch.Tensor) -> torch.Tensor:
        return snapmla.plan_decode(n, H, n.shape[0], page_size=P, max_pages=1).work_items

    def append(c_kv: torch.Tensor, k_rope: torch.Tensor) -> None:
        snapmla.append_kv(cache, c_kv, k_rope, torch.arange(B))

    yield "jit.trace", lambda: torch.jit.trace(plan, (lengths,))
    yield "jit.trace", lambda: torch.jit.trace(snapmla.quantize_q, tuple(q.values()))
    for function in (append, lambda a, b: snapmla.quantize_q(a, b).scale):
        yield "fx.symbolic_trace", lambda function=function: torch.fx.symbolic_trace(function)


def test_older_tracers_are_told_of_newer_ones(no_kernel: None) -> None:
    with warnings.catch_warnings(action="ignore"):  # jit.trace is deprecated
        for tracer, call_ in older_tracers():
            with pytest.raises(TypeError, match=rf"\(torch.{tracer} cannot record it: use make_fx"):
                call_()


def test_nested_tensors_of_the_newer_layout() -> None:
    rows = [torch.zeros(n, H, 512) for n in (1, 2)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for refuse in (
        lambda: snapmla.quantize_q(nested, nested),
        lambda: snapmla.merge_state(nested, nested, nested, nested),
    ):
        with pytest.raises(TypeError, match="expected a tensor of one shape, got a nested tensor"):
            refuse()

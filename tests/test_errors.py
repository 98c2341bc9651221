# ruff: noqa: E501 (a table: one row reads better on one line)
"""Wrong input: every row must raise the right type and say the argument, expected, and got.

No row reaches a kernel: arguments are checked before anything is looked up or launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla import PagedKVCache, QuantizedQuery, runtime
from snapmla.errors import UnsupportedDeviceError, VariantError
from snapmla.plan import DecodePlan
from snapmla.reference_plan import plan_reference

B, S_Q, H, PAGES, P, WIDTH = 2, 1, 16, 4, 64, 3
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64


def query(b: int = B, s_q: int = S_Q, h: int = H, scale_dims: int = 3) -> QuantizedQuery:
    return QuantizedQuery(
        torch.zeros((b, s_q, h, 512), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.zeros((b, s_q, h, 64), dtype=BF16),
        torch.ones((b, s_q, h)[:scale_dims]),
    )


def plan(**changes: Any) -> DecodePlan:
    fields: dict[str, Any] = {
        "work_items": torch.zeros((4 + B, 4), dtype=I32),
        "part_begin": torch.zeros(5, dtype=I32),
        "split_begin": torch.zeros(B + 1, dtype=I32),
        "o_accum": torch.zeros(8, 16, 512),
        "lse_accum": torch.zeros(8, 16),
        "batch": B, "num_heads": H, "s_q": S_Q, "page_size": P, "max_pages": WIDTH,
        "num_parts": 4, "pipeline": "etap", "row_tile": 16, "fixed_overhead": 4,
    }  # fmt: skip
    return DecodePlan(**{**fields, **changes})


def decode_arguments() -> dict[str, Any]:
    return {
        "q": query(),
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "block_table": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.ones(B, dtype=I32),
        "softmax_scale": 0.1,
        "plan": plan(),
    }


def append_arguments() -> dict[str, Any]:
    return {
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "c_kv": torch.zeros((5, 512), dtype=BF16),
        "k_rope": torch.zeros((5, 64), dtype=BF16),
        "slot_mapping": torch.zeros(5, dtype=I32),
    }


def quantize_arguments() -> dict[str, Any]:
    return {
        "q_nope": torch.zeros((B, S_Q, H, 512), dtype=BF16),
        "q_rope": torch.zeros((B, S_Q, H, 64), dtype=BF16),
    }


def fetch_arguments() -> dict[str, Any]:
    return {
        "cache": PagedKVCache.allocate(PAGES, P, device="cpu"),
        "where": torch.zeros((B, WIDTH), dtype=I32),
        "cache_seqlens": torch.ones(B, dtype=I32),
    }


def cache_arguments() -> dict[str, Any]:
    return {
        "content": torch.zeros((PAGES, P, 512), dtype=torch.uint8),
        "rope": torch.zeros((PAGES, P, 64), dtype=BF16),
        "scale": torch.zeros((PAGES, P)),
    }


def plan_arguments() -> dict[str, Any]:
    lengths = torch.ones(B, dtype=I32)
    return {
        "cache_seqlens": lengths, "num_heads": H, "s_q": 1, "page_size": 64, "max_pages": 3,
    }  # fmt: skip


META = {"device": "meta"}
ROWS: list[tuple[str, str, Any, type, str]] = [
    # decode
    ("decode", "q", torch.zeros(B, S_Q, H, 576, dtype=F16), TypeError,
     "q: expected a snapmla.QuantizedQuery, got a float16 tensor .*quantize_q"),
    ("decode", "cache", torch.zeros(4, 64, 576), TypeError, "cache: .*PagedKVCache.*from_tensors"),
    ("decode", "block_table", torch.zeros((B, WIDTH), dtype=I64), TypeError,
     r"block_table: expected dtype int32, got int64 \(use \.to\(torch\.int32\) once"),
    ("decode", "block_table", torch.zeros((B + 1, WIDTH), dtype=I32), ValueError,
     r"block_table: expected shape \(2, width\), got \(3, 3\)"),
    ("decode", "block_table", torch.zeros(B, dtype=I32), ValueError, "block_table: expected shape"),
    ("decode", "block_table", torch.zeros((WIDTH, B), dtype=I32).T, ValueError,
     "block_table: expected innermost stride 1"),
    ("decode", "block_table", torch.zeros((B, WIDTH), dtype=I32, **META), ValueError,
     "block_table: expected a tensor on cpu, got meta"),
    ("decode", "block_table", [[0, 1, 2]], TypeError, "block_table: expected a torch.Tensor, got list"),
    ("decode", "block_table", torch.zeros((B, 2), dtype=I32), ValueError,
     r"block_table: expected a width of 3, the plan's max_pages, got 2 \(slice the table, or plan"),
    ("decode", "block_table", torch.zeros((B, 4), dtype=I32), ValueError,
     r"block_table: expected a width of 3, the plan's max_pages, got 4 \(slice the table, or plan"),
    ("decode", "block_table", torch.zeros((B, 0), dtype=I32), ValueError,
     "block_table: expected a width of 1 or more pages, got 0"),
    ("decode", "cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: .*int32.*int64"),
    ("decode", "cache_seqlens", torch.ones((B, 1), dtype=I32), ValueError, "cache_seqlens: expected sh"),
    ("decode", "cache_seqlens", torch.ones(2 * B, dtype=I32)[::2], ValueError,
     "cache_seqlens: expected a contiguous"),
    ("decode", "softmax_scale", None, TypeError, r"softmax_scale: .*192\*\*-0.5"),
    ("decode", "softmax_scale", 0.0, ValueError, "softmax_scale: expected a positive finite number"),
    ("decode", "softmax_scale", float("nan"), ValueError, "softmax_scale: .*got nan"),
    ("decode", "softmax_scale", float("inf"), ValueError, "softmax_scale: .*got inf"),
    ("decode", "softmax_scale", 1e39, ValueError, r"softmax_scale: expected .*2.36e\+38, got 1e\+39"),
    ("decode", "softmax_scale", 10**400, ValueError, "softmax_scale: "),
    ("decode", "softmax_scale", torch.tensor(0.1), TypeError, "softmax_scale: .*got Tensor"),
    ("decode", "lse_base", "10", ValueError, "lse_base: expected one of 'e', '2', got '10'"),
    ("decode", "empty_lse", "nan", ValueError, "empty_lse: expected one of '-inf', '\\+inf', got 'nan'"),
    ("decode", "out", torch.zeros(B, S_Q, H, 512, dtype=F16), TypeError,
     "out: expected dtype bfloat16 or float32, got float16"),
    ("decode", "out", torch.zeros(B, S_Q, H, 576, dtype=BF16), ValueError, r"out: .*\(2, 1, 16, 512\)"),
    ("decode", "out", torch.zeros(B, S_Q, 512, H, dtype=BF16).mT, ValueError, "out: .*contiguous"),
    ("decode", "out", torch.zeros(B * H * 512 + 1, dtype=BF16)[1:].view(B, S_Q, H, 512), ValueError,
     "out: expected storage aligned to 16 bytes, got address"),
    ("decode", "lse", torch.zeros(B, S_Q, H), ValueError, r"lse: expected shape \(2, 16, 1\)"),
    ("decode", "lse", torch.zeros(B, H, S_Q, dtype=BF16), TypeError, "lse: expected dtype float32"),
    ("decode", "out_dtype", F16, TypeError, "out_dtype: expected bfloat16 or float32"),
    ("decode", "plan", torch.zeros(3), TypeError, "plan: expected a snapmla.DecodePlan or None"),
    ("decode", "plan", plan(num_heads=32), ValueError, "plan: .*num_heads.*got"),
    ("decode", "plan", plan(page_size=16), ValueError, "plan: .*page_size"),
    ("decode", "plan", plan(batch=3), ValueError, "plan: "),
    ("decode", "plan", plan(work_items=torch.zeros((6, 4), dtype=I32, **META)), ValueError,
     "plan: expected a plan on cpu.*got meta"),
    ("decode", "pipeline", "dual_wg", ValueError, "pipeline: expected 'etap', as planned"),
    # append_kv
    ("append_kv", "cache", None, TypeError, "cache: expected a snapmla.PagedKVCache, got NoneType"),
    ("append_kv", "c_kv", torch.zeros(5, 512, dtype=torch.float64), TypeError, "c_kv: .*float64"),
    ("append_kv", "c_kv", torch.zeros(5, 576, dtype=BF16), ValueError, r"c_kv: expected shape \(n, 512\)"),
    ("append_kv", "c_kv", torch.zeros(512, 5, dtype=BF16).T, ValueError, "c_kv: expected innermost"),
    ("append_kv", "c_kv", torch.zeros(5, 513, dtype=BF16)[:, :512], ValueError, "c_kv: .*16 bytes"),
    ("append_kv", "k_rope", torch.zeros(5, 64), TypeError, "k_rope: expected dtype bfloat16, got float32"),
    ("append_kv", "k_rope", torch.zeros(4, 64, dtype=BF16), ValueError, "k_rope: "),
    ("append_kv", "slot_mapping", torch.zeros(5), TypeError, "slot_mapping: .*int32 or int64"),
    ("append_kv", "slot_mapping", torch.zeros(4, dtype=I32), ValueError, "slot_mapping: "),
    ("append_kv", "slot_mapping", torch.zeros(10, dtype=I32)[::2], ValueError, "slot_mapping: .*contig"),
    ("append_kv", "slot_mapping", torch.zeros(5, dtype=I32, **META), ValueError, "slot_mapping: .*meta"),
    # quantize_q
    ("quantize_q", "granularity", "channel", ValueError, "granularity: .*'token_head'.*got 'channel'"),
    ("quantize_q", "q_nope", torch.zeros(B, H, 512, dtype=BF16), ValueError, "q_nope: expected shape"),
    ("quantize_q", "q_nope", torch.zeros(B, 1, 129, 512, dtype=BF16), ValueError,
     "num_heads: expected 1 to 128, got 129"),
    ("quantize_q", "q_nope", torch.zeros(B, 9, H, 512, dtype=BF16), ValueError,
     "s_q: expected 1 to 8, got 9"),
    ("quantize_q", "q_nope", torch.zeros(B, 0, H, 512, dtype=BF16), ValueError, "s_q: .*got 0"),
    ("quantize_q", "q_nope", torch.zeros(B, 1, H, 512, dtype=torch.int8), TypeError, "q_nope: .*int8"),
    ("quantize_q", "q_rope", torch.zeros(B, 1, H, 64), TypeError, "q_rope: .*bfloat16.*float32"),
    ("quantize_q", "q_rope", torch.zeros(B, 1, H, 65, dtype=BF16)[..., 1:], ValueError, "q_rope: "),
    ("quantize_q", "out", torch.zeros(3), TypeError, "out: expected a snapmla.QuantizedQuery"),
    ("quantize_q", "out", query(b=3), ValueError, "out.nope: expected shape"),
    ("quantize_q", "out", query(scale_dims=2), ValueError, "out.scale: expected shape"),
    # fetch_dequant
    ("fetch_dequant", "where", torch.zeros((B, WIDTH), dtype=I64), TypeError, "block_table: .*int64"),
    ("fetch_dequant", "where", torch.zeros((1, B, WIDTH), dtype=I32), ValueError, "where: expected a bl"),
    ("fetch_dequant", "where", torch.zeros((B, 0), dtype=I32), ValueError,
     "block_table: expected a width of 1"),
    ("fetch_dequant", "cache_seqlens", None, ValueError, "cache_seqlens: .*beside a block table"),
    ("fetch_dequant", "out", torch.zeros(B, 192, 512, dtype=BF16), ValueError, "out: .*576"),
    ("fetch_dequant", "out", 3, TypeError, "out: expected a .*576.* tensor or a pair"),
    ("fetch_dequant", "dtype", torch.float64, TypeError, "dtype: expected bfloat16"),
    # from_tensors
    ("from_tensors", "content", torch.zeros((0, P, 512), dtype=torch.uint8), ValueError,
     "content: expected 1 page or more, got 0"),
    # plan_decode
    ("plan_decode", "cache_seqlens", torch.ones(B, dtype=I64), TypeError, "cache_seqlens: .*int64"),
    ("plan_decode", "num_heads", 129, ValueError, "num_heads: expected 1 to 128, got 129"),
    ("plan_decode", "num_heads", 16.0, TypeError, "num_heads: expected an int, got float"),
    ("plan_decode", "s_q", 9, ValueError, "s_q: expected 1 to 8, got 9"),
    ("plan_decode", "page_size", 48, ValueError, "page_size: .*got 48 .*nearest is 32"),
    ("plan_decode", "max_pages", 0, ValueError, "max_pages: expected 1"),
    ("plan_decode", "num_parts", 0, ValueError, "num_parts: "),
    ("plan_decode", "pipeline", "magic", ValueError, "pipeline: expected one of 'etap', 'dual_wg'"),
    ("plan_decode", "row_tile", 8, ValueError, "row_tile: expected one of 16, 32, 64, 128, got 8"),
    ("plan_decode", "fixed_overhead", -1, ValueError, "fixed_overhead: "),
]  # fmt: skip
GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "decode": decode_arguments,
    "append_kv": append_arguments,
    "quantize_q": quantize_arguments,
    "fetch_dequant": fetch_arguments,
    "from_tensors": cache_arguments,
    "plan_decode": plan_arguments,
}


def call(function: str) -> Callable[..., Any]:
    return getattr(PagedKVCache if function == "from_tensors" else snapmla, function)


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(spec: VariantSpec, device_type: str) -> runtime.Kernel:
        raise AssertionError(f"wrong input reached {spec.name}")

    runtime.forget()
    monkeypatch.setattr(runtime, "kernel", reached)


@pytest.mark.parametrize(
    ("function", "name", "value", "error", "words"),
    ROWS,
    ids=[f"{row[0]}-{row[1]}-{i}" for i, row in enumerate(ROWS)],
)
def test_wrong_argument(function: str, name: str, value: Any, error: type, words: str) -> None:
    arguments = {**GOOD[function](), name: value}
    with pytest.raises(error, match=f"(?s)^{words}") as caught:
        call(function)(**arguments)
    assert "expected" in str(caught.value) and "got" in str(caught.value)


@pytest.mark.parametrize("function", GOOD)
def test_right_arguments_pass_the_checks(function: str) -> None:
    if function == "from_tensors":  # launches nothing
        call(function)(**GOOD[function]())
        return
    with pytest.raises(AssertionError, match="wrong input reached"):
        call(function)(**GOOD[function]())


def test_one_row_may_have_any_stride() -> None:
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


def test_one_page_needs_an_aligned_stride() -> None:
    """TMA descriptors hold the page stride of even a single page."""
    fields = cache_arguments()
    for name, view in fields.items():
        fields[name] = view[:1]
    fields["rope"] = torch.zeros(P * 64, dtype=BF16).as_strided((1, P, 64), (P * 64 + 1, 64, 1))
    with pytest.raises(ValueError, match="rope: expected outer strides"):
        PagedKVCache.from_tensors(**fields)


def test_table_is_long_enough() -> None:
    assert len(ROWS) >= 30


def test_softmax_scale_has_no_default() -> None:
    arguments = decode_arguments()
    del arguments["softmax_scale"]
    with pytest.raises(TypeError, match="softmax_scale"):
        snapmla.decode(**arguments)


def test_overhead_has_one_default_only() -> None:
    """The plan's constant; a second one in the reference could differ."""
    with pytest.raises(TypeError, match="fixed_overhead"):
        plan_reference([64], 2, 64)  # type: ignore[call-arg]


def test_query_must_be_contiguous() -> None:
    nope = torch.zeros((B, H, S_Q, 512), dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide = torch.zeros((B, S_Q, 2 * H, 512), dtype=torch.uint8).view(torch.float8_e4m3fn)
    rope, scale = torch.zeros((B, S_Q, H, 64), dtype=BF16), torch.ones(B, S_Q, H)
    with pytest.raises(ValueError, match=r"q\.nope: expected a contiguous"):
        QuantizedQuery(wide[:, :, ::2], rope, scale)
    with pytest.raises(ValueError, match=r"s_q: expected 1 to 8, got 16"):
        QuantizedQuery(nope, rope, scale)


def test_other_devices_are_refused() -> None:
    with pytest.raises(UnsupportedDeviceError, match="device meta: kernels are built for cuda"):
        runtime.arch_of(torch.device("meta"))


def test_missing_variant_names_the_nearest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, no_jit: None
) -> None:
    monkeypatch.setattr("snapmla.env.variant_dirs", lambda: [tmp_path])
    wanted = VariantSpec(op="decode", pipeline="etap", row_tile=32, page_size=32)
    with pytest.raises(VariantError, match="no variant of this op is there"):
        runtime.find_or_build(wanted, need_library=False)
    for row_tile in (16, 64):
        name = VariantSpec(op="decode", pipeline="etap", row_tile=row_tile, page_size=32).name
        (tmp_path / f"{name}.json").write_text("{}")
    with pytest.raises(VariantError, match="SNAPMLA_NO_JIT.*nearest.*decode_etap_r16_p32_obf16"):
        runtime.find_or_build(wanted, need_library=False)


@pytest.mark.parametrize("forbidden", ["0", "1"])
def test_unwritten_kernel_is_one_sentence(monkeypatch: pytest.MonkeyPatch, forbidden: str) -> None:
    monkeypatch.setenv("SNAPMLA_NO_JIT", forbidden)
    monkeypatch.setattr(runtime, "compile_variant", lambda spec: pytest.fail("compiled"))
    spec = VariantSpec(op="decode", arch="sm_100a", pipeline="etap")
    with pytest.raises(VariantError) as caught:
        runtime.find_or_build(spec, need_library=False)
    assert str(caught.value) == (
        "variant decode_etap_r64_p64_obf16_sm100a: no sm_100a decode kernel of pipeline etap exists "
        "yet; the nearest one that can be built is decode_etap_r64_p64_obf16_sm90a"
    )

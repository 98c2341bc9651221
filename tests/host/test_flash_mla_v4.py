"""FlashMLA's names over DeepSeek V4's pages, and over tokens of 528 bytes by ``kv_format``: its
gates, a second cache, what is refused.

What no index names is 0xff, the eighth byte of a token's scales too.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla
from dsl_kernels.formats.registered import FORMATS
from snapmla.compat import flash_mla
from snapmla.sparse.decode import sparse_decode
from snapmla.sparse.two_lists import Second
from snapmla.testing.byte_records import quantize_tokens
from snapmla.testing.record_job import poisoned_rows
from snapmla.testing.record_reference import RecordCall, record_decode_reference
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
RUNS = pytest.mark.whole_matrix  # what launches a kernel, which is not in the test set
HEADS, SCALE = 9, 0.07
ABS, REL, COSINE = 1e-3, 2.01 / 128, 5e-6  # FlashMLA's gates of ``out``
LSE_ABS, LSE_REL = 1e-6, 8.01 / 65536
FORMATS_OF_TWO = ("fp8_v4", "fp8_v41_planar", "fp8_v41_rows")


def pool(pages: int, page_size: int, named: Tensor, fmt: str = "fp8_v4") -> Tensor:
    """uint8 (pages, P, 1, bytes of a token); tokens that are not named are 0xff."""
    record = FORMATS[fmt]
    cache = poisoned_rows(pages, page_size, "padded" if record.two_lists else "packed", record)
    kv = cache[:, :, None]
    view = snapmla.PagedKVCache.from_tensors(kv, format=fmt)
    slots = named[(named >= 0) & (named < pages * page_size)].long().unique()
    values = quantize_tokens(
        record, torch.randn(len(slots), record.content.count) / 4,
        torch.randn(len(slots), record.rope_channels) / 4, True,
    )  # fmt: skip
    for field, value in zip((view.content, view.rope, view.scale), values, strict=True):
        assert field is not None
        where = field.view(torch.uint8) if field.dtype != torch.bfloat16 else field
        where[slots // page_size, slots % page_size] = value.view(where.dtype)
    return kv


def lists(b: int, s_q: int, topk: int, slots: int) -> tuple[Tensor, Tensor]:
    """(entries, some of no token, INT_MAX behind the lengths; lengths)"""
    indices = torch.randint(slots, (b, s_q, topk), dtype=torch.int32)
    indices[torch.rand(indices.shape) < 0.2] = -1
    length = torch.full((b,), topk, dtype=torch.int32)
    length[0] = topk // 2
    indices[0, :, topk // 2 :] = 2**31 - 1
    return indices, length


class Step:
    """One call, of two caches unless ``extra`` is 0 entries."""

    def __init__(
        self, b: int = 2, s_q: int = 2, topk: int = 128, extra: int = 130, fmt: str = "fp8_v4"
    ) -> None:
        self.fmt = fmt
        self.q = torch.randn(b, s_q, HEADS, 512).clamp(-1, 1).bfloat16()
        self.indices, self.length = lists(b, s_q, topk, 2 * 256)
        self.cache = pool(2, 256, self.indices, fmt)
        self.extra = self.extra_indices = self.extra_length = None
        if extra:
            self.extra_indices, self.extra_length = lists(b, s_q, extra, 90 * 2)
            self.extra = pool(90, 2, self.extra_indices, fmt)

    def call(self, metadata: Any, **options: Any) -> Any:
        given = {
            "topk_length": self.length, "extra_k_cache": self.extra, "softmax_scale": SCALE,
            "extra_indices_in_kvcache": self.extra_indices,
            "extra_topk_length": self.extra_length, "is_fp8_kvcache": True,
            "kv_format": None if self.fmt == "fp8_v4" else self.fmt, **options,
        }  # fmt: skip
        return flash_mla.flash_mla_with_kvcache(
            self.q, self.cache, None, None, 512, metadata, indices=self.indices, **given,
        )  # fmt: skip

    def assert_right(self, out: Tensor, lse: Tensor, **options: Any) -> None:
        b, s_q, heads, _ = self.q.shape
        each = self.length.repeat_interleave(s_q)
        extra = None
        if self.extra is not None:
            assert self.extra_indices is not None and self.extra_length is not None
            more = self.extra_length.repeat_interleave(s_q)
            extra = self.extra[:, :, 0], self.extra_indices.flatten(0, 1), more
        call = RecordCall(
            self.q.flatten(0, 1), self.cache[:, :, 0], self.indices.flatten(0, 1), each,
            options.get("softmax_scale", SCALE), options.get("attn_sink"), FORMATS[self.fmt], extra,
        )  # fmt: skip
        want, want_lse = record_decode_reference(call)
        got, want_lse = out.flatten(0, 1).double(), want_lse.view(heads, b, s_q).transpose(0, 1)
        assert ((got - want).abs() <= torch.maximum(torch.tensor(ABS), REL * want.abs())).all()
        cosine = 2 * (got * want).sum() / (got.square().sum() + want.square().sum())
        assert 1 - float(cosine) < COSINE
        empty = torch.isneginf(want_lse)
        assert torch.isposinf(lse[empty]).all() and torch.isfinite(lse[~empty]).all()
        error, size = (lse - want_lse)[~empty].abs(), want_lse[~empty].abs()
        assert (error <= torch.maximum(torch.tensor(LSE_ABS), LSE_REL * size)).all()


@RUNS
@pytest.mark.parametrize("fmt", FORMATS_OF_TWO)
@pytest.mark.parametrize("extra", [0, 1, 130, 512])
def test_an_object(extra: int, fmt: str) -> None:
    """Layers share the plan; another list's width makes another call."""
    step, other = Step(extra=extra, fmt=fmt), Step(extra=extra, fmt=fmt)
    metadata, _ = flash_mla.get_mla_metadata()
    step.assert_right(*step.call(metadata))
    other.assert_right(*other.call(metadata))
    assert len(metadata._plans) == 1 and metadata.config.extra_topk == (extra or None)
    with pytest.raises(ValueError, match="tile_scheduler_metadata: expected calls like its first"):
        Step(extra=64, fmt=fmt).call(metadata)


@RUNS
def test_two_tensors() -> None:
    """Metadata of earlier versions, which nobody reads; lengths left out."""
    step = Step(b=1, s_q=5, topk=70, extra=65)
    made, splits = flash_mla.get_mla_metadata_tensors(
        torch.tensor([400]).int(), 5 * HEADS, 1, HEADS
    )
    step.indices[0, :, 35:], step.length[:] = -1, 70
    assert step.extra_indices is not None and step.extra_length is not None
    step.extra_indices[0, :, 30:], step.extra_length[:] = -1, 65
    result = step.call(made, num_splits=splits, topk_length=None, extra_topk_length=None)
    step.assert_right(*result)


@RUNS
def test_sinks_and_results_in_place() -> None:
    """A sink weighs once in the union; rows of no token in one list, or in both."""
    step = Step(b=1, s_q=4)
    assert step.extra_indices is not None and step.extra_length is not None
    step.length[:], step.extra_length[:] = 100, 66
    step.indices[0, 1] = step.indices[0, 3] = -1
    step.extra_indices[0, 2] = step.extra_indices[0, 3] = -1
    step.indices[0, :, 100:], step.extra_indices[0, :, 66:] = -1, -1
    sink = torch.tensor([0.3, -math.inf, math.inf, 2.0, -1.0, 0.0, 5.0, 1.0, 4.0])
    out = torch.full((1, 4, HEADS, 512), math.nan).bfloat16()
    made = step.call(flash_mla.get_mla_metadata()[0], attn_sink=sink, out=out)
    assert made[0] is out
    step.assert_right(*made, attn_sink=sink)


@RUNS
def test_the_scale_is_of_512_channels() -> None:
    step = Step(b=1, s_q=1, extra=0)
    result = step.call(flash_mla.get_mla_metadata()[0], softmax_scale=None)
    step.assert_right(*result, softmax_scale=512**-0.5)


@RUNS
def test_negative_lengths_are_none() -> None:
    """Of either list: what is behind them is not looked at, not even as a whole row."""
    for own, more in ((-1, 66), (100, -1), (-5, -(2**31))):
        step, wanted = Step(b=1, s_q=3), Step(b=1, s_q=3)
        assert step.extra_indices is not None and step.extra_length is not None
        step.length[:], step.extra_length[:] = own, more
        step.indices[0, :, max(own, 0) :], step.extra_indices[0, :, max(more, 0) :] = 7, 7
        vars(wanted).update(vars(step))
        wanted.length, wanted.extra_length = step.length.clamp(0), step.extra_length.clamp(0)
        made, splits = flash_mla.get_mla_metadata_tensors(
            torch.tensor([400]).int(), 3 * HEADS, 1, HEADS
        )
        wanted.assert_right(*step.call(made, num_splits=splits))  # a plan of whole rows


@RUNS
@pytest.mark.parametrize("fmt", ["fp8_v4", "fp8_v41_planar", "fp8_v41_rows", "fp8_nope"])
def test_decode_without_a_second_list(fmt: str) -> None:
    """``snapmla.decode`` over the same pages, ragged."""
    step = Step(b=3, s_q=1, topk=100, extra=0, fmt=fmt)
    cache = snapmla.PagedKVCache.from_tensors(step.cache, format=fmt)
    begins = torch.tensor([0, 1, 3], dtype=torch.int32)
    length = step.length[1:]
    step.length = torch.tensor([100, 100, 100]).int()
    plan = snapmla.plan_sparse_decode(
        HEADS, topk=100, topk_length=length, cu_seqlens_q=begins, total_q=3, cache_dtype=fmt
    )
    out, lse = snapmla.decode(
        step.q[:, 0], cache, indices=step.indices[:, 0], softmax_scale=SCALE, plan=plan,
        topk_length=length, empty_lse="+inf",
    )  # fmt: skip
    step.assert_right(out[:, None], lse.T[..., None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra_indices_in_kvcache": None}, "extra_indices_in_kvcache: expected a tensor"),
        ({"extra_k_cache": None}, "extra_k_cache: expected a tensor"),
        ({"extra_k_cache": torch.zeros(2, 64, 1, 656).byte()}, "extra_k_cache: expected shape"),
        ({"extra_topk_length": torch.zeros(3).int()}, "extra_topk_length: expected shape"),
        (
            {"extra_indices_in_kvcache": torch.zeros(2, 1, 4).int()},
            "extra_indices_in_kvcache: expected shape",
        ),
        ({"causal": True}, "causal: expected False beside indices"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Step().call(flash_mla.get_mla_metadata()[0], **options)


def test_queries_of_576_channels_are_refused() -> None:
    step = Step(extra=0)
    step.q = torch.zeros(2, 2, HEADS, 576).bfloat16()
    with pytest.raises(ValueError, match="q: expected shape .*512"):
        step.call(flash_mla.get_mla_metadata()[0])


def test_528_bytes_are_of_no_format_that_a_width_tells() -> None:
    step = Step(extra=0)
    step.cache = torch.zeros(2, 64, 1, 528).byte()
    with pytest.raises(ValueError, match="k_cache: expected shape .*three formats .*kv_format"):
        step.call(flash_mla.get_mla_metadata()[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_format": "V41"}, "kv_format: expected a name of one .*fp8_v41_planar.*fp8_v41_rows"),
        ({"kv_format": "v4"}, "kv_format: expected one of .*, got 'v4'"),
        ({"kv_format": "fp8"}, "kv_format: expected one of "),
        ({"kv_format": "V32_NO_ROPE"}, "k_cache: expected shape .*528"),
        ({"kv_format": "V4", "is_fp8_kvcache": False}, "kv_format: expected None with is_fp8"),
        ({"kv_format": "V32"}, "k_cache: expected shape .*656.*584 bytes a token"),
    ],
)
def test_formats_that_are_not_the_caches(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Step(extra=0).call(flash_mla.get_mla_metadata()[0], **options)


def test_a_format_is_of_calls_with_indices() -> None:
    q = torch.zeros(1, 1, HEADS, 576).bfloat16()
    with pytest.raises(ValueError, match="kv_format: expected None without indices"):
        flash_mla.flash_mla_with_kvcache(
            q, torch.zeros(1, 64, 1, 576).bfloat16(), torch.zeros(1, 1).int(),
            torch.ones(1).int(), 512, flash_mla.get_mla_metadata()[0], kv_format="V4",
        )  # fmt: skip


def test_both_caches_are_of_one_format() -> None:
    """V4.1's byte orders are two formats, whose memory looks alike."""
    step, other = Step(fmt="fp8_v41_rows"), Step(fmt="fp8_v41_planar")
    assert step.extra is not None and step.extra_indices is not None
    cache = snapmla.PagedKVCache.from_tensors(step.cache, format="fp8_v41_rows")
    second = Second(
        snapmla.PagedKVCache.from_tensors(other.extra, format="fp8_v41_planar"),
        step.extra_indices, None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="extra_cache: expected format 'fp8_v41_rows', as cache"):
        sparse_decode(step.q, cache, step.indices, softmax_scale=SCALE, extra=second)


def test_bfloat16_rows_are_told_from_bytes() -> None:
    """``is_fp8_kvcache=False`` reads no bytes, and has no second cache."""
    step = Step()
    with pytest.raises(ValueError, match="k_cache: .*bytes of 584 want is_fp8_kvcache"):
        step.call(flash_mla.get_mla_metadata()[0], is_fp8_kvcache=False)
    step.q, step.cache = torch.zeros(2, 2, HEADS, 576).bfloat16(), torch.zeros(2, 256, 1, 576)
    step.cache = step.cache.bfloat16()
    with pytest.raises(ValueError, match="extra_k_cache: expected None beside rows of bfloat16"):
        step.call(flash_mla.get_mla_metadata()[0], is_fp8_kvcache=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_other_caches_have_no_second_list(dtype: torch.dtype) -> None:
    """Not overlooked, whichever way the first cache goes."""
    step = Step()
    second = Second(
        snapmla.PagedKVCache.from_tensors(step.extra, format="fp8_v4"), step.extra_indices, None
    )
    cache = snapmla.PagedKVCache.allocate(2, 64, device="cpu", dtype=dtype)
    q: Any = torch.zeros(2, 2, HEADS, 576).bfloat16()
    if dtype != torch.bfloat16:
        q = snapmla.quantize_q(q[..., :512], q[..., 512:])
    with pytest.raises(ValueError, match="cache: expected format 'fp8_v4' or .* a second list"):
        sparse_decode(q, cache, step.indices, softmax_scale=SCALE, extra=second)


def sliced(indices: Tensor) -> Tensor:
    """The same entries in a slice of a larger tensor, which no (tokens, topk) view has."""
    b, s_q, topk = indices.shape
    big = torch.full((b + 1, s_q + 1, topk + 28), 7, dtype=torch.int32)
    big[:b, :s_q, :topk] = indices
    return big[:b, :s_q, :topk]


@RUNS
@pytest.mark.parametrize("fmt", FORMATS_OF_TWO)
def test_lists_that_are_slices(fmt: str) -> None:
    """FlashMLA's own test passes such, of both lists; nothing is copied."""
    step = Step(topk=64, extra=65, fmt=fmt)
    want = step.call(flash_mla.get_mla_metadata()[0])
    assert step.extra_indices is not None
    step.indices, step.extra_indices = sliced(step.indices), sliced(step.extra_indices)
    for got, wanted in zip(step.call(flash_mla.get_mla_metadata()[0]), want, strict=True):
        assert torch.equal(got, wanted)

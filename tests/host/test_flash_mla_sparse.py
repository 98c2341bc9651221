"""FlashMLA's names with ``indices``: its versions' calls, engines' ways with them, its gates.

Rows of 656 bytes have fp32 scales that are no powers of two; what no index names is NaN.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from snapmla.compat import flash_mla
from snapmla.testing.record_reference import RecordCall, record_decode_reference
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
PAGES, P, HEADS = 3, 53, 7
SCALE = 576**-0.5
ABS, REL, COSINE = 1e-3, 2.01 / 128, 5e-6  # FlashMLA's gates of ``out``
LSE_ABS, LSE_REL = 1e-6, 8.01 / 65536


def pool(named: torch.Tensor) -> torch.Tensor:
    """uint8 (pages, P, 1, 656), pages apart; tokens that are not named are NaN."""
    whole = torch.full((PAGES, 2, P * 656), 0xFF, dtype=torch.uint8)
    rows = whole[:, 1].unflatten(1, (P, 1, 656))
    x = torch.randn(PAGES, P, 576) / 4
    groups = x[..., :512].unflatten(-1, (4, 128))
    scale = groups.abs().amax(-1) / 448
    content = (groups / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8)
    rope = x[..., 512:].bfloat16()
    filled = torch.cat((content, scale.view(torch.uint8), rope.view(torch.uint8)), -1)
    slots = named[(named >= 0) & (named < PAGES * P)].long().unique()
    rows[slots // P, slots % P, 0] = filled[slots // P, slots % P]
    return rows


class Step:
    """One call: entries of no token anywhere, INT_MAX behind ``topk_length``."""

    def __init__(self, b: int = 2, s_q: int = 2, topk: int = 100) -> None:
        self.q = torch.randn(b, s_q, HEADS, 576).clamp(-1, 1).bfloat16()
        self.indices = torch.randint(PAGES * P, (b, s_q, topk), dtype=torch.int32)
        self.indices[torch.rand(self.indices.shape) < 0.2] = -1
        self.length = torch.full((b,), topk, dtype=torch.int32)
        self.length[0] = topk // 2
        self.indices[0, :, topk // 2 :] = 2**31 - 1
        self.rows = pool(self.indices)

    def call(self, metadata: Any, splits: Any = None, **options: Any) -> Any:
        given = {"topk_length": self.length, **options}
        return flash_mla.flash_mla_with_kvcache(
            self.q, self.rows, given.pop("block_table", None), given.pop("cache_seqlens", None),
            512, metadata, splits, is_fp8_kvcache=True, indices=self.indices, **given,
        )  # fmt: skip

    def assert_right(
        self, out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None = None
    ) -> None:
        """FlashMLA's gates."""
        b, s_q, heads, _ = self.q.shape
        call = RecordCall(
            self.q.flatten(0, 1), self.rows.squeeze(2), self.indices.flatten(0, 1),
            self.length.repeat_interleave(s_q), SCALE, attn_sink,
        )  # fmt: skip
        want, want_lse = record_decode_reference(call)
        want_lse = torch.where(torch.isneginf(want_lse), math.inf, want_lse)
        got = out.flatten(0, 1).double()
        assert ((got - want).abs() <= torch.maximum(torch.tensor(ABS), REL * want.abs())).all()
        cosine = 2 * (got * want).sum() / (got.square().sum() + want.square().sum())
        assert 1 - float(cosine) < COSINE
        want_lse = want_lse.view(heads, b, s_q).transpose(0, 1)
        empty = torch.isposinf(want_lse)
        assert torch.isposinf(lse[empty]).all()
        assert not got.view_as(out)[empty.transpose(1, 2)].any()
        error, size = (lse - want_lse)[~empty].abs(), want_lse[~empty].abs()
        assert (error <= torch.maximum(torch.tensor(LSE_ABS), LSE_REL * size)).all()


def test_an_object() -> None:
    """Era C; layers share the plan, and the next step makes another object."""
    step, other = Step(), Step()
    metadata, nothing = flash_mla.get_mla_metadata()
    assert nothing is None
    step.assert_right(*step.call(metadata))
    other.assert_right(*other.call(metadata))
    assert len(metadata._plans) == 1 and metadata.config.topk == 100
    with pytest.raises(ValueError, match="tile_scheduler_metadata: expected calls like its first"):
        Step(topk=64).call(metadata)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_two_tensors(dtype: torch.dtype) -> None:
    """Era B, as SGLang and LMDeploy call it: static buffers, filled anew, that nobody reads."""
    step = Step(b=1, s_q=5, topk=70)
    lengths = torch.tensor([400], dtype=torch.int32)
    made, splits = flash_mla.get_mla_metadata_tensors(lengths, 5 * HEADS, 1, HEADS, True, 70)
    assert isinstance(made, torch.Tensor) and made.shape[1] == 8 and splits is not None
    step.length[:] = 70
    step.rows = step.rows.view(dtype)
    step.indices[0, :, 35:] = -1
    nothing = torch.empty(1, 0).int()
    result = step.call(made.fill_(-1), splits, topk_length=None, block_table=nothing)
    step.rows = step.rows.view(torch.uint8)
    step.assert_right(*result)


def test_sinks_and_results_in_place() -> None:
    """vLLM's form: one sequence of many query tokens, rows of -1 alone among them."""
    step = Step(b=1, s_q=6, topk=64)
    step.length[:] = 64
    step.indices[0, 2] = -1
    sink = torch.tensor([0.3, -math.inf, math.inf, 2.0, -1.0, 0.0, 5.0])
    out = torch.full((1, 6, HEADS, 512), math.nan).bfloat16()
    metadata, _ = flash_mla.get_mla_metadata()
    made = step.call(metadata, attn_sink=sink, out=out)
    assert made[0] is out
    step.assert_right(*made, attn_sink=sink)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True}, "causal: expected False beside indices"),
        ({"extra_k_cache": torch.zeros(1)}, "extra_k_cache: expected None beside rows of 656"),
        (
            {"extra_indices_in_kvcache": torch.zeros(1).int()},
            "extra_indices_in_kvcache: expected None beside rows of 656",
        ),
        ({"topk_length": torch.zeros(3, dtype=torch.int32)}, "topk_length: expected shape"),
        ({"attn_sink": torch.zeros(3)}, "attn_sink: expected shape"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Step().call(flash_mla.get_mla_metadata()[0], **options)


def test_indices_that_are_no_tensor() -> None:
    """Neither sparse decode of a list, nor dense decode that overlooks it."""
    step = Step()
    step.indices = [[[0]]]  # type: ignore[assignment]
    with pytest.raises(TypeError, match="indices: expected a torch.Tensor, got .*list"):
        step.call(flash_mla.get_mla_metadata()[0])


@pytest.mark.parametrize(("width", "message"), [(528, "528"), (576, "is_fp8_kvcache=False")])
def test_other_rows_are_refused(width: int, message: str) -> None:
    step = Step()
    step.rows = torch.zeros(2, 64, 1, width, dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"k_cache: expected shape .*{message}"):
        step.call(flash_mla.get_mla_metadata()[0])


def test_fp16_rows_are_refused() -> None:
    step = Step()
    with pytest.raises(TypeError, match="k_cache: expected dtype bfloat16, got float16"):
        flash_mla.flash_mla_with_kvcache(
            step.q, torch.zeros(2, 64, 1, 576).half(), None, None, 512,
            flash_mla.get_mla_metadata()[0], indices=step.indices,
        )  # fmt: skip


def sliced(indices: torch.Tensor) -> torch.Tensor:
    """The same entries in a slice of a larger tensor, which no (tokens, topk) view has."""
    b, s_q, topk = indices.shape
    big = torch.full((b + 1, s_q + 1, topk + 28), 7, dtype=torch.int32)
    big[:b, :s_q, :topk] = indices
    return big[:b, :s_q, :topk]


def test_lists_that_are_a_slice() -> None:
    """FlashMLA's own test passes such; nothing is copied."""
    step = Step(topk=64)
    want = step.call(flash_mla.get_mla_metadata()[0])
    step.indices = sliced(step.indices)
    assert not step.indices.is_contiguous()
    with pytest.raises(RuntimeError):
        step.indices.view(-1, 64)
    for got, wanted in zip(step.call(flash_mla.get_mla_metadata()[0]), want, strict=True):
        assert torch.equal(got, wanted)

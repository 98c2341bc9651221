"""SnapMLA's host names: the same bits as the primary API, an engine's calls as it makes them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch

import snapmla
import snapmla.dense.plan_decode
from snapmla.cache import quant
from snapmla.compat import flash_mla_fp8 as names
from snapmla.compat import metadata_pair
from snapmla.dense import PlanVariant, decode
from snapmla.testing import selfcheck
from tests.support.bits import assert_same_bits
from tests.support.families import with_family
from tests.support.needs import needs_compiler
from tests.support.pairs import PAGE, SCALE, SLOTS, Pool, Step

pytestmark = needs_compiler


@pytest.mark.parametrize(
    ("heads", "s_q", "lengths", "splits"),
    [
        (16, 1, (65, 0, 500, 64, 1), True),
        (40, 2, (1, 0), False),
        pytest.param(10, 3, (400, 0), True, marks=pytest.mark.whole_matrix),
        pytest.param(20, 2, (65, 0), True, marks=pytest.mark.whole_matrix),
    ],
)
def test_decode_has_the_primary_bits(
    monkeypatch: pytest.MonkeyPatch, heads: int, s_q: int, lengths: tuple[int, ...], splits: bool
) -> None:
    with_family(monkeypatch, "decode", item_overhead=1)  # so that short batches split
    metadata_pair._plans.clear()
    step = Step(lengths, heads, s_q)
    pair = step.metadata()
    assert (int(pair[1][-1]) > 0) == splits
    out, lse = step.decode(pair)
    assert_same_bits((out, lse), step.primary())
    assert out.dtype == torch.bfloat16 and (out[1] == 0).all() and torch.isposinf(lse[1]).all()
    if (heads, s_q) != (16, 1):
        return  # the primary API's own tests say whether its bits are right
    errors = selfcheck.decode_errors(
        out, torch.where(torch.isposinf(lse), -math.inf, lse),
        snapmla.quantize_q(step.q[..., :512], step.q[..., 512:]), step.pool.primary(), step.table,
        step.lengths, SCALE,
    )  # fmt: skip
    assert errors.right, str(errors)


def test_any_number_of_query_tokens() -> None:
    """Row blocks in step, of a pair that knows rows alone and leaves no tile out."""
    step = Step((66,), 8, 9)
    pair = step.metadata()
    out, lse = step.decode(pair, causal=True, empty_lse="-inf")
    errors = selfcheck.decode_errors(
        out, lse, snapmla.quantize_q(step.q[..., :512], step.q[..., 512:]), step.pool.primary(),
        step.table, step.lengths, SCALE,
    )  # fmt: skip
    assert errors.right, str(errors)
    with pytest.raises(
        ValueError, match=r"^q_nope: expected shape \(b, s_q, num_heads, 512\), got"
    ):
        step.decode(pair, q_nope=torch.zeros(9, 8, 512).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match="^block_table: expected shape"):
        step.decode(pair, block_table=step.table.repeat(2, 1))


def test_defaults_are_flashmlas() -> None:
    step = Step((70, 3), 16, 2)
    out, lse = step.decode(step.metadata(), softmax_scale=None, causal=False, empty_lse="-inf")
    q = snapmla.quantize_q(step.q[..., :512], step.q[..., 512:])
    want = snapmla.decode(
        q, step.pool.primary(), step.table, step.lengths, softmax_scale=576**-0.5, causal=False
    )
    assert_same_bits((out, lse), want)
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(
            names.flash_mla_ckv_fp8_per_token
        ).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert defaults == {
        "softmax_scale": None, "causal": False, "out": None, "lse": None, "empty_lse": "+inf",
    }  # fmt: skip


def test_signatures() -> None:
    """Positional order as the call sites have it."""
    expected = {
        "flash_mla_ckv_fp8_per_token":
            "q_nope q_rope k_cache_lora k_cache_rope q_scale k_scale block_table cache_seqlens "
            "head_dim_v tile_scheduler_metadata num_splits softmax_scale causal",
        "quantize_ckv_per_token_head": "q kv_lora_rank",
        "quantize_and_cache_k":
            "key k_lora_cache k_lora_scale_cache k_rope_cache indices head_dim_v",
        "dequantize_ckv_fused_indexed": "k_lora k_rope k_scale indices",
        "get_mla_metadata": "cache_seqlens num_heads_per_head_k num_heads_k",
    }  # fmt: skip
    assert set(expected) == set(names.__all__)
    for name, words in expected.items():
        parameters = inspect.signature(getattr(names, name)).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == words.split()


def test_append_and_fetch_have_the_primary_bits() -> None:
    step = Step((130, 20), 4, 1)
    own = Pool()
    strided = torch.randn(len(step.slots), 2, 1024).bfloat16()[:, 1:, :576]
    strided.copy_(step.keys)
    own.append(strided, step.slots.long())  # a strided key and int64 slots: no copy, no cast
    assert torch.equal(own.lora, step.pool.lora)
    assert torch.equal(own.rope.view(torch.int16), step.pool.rope.view(torch.int16))
    indices = torch.tensor([step.slots[7], -1, step.slots[149]], dtype=torch.int32)
    lora, rope = names.dequantize_ckv_fused_indexed(own.lora, own.rope, own.scale, indices)
    assert lora.shape == (3, 1, 512) and rope.shape == (3, 1, 64) and lora.dtype == torch.bfloat16
    want = snapmla.fetch_dequant(own.primary(16), indices)
    assert torch.equal(lora[:, 0], want[0]) and torch.equal(rope[:, 0], want[1])
    assert (lora[1] == 0).all() and (lora[0] != 0).any()
    given = (torch.empty_like(lora), torch.empty_like(rope))
    back = names.dequantize_ckv_fused_indexed(
        own.lora.view(-1, 64, 1, 512), own.rope.view(-1, 64, 1, 64),
        own.scale.view(-1, 64, 1, 1), indices, out=given,
    )  # fmt: skip
    assert back is given and torch.equal(given[0], lora) and torch.equal(given[1], rope)


@pytest.mark.parametrize("kind", ["joint", "flat", "strided", "float32", "empty", "fp8"])
def test_an_engines_append_takes_the_quick_way(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    key = torch.randn(3, 1, 576).bfloat16()
    slots = torch.tensor([5, 1023, -1])
    given = {
        "flat": key[:, 0], "float32": key.float(), "empty": key[:0],
        "strided": torch.cat([key, key, key[..., :8]], -1)[..., 576:1152],
    }.get(kind, key)  # fmt: skip
    slots = slots[: len(given)]
    own, want = Pool(), Pool()
    own_lora = own.lora.view(torch.float8_e4m3fn) if kind == "fp8" else own.lora
    joint = given.reshape(-1, 576)
    snapmla.append_kv(want.primary(), joint[:, :512], joint[:, 512:], slots)
    names.quantize_and_cache_k(given, own_lora, own.scale, own.rope, slots, 512)
    for part in (own.lora, own.rope, own.scale):
        part.zero_()
    for part in (want.lora, want.rope, want.scale):
        part.zero_()
    snapmla.append_kv(want.primary(), joint[:, :512], joint[:, 512:], slots)
    monkeypatch.setattr(names, "_flat_cache", lambda *_: pytest.fail("the long way"))
    names.quantize_and_cache_k(given, own_lora, own.scale, own.rope, slots, 512)
    for name in ("lora", "rope", "scale"):
        a, b = getattr(own, name), getattr(want, name)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@pytest.mark.parametrize("layout", ["split", "paged", "row640"])
def test_paged_views_are_written_and_read_in_place(layout: str) -> None:
    """4-D views of any layout; pages of ``paged`` lie apart, so flattening them would copy."""
    cache = selfcheck.poisoned_cache(4, PAGE, layout)
    views = (cache.content.unsqueeze(2), cache.scale[..., None, None], cache.rope.unsqueeze(2))
    key = torch.randn(3, 1, 576).bfloat16()
    slots = torch.tensor([0, 70, 255], dtype=torch.int32)
    names.quantize_and_cache_k(key, *views, slots, 512)
    want = snapmla.PagedKVCache.allocate(4, PAGE, device="cpu")
    snapmla.append_kv(want, key[:, 0, :512], key[:, 0, 512:], slots)
    page, offset = slots.long() // PAGE, slots.long() % PAGE
    assert torch.equal(cache.content_u8[page, offset], want.content_u8[page, offset])
    assert torch.equal(cache.rope[page, offset], want.rope[page, offset])
    assert torch.equal(cache.scale[page, offset], want.scale[page, offset])
    back = names.dequantize_ckv_fused_indexed(views[0], views[2], views[1], slots)
    for got, expected in zip(back, snapmla.fetch_dequant(want, slots), strict=True):
        assert torch.equal(got[:, 0], expected)
    flat_scale = want.scale.view(-1, 1, 1)  # 3-D beside 4-D: addressed by the same page size
    mixed = (want.content.unsqueeze(2), want.rope.unsqueeze(2), flat_scale)
    again = names.dequantize_ckv_fused_indexed(*mixed, slots)
    assert torch.equal(again[0], back[0]) and torch.equal(again[1], back[1])


def test_queries_may_be_strided_and_written_in_place() -> None:
    wide = torch.randn(2, 1, 4, 640).bfloat16()
    q_nope, q_scale, q_rope = names.quantize_ckv_per_token_head(wide[..., :576], 512)
    want = snapmla.quantize_q(wide[..., :512], wide[..., 512:576])
    assert q_scale.shape == (2, 1, 4, 1)
    assert torch.equal(q_nope.view(torch.uint8), want.nope_u8) and torch.equal(q_rope, want.rope)
    assert torch.equal(q_scale[..., 0], want.scale)
    again = names.quantize_ckv_per_token_head(2 * wide[..., :576], 512, out=want)
    assert again[0].data_ptr() == want.nope.data_ptr()
    assert torch.equal(again[1], 2 * q_scale)


def test_out_and_lse_are_written_in_place() -> None:
    step = Step((70, 3), 16, 1)
    out, lse = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16), torch.empty(2, 16, 1)
    got = step.decode(step.metadata(), out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    assert_same_bits(got, step.primary())


@pytest.mark.parametrize("error", [RuntimeError("CUDA error 700"), ValueError("Mismatched")])
def test_a_failing_kernel_is_called_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """By decode and append, on the quick way and on the long one; and reported as it failed."""
    step, calls = Step((70, 3), 16, 1), []
    pair = step.metadata()

    def failing(*_: object) -> None:
        calls.append(1)
        raise error

    def check(call: Callable[[], object]) -> None:
        calls.clear()
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error and calls == [1]
        assert error.__cause__ is None and error.__context__ is None

    with monkeypatch.context() as patch:
        PlanVariant.forget()  # the kernels that were loaded
        patch.setattr(PlanVariant, "kernel", lambda *_: failing)
        check(lambda: step.decode(pair))
    with monkeypatch.context() as patch:  # a known call
        PlanVariant.forget()
        patch.setattr(PlanVariant, "kernel", lambda *_: lambda *_: None)
        step.decode(pair)
        patch.setattr(decode, "checked", lambda *_, **__: None)  # finds nothing wrong
        patch.setattr(PlanVariant, "kernel", lambda *_: failing)
        check(lambda: step.decode(pair))
    lora, scale, rope = step.pool.lora, step.pool.scale, step.pool.rope
    monkeypatch.setattr(quant, "_appender", lambda *_: failing)
    check(lambda: step.pool.append(step.keys, step.slots))
    monkeypatch.setattr(quant, "_appender", lambda *_: lambda *_: None)
    step.pool.append(step.keys, step.slots)
    monkeypatch.setattr(quant, "_appender", lambda *_: failing)
    check(lambda: step.pool.append(step.keys, step.slots))  # a known call
    paged = [t.view(-1, PAGE, 1, t.shape[2]) for t in (lora, scale, rope)]
    check(lambda: names.quantize_and_cache_k(step.keys, *paged, step.slots, 512))


@pytest.mark.parametrize("width", [1, 2])
def test_lengths_beyond_the_block_table(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The pair is made before the table's width is known: its splits are merged all the same."""
    with_family(monkeypatch, "decode", item_overhead=0)
    metadata_pair._plans.clear()
    step = Step((190, 500), 16, 1)
    pair = step.metadata()
    assert int(pair[1][-1]) > 0
    step.table = step.table[:, :width].contiguous()
    results = {"out": torch.full((2, 1, 16, 512), 7.0), "lse": torch.full((2, 16, 1), 7.0)}
    out, lse = step.decode(pair, **results)
    want, want_lse = step.primary(out_dtype=torch.float32)
    assert selfcheck.metrics.relative_l2(out, want) < 5e-3
    assert selfcheck.metrics.lse_error(lse, want_lse) < 1e-5
    metadata_pair._plans.clear()


def test_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("an empty call reached a kernel")

    monkeypatch.setattr("snapmla.dense.decode.launch_decode", reached)
    step = Step((5,), 4, 1)
    step.lengths, step.table, step.q = step.lengths[:0], step.table[:0], step.q[:0]
    out, lse = step.decode(step.metadata())
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 4, 1)


def test_an_engines_call_takes_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous views as the framework passes them; one plan for all layers of a step."""
    step = Step((70, 3), 16, 1)
    pair = step.metadata()
    want = step.primary()
    made = []
    real = metadata_pair.make_plan
    monkeypatch.setattr(metadata_pair, "make_plan", lambda *a: made.append(1) or real(*a))
    metadata_pair._plans.clear()
    assert_same_bits(step.decode(pair), want)
    with monkeypatch.context() as patch:
        patch.setattr(decode, "checked", lambda *_: pytest.fail("the long way"))
        for _ in range(2):
            assert_same_bits(step.decode(pair), want)
    assert len(made) == 1
    assert_same_bits(step.decode(step.metadata()), want)  # other memory, another plan
    assert len(made) > 1


def test_gaps_that_the_exported_function_does_not_see() -> None:
    step = Step((70, 3), 16, 1)
    with pytest.raises(ValueError, match="^lse: .*contiguous"):
        step.decode(step.metadata(), lse=torch.zeros(16, 2, 1).transpose(0, 1))


@pytest.mark.parametrize("layout", ["paged", "row640"])
def test_other_layouts_take_the_quick_way(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    step = Step((70, 3), 16, 1)
    want = step.primary()
    cache = snapmla.PagedKVCache.allocate(SLOTS // PAGE, PAGE, layout, "cpu")
    for name in ("content_u8", "rope", "scale"):
        getattr(cache, name).copy_(getattr(step.pool.primary(), name))
    pool = {
        "k_cache_lora": cache.content.unsqueeze(2), "k_cache_rope": cache.rope.unsqueeze(2),
        "k_scale": cache.scale[..., None, None],
    }  # fmt: skip
    pair = step.metadata()
    step.decode(pair, **pool)
    monkeypatch.setattr(decode, "checked", lambda *_: pytest.fail("the long way"))
    assert_same_bits(step.decode(pair, **pool), want)


def test_other_strides_take_the_long_way() -> None:
    """A pool of layout row640, scales without the last dimension: same bits."""
    step = Step((70, 3), 16, 1)
    pair = step.metadata()
    want = step.primary()
    wide = torch.zeros(SLOTS // PAGE, PAGE, 1, 640, dtype=torch.uint8)
    wide[..., :512] = step.pool.lora.view(-1, PAGE, 1, 512)
    wide[..., 512:] = step.pool.rope.view(-1, PAGE, 1, 64).view(torch.uint8)
    q_nope, q_scale, q_rope = names.quantize_ckv_per_token_head(step.q, 512)
    got = names.flash_mla_ckv_fp8_per_token(
        q_nope, q_rope, wide[..., :512], wide.view(torch.bfloat16)[..., 256:], q_scale[..., 0],
        step.pool.scale.view(-1, PAGE, 1, 1), step.table, step.lengths, 512, *pair, SCALE, True,
    )  # fmt: skip
    assert_same_bits(got, want)


def test_under_torch_compile() -> None:
    """Quantisation is traced; metadata and decode break the graph and say what does not."""
    step = Step((70, 3), 16, 1)
    other = Pool()

    def traced(key: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        other.append(key, step.slots)
        lora, rope = names.dequantize_ckv_fused_indexed(
            other.lora, other.rope, other.scale, step.slots
        )
        return *names.quantize_ckv_per_token_head(q * 2, 512), lora, rope

    torch._dynamo.reset()
    got = torch.compile(traced, fullgraph=True, backend="aot_eager")(step.keys, step.q)
    assert torch.equal(other.lora, step.pool.lora)
    for a, b in zip(got, traced(step.keys, step.q), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

    def broken(q: torch.Tensor) -> torch.Tensor:
        out, _ = step.decode(names.get_mla_metadata(step.lengths, 16, 1))
        return out + q[..., :1]

    compiled = torch.compile(broken, backend="aot_eager")
    assert torch.equal(compiled(step.q), broken(step.q))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"plan\.update_ and snapmla\.decode"):
        torch.compile(broken, backend="aot_eager", fullgraph=True)(step.q)

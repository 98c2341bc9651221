"""FlashMLA's names: metadata of all its versions, engines' ways with it, what every call promises.

Results by FlashMLA's gates to fp64.  Every pool is NaN where no token is, tables end in absurd ids.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import snapmla
from snapmla import dense
from snapmla.compat import flash_mla, sched_meta
from snapmla.compat.flash_mla import mha
from snapmla.compat.flash_mla import sparse_prefill as sparse_names
from snapmla.dense import decode as attention
from snapmla.testing.reference_plan import records_reference
from softgpu import Options, using
from tests.support.bits import assert_same_bits, same_bits
from tests.support.dense_steps import SCALE, DenseStep
from tests.support.needs import needs_compiler
from tests.support.records import drawn

pytestmark = needs_compiler
# what the test set has
FEW: dict[str, Any] = {"page_size": 16, "dtype": torch.float16}
Metadata = tuple[Any, torch.Tensor | None]


def decode(step: DenseStep, metadata: Metadata, **options: Any) -> tuple[torch.Tensor, ...]:
    kv = step.cache.kv
    assert kv is not None
    return flash_mla.flash_mla_with_kvcache(
        step.q, kv, step.block_table, step.cache_seqlens, 512, *metadata,
        **{"causal": True, **options},
    )  # fmt: skip


def assert_right(step: DenseStep, out: torch.Tensor, lse: torch.Tensor, **rule: Any) -> None:
    """FlashMLA's convention of empty rows, and the gates."""
    empty = step.cache_seqlens == 0
    assert (out[empty] == 0).all() and torch.isposinf(lse[empty]).all()
    step.assert_right(out, torch.where(torch.isposinf(lse), -math.inf, lse), **rule)


def pair(step: DenseStep, lengths: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Metadata in two tensors, for other lengths if given."""
    _, s_q, heads, _ = step.q.shape
    seqlens = step.cache_seqlens if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    made, splits = flash_mla.get_mla_metadata_tensors(seqlens, s_q * heads, 1)
    assert isinstance(made, torch.Tensor) and splits is not None
    return made, splits


# ---------------------------------------------------------------- what engines do with records


def fresh(step: DenseStep) -> Metadata:
    return pair(step)


def sglang(step: DenseStep) -> Metadata:
    """Static buffers of the largest batch, made for ones; each step copies and slices."""
    static, static_splits = pair(step, [1] * 9)
    made, splits = pair(step)
    static.copy_(made)
    static_splits[: len(splits)].copy_(splits)
    return static, static_splits[: len(splits)]


def sglang_whole(step: DenseStep) -> Metadata:
    """Its draft workers hand over all of ``num_splits``."""
    return sglang(step)[0], torch.zeros(10, dtype=torch.int32)


def vllm_form(step: DenseStep) -> Metadata:
    """``meta, _ = get_mla_metadata(...)``; num_splits is left out of the decode."""
    return pair(step)[0], None


def vllm_static(step: DenseStep) -> Metadata:
    """Rows of a buffer of (num_sms, 8) are filled; the rest is of another step."""
    buffer = torch.randint(-5, 100, (7, 8), dtype=torch.int32)
    made, splits = pair(step)
    buffer[: len(made)] = made
    return buffer, splits


def vllm_batch_invariant(step: DenseStep) -> Metadata:
    """One part by hand, whose end is in blocks of blocks, assigned to an object."""
    b, width = step.block_table.shape
    metadata = flash_mla.FlashMLASchedMeta()
    one = torch.tensor([[0, 0, b - 1, width // 64, 0, 0, 0, 0]], dtype=torch.int32)
    metadata.tile_scheduler_metadata = one
    metadata.num_splits = torch.zeros(b + 1, dtype=torch.int32)
    return metadata, None


def stale(step: DenseStep) -> Metadata:
    """Made when the first sequence was short and there were fewer."""
    return pair(step, [1, 200])


def other_rows(step: DenseStep) -> Metadata:
    """Made for the heads of all ranks, and for one query token."""
    made, splits = flash_mla.get_mla_metadata_tensors(step.cache_seqlens, 128, 1)
    assert isinstance(made, torch.Tensor)
    return made, splits


def larger_batch(step: DenseStep) -> Metadata:
    return pair(step, [70, 0, 3, 200])


def cut_off(step: DenseStep) -> Metadata:
    """A slice of half the parts, beside splits of another step."""
    return pair(step)[0][:2], torch.tensor([0, 2, 4, 6], dtype=torch.int32)


def inside_a_larger(step: DenseStep) -> Metadata:
    made, splits = pair(step)
    wide = torch.full((len(made), 11), 3, dtype=torch.int32)
    wide[:, :8] = made
    return wide[:, :8], splits


PATTERNS: list[Callable[[DenseStep], Metadata]] = [
    fresh, sglang, sglang_whole, vllm_form, vllm_static, vllm_batch_invariant, stale,
    other_rows, larger_batch, cut_off, inside_a_larger,
]  # fmt: skip
DECODED = (sglang, vllm_batch_invariant)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda f: f.__name__)
def test_patterns(monkeypatch: pytest.MonkeyPatch, pattern: Callable[..., Metadata]) -> None:
    """Every way becomes the plan that the rule makes of its records and the present lengths."""
    flash_mla._DECODE.memo.forget()  # what another pattern's call left there
    step = DenseStep.make((70, 0, 3), 4, 2, **FEW)
    metadata = pattern(step)
    given = metadata[0]
    if isinstance(given, flash_mla.FlashMLASchedMeta):
        given = given.tile_scheduler_metadata
    assert isinstance(given, torch.Tensor)
    room = 16 * step.block_table.shape[1]
    want = records_reference(given.tolist(), step.cache_seqlens.tolist(), room, 64, 8)
    plans = []

    def seen(*arguments: Any) -> tuple[torch.Tensor, ...]:
        plans.append(arguments[4])
        return run_plan(*arguments)

    run_plan = attention.run_plan
    if pattern not in DECODED:
        run_plan = lambda *_: ()
    monkeypatch.setattr(attention, "run_plan", seen)
    results = decode(step, metadata)
    (plan,) = plans
    n = len(want.work_items)
    assert [tuple(x) for x in plan.work_items[:n].tolist()] == want.work_items
    assert plan.part_begin.tolist() == want.part_begin
    assert plan.split_begin.tolist() == want.split_begin
    if pattern in DECODED:
        assert_right(step, *results)
    # other lengths, for which nobody plans
    step.cache_seqlens.copy_(torch.tensor([1, 5, 90]))
    monkeypatch.setattr(attention, "run_plan", lambda *_: ())
    monkeypatch.setattr(attention, "run_prepared", lambda *_: ())
    decode(step, metadata)
    want = records_reference(given.tolist(), [1, 5, 90], room, 64, 8)
    n = len(want.work_items)
    assert [tuple(x) for x in plan.work_items[:n].tolist()] == want.work_items


@pytest.mark.whole_matrix
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_random_records(kv_heads: int) -> None:
    """200 cases under the hazard check: the right results, nothing written beside them."""
    g = random.Random(kv_heads)
    step = DenseStep.make((40, 0, 3), 4, 1, kv_heads=kv_heads, **FEW)
    written: list[torch.Tensor] = []  # by the call before, which the next launch may overtake
    for case in range(100):
        table, _ = drawn(g, case)
        step.cache_seqlens.copy_(torch.tensor([g.randint(0, 40), 0, g.randint(0, 3)]))
        new, new_lse = torch.full((3 * 4 * 512 + 512,), 7.0).half(), torch.full((3, 4, 1), 7.0)
        out, behind = new[:-512].view(3, 1, 4, 512), new[-512:]
        with using(Options(hazards="raise", seed=case)):
            decode(step, (torch.tensor(table, dtype=torch.int32), None), out=out, lse=new_lse)
        assert_right(step, out, new_lse)
        assert (behind == 7).all()
        written = [new, new_lse]
    assert written


# ---------------------------------------------------------------- the object


def test_an_object_is_what_every_signature_gives() -> None:
    """vLLM's test and FlashMLA's: an object and None; both go into a call, dense or sparse."""
    step = DenseStep.make((20, 0), 4, 2, **FEW)
    lengths = step.cache_seqlens
    for made in (
        flash_mla.get_mla_metadata(lengths, 8, 1, num_heads_q=4, is_fp8_kvcache=True, topk=64),
        flash_mla.get_mla_metadata(lengths, num_heads_per_head_k=8, num_heads_k=1),
        flash_mla.get_mla_metadata(cache_seqlens=lengths, is_fp8_kvcache=True),
        flash_mla.get_mla_metadata(lengths, 8, 1),
    ):
        assert isinstance(made[0], flash_mla.FlashMLASchedMeta) and made[1] is None
        assert made[0] == flash_mla.FlashMLASchedMeta() == made[0]
        assert made[0] != flash_mla.FlashMLASchedMeta(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (made[0], copy.copy(made[0]), copy.deepcopy(made[0])):
            assert_right(step, *decode(step, (again, None)))


def test_an_object_answers_as_the_first_of_two_tensors() -> None:
    """A version long, with a warning: what callers do with tensors before they hand them over."""
    step = DenseStep.make((20, 3), 4, 2, **FEW)
    records_, _ = pair(step)
    metadata, nothing = flash_mla.get_mla_metadata(step.cache_seqlens, 8, 1)
    old = "two tensors from snapmla.flash_mla.get_mla_metadata_tensors"
    static = torch.zeros_like(records_)
    for use in (
        lambda: static.copy_(metadata), lambda: metadata.clone(), lambda: metadata[:],
        lambda: metadata.contiguous(), lambda: torch.cat([metadata[:1], metadata[1:]]),
        lambda: torch.clone(input=metadata), lambda: torch.stack([metadata, metadata])[0],
    ):  # fmt: skip
        with pytest.warns(DeprecationWarning, match=old) as seen:
            made = use()
        assert torch.equal(made, records_) and seen[0].filename == __file__
        assert_right(step, *decode(step, (made, nothing)))
    with pytest.warns(DeprecationWarning, match=old):
        assert metadata.shape == records_.shape and metadata.dtype == torch.int32
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        metadata.frobnicate  # noqa: B018
    alone = flash_mla.FlashMLASchedMeta()  # nothing that records could be made of
    with pytest.raises(AttributeError, match="no attribute 'clone'"):
        alone.clone()
    with pytest.raises(TypeError, match="not subscriptable"):
        alone[:2]
    with pytest.raises(TypeError):
        static.copy_(alone)


def test_an_object_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call plans, the next launches a decode alone and skips the full checks."""
    step = DenseStep.make((20, 0), 4, 2, **FEW)
    metadata, nothing = flash_mla.get_mla_metadata()
    assert nothing is None and metadata == flash_mla.FlashMLASchedMeta(False, None, None, None)
    out, lse = decode(step, (metadata, None))
    assert_right(step, out, lse)
    assert metadata.have_initialized and metadata.config == flash_mla.Config(
        2, 2, 4, 16, 1, True, torch.float16
    )
    assert metadata.tile_scheduler_metadata is metadata.num_splits is None

    given = {"out": torch.full_like(out, 7.0), "lse": torch.full_like(lse, 7.0)}
    decode(step, (metadata, None), **given)  # another kind of call

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("planned, or checked in full")

    for module, name in (
        (dense, "launch_plan"), (dense.plan, "launch_plan"),
        (sched_meta, "launch_plan_of"), (attention, "checked"), (flash_mla, "checked_cache"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, refuse)
    given = {"out": torch.full_like(out, 7.0), "lse": torch.full_like(lse, 7.0)}
    for _ in range(2):
        assert decode(step, (metadata, None), **given) == (given["out"], given["lse"])
        assert same_bits(given["out"], out) and same_bits(given["lse"], lse)
    monkeypatch.setattr(attention, "run_plan", refuse)  # from here on, as the last
    given = {name: torch.full_like(t, 7.0) for name, t in given.items()}
    assert decode(step, (metadata, None), **given) == (given["out"], given["lse"])
    assert same_bits(given["out"], out) and same_bits(given["lse"], lse)


def test_a_layer_unlike_the_last(monkeypatch: pytest.MonkeyPatch, no_decode: None) -> None:
    """What the quick way of a repeated call must not take, or must refuse, in the usual words."""
    step = DenseStep.make((20, 0), 4, 2, **FEW)
    kv = step.cache.kv
    assert kv is not None
    metadata = flash_mla.get_mla_metadata()
    out, lse = torch.empty(2, 2, 4, 512, dtype=torch.float16), torch.empty(2, 4, 2)
    quick: list[Any] = []
    monkeypatch.setattr(attention, "run_prepared", lambda *x: quick.append(x))

    def is_quick(other: DenseStep = step, **options: Any) -> bool:
        """Whether a call like the last is quick, and this one as well."""
        for _ in range(18):  # calls of a kind until one is like the last that was noted
            decode(step, metadata, out=out)
        assert quick
        quick.clear()
        decode(other, metadata, **{"out": out, **options})
        return len(quick) == 1

    def changed(**fields: Any) -> DenseStep:
        return DenseStep(**{**vars(step), **fields})

    assert is_quick() and is_quick(changed(q=step.q.clone()), out=out.clone())
    assert is_quick(changed(block_table=step.block_table.clone()))  # another step's
    assert is_quick(changed(cache_seqlens=step.cache_seqlens.clone()))
    wide = torch.zeros(2, 2, 4, 640, dtype=torch.float16)
    for other in (
        changed(q=wide[..., :576]),
        changed(q=step.q.as_subclass(torch.nn.Parameter)),
    ):  # fmt: skip
        assert not is_quick(other)
    assert not is_quick(out=None) and not is_quick(lse=lse) and not is_quick(softmax_scale=0.5)
    for name, value, words in (
        ("out", out[..., :256], "out: expected shape"),
        ("out", wide[..., :512], "out: expected a contiguous"),
        ("out", torch._neg_view(out), "out: expected "),
        ("out", kv.view(-1)[:8192].view(out.shape), "out: expected memory apart from k_cache,"),
        ("out", step.q.view(-1)[:8192].view(out.shape), "out: expected memory apart from q,"),
        ("other", changed(q=torch._neg_view(step.q)), "q: expected values as memory holds them"),
        ("softmax_scale", torch.tensor(SCALE), "softmax_scale: expected"),
        ("causal", False, "tile_scheduler_metadata: expected calls like its first"),
        ("indices", out, "causal: expected False beside indices"),
        ("attn_sink", out, "attn_sink: expected None without indices"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            is_quick(**{name: value})
        assert not quick
    for name in ("block_table", "cache_seqlens"):  # the same tensor, whose memory is another
        assert is_quick()
        quick.clear()
        table = getattr(step, name)
        there, table.data = table.data, torch._neg_view(-table)
        with pytest.raises(ValueError, match=f"^{name}: expected values as memory holds them"):
            decode(step, metadata, out=out)
        assert not quick
        table.data = there
    records_, _ = pair(step)
    assert is_quick()
    metadata[0].tile_scheduler_metadata = records_
    quick.clear()
    decode(step, metadata, out=out)
    assert not quick, "the caller's records"


def test_a_layer_whose_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called once and its error is the caller's, on the quick way of a repeated call too."""
    step = DenseStep.make((20, 0), 4, 2, **FEW)
    metadata, _ = flash_mla.get_mla_metadata()
    calls: list[int] = []
    error = RuntimeError("CUDA error 700")

    def failing(*_: Any) -> None:
        calls.append(1)
        raise error

    variant = step.plan().variant
    monkeypatch.setitem(variant.kernels, torch.float16, lambda *_: None)
    for _ in range(4):
        decode(step, (metadata, None))
    assert metadata.memo.kinds
    monkeypatch.setitem(variant.kernels, torch.float16, failing)
    for options in ({}, {"lse": torch.empty(2, 4, 2)}):  # the second is unlike the last
        calls.clear()
        with pytest.raises(RuntimeError) as caught:
            decode(step, (metadata, None), **options)
        assert caught.value is error and calls == [1]
        assert error.__cause__ is None and error.__context__ is None


def test_an_object_is_for_calls_like_its_first(no_decode: None) -> None:
    step = DenseStep.make((70, 0), 4, 2, **FEW)
    metadata, _ = flash_mla.get_mla_metadata()
    with pytest.raises(ValueError, match="^out: expected shape"):
        decode(step, (metadata, None), out=torch.zeros(1, dtype=torch.float16))
    assert not metadata.have_initialized, "of a call that was refused"
    decode(step, (metadata, None))
    words = r"^tile_scheduler_metadata: expected calls like its first, {}, got {} \(make another"
    with pytest.raises(ValueError, match=words.format("causal = True", "causal = False")):
        decode(step, (metadata, None), causal=False)
    other = DenseStep.make((70, 0), 2, 2, **FEW)
    with pytest.raises(ValueError, match=words.format("h_q = 4", "h_q = 2")):
        decode(other, (metadata, None))
    # a narrower table is the same call, but its plan is its own: lengths are cut at the width
    plan = next(iter(metadata._plans.values()))
    step.block_table = step.block_table[:, :-1]
    decode(step, (metadata, None))
    first, second = metadata._plans.values()
    assert first is plan and second.max_pages == plan.max_pages - 1
    assert second.work_items is not plan.work_items and second.o_accum is not plan.o_accum


def test_tables_of_two_widths_with_lengths_beyond_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first table cut is no part of the second's plan, nor is that no sequence is cut."""
    step = DenseStep.make((200, 0), 4, 1, **FEW)
    whole, metadata = step.block_table, flash_mla.get_mla_metadata()[0]
    step.block_table = whole[:, :3]
    out, lse = decode(step, (metadata, None))
    assert torch.isfinite(out[0]).all() and torch.isfinite(lse[0]).all()
    step.block_table = whole
    assert_right(step, *decode(step, (metadata, None)))


def test_an_object_set_back_is_planned_anew(no_decode: None) -> None:
    """``have_initialized`` and ``config`` are all of the state that FlashMLA's has."""
    step = DenseStep.make((70, 0), 4, 2, **FEW)
    metadata, _ = flash_mla.get_mla_metadata()
    for _ in range(3):
        decode(step, (metadata, None))
    assert metadata.memo.kinds and metadata._planned()
    metadata.have_initialized, metadata.config = False, None
    step.cache_seqlens.copy_(torch.tensor([3, 64]))
    decode(step, (metadata, None))
    (plan,) = metadata._plans.values()
    assert plan.planned_seqlens.tolist() == [3, 64] and metadata._planned()
    metadata.config = None
    decode(DenseStep.make((5,), 4, 2, **FEW), (metadata, None))
    assert [plan.batch for plan in metadata._plans.values()] == [1]


def test_shallow_copies_are_planned_apart(no_decode: None) -> None:
    step = DenseStep.make((70, 0), 4, 2, **FEW)
    metadata, _ = flash_mla.get_mla_metadata()
    other = copy.copy(metadata)
    decode(step, (other, None))
    assert other._plans and not metadata._plans and not metadata._planned()


def test_a_stale_object_is_told_by_its_own_name(
    monkeypatch: pytest.MonkeyPatch, no_decode: None
) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step = DenseStep.make((70, 0), 4, 2, **FEW)
    metadata, _ = flash_mla.get_mla_metadata()
    decode(step, (metadata, None))
    step.cache_seqlens[0] = 71
    words = r"^tile_scheduler_metadata: .*0 \(70 -> 71\) \(make another object by get_mla_metadata"
    with pytest.raises(ValueError, match=words):
        decode(step, (metadata, None))


def test_a_query_with_gaps_is_copied_once(no_decode: None) -> None:
    step = DenseStep.make((70, 0), 4, 2, **FEW)
    step.q = step.q.repeat_interleave(2, 2)[:, :, ::2]
    assert not step.q.is_contiguous()
    metadata, _ = flash_mla.get_mla_metadata()
    decode(step, (metadata, None))
    with torch.profiler.profile() as profile:
        decode(step, (metadata, None))
    assert [event.count for event in profile.key_averages() if event.key == "aten::clone"] == [1]


@pytest.fixture
def no_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made, decodes are not."""
    monkeypatch.setattr(attention, "launch_decode", lambda *_: None)


def test_a_query_token_alone_is_not_causal(no_decode: None) -> None:
    step = DenseStep.make((20,), 4, 1, **FEW)
    metadata, _ = flash_mla.get_mla_metadata()
    decode(step, (metadata, None), causal=True)
    decode(step, (metadata, None), causal=False)
    assert metadata.config is not None and not metadata.config.causal
    assert len(metadata._plans) == 1


def test_defaults_are_flashmlas(monkeypatch: pytest.MonkeyPatch) -> None:
    """softmax_scale 576**-0.5, not causal, natural LSE, +inf of empty rows; no witness."""
    seen: list[Any] = []
    monkeypatch.setattr(attention, "run_plan", lambda *x: seen.append(x[8:]))
    step = DenseStep.make((20, 0), 4, 2, **FEW)
    kv = step.cache.kv
    assert kv is not None
    flash_mla.flash_mla_with_kvcache(
        step.q, kv, step.block_table, step.cache_seqlens, 512, *pair(step)
    )
    assert seen == [((SCALE, False, "e", "+inf"), None)]


def test_indices_that_are_no_tensor(no_decode: None) -> None:
    """A list is refused beside a dense cache, too, not overlooked."""
    step = DenseStep.make((20, 7), 4, 2, page_size=16, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="indices: expected a torch.Tensor"):
        decode(step, fresh(step), indices=[[0]], causal=False)


def test_nan_is_no_empty_row() -> None:
    """FlashMLA gives LSE +inf; queries may have gaps."""
    step = DenseStep.make((20, 3), 4, 1, **FEW)
    step.q[0, 0, 1, 5] = math.nan
    kept = step.q
    step.q = torch.cat([step.q, step.q], -1)[..., :576]
    assert not step.q.is_contiguous()
    out, lse = decode(step, pair(step))
    assert torch.isnan(out[0, 0, 1]).all() and torch.isnan(lse[0, 1]).all()
    step.q = kept
    kept[0, 0, 1, 5] = 0.0
    out[0, 0, 1], lse[0, 1] = 0.0, 0.0
    truth, truth_lse = step.decode(step.plan())
    truth[0, 0, 1], truth_lse[0, 1] = 0.0, 0.0
    assert_same_bits((out, lse), (truth, truth_lse))


@pytest.mark.parametrize(
    "make", [pair, lambda _: flash_mla.get_mla_metadata()], ids=["pair", "meta"]
)
def test_kv_heads(make: Callable[..., Metadata]) -> None:
    step = DenseStep.make((20, 0, 3), 4, 2, kv_heads=2, **FEW)
    metadata = make(step)
    assert_right(step, *decode(step, metadata))


def test_no_sequences() -> None:
    step = DenseStep.make((20, 0), 4, 2, **FEW)
    none = DenseStep(step.cache, step.q[:0], step.block_table[:0], step.cache_seqlens[:0])
    for metadata in (flash_mla.get_mla_metadata(), pair(none)):
        out, lse = decode(none, metadata)
        assert out.shape == (0, 2, 4, 512) and lse.shape == (0, 4, 2)


def test_copies_of_objects(no_decode: None) -> None:
    """A copy is planned as its original, for the same lengths."""
    step = DenseStep.make((20, 0), 4, 2, **FEW)
    metadata, _ = flash_mla.get_mla_metadata()
    for _ in range(3):
        decode(step, (metadata, None))
    assert metadata.memo.kinds
    other = copy.deepcopy(metadata)
    assert not other.memo.kinds
    decode(step, (other, None))
    assert other == metadata
    mine, theirs = (next(iter(m._plans.values())) for m in (metadata, other))
    assert torch.equal(mine.work_items, theirs.work_items)


def test_results_over_the_pool_are_refused() -> None:
    step = DenseStep.make((20,), 4, 1, **FEW)
    kv = step.cache.kv
    assert kv is not None
    over = kv.view(-1)[: 4 * 512].view(1, 1, 4, 512)
    for metadata in (flash_mla.get_mla_metadata(), pair(step)):
        with pytest.raises(ValueError, match="^out: expected memory apart from k_cache, got"):
            decode(step, metadata, out=over)


@pytest.mark.parametrize("name", ["block_table", "cache_seqlens"])
@pytest.mark.parametrize("make", [lambda _: flash_mla.get_mla_metadata(), pair])
def test_results_over_the_tables_are_refused(
    make: Callable[..., Metadata], name: str, no_decode: None
) -> None:
    """By every way: the first call, and those that are like the last but for that."""
    step = DenseStep.make((20, 30, 40, 50), 4, 1, **FEW)
    memory = torch.zeros(32)
    held = getattr(step, name)
    over = memory.view(torch.int32)[: held.numel()].view(held.shape)
    over.copy_(held)
    setattr(step, name, over)
    apart, on_it = torch.zeros(4, 4, 1), memory[:16].view(4, 4, 1)
    metadata = make(step)
    words = f"^lse: expected memory apart from {name}, got"
    for lse in (on_it, apart, apart, apart, apart, on_it):
        if lse is on_it:
            with pytest.raises(ValueError, match=words):
                decode(step, metadata, lse=lse)
        else:
            decode(step, metadata, lse=lse)


def test_prefill_is_that_of_its_kernels() -> None:
    """By FlashMLA's names; ``test_mha.py`` and ``test_sparse_prefill.py`` are of what they do."""
    for module in (mha, sparse_names):
        for name in module.__all__:
            assert getattr(flash_mla, name) is getattr(module, name)
    assert {*mha.__all__, *sparse_names.__all__} < set(flash_mla.__all__)


def test_the_primary_api_has_the_same_bits() -> None:
    """An object's plan is ``plan_decode``'s."""
    step = DenseStep.make((20, 3), 4, 2, **FEW)
    out, lse = decode(step, flash_mla.get_mla_metadata())
    assert_same_bits((out, lse), snapmla.decode(
        step.q, step.cache, step.block_table, step.cache_seqlens, softmax_scale=SCALE,
        plan=step.plan(), empty_lse="+inf",
    ))  # fmt: skip

"""SnapMLA's host names: the same bits as the primary API, an engine's calls as it makes them."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable

import pytest
import torch

import snapmla
import snapmla.plan
from snapmla import attention, quant, selfcheck
from snapmla import flash_mla_fp8 as names
from snapmla.plan import PlanVariant
from snapmla.reference_plan import plan_reference
from tests.support.bits import assert_same_bits
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
SCALE = 192**-0.5
SLOTS, PAGE, WIDTH = 16 * 64, 64, 10


class Pool:
    """A layer's pool as the host framework allocates it: flat slots, NaN in every unused byte."""

    def __init__(self) -> None:
        self.lora = torch.full((SLOTS, 1, 512), 0x7F, dtype=torch.uint8)
        self.scale = torch.full((SLOTS, 1, 1), math.nan)
        self.rope = torch.full((SLOTS, 1, 64), math.nan, dtype=torch.bfloat16)

    def append(self, key: torch.Tensor, slots: torch.Tensor) -> None:
        names.quantize_and_cache_k(
            key=key, k_lora_cache=self.lora, k_lora_scale_cache=self.scale,
            k_rope_cache=self.rope, indices=slots, head_dim_v=512,
        )  # fmt: skip

    def primary(self, page_size: int = PAGE) -> snapmla.PagedKVCache:
        """The same memory for the primary API."""
        return snapmla.PagedKVCache.from_tensors(
            self.lora.view(-1, page_size, 512), self.rope.view(-1, page_size, 64),
            self.scale.view(-1, page_size),
        )  # fmt: skip


class Step:
    """One decode step of sequences with these lengths over a freshly filled pool."""

    def __init__(self, lengths: tuple[int, ...], heads: int, s_q: int) -> None:
        self.pool, self.heads, self.s_q = Pool(), heads, s_q
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.table = torch.full((len(lengths), WIDTH), -1, dtype=torch.int32)
        order, slots = torch.randperm(SLOTS // PAGE).tolist(), []
        for i, n in enumerate(lengths):
            pages = [order.pop() for _ in range(-(-n // PAGE))]
            self.table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            slots += [pages[t // PAGE] * PAGE + t % PAGE for t in range(n)]
        self.keys = torch.randn(len(slots), 1, 576).bfloat16()
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.pool.append(self.keys, self.slots)
        self.q = torch.randn(len(lengths), s_q, heads, 576).bfloat16()

    def decode(self, pair: names.Pair, **extra: object) -> names.Pair:
        """As the framework calls it: keywords, views of the pool."""
        q_nope, q_scale, q_rope = names.quantize_ckv_per_token_head(self.q, 512)
        arguments = {
            "q_nope": q_nope, "q_rope": q_rope,
            "k_cache_lora": self.pool.lora.view(torch.float8_e4m3fn).view(-1, PAGE, 1, 512),
            "k_cache_rope": self.pool.rope.view(-1, PAGE, 1, 64),
            "q_scale": q_scale, "k_scale": self.pool.scale.view(-1, PAGE, 1, 1),
            "block_table": self.table, "cache_seqlens": self.lengths, "head_dim_v": 512,
            "tile_scheduler_metadata": pair[0], "num_splits": pair[1],
            "softmax_scale": SCALE, "causal": True,
        }  # fmt: skip
        return names.flash_mla_ckv_fp8_per_token(**{**arguments, **extra})  # type: ignore[arg-type]

    def metadata(self, **extra: object) -> names.Pair:
        rows = self.heads * self.s_q
        return names.get_mla_metadata(self.lengths, rows, 1, **extra)  # type: ignore[arg-type]

    def primary(self, **extra: object) -> names.Pair:
        q = snapmla.quantize_q(self.q[..., :512], self.q[..., 512:])
        return snapmla.decode(
            q, self.pool.primary(), self.table, self.lengths, softmax_scale=SCALE,
            empty_lse="+inf", **extra,  # type: ignore[arg-type]
        )  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "s_q", "lengths", "splits"),
    [(16, 1, (65, 0, 500, 64, 1), True), (10, 3, (400, 0), True), (20, 2, (65, 0), True),
     (40, 2, (1, 0), False)],
)  # fmt: skip
def test_decode_has_the_primary_bits(
    monkeypatch: pytest.MonkeyPatch, heads: int, s_q: int, lengths: tuple[int, ...], splits: bool
) -> None:
    monkeypatch.setattr("snapmla.plan.DEFAULT_FIXED_OVERHEAD", 1)  # so that short batches split
    names._plans.clear()
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


def test_static_buffers_of_a_graph() -> None:
    """The framework's graph code: buffers for the largest batch, fresh pairs copied onto them."""
    step = Step((200, 0, 64), 16, 1)
    static, splits = names.get_mla_metadata(torch.ones(32, dtype=torch.int32), 16, 1)
    fresh, fresh_splits = step.metadata()
    static.copy_(fresh)
    splits[:4].copy_(fresh_splits)
    assert_same_bits(step.decode((static, splits[:4])), step.primary())
    for lengths in ((5, 130, 64), (0, 0, 0), (64, 64, 200)):
        step.lengths.copy_(torch.tensor(lengths))
        before = static.data_ptr()
        pair = step.metadata(out=(static, splits[:4]))
        assert pair[0] is static and static.data_ptr() == before
        step.table = step.table.abs()  # every page is readable: lengths moved
        got = step.decode(pair)
        want = step.primary()
        torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


def test_metadata_is_the_schedule() -> None:
    lengths = torch.tensor([300, 0, 64, 700], dtype=torch.int32)
    metadata, splits = names.get_mla_metadata(lengths, 16, 1, max_batch=9)
    parts = metadata.shape[0]
    want = plan_reference(lengths.tolist(), parts, 64, snapmla.plan.DEFAULT_FIXED_OVERHEAD)
    flat = metadata.view(-1).tolist()
    found = [tuple(flat[4 * i : 4 * i + 4]) for i in range(len(want.work_items))]
    assert found == want.work_items
    assert flat[-(parts + 1) :] == want.part_begin and splits.tolist() == want.split_begin
    assert metadata.shape[1] == names._metadata_width(parts, 9)
    assert names._metadata_capacity(metadata) >= 9


@pytest.mark.parametrize("parts", [1, 2, 4, 33, 66, 132])
@pytest.mark.parametrize("batch", [1, 7, 2048])
def test_metadata_has_room(parts: int, batch: int) -> None:
    """Items and, from the back, part_begin and lengths never overlap; room for what was asked."""
    metadata = torch.zeros(parts, names._metadata_width(parts, batch), dtype=torch.int32)
    assert names._metadata_capacity(metadata) >= batch
    assert 4 * (parts + batch) + batch + parts + 1 <= metadata.numel()


def ints_of(metadata: torch.Tensor, batch: int) -> list[tuple[int, int]]:
    """Where a pair's tables begin and end in its metadata, in ints, in order."""
    base = metadata.data_ptr()
    return sorted(
        ((t.data_ptr() - base) // 4, (t.data_ptr() - base) // 4 + t.numel())
        for t in names._tables(metadata, batch)
    )


@pytest.mark.parametrize("columns", range(9, 14))
@pytest.mark.parametrize("parts", [1, 2, 4, 33])
def test_a_full_metadata_tensor(parts: int, columns: int) -> None:
    """As many sequences as there is room for: tables side by side, and no room for one more."""
    metadata = torch.zeros(parts, columns * (8 if parts == 1 else 1), dtype=torch.int32)
    room = names._metadata_capacity(metadata)
    spans = ints_of(metadata, room)
    assert spans[0][0] >= 0 and spans[-1][1] <= metadata.numel()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))

    one_more = 4 * (parts + room + 1) + (room + 1) + (parts + 1)  # items, lengths, part_begin
    assert metadata.numel() < one_more
    lengths, splits = torch.ones(room, dtype=torch.int32), torch.zeros(room + 1, dtype=torch.int32)
    names.get_mla_metadata(lengths, 16, 1, out=(metadata, splits))
    want = plan_reference([1] * room, parts, 64, snapmla.plan.DEFAULT_FIXED_OVERHEAD)
    items = names._tables(metadata, room).work_items[:room].tolist()
    assert [tuple(item) for item in items] == want.work_items
    more = torch.ones(room + 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"expected room for {room + 1} .*got room for {room} "):
        names.get_mla_metadata(more, 16, 1, out=(metadata, torch.zeros(room + 2).int()))


def test_another_shape_at_the_same_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the metadata are parts: the same memory in other rows is another schedule."""
    monkeypatch.setattr("snapmla.plan.DEFAULT_FIXED_OVERHEAD", 1)
    names._plans.clear()
    step = Step((70, 250), 16, 1)
    pair = step.metadata()
    for parts in (4, 2):  # as many as the software GPU fills, then half
        own = step.metadata(out=(pair[0].view(parts, -1), pair[1]))
        plan = snapmla.plan_decode(
            step.lengths, 16, 1, page_size=PAGE, max_pages=WIDTH, num_parts=parts, fixed_overhead=1
        )
        assert int(own[1][-1]) == int(plan.split_begin[-1]) > 0
        out, lse = torch.full((2, 1, 16, 512), 7.0).bfloat16(), torch.full((2, 16, 1), 7.0)
        assert_same_bits(step.decode(own, out=out, lse=lse), step.primary(plan=plan))
    names._plans.clear()


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


def test_workspace_is_kept() -> None:
    like = torch.zeros(1, dtype=torch.int32)
    first = names._workspace(like, 0, 3, 16)
    assert names._workspace(like, 0, 3, 16)[0] is first[0]
    for other in ((0, 4, 16), (0, 3, 32), (7, 3, 16), (None, 3, 16)):
        assert names._workspace(like, *other)[0] is not first[0]
    captured = [names._workspace(like, None, 3, 16)[0] for _ in range(2)]
    assert captured[0] is not captured[1]


def test_stale_metadata_is_caught_in_debug_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step = Step((70, 3), 16, 1)
    pair = step.metadata()
    step.decode(pair)
    step.lengths[1] = 2
    with pytest.raises(ValueError, match=r"planned -> now.* 1 \(3 -> 2\)"):
        step.decode(pair)
    step.decode(step.metadata(out=pair))


def test_stale_metadata_is_named_as_the_caller_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step = Step((70, 3), 16, 1)
    pair = step.metadata()
    step.lengths[1] = 2
    for extra in ({}, {"softmax_scale": 1}):  # the quick way and the long one
        with pytest.raises(ValueError, match=r"^tile_scheduler_metadata: .*\(call get_mla"):
            step.decode(pair, **extra)


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
        patch.setattr(attention, "_kernel", lambda *_: failing)
        check(lambda: step.decode(pair))
        patch.setattr(names, "_quick_decode", lambda *_: None)
        check(lambda: step.decode(pair))
    lora, scale, rope = step.pool.lora, step.pool.scale, step.pool.rope
    monkeypatch.setattr(quant, "_kernel", lambda *_, **axes: failing)
    check(lambda: step.pool.append(step.keys, step.slots))
    paged = [t.view(-1, PAGE, 1, t.shape[2]) for t in (lora, scale, rope)]
    check(lambda: names.quantize_and_cache_k(step.keys, *paged, step.slots, 512))


def test_stale_metadata_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step, compared = Step((70, 3), 16, 1), []
    pair = step.metadata()
    check = snapmla.DecodePlan.check
    monkeypatch.setattr(
        snapmla.DecodePlan,
        "check",
        lambda plan, lengths: compared.append(1) or check(plan, lengths),
    )
    step.lengths[1] = 2
    with pytest.raises(ValueError, match="^tile_scheduler_metadata: "):
        step.decode(pair)
    assert compared == [1]


@pytest.mark.parametrize(("planned", "decoded"), [((40, 40, 40), 2), ((40, 40, 50), 2), ((70,), 2)])
def test_metadata_of_another_batch(
    monkeypatch: pytest.MonkeyPatch, planned: tuple[int, ...], decoded: int
) -> None:
    """Shapes cannot tell, the pair has room for any batch: named in debug mode, harmless without.

    Of a larger batch's pair the first sequences come out right.
    """
    step = Step((40,) * decoded, 4, 1)
    metadata, splits = names.get_mla_metadata(torch.tensor(planned, dtype=torch.int32), 4, 1)
    pair = (metadata, torch.cat([splits, splits[-1:]])[: decoded + 1])
    results = {
        "out": torch.full((decoded, 1, 4, 512), 7.0),
        "lse": torch.full((decoded, 4, 1), 7.0),
    }
    out, lse = step.decode(pair, **results)
    if len(planned) > decoded:
        assert_same_bits((out, lse), step.primary(out_dtype=torch.float32))
    names._plans.clear()
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    with pytest.raises(
        ValueError,
        match=rf"^tile_scheduler_metadata: expected one made for b = {decoded} sequences, got "
        rf"{len(planned)} \(call get_mla_metadata\(..., out=\) after the batch changes\)",
    ):
        step.decode(pair)
    step.decode(step.metadata(out=pair))
    names._plans.clear()


def test_debug_mode_survives_garbage_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPMLA_CHECK_PLAN", "1")
    step = Step((70, 3), 4, 1)
    metadata, splits = step.metadata()
    metadata.random_(-(2**31), 2**31)
    with pytest.raises(ValueError, match=r"^tile_scheduler_metadata: .*b = 2 sequences, got"):
        step.decode((metadata, splits))


@pytest.mark.parametrize("width", [1, 2])
def test_lengths_beyond_the_block_table(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """The pair is made before the table's width is known: its splits are merged all the same."""
    monkeypatch.setattr("snapmla.plan.DEFAULT_FIXED_OVERHEAD", 0)
    names._plans.clear()
    step = Step((190, 500), 16, 1)
    pair = step.metadata()
    assert int(pair[1][-1]) > 0
    step.table = step.table[:, :width].contiguous()
    results = {"out": torch.full((2, 1, 16, 512), 7.0), "lse": torch.full((2, 16, 1), 7.0)}
    out, lse = step.decode(pair, **results)
    want, want_lse = step.primary(out_dtype=torch.float32)
    assert selfcheck.metrics.relative_l2(out, want) < 5e-3
    assert selfcheck.metrics.lse_error(lse, want_lse) < 1e-5
    names._plans.clear()


@pytest.mark.parametrize("batch", [128, 200])
def test_garbage_lengths_do_not_overflow_the_schedule(batch: int) -> None:
    """The pair knows no capacity; the sum of all tiles must still fit 32 bits."""
    lengths = torch.full((batch,), 2**31 - 1, dtype=torch.int32)
    metadata, splits = names.get_mla_metadata(lengths, 16, 1)
    parts = metadata.shape[0]
    begin = metadata.view(-1)[-(parts + 1) :].tolist()
    assert begin[0] == 0 and begin == sorted(begin) and batch <= begin[-1] < batch + parts
    items = metadata.view(-1)[: 4 * begin[-1]].view(-1, 4)
    assert (items[:, 2] > items[:, 1]).all() and splits[-1] <= 2 * parts
    assert items[:, 0].unique().numel() == batch


def test_other_metadata_beside_the_same_splits() -> None:
    """A kept plan belongs to both tensors of the pair."""
    step = Step((200, 500), 16, 1)
    first, splits = step.metadata()
    step.decode((first, splits))
    step.lengths.copy_(torch.tensor([200, 1]))
    second, fresh = step.metadata()
    splits.copy_(fresh)
    assert not torch.equal(first, second)
    assert_same_bits(step.decode((second, splits)), step.primary())


def test_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object) -> None:
        raise AssertionError("an empty call reached a kernel")

    monkeypatch.setattr("snapmla.attention.launch_decode", reached)
    step = Step((5,), 4, 1)
    step.lengths, step.table, step.q = step.lengths[:0], step.table[:0], step.q[:0]
    out, lse = step.decode(step.metadata())
    assert out.shape == (0, 1, 4, 512) and lse.shape == (0, 4, 1)


def test_an_engines_call_takes_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous views as the framework passes them; one plan for all layers of a step."""
    step = Step((70, 3), 16, 1)
    pair = step.metadata()
    want = step.primary()
    monkeypatch.setattr(names, "_checked_decode", lambda *_: pytest.fail("the long way"))
    made = []
    real = names._plan
    monkeypatch.setattr(names, "_plan", lambda *a: made.append(1) or real(*a))
    names._plans.clear()
    for _ in range(3):
        assert_same_bits(step.decode(pair), want)
    assert len(made) == 1
    assert_same_bits(step.decode(step.metadata()), want)  # other memory, another plan
    assert len(made) > 1


def test_gaps_that_the_exported_function_does_not_see() -> None:
    step = Step((70, 3), 16, 1)
    with pytest.raises(ValueError, match="^lse: .*contiguous"):
        step.decode(step.metadata(), lse=torch.zeros(16, 2, 1).transpose(0, 1))


def test_a_kept_plan_is_for_the_very_same_view() -> None:
    """Other views of a kept pair's memory, at the same address, are checked anew."""
    lengths = torch.ones(2, dtype=torch.int32)
    metadata, _ = names.get_mla_metadata(lengths, 16, 1)
    buffer = torch.zeros(9, dtype=torch.int32)
    plan = names._kept_plan(metadata, buffer[:3], 2, 16, 1, 64, 4)
    assert names._kept_plan(metadata.view(4, -1), buffer[:3], 2, 16, 1, 64, 4) is plan
    rows, columns = metadata.shape
    others = (metadata.view(torch.float32), metadata.as_strided((rows, columns), (1, rows)))
    for other in others:
        with pytest.raises((TypeError, ValueError), match="^tile_scheduler_metadata: "):
            names._kept_plan(other, buffer[:3], 2, 16, 1, 64, 4)
    for other in (buffer[:4], buffer[::2][:3], buffer[:3].view(torch.float32)):
        with pytest.raises((TypeError, ValueError), match="^num_splits: "):
            names._kept_plan(metadata, other, 2, 16, 1, 64, 4)


@pytest.mark.parametrize("layout", ["paged", "row640"])
def test_other_layouts_take_the_quick_way(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    step = Step((70, 3), 16, 1)
    want = step.primary()
    cache = snapmla.PagedKVCache.allocate(SLOTS // PAGE, PAGE, layout, "cpu")
    for name in ("content_u8", "rope", "scale"):
        getattr(cache, name).copy_(getattr(step.pool.primary(), name))
    monkeypatch.setattr(names, "_checked_decode", lambda *_: pytest.fail("the long way"))
    got = step.decode(
        step.metadata(), k_cache_lora=cache.content.unsqueeze(2),
        k_cache_rope=cache.rope.unsqueeze(2), k_scale=cache.scale[..., None, None],
    )  # fmt: skip
    assert_same_bits(got, want)


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


def test_kept_plans_are_bounded() -> None:
    lengths = torch.ones(1, dtype=torch.int32)
    names._plans.clear()
    for width in range(1, names.KEPT_PLANS + 10):
        names._kept_plan(*names.get_mla_metadata(lengths, 16, 1), 1, 16, 1, 64, width)
        assert 0 < len(names._plans) <= names.KEPT_PLANS

"""``fetch_dequant`` by sequence, by slot and as packed chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import snapmla
from snapmla import reference
from snapmla.testing import fetched, selfcheck
from tests.support.needs import needs_compiler
from tests.support.steps import make_step

I32, BF16 = torch.int32, torch.bfloat16


@needs_compiler
def test_append_then_fetch() -> None:
    step = make_step((33, 0, 64), 4, 1, page_size=16, layout="paged")
    c_kv, k_rope = snapmla.fetch_dequant(step.cache, step.block_table, step.cache_seqlens)
    assert tuple(c_kv.shape) == (3, step.block_table.shape[1] * 16, 512)
    for i, n in enumerate((33, 0, 64)):
        t = torch.arange(n)
        page = step.block_table[i, t // 16].long()
        want = reference.dequantize_rows(
            step.cache.content[page, t % 16], step.cache.rope[page, t % 16],
            step.cache.scale[page, t % 16],
        )  # fmt: skip
        assert torch.equal(c_kv[i, :n], want[0]) and torch.equal(k_rope[i, :n], want[1])
        assert (c_kv[i, n:] == 0).all() and (k_rope[i, n:] == 0).all()
    indices = (step.block_table[2, :1] * 16 + 5).int()
    joint = torch.zeros(1, 576, dtype=torch.bfloat16)
    flat, _ = snapmla.fetch_dequant(step.cache, indices, out=joint)
    assert torch.equal(flat[0], c_kv[2, 5]) and torch.equal(joint[0, 512:], k_rope[2, 5])


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=I32).cumsum(0, dtype=I32)


@needs_compiler
@pytest.mark.parametrize("started", [True, False], ids=["starts", "from 0"])
def test_chunks_into_a_workspace(started: bool) -> None:
    """Strided joint rows; the rows behind the last sequence stay, the memory between rows too."""
    cache, table, _ = selfcheck.filled_cache((40, 0, 33, 5), 16, "paged")
    begins = packed([21, 0, 9, 5])
    starts = torch.tensor([19, 0, 13, 0], dtype=I32) if started else None
    memory = torch.full((38, 640), 7.0, dtype=BF16)
    c_kv, k_rope = snapmla.fetch_dequant(
        cache, table, cu_seqlens=begins, seq_starts=starts, out=memory[:, :576]
    )
    assert c_kv.data_ptr() == memory.data_ptr() and tuple(k_rope.shape) == (38, 64)
    slots = fetched.packed_slots(table, begins, starts, cache, 38)
    assert slots[:35].min() >= 0 and slots[35:].tolist() == [fetched.UNTOUCHED] * 3
    want = fetched.rows_at(cache, slots, BF16, 7.0)
    assert torch.equal(memory, torch.cat([*want, torch.full((38, 64), 7.0)], 1))


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """What torch does not initialise is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before)


@needs_compiler
def test_chunks_that_are_allocated(nan_memory: None) -> None:
    """Zeros behind the last row, and of tokens that no page of the pool holds."""
    cache, table, _ = selfcheck.filled_cache((20, 16), 16)
    begins = packed([4, 20])
    got = snapmla.fetch_dequant(cache, table, cu_seqlens=begins, total=30, dtype=torch.float32)
    slots = fetched.packed_slots(table, begins, None, cache, 30)
    assert (slots[20:24] == fetched.ZEROS).all() and slots[:20].min() >= 0
    for rows, want in zip(got, fetched.rows_at(cache, slots, torch.float32, 0.0), strict=True):
        assert torch.equal(rows, want)


@needs_compiler
def test_nothing_to_fetch() -> None:
    cache = snapmla.PagedKVCache.allocate(2, 16, device="cpu")
    for b, total in ((0, 5), (3, 0), (3, 5)):
        table, out = torch.zeros((b, 1), dtype=I32), torch.full((total, 576), 7.0, dtype=BF16)
        column = torch.zeros((b, 2), dtype=I32)[:, 0]  # without entries as contiguous as any
        for starts in (None, column if b == 0 else column.contiguous()):
            snapmla.fetch_dequant(
                cache, table, cu_seqlens=packed([0] * b), seq_starts=starts, out=out
            )
            assert (out == 7.0).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_either_width(dtype: torch.dtype) -> None:
    """None is cut to 32 bits."""
    cache, table, _ = selfcheck.filled_cache((7,), 16)
    first = int(table[0, 0]) * 16
    indices, n = torch.tensor([first + 6, -1, first, cache.num_slots]), 4
    if dtype == torch.int64:
        wide = torch.tensor([2**32 + first, first - 2**32, 2**31 + first, 2**63 - 1, -(2**63)])
        indices = torch.cat([indices, wide])
        n += 5
    c_kv, k_rope = snapmla.fetch_dequant(cache, indices.to(dtype))
    want = fetched.rows_at(cache, torch.tensor([first + 6, -1, first] + [-1] * (n - 3)), BF16, 0.0)
    assert torch.equal(c_kv, want[0]) and torch.equal(k_rope, want[1])
    assert c_kv[0].any() and c_kv[2].any()


@needs_compiler
@pytest.mark.parametrize(("dtype", "heads", "page_size"), [(BF16, 1, 64), (torch.float16, 3, 192)])
def test_append_then_fetch_of_16_bits(dtype: torch.dtype, heads: int, page_size: int) -> None:
    """The bits that went in; unused slots are NaN, and a second pool beside it stays."""
    pool = torch.full((4, 2, page_size, heads, 576), float("nan"), dtype=dtype)
    cache = snapmla.PagedKVCache.from_tensors(pool[:, 1])
    own = () if heads == 1 else (heads,)
    tokens = torch.randn(33, *own, 576).to(dtype)
    slots = torch.randperm(cache.num_slots)[:33].int()
    slots[4] = -1
    for _ in range(2):  # the second goes straight to the kernel
        snapmla.append_kv(cache, tokens[..., :512], tokens[..., 512:], slots)
    assert pool[:, 0].isnan().all()
    assert (~pool[:, 1].isnan()).any(-1).sum() == 32 * heads
    table, length = torch.randperm(4)[:2].view(1, 2).int(), page_size + 3
    rows = pool[table[0].long(), 1].flatten(0, 1)[:length].view(-1, *own, 576)
    if dtype == torch.float16:  # of each dtype the variants of the test set
        joint = torch.full((1, length + 2, *own, 576), 7.0, dtype=dtype)
        snapmla.fetch_dequant(cache, table, torch.tensor([length], dtype=I32), out=joint)
        assert _same_or_nan(joint[0, :length], rows) and (joint[0, length:] == 7.0).all()
        return
    c_kv, k_rope = snapmla.fetch_dequant(cache, slots)
    tokens[4] = 0.0
    assert c_kv.dtype == dtype and torch.equal(torch.cat([c_kv, k_rope], -1), tokens)
    chunk, _ = snapmla.fetch_dequant(
        cache, table, cu_seqlens=packed([9]), total=12,
        seq_starts=torch.tensor([length - 9], dtype=I32),
    )  # fmt: skip
    assert _same_or_nan(chunk[:9], rows[-9:, ..., :512]) and (chunk[9:] == 0).all()


def _same_or_nan(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())

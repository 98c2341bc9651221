"""``snapmla.dsa.fetch_index_k``: results, known calls, mistakes, operators."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from snapmla.dsa import append_index_k, fetch_index_k
from snapmla.indexer import fetch_index_k as fetch
from snapmla.testing import index_reference as reference
from snapmla.testing import index_tables
from tests.support.needs import needs_compiler

E4M3, I32, I64 = torch.float8_e4m3fn, torch.int32, torch.int64


def filled() -> Tensor:
    """Four pages of random keys."""
    torch.manual_seed(0)
    cache = torch.zeros(4, 64, 132, dtype=torch.uint8)
    keys, scales = reference.quantize_keys(torch.randn(256, 128), power_of_two=False)
    flat = cache.view(4, 8448)
    reference.fill_pages(flat, keys.view(4, 64, 128), scales.view(4, 64))
    return cache


def bits(keys: Tensor) -> Tensor:
    return keys.view(torch.uint8)


WHOLE = pytest.mark.whole_matrix
DTYPES = [E4M3, *(pytest.param(x, marks=WHOLE) for x in (torch.bfloat16, torch.float16))]


@needs_compiler
@WHOLE
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16, torch.float32])
def test_by_slot(dtype: torch.dtype) -> None:
    """As stored or multiplied out; slots of no page are zeros."""
    cache, slots = filled(), torch.tensor([255, 3, -1, 64, 256])
    want = index_tables.keys_at(cache.view(4, 8448), slots)
    same(fetch_index_k(cache, slots, dtype=dtype), *want, dtype)
    assert want[1].tolist()[2::2] == [0.0, 0.0]


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_by_sequence(dtype: torch.dtype) -> None:
    """As stored or multiplied out; results allocated and given, with room."""
    cache = filled()
    table = torch.tensor([[1, 3], [2, 0]]).int()
    begins, starts = torch.tensor([0, 66, 68]).int(), torch.tensor([10, 0]).int()
    slots = index_tables.packed_slots(table, begins, starts, 4, 68)
    want = index_tables.keys_at(cache.view(4, 8448), slots)
    told = {"cu_seqlens": begins, "seq_starts": starts}
    found = fetch_index_k(cache, table, **told, total=70, dtype=dtype)
    same(found, *want, dtype)
    stored = dtype == E4M3
    memory = torch.full((70, 144), 7.0).to(dtype)
    out = memory[:, :128], torch.full((70,), 7.0)
    fetch_index_k(cache, table, **told, out=out if stored else out[0])
    same(out if stored else out[0], *want, dtype)
    assert bool((memory[68:].float() == 7).all() and (memory[:, 128:].float() == 7).all())
    assert bool((out[1][68 if stored else 0 :] == 7).all())


def same(found: Any, keys: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
    """Rows bit for bit, as many as there are of ``keys``."""
    n = len(keys)
    if dtype == E4M3:
        assert torch.equal(bits(found[0])[:n], bits(keys)) and torch.equal(found[1][:n], scales)
    else:
        assert torch.equal(found[:n], index_tables.dequantised(keys, scales, dtype))


@needs_compiler
@WHOLE
def test_what_was_appended_comes_back() -> None:
    """In every shape of cache that engines use."""
    k, slots = torch.randn(5, 128).bfloat16(), torch.tensor([0, 63, 64, 200, 255])
    for shape in ((4, 64, 132), (4, 64, 1, 132), (4, 8448)):
        cache = torch.zeros(shape, dtype=torch.uint8)
        append_index_k(cache, k, slots, hadamard=True)
        keys, scales = fetch_index_k(cache, slots)
        stored = reference.quantize_keys(reference.hadamard(k).bfloat16(), power_of_two=True)
        assert torch.equal(bits(keys), bits(stored[0])) and torch.equal(scales, stored[1])


@needs_compiler
def test_known_calls_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, table = filled(), torch.tensor([[2, 1]]).int()
    out, begins = (torch.zeros(2, 128).to(E4M3), torch.zeros(2)), torch.tensor([0, 2]).int()
    fetch_index_k(cache, table, cu_seqlens=begins, out=out)
    monkeypatch.setattr(fetch, "check_where", None)
    fetch_index_k(cache, table.flip(1), cu_seqlens=begins, out=out)
    monkeypatch.undo()
    assert torch.equal(bits(out[0]), cache.view(4, 8448)[1, :256].view(2, 128))
    with pytest.raises(ValueError, match=r"^out\[1\]: expected memory apart from cache"):
        scales = cache.view(-1)[8192:8200].view(torch.float32)
        fetch_index_k(cache, table, cu_seqlens=begins, out=(out[0], scales))


Wrong = tuple[str, Callable[[Any], Any], str]
WRONG: list[Wrong] = [
    ("cache", lambda c: c[:, :32], "cache: expected shape (pages, 64, 132)"),
    ("cache", lambda c: c.float(), "cache: expected dtype uint8, got float32"),
    ("where", lambda w: w.float(), "indices: expected dtype int32 or int64, got float32"),
    ("where", lambda w: w.tolist(), "where: expected a block table (b, width) or indices (n,)"),
    ("where", lambda w: w.view(1, 3).int(), "cu_seqlens: expected int32 (b + 1,) beside a block"),
    ("cu_seqlens", lambda _: torch.zeros(2, dtype=I32), "cu_seqlens: expected None beside flat"),
    ("total", lambda _: 4, "total: expected None beside flat indices, got 4"),
    ("dtype", lambda _: torch.float64, "dtype: expected float8_e4m3fn or bfloat16 or float16 or"),
    ("out", lambda _: torch.zeros(3, 128).double(), "out: expected dtype bfloat16 or float16 or"),
    ("out", lambda _: torch.zeros(2, 128), "out: expected shape (3, 128), got (2, 128)"),
    ("out", lambda _: torch.zeros(3, 130)[:, :128], "out: expected outer strides that are"),
    ("out", lambda _: [torch.zeros(3, 128)], "out: expected a (n, 128) tensor or a pair"),
    ("out", lambda _: (torch.zeros(3, 128), torch.zeros(3)), "out[0]: expected dtype float8"),
    ("out", lambda _: (torch.zeros(3, 128).to(E4M3), torch.zeros(4)), "out[1]: expected shape (3,"),
]


@needs_compiler
@pytest.mark.parametrize(("name", "change", "words"), WRONG)
def test_wrong_arguments(name: str, change: Callable[[Any], Any], words: str) -> None:
    given: dict[str, Any] = {"cache": filled(), "where": torch.tensor([0, 1, 2])}
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(words)}"):
        fetch_index_k(**given | {name: change(given.get(name))})


def test_room_for_chunks() -> None:
    table, begins = torch.zeros(1, 2, dtype=I32), torch.zeros(2, dtype=I32)
    with pytest.raises(ValueError, match="^total: expected one of total and out beside cu_seqlens"):
        fetch_index_k(filled(), table, cu_seqlens=begins)
    with pytest.raises(ValueError, match="^dtype: expected None beside out"):
        out = torch.zeros(3, 128)
        fetch_index_k(filled(), table, cu_seqlens=begins, out=out, dtype=torch.bfloat16)
    torch.full((3, 128), 7, dtype=torch.uint8)  # what an allocator may hand out again
    keys, scales = fetch_index_k(filled(), table[:0], cu_seqlens=begins[:1], total=3)
    assert not bits(keys).any() and scales.tolist() == [0.0] * 3, "no sequence: zeros"


@needs_compiler
@WHOLE
def test_compiled_equals_eager() -> None:
    table, begins = torch.tensor([[1, 3]]).int(), torch.tensor([0, 70]).int()

    def body(cache: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        keys, scales = fetch_index_k(cache, table, cu_seqlens=begins, total=70)
        found = fetch_index_k(cache, slots, dtype=torch.bfloat16)
        return bits(keys) + 1, scales + 1, found + 1

    torch._dynamo.reset()
    given = filled(), torch.tensor([5, 70, -1])
    compiled = torch.compile(body, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, body(*given), compiled(*given)))


def test_shapes_for_tracers() -> None:
    given = filled(), torch.tensor([5, 70])
    with torch._subclasses.FakeTensorMode() as mode:
        keys, scales = fetch_index_k(*map(mode.from_tensor, given))
        found = fetch_index_k(*map(mode.from_tensor, given), dtype=torch.float16)
    assert keys.shape == found.shape == (2, 128) and scales.shape == (2,)
    assert keys.dtype == E4M3 and found.dtype == torch.float16


@needs_compiler
def test_chunks_of_no_sequence() -> None:
    """Starts that are a column, whose stride counts for nothing; rows stay as they are."""
    cache, none = torch.zeros(1, 64, 132, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.int32)
    out = torch.full((3, 128), 7.0).bfloat16()
    begins = torch.zeros(1, dtype=torch.int32)
    fetch_index_k(cache, none, cu_seqlens=begins, seq_starts=none[:, 0], out=out)
    assert bool((out == 7.0).all())

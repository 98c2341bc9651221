"""A call as a file: tensors come back strided as they were, pools cut down to what is touched."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dsl_kernels.families import FORMATS
from snapmla.cache.paged import PagedKVCache
from snapmla.runtime import dump
from snapmla.testing import selfcheck


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5),
        torch.randn(3, 5).T,
        torch.randn(4, 9)[1:, 2:7],
        torch.randn(3, 1).expand(3, 4),  # a scale per token, as rows see it
        torch.randn(2, 1, 3)[:, :, 1:],
        torch.zeros(0, 4),
        torch.tensor(2.0),
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.randn(4, 16).to(torch.float8_e4m3fn),
    ],
    ids=lambda t: f"{tuple(t.shape)}, {t.stride()}",
)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    again = dump.unpack(dump.pack(tensor))
    assert (again.shape, again.stride(), again.dtype) == (
        tensor.shape, tensor.stride(), tensor.dtype,
    )  # fmt: skip
    assert torch.equal(again.float(), tensor.float())


def test_a_pair_that_shares_memory() -> None:
    """A dimension of two that repeats one row, as scales of a token of two heads do."""
    tensor = torch.randn(3, 1).expand(3, 2)
    packed = dump.pack(tensor)
    assert packed["values"].shape == (3, 1)
    assert torch.equal(dump.unpack(packed), tensor)


def test_what_is_packed_is_a_copy() -> None:
    pool = torch.zeros(1000)
    packed = dump.pack(pool[10:20])
    pool.fill_(1.0)
    assert not packed["values"].any(), "the call writes its arguments"
    assert packed["values"].untyped_storage().nbytes() == 40, "not the whole pool"


def test_workspace_is_not_kept() -> None:
    call = dump.Dump("v", "decode", {"o_accum": torch.ones(2, 3).half(), "may_split": 1})
    content = dump.packed(call)
    assert content["arguments"]["o_accum"]["values"] is None
    assert bool(dump.unpack(content["arguments"]["o_accum"]).isnan().all())
    assert dump.size(call.arguments) == 0


@pytest.mark.parametrize("layout", ["split", "paged", "row640"])
def test_a_pool_is_cut_down_to_the_pages_in_use(layout: str) -> None:
    """What a sequence sees is the same, at the same strides; the rest is gone."""
    torch.manual_seed(0)
    cache, table, lengths = selfcheck.filled_cache((70, 0, 3, 64), 64, layout)
    table[2, 0] = table[0, 1]  # shared by two sequences
    table[3, 0] = cache.num_pages + 7  # moved into the pool by kernels
    values = {
        "content": cache.content_u8, "rope": cache.rope, "scale": cache.scale,
        "block_table": table, "cache_seqlens": lengths,
    }  # fmt: skip
    kept, notes = dump.reduced(values)
    pages = {int(table[0, 0]), int(table[0, 1]), cache.num_pages - 1}
    assert notes == (f"{len(pages)} of the pool's {cache.num_pages} pages are kept, numbered anew",)
    assert kept["content"].shape[0] == len(pages)
    for name in FORMATS["fp8"].parts:
        assert kept[name].stride() == values[name].stride()
        for i, length in enumerate(lengths.tolist()):
            for column in range(-(-length // 64)):
                page = min(int(table[i, column]), cache.num_pages - 1)
                new = int(kept["block_table"][i, column])
                got, want = kept[name][new], values[name][page]
                assert torch.equal(got.nan_to_num(), want.nan_to_num())
            assert bool((kept["block_table"][i, -(-length // 64) :] == -1).all())
    assert values["block_table"] is table, "the call's own is left alone"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["slot_mapping", "indices"])
def test_slots_name_pages_of_the_small_pool(name: str, dtype: torch.dtype) -> None:
    cache = PagedKVCache.allocate(9, 16, device="cpu")
    cache.scale.copy_(torch.arange(144.0).view(9, 16))
    slots = torch.tensor([140, -1, 3, 144, 37, 2, -(2**31)], dtype=dtype)
    values = {"content": cache.content_u8, "rope": cache.rope, "scale": cache.scale, name: slots}
    kept, notes = dump.reduced(values)
    assert notes[0].startswith("3 of the pool's 9 pages") and kept[name].dtype == dtype
    inside = (slots >= 0) & (slots < 144)
    assert kept[name][~inside].tolist() == [-1, -1, -1]
    assert kept["scale"].flatten()[kept[name][inside].long()].tolist() == slots[inside].tolist()


@pytest.mark.parametrize("even", [True, False])
def test_lists_keep_the_pages_that_count(even: bool) -> None:
    """What is no token stays what it is; behind a list's end, of ragged queries the longest one's,
    tokens become -1."""
    cache = torch.arange(9 * 4).view(9, 4, 1).to(torch.uint8)
    lists = torch.tensor([[33, -1, 7, 2**31 - 1, 0], [9, 36, 7, 9, 1]], dtype=torch.int32)
    values = {
        "q": torch.zeros((2, 1, 1, 1) if even else (1, 2, 1, 1)), "cache": cache, "indices": lists,
        "topk_length": torch.tensor([4, 2], dtype=torch.int32),
    }  # fmt: skip
    kept, notes = dump.reduced(values)
    new = kept["indices"]
    assert notes[0].startswith("3 of the pool's 9 pages") and new.dtype == torch.int32
    assert [new[0, 1], new[0, 3], new[1, 1]] == [-1, 2**31 - 1, 36]
    counted = [(0, 0), (0, 2), (1, 0), *([] if even else [(1, 2), (1, 3)])]
    for at in counted:
        assert kept["cache"].flatten()[int(new[at])] == lists[at]
    behind = [(0, 4), (1, 4), *([(1, 2), (1, 3)] if even else [])]
    assert all(int(new[at]) == -1 for at in behind)


@pytest.mark.parametrize("lengths", [[3, 0], []])
def test_lists_of_sparse_prefill(lengths: list[int]) -> None:
    """Rows of KV are pages of one; a length for each query token, or none at all."""
    kv = torch.arange(20.0)[:, None, None].expand(20, 1, 576).bfloat16()
    lists = torch.tensor([[[7, -1, 19, 4]], [[20, 3, 3, 0]]], dtype=torch.int32)
    values = {
        "q": torch.zeros(2, 1, 576), "kv": kv, "indices": lists,
        "topk_length": torch.tensor(lengths, dtype=torch.int32),
    }  # fmt: skip
    kept, notes = dump.reduced(values)
    new = kept["indices"]
    assert notes[0].startswith("2 of" if lengths else "5 of") and new.shape == lists.shape
    named = [(0, 0), (0, 2), *([] if lengths else [(0, 3), (1, 1), (1, 3)])]
    assert all(kept["kv"][int(new[i, 0, k]), 0, 0] == lists[i, 0, k] for i, k in named)
    assert [int(new[0, 0, 1]), int(new[1, 0, 0])] == [-1, 20] and bool(lengths) == (
        new[0, 0, 3] == -1
    )


def test_chunks_keep_what_they_ask_for() -> None:
    """Of sequence 0 tokens 20 to 39, of sequence 1 none."""
    cache = PagedKVCache.allocate(8, 16, device="cpu")
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    begin, starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 20], [20, 0]))
    values = {
        "content": cache.content_u8, "rope": cache.rope, "scale": cache.scale,
        "block_table": table, "cu_seqlens": begin, "seq_starts": starts,
    }  # fmt: skip
    assert dump.reduced(values)[0]["block_table"].tolist() == [[0, 1, 2, -1], [-1] * 4]
    values["seq_starts"] = starts[:0]
    assert dump.reduced(values)[0]["block_table"].tolist() == [[0, 1, -1, -1], [-1] * 4]


def test_index_caches_have_pages_of_64() -> None:
    """Whose bytes are their only other dimension."""
    cache = torch.arange(9, dtype=torch.uint8)[:, None].expand(9, 8448).clone()
    slots = torch.tensor([5 * 64 + 63, 64, -1])
    kept, notes = dump.reduced({"cache": cache, "slot_mapping": slots})
    assert notes[0].startswith("2 of the pool's 9 pages")
    assert kept["slot_mapping"].tolist() == [64 + 63, 0, -1]
    assert kept["cache"][:, 0].tolist() == [1, 5]
    table, lengths = torch.tensor([[7, 2, 3], [4, 7, 1]]).int(), torch.tensor([65, 0]).int()
    given = {"cache": cache, "block_table": table, "cache_seqlens": lengths}
    kept, _ = dump.reduced(given)
    assert kept["cache"][:, 0].tolist() == [2, 7]
    assert kept["block_table"].tolist() == [[1, 0, -1], [-1, -1, -1]]


def test_a_call_without_any_token_keeps_one_page() -> None:
    """Kernels want a pool that is not empty."""
    cache = PagedKVCache.allocate(8, 16, device="cpu")
    values = {
        "content": cache.content_u8, "rope": cache.rope, "scale": cache.scale,
        "block_table": torch.zeros(1, 2, dtype=torch.int32),
        "cache_seqlens": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip
    assert dump.reduced(values)[0]["content"].shape[0] == 1


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    arguments = {"q_nope": torch.ones(2), "softmax_scale": 0.5, "empty_lse": -math.inf}
    call = dump.Dump("v", "decode", arguments, {"out": torch.zeros(1)}, ("note",), {"torch": "2"})
    dump.write(path, dump.packed(call))
    again = dump.read(path)
    assert list(again.arguments) == list(arguments) and again.arguments["empty_lse"] == -math.inf
    assert torch.equal(again.arguments["q_nope"], torch.ones(2))
    assert again.results["out"].tolist() == [0.0] and again.facts == {"torch": "2"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"], "nothing half is left"
    assert not path.stat().st_mode & 0o077, "it holds what requests said"


def test_what_is_no_dump_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with pytest.raises(dump.DumpError, match=r"a\.pt: No such file"):
        dump.read(path)
    for content in (b"nothing", b"", bytes(range(256)) * 9):
        path.write_bytes(content)
        with pytest.raises(
            dump.DumpError, match=r"a\.pt is no dump of a call: torch.save did not w"
        ):
            dump.read(path)
    torch.save({"weights": torch.zeros(1)}, path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(dump.DumpError, match=r"a\.pt is no dump of a call: it is cut off or damag"):
        dump.read(path)
    torch.save(path, path)
    with pytest.raises(dump.DumpError, match=r"a\.pt is no dump of a call: it holds other things"):
        dump.read(path)
    torch.save({"variant": "v", "format": dump.FORMAT, "arguments": {}}, path)
    with pytest.raises(dump.DumpError, match=r"a\.pt is no dump of a call: its entries are others"):
        dump.read(path)
    torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(dump.DumpError, match=r"a\.pt is no dump of a call$"):
        dump.read(path)
    torch.save({"variant": "v", "format": 99, "facts": {"snapmla": "9.9"}}, path)
    with pytest.raises(dump.DumpError, match=r"has format 99 of snapmla 9\.9, this one \("):
        dump.read(path)

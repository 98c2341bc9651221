"""``snapmla.indexer.dsa_prologue``: the bits of single calls, results, known calls, mistakes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla
from snapmla import PagedKVCache, dsa, reference
from snapmla.cache import quant
from snapmla.testing import index_reference
from tests.support.bits import assert_same, same_bits
from tests.support.needs import needs_compiler

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
E4M3, U8 = torch.float8_e4m3fn, torch.uint8
MAX_POSITION, HEADS, NUM_HEADS, PAGES = 50, 32, 3, 2
DS_MLA = "fp8_ds_mla"


def cache_of(fmt: str) -> PagedKVCache:
    """Empty pages of 64 tokens."""
    cache = PagedKVCache.allocate(PAGES, 64, device="cpu", dtype=fmt)
    for part in cache.named_tensors.values():
        part.view(U8).zero_()
    return cache


def arguments(n: int, fmt: str = DS_MLA, seed: int = 0) -> dict[str, Any]:
    """Of ``n`` tokens, rows with gaps; of many one has no slot in each cache, one no angles, and
    two have a NaN."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=g).to(BF16)
    latent, key = normal(n, 576 + 8), normal(n, 128 + HEADS)
    c_kv, index_k, q = latent[:, :512], key[:, :128], normal(n, HEADS, 136)[..., 8:]
    slots, index_slots = (torch.randperm(PAGES * 64, generator=g)[:n] for _ in range(2))
    positions = torch.randint(0, MAX_POSITION, (n,), generator=g)
    if n > 8:
        slots[3], index_slots[4], positions[5] = -1, -1, MAX_POSITION
        c_kv[6, 100] = index_k[7, 3] = q[2, 1, 70] = math.nan
    angle = torch.arange(MAX_POSITION)[:, None] * 10000.0 ** -(torch.arange(32) / 32)
    return {
        "cache": cache_of(fmt), "c_kv": c_kv, "k_rope": latent[:, 512:576], "slot_mapping": slots,
        "index_cache": torch.zeros(PAGES, 64, 132, dtype=U8), "index_k": index_k, "index_q": q,
        "index_weights": key[:, 128:], "positions": positions,
        "cos_sin_cache": torch.cat([angle.cos(), angle.sin()], -1),
        "norm_weight": (1 + 0.2 * torch.randn(512, generator=g)).to(BF16),
        "index_norm_weight": 1 + 0.2 * torch.randn(128, generator=g),
        "index_norm_bias": 0.3 * torch.randn(128, generator=g),
        "index_slot_mapping": index_slots, "q_rope": normal(n, NUM_HEADS, 192)[..., 128:],
    }  # fmt: skip


def turned(given: dict[str, Any], rows: Tensor, at: Tensor) -> Tensor:
    """Rows with RoPE, by the reference."""
    return index_reference.rotate(rows, at, given["cos_sin_cache"], True)


@needs_compiler
@pytest.mark.parametrize(
    ("n", "fmt"),
    [
        (9, DS_MLA),
        *(
            pytest.param(n, fmt, marks=pytest.mark.whole_matrix)
            for n in (1, 2, 32, 33)
            for fmt in (DS_MLA, "fp8")
        ),
    ],
)
def test_the_bits_of_single_calls(n: int, fmt: str) -> None:
    """Index rows are turned by the reference, so that every call is a kernel of the test set."""
    given = arguments(n, fmt)
    made = dsa.prologue(**given)
    want = cache_of(fmt)
    snapmla.rope_append_kv(
        want, given["c_kv"], given["k_rope"], given["slot_mapping"], given["positions"],
        given["cos_sin_cache"], norm_weight=given["norm_weight"],
    )  # fmt: skip
    for name, part in want.named_tensors.items():
        assert same_bits(given["cache"].named_tensors[name], part), name

    norm = given["index_norm_weight"], given["index_norm_bias"], 1e-6
    key = index_reference.layer_norm(given["index_k"], *norm)
    cache = torch.zeros(PAGES, 64, 132, dtype=U8)
    key = turned(given, key, given["positions"])
    dsa.append_index_k(cache, key, given["index_slot_mapping"])
    assert torch.equal(given["index_cache"], cache)

    at = given["positions"].repeat_interleave(HEADS)
    rows = turned(given, given["index_q"].flatten(0, 1), at)
    cache = torch.zeros(-(-len(rows) // 64), 64, 132, dtype=U8)
    dsa.append_index_k(cache, rows, torch.arange(len(rows)))
    keys, scales = index_reference.pages_of(cache.view(len(cache), 8448))
    keys, scales = (x.flatten(0, 1)[: len(rows)] for x in (keys.view(U8), scales))
    assert torch.equal(made.index_q.view(U8), keys.view(n, HEADS, 128))
    factor = torch.tensor(128**-0.5 * HEADS**-0.5)
    assert_same(made.index_weights, given["index_weights"] * scales.view(n, HEADS) * factor)
    want_rope = reference.rotate_rows(given["q_rope"], given["positions"], given["cos_sin_cache"])
    assert made.q_rope is not None
    assert_same(made.q_rope, want_rope)
    if n > 8:  # what is no number is so in its own rows alone
        bad = made.index_weights.isnan()
        assert bad[5].all() and bad[2, 1] and bad.sum() == HEADS + 1


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("n", [1, 2, 32, 33])
def test_the_bits_of_fused_keys(n: int) -> None:
    """LayerNorm and RoPE inside of ``append_index_k``."""
    given = arguments(n)
    dsa.prologue(**given)
    cache = torch.zeros_like(given["index_cache"])
    dsa.append_index_k(
        cache, given["index_k"], given["index_slot_mapping"], positions=given["positions"],
        cos_sin_cache=given["cos_sin_cache"], norm_weight=given["index_norm_weight"],
        norm_bias=given["index_norm_bias"],
    )  # fmt: skip
    assert torch.equal(given["index_cache"], cache)


@needs_compiler
def test_results_into_wider_queries() -> None:
    """RoPE goes behind the absorbed channels of queries of 576; one slot mapping for both caches;
    a second call is known."""
    given = arguments(1)
    want = dsa.prologue(**given | {"index_slot_mapping": given["slot_mapping"]})
    first = given["index_cache"].clone()
    del given["index_slot_mapping"]
    q = torch.full((1, NUM_HEADS, 576), 7.0, dtype=BF16)
    out = dsa.Prologue(
        torch.zeros(1, HEADS, 128, dtype=U8).view(E4M3), torch.zeros(1, HEADS), q[..., 512:]
    )
    for _ in range(2):
        given["index_cache"].zero_()
        assert dsa.prologue(**given, out=out) is out
        assert torch.equal(first, given["index_cache"])
        for a, b in zip(out, want, strict=True):
            assert a is not None and b is not None
            assert same_bits(a.contiguous(), b)
        q[..., 512:] = 0
        out.index_weights.zero_()
    assert bool((q[..., :512] == 7).all())
    assert dsa.prologue(**given | {"q_rope": None}).q_rope is None


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("given_out", [False, True])
def test_traced(given_out: bool) -> None:
    """One operator in a compiled graph."""
    want, given = arguments(2), arguments(2)
    made = dsa.prologue(**want)

    def layer(given: dict[str, Any], out: Any) -> Any:
        return dsa.prologue(**given, out=out)

    out = None
    if given_out:
        out = dsa.Prologue(*(torch.zeros_like(t) for t in made if t is not None))
    found = torch.compile(layer, backend="eager", fullgraph=True)(given, out)
    for a, b in zip(found, made, strict=True):
        assert same_bits(a, b)
    assert same_bits(given["cache"].kv, want["cache"].kv)
    assert torch.equal(given["index_cache"], want["index_cache"])


def test_no_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise AssertionError("no kernel is asked for")

    monkeypatch.setattr(quant, "variant_kernel", none)
    made = dsa.prologue(**arguments(0))
    assert made.index_q.shape == (0, HEADS, 128) and made.index_weights.shape == (0, HEADS)
    assert made.q_rope is not None and made.q_rope.shape == (0, NUM_HEADS, 64)


def bad_cache(fmt: str) -> PagedKVCache:
    return PagedKVCache.allocate(PAGES, 64, device="cpu", dtype=fmt)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cache": "v4"}, ValueError, "cache: expected a format of 512 channels with RoPE apart"),
    ({"cache": "nope"}, ValueError, "cache: expected a format of 512 channels with RoPE apart"),
    ({"c_kv": torch.zeros(3, 500, dtype=BF16)}, ValueError, "c_kv: expected shape"),
    ({"k_rope": torch.zeros(3, 64)}, TypeError, "k_rope: expected dtype bfloat16"),
    ({"index_k": torch.zeros(3, 64, dtype=BF16)}, ValueError, "index_k: expected shape"),
    ({"index_q": torch.zeros(3, 16, 128, dtype=BF16)}, ValueError, "index_q: expected one of"),
    ({"index_weights": torch.zeros(3, 64)}, ValueError, "index_weights: expected shape"),
    ({"index_slot_mapping": torch.zeros(3, dtype=I32)}, TypeError, "index_slot_mapping: expected"),
    ({"positions": torch.zeros(2, dtype=I64)}, ValueError, "positions: expected shape"),
    ({"cos_sin_cache": torch.zeros(9, 32)}, ValueError, "cos_sin_cache: expected shape"),
    ({"norm_weight": None}, TypeError, "norm_weight: expected a torch.Tensor"),
    ({"norm_weight": torch.ones(512)}, TypeError, "norm_weight: expected dtype bfloat16"),
    ({"index_norm_bias": torch.ones(64)}, ValueError, "index_norm_bias: expected shape"),
    ({"norm_eps": 0.0}, ValueError, "norm_eps: expected 1e-12 to 1"),
    ({"index_norm_eps": 2}, ValueError, "index_norm_eps: expected 1e-12 to 1"),
    ({"weight_scale": 0.0}, ValueError, "weight_scale: expected a positive finite number"),
    ({"weight_scale": torch.ones(1)}, TypeError, "weight_scale: expected a Python float"),
    ({"scale": "e8m0"}, ValueError, "scale: expected one of"),
    ({"is_neox": "no"}, TypeError, "is_neox: expected True or False"),
    ({"index_is_neox": 2}, TypeError, "index_is_neox: expected True or False"),
    ({"q_rope": torch.zeros(3, 129, 64, dtype=BF16)}, ValueError, "num_heads: expected 1 to 128"),
    ({"q_rope": torch.zeros(3, 4, 65, dtype=BF16)[..., 1:]}, ValueError, "q_rope: expected outer"),
    ({"index_cache": torch.zeros(2, 64, 128, dtype=U8)}, ValueError, "index_cache: expected shape"),
    ({"out": (1, 2, 3)}, TypeError, "out: expected a snapmla.dsa.Prologue"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG)
def test_mistakes(wrong: dict[str, Any], error: type[Exception], words: str) -> None:
    given = arguments(3)
    if isinstance(wrong.get("cache"), str):
        wrong = {"cache": bad_cache(f"fp8_{wrong['cache']}")}
    with pytest.raises(error, match=f"^{words}"):
        dsa.prologue(**given | wrong)


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("index_q", "index_q"), ("index_weights", "cos_sin_cache"), ("q_rope", "q_rope"),
        ("index_cache", "cache.kv"), ("index_weights", "index_cache"), ("q_rope", "out.index_q"),
    ],
)  # fmt: skip
def test_results_lie_apart(name: str, over: str) -> None:
    given = arguments(64)
    results: dict[str, Tensor] = {
        "index_q": torch.zeros(64, HEADS, 128, dtype=U8).view(E4M3),
        "index_weights": torch.zeros(64, HEADS), "q_rope": torch.zeros_like(given["q_rope"]),
    }  # fmt: skip
    results["q_rope"] = torch.zeros(64, NUM_HEADS, 64, dtype=BF16)
    given["cache"] = PagedKVCache.from_tensors(torch.zeros(PAGES, 64, 656, dtype=U8), format=DS_MLA)
    there = given | {f"out.{n}": t for n, t in results.items()} | {"cache.kv": given["cache"].kv}
    memory = there[over].contiguous() if over in ("index_q", "q_rope") else there[over]
    if over in ("index_q", "q_rope"):
        given[over] = memory
    like = given["index_cache"] if name == "index_cache" else results[name]
    value = memory.view(-1).view(U8)[: like.nbytes].view(like.dtype).view(like.shape)
    told = name if name == "index_cache" else f"out.{name}"
    if name == "index_cache":
        given["index_cache"] = value
    else:
        results[name] = value
    with pytest.raises(ValueError, match=f"^{told}: expected memory apart from {over},"):
        dsa.prologue(**given, out=dsa.Prologue(**results))

"""Public calls over an index cache: results, operators, known calls, mistakes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla  # noqa: F401 (operators)
from dsl_kernels import registry
from dsl_kernels.families import ARCHS
from dsl_kernels.spec import VariantSpec
from snapmla.compat import deep_gemm
from snapmla.dsa import append_index_k, index_logits
from snapmla.runtime import variants
from snapmla.testing import index_reference as reference
from snapmla.testing.workloads import index_logits as work
from tests.support.needs import needs_compiler
from tests.support.on_blackwell import software_gpu

E4M3 = torch.float8_e4m3fn
# modules, whose names are those of functions
appending: Any = importlib.import_module("snapmla.indexer.append_index_k")
scoring: Any = importlib.import_module("snapmla.indexer.index_logits")


def pool(pages: int = 3, form: tuple[int, ...] = (64, 132), gap: int = 0) -> Tensor:
    """Pages of zeros as engines shape them."""
    memory = torch.zeros(pages, 8448 + gap, dtype=torch.uint8)
    strides = {(64, 132): (132, 1), (64, 1, 132): (132, 132, 1), (8448,): (1,)}[form]
    return memory.as_strided((pages, *form), (8448 + gap, *strides))


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a right call for two sequences of two query tokens."""
    given: dict[str, Any] = {
        "q": torch.zeros(2, 2, 64, 128, dtype=torch.uint8).view(E4M3), "w": torch.ones(2, 2, 64),
        "cache": pool(), "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "cache_seqlens": torch.tensor([70, 3], dtype=torch.int32),
    }  # fmt: skip
    return given | changes


@needs_compiler
def test_append_then_score() -> None:
    """Keys through ``append_index_k`` into pages apart, scored beside the model; again through the
    operator, in the other shape that engines use: the same bits."""
    torch.manual_seed(0)
    lengths, table = torch.tensor([70, 3], dtype=torch.int32), torch.tensor([[3, 1], [2, -1]])
    keys = torch.randn(73, 128).bfloat16()
    slots = torch.cat([64 * 3 + torch.arange(64), 64 + torch.arange(6), 128 + torch.arange(3)])
    q = torch.randn(2, 2, 64, 128).to(E4M3)
    w = torch.randn(2, 2, 64)
    found = []
    for form in ((64, 132), (64, 1, 132)):
        cache = pool(4, form, gap=64)
        scoring.pages(cache).fill_(0x7F)
        append_index_k(cache, keys, slots, hadamard=True)
        given = (q, w, cache, table.int(), lengths)
        out = torch.full((4, 128), -7.0)
        assert index_logits(*given, out=out, unit_rows=2) is out
        found.append(out)
    watched = torch.full((4, 128), -7.0)
    torch.ops.snapmla.index_logits_out(q.view(torch.uint8), *given[1:], None, watched, 2)
    assert torch.equal(found[0], found[1]) and torch.equal(watched, found[0])
    call = {
        "q": q.view(torch.uint8).view(4, 64, 128), "w": w.view(4, 64),
        "cache": scoring.pages(cache), "block_table": table.int(),
        "cache_seqlens": lengths, "s_q": 2, "out": out,
        "cu_seqlens_q": torch.empty(0, dtype=torch.int32),
    }  # fmt: skip
    stored, scales = reference.quantize_keys(reference.hadamard(keys).bfloat16(), power_of_two=True)
    kept, factors = reference.pages_of(scoring.pages(cache))
    assert torch.equal(kept.view(torch.uint8).view(-1, 128)[slots], stored.view(torch.uint8))
    assert torch.equal(factors.view(-1)[slots], scales)
    for row, want in zip(out, reference.scores(call), strict=True):
        seen = len(want.values)
        assert bool(((row[:seen] - want.values).abs() <= work.SLACK * want.size).all())
        assert bool((row[seen:] == -7.0).all())


@needs_compiler
def test_known_calls_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(q=torch.zeros(2, 2, 64, 128, dtype=torch.uint8).view(E4M3))
    out = torch.zeros(4, 128)
    index_logits(**given, out=out, unit_rows=2)
    monkeypatch.setattr(scoring, "check_queries", None)
    index_logits(**given, out=out, unit_rows=2)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="out: expected memory apart from w"):
        index_logits(**given | {"w": out.view(-1)[:256].view(2, 2, 64)}, out=out, unit_rows=2)


@needs_compiler
def test_lengths_that_are_a_column() -> None:
    """One sequence's are contiguous whatever their stride, which no absent table may take."""
    lengths = torch.tensor([[60, 9]], dtype=torch.int32)[:, 0]
    assert lengths.stride() == (2,) and lengths.is_contiguous()
    given = arguments(
        q=torch.randn(1, 2, 64, 128).to(E4M3), w=torch.rand(1, 2, 64),
        cache=torch.randint(0, 60, (3, 64, 132), dtype=torch.uint8),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
    )  # fmt: skip
    found = torch.zeros(2, 2, 64)
    for out, told in zip(found, (lengths, lengths.clone())):
        index_logits(**given | {"cache_seqlens": told}, out=out, unit_rows=2)
    assert torch.equal(*found) and bool(found.any())


def test_rows_of_a_unit_follow_from_shapes() -> None:
    def unit(heads: int, s_q: int, ragged: int = 0) -> int:
        shape = (ragged, heads, 128) if ragged else (2, s_q, heads, 128)
        q = torch.zeros(shape, dtype=torch.uint8).view(E4M3)
        lengths = torch.zeros(2, dtype=torch.int32)
        call = scoring.Call(q, q, q, q, lengths, None, None, None, None)
        return scoring.unit_of(call)

    assert [unit(64, s) for s in (1, 2, 3, 4, 8)] == [1, 2, 4, 4, 4]
    assert [unit(32, s) for s in (1, 2, 3, 5, 100)] == [1, 2, 4, 8, 8]
    assert [unit(64, 0, total) for total in (1, 2, 3, 300)] == [1, 1, 2, 4]


@pytest.mark.parametrize("arch", ARCHS)
def test_the_variant_of_an_architecture(arch: str) -> None:
    """Of the same call, also by DeepGEMM's name."""
    asked: list[VariantSpec] = []

    def kernel(spec: VariantSpec, _device: str) -> Callable[..., None]:
        asked.append(spec)
        return lambda *_: None

    given = arguments()
    with software_gpu(arch) as patch:
        patch.setattr(variants, "kernel", kernel)
        index_logits(**given, unit_rows=4)
        deep_gemm.fp8_paged_mqa_logits(
            given["q"], given["cache"].view(3, 64, 1, 132), given["w"].view(4, 64),
            given["cache_seqlens"], given["block_table"], None, 128,
        )  # fmt: skip
    name = arch.replace("_", "")
    assert [s.name for s in asked] == [f"index_logits_h64_u{u}_{name}" for u in (4, 2)]
    assert all(registry.feasible(spec) is None for spec in asked)


@pytest.mark.whole_matrix
@needs_compiler
@pytest.mark.parametrize("ragged", [False, True])
def test_sm100_through_the_public_call(ragged: bool) -> None:
    """Beside fp64, into ``out`` and into what is allocated."""
    tokens: Any = (2, 3) if ragged else 2
    given = work.sample_call(32, (130, 67), tokens)
    shape = (len(given["q"]), 32) if ragged else (2, 2, 32)
    read = (
        given["q"].view(E4M3).view(*shape, 128), given["w"].view(shape), given["cache"],
        given["block_table"], given["cache_seqlens"],
    )  # fmt: skip
    cu = given["cu_seqlens_q"] if ragged else None
    with software_gpu("sm_100a") as patch:
        patch.setenv("SOFTGPU_HAZARDS", "raise")
        index_logits(*read, cu_seqlens_q=cu, out=given["out"])
        allocated = index_logits(*read, cu_seqlens_q=cu, max_tokens=133)
    for row, other, want in zip(
        given["out"], allocated, reference.scores(given, reference.EXACT), strict=True
    ):
        seen = len(want.values)
        assert torch.equal(row[:seen], other[:seen])
        assert bool(((row[:seen] - want.values).abs() <= work.SLACK * want.size).all())
        assert bool((row[seen:] == work.UNTOUCHED).all())


def test_what_is_allocated() -> None:
    """Nothing is launched for no sequence; columns as asked for, rows aligned."""
    empty = arguments(
        q=torch.zeros(0, 2, 64, 128, dtype=torch.uint8).view(E4M3), w=torch.ones(0, 2, 64),
        block_table=torch.zeros(0, 2, dtype=torch.int32),
        cache_seqlens=torch.zeros(0, dtype=torch.int32),
    )  # fmt: skip
    assert index_logits(**empty).shape == (0, 128)
    call = scoring.Call(*arguments().values(), None, None, 70, None)
    out = scoring.empty_out(call)
    assert out.shape == (4, 70) and out.stride() == (128, 1)


@needs_compiler
def test_compiled_step_equals_eager() -> None:
    """Append and scores in one graph; what is allocated, and what is given."""
    torch.manual_seed(0)
    q, w = torch.randn(2, 2, 64, 128).to(E4M3), torch.randn(2, 2, 64)
    keys, slots = torch.randn(3, 128).bfloat16(), torch.tensor([0, 1, 2])
    table, lengths = torch.tensor([[0, 1], [0, 2]]).int(), torch.tensor([3, 2]).int()

    def step(cache: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        append_index_k(cache, keys, slots, hadamard=True)
        given = (q, w, cache, table, lengths)
        index_logits(*given, out=out, unit_rows=2)
        scores = index_logits(*given, max_tokens=70, unit_rows=2)
        return scores[0, :2] + 1, out + 0

    found = []
    torch._dynamo.reset()
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        cache, out = pool(), torch.zeros(4, 70)
        found.append((*function(cache, out), cache, out))
    assert all(map(torch.equal, *found)) and found[0][3].any()


def test_shapes_for_tracers() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        given = {name: mode.from_tensor(value) for name, value in arguments().items()}
        out = index_logits(**given, max_tokens=99)
        slots = mode.from_tensor(torch.arange(3))
        append_index_k(given["cache"], mode.from_tensor(torch.zeros(3, 128)), slots)
    assert out.shape == (4, 99) and out.dtype == torch.float32


Change = Callable[[Tensor], Any]
WRONG: list[tuple[str, Any, str]] = [
    ("q", lambda q: q.view(torch.uint8), "q: expected dtype float8_e4m3fn, got uint8"),
    ("q", lambda q: q[:, :, :16], "h, the heads of q: expected one of 64, 32, got 16"),
    ("q", lambda q: q[..., :64], r"q: expected shape \(b, s_q, h, 128\)"),
    ("q", lambda q: q.transpose(0, 1), "q: expected a contiguous tensor"),
    ("q", lambda q: q[:, :0], "q: expected s_q of 1 or more"),
    ("q", lambda q: q.view(4, 64, 128), r"w: expected shape \(4, 64\)"),
    ("w", lambda w: w.double(), "w: expected dtype float32, got float64"),
    ("w", lambda w: w[:, :1], r"w: expected shape \(2, 2, 64\)"),
    ("cache", lambda c: c.float(), "cache: expected dtype uint8, got float32"),
    ("cache", lambda c: c[:, :, :128], r"cache: expected shape \(pages, 64, 132\)"),
    ("cache", lambda c: c[:0], "cache: expected 1 page or more, got 0"),
    ("cache", lambda _: pool(3, gap=8), "cache: expected pages a multiple of 16 bytes apart"),
    ("cache", lambda c: c[:1].expand(3, -1, -1), "cache: expected pages a multiple of 16 bytes"),
    ("cache", lambda _: torch.zeros(3, 64, 136, dtype=torch.uint8)[..., :132],
     "cache: expected bytes of a page side by side"),
    ("block_table", lambda t: t.long(), "block_table: expected dtype int32, got int64"),
    ("block_table", lambda t: t[:1], r"block_table: expected shape \(2, width\)"),
    ("block_table", lambda t: t[:, :0], "block_table: expected a width of 1 or more pages, got 0"),
    ("cache_seqlens", lambda n: n[:1], r"cache_seqlens: expected shape \(2,\)"),
    ("cache_seqlens", lambda n: n[:, None], "cache_seqlens: expected shape"),
    ("cu_seqlens_q", lambda _: torch.zeros(3, dtype=torch.int32), "cu_seqlens_q: expected None"),
    ("out", lambda _: torch.zeros(3, 128), r"out: expected shape \(4, columns\)"),
    ("out", lambda _: torch.zeros(4, 128).half(), "out: expected dtype float32"),
    ("out", lambda _: torch.zeros(128, 4).mT, "out: expected innermost stride 1"),
    ("out", lambda _: torch.zeros(1, 128).expand(4, -1), "out: expected strides of distinct rows"),
    ("max_tokens", lambda _: 0, "max_tokens: expected 1"),
    ("max_tokens", lambda _: 3.5, "max_tokens: expected an int"),
    ("unit_rows", lambda _: 8, "unit_rows: expected one of 1, 2, 4, got 8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "words"), WRONG)
def test_wrong_arguments(name: str, change: Change, words: str) -> None:
    given = arguments()
    with pytest.raises((TypeError, ValueError), match=words):
        index_logits(**given | {name: change(given.get(name))})


def test_both_columns_and_out() -> None:
    with pytest.raises(ValueError, match="max_tokens: expected None beside out"):
        index_logits(**arguments(), out=torch.zeros(4, 128), max_tokens=128)
    ragged = arguments(q=arguments()["q"].view(4, 64, 128), w=torch.ones(4, 64))
    with pytest.raises(TypeError, match=r"cu_seqlens_q: expected a torch\.Tensor"):
        index_logits(**ragged)


WRONG_KEYS: list[tuple[str, Any, str]] = [
    ("k", lambda k: k.double(), "k: expected dtype bfloat16 or float16 or float32"),
    ("k", lambda k: k[:, :64], r"k: expected shape \(n, 128\)"),
    (
        "k",
        lambda _: torch.zeros(3, 130, dtype=torch.bfloat16)[:, 1:129],
        "k: expected outer strides",
    ),
    ("slot_mapping", lambda s: s.int()[:2], r"slot_mapping: expected shape \(3,\)"),
    ("slot_mapping", lambda s: s.float(), "slot_mapping: expected dtype int32 or int64"),
    (
        "positions",
        lambda _: torch.arange(3),
        "cos_sin_cache: expected a torch.Tensor, got NoneType",
    ),
    ("cos_sin_cache", lambda _: torch.zeros(9, 64), "positions: expected a torch.Tensor"),
    ("norm_weight", lambda _: torch.ones(128), "norm_weight: expected None without positions"),
    ("norm_bias", lambda _: torch.ones(128), "norm_weight: expected None without positions"),
    ("norm_eps", lambda _: 0.0, "norm_eps: expected 1e-12 to 1, got 0.0"),
    ("rope_last", lambda _: True, "rope_last: expected False without positions, got True"),
    ("rope_last", lambda _: 1.5, "rope_last: expected True or False"),
    ("is_neox", lambda _: "yes", "is_neox: expected True or False"),
    ("scale", lambda _: "e8m0", "scale: expected one of 'free', 'ue8m0', got 'e8m0'"),
    ("hadamard", lambda _: 2, "hadamard: expected True or False"),
    ("cache", lambda c: c[:, :, :100], r"cache: expected shape \(pages, 64, 132\)"),
]


@pytest.mark.parametrize(("name", "change", "words"), WRONG_KEYS)
def test_wrong_keys(name: str, change: Change, words: str) -> None:
    given: dict[str, Any] = {
        "cache": pool(), "k": torch.zeros(3, 128, dtype=torch.bfloat16),
        "slot_mapping": torch.arange(3),
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=words):
        append_index_k(**given | {name: change(given.get(name))})


def test_a_norm_has_a_weight() -> None:
    given = {"positions": torch.arange(3), "cos_sin_cache": torch.zeros(9, 64)}
    keys = pool(), torch.zeros(3, 128, dtype=torch.bfloat16), torch.arange(3)
    with pytest.raises(TypeError, match=r"norm_weight: expected a torch\.Tensor, got NoneType"):
        append_index_k(*keys, **given, norm_bias=torch.ones(128))
    with pytest.raises(TypeError, match="norm_weight: expected dtype float32, got bfloat16"):
        weight = torch.ones(128).bfloat16()
        append_index_k(*keys, **given, norm_weight=weight, norm_bias=torch.ones(128))


def test_the_variant_of_a_call() -> None:
    """Rotation, norm and dtypes of what is given."""
    keys = pool(), torch.zeros(3, 128, dtype=torch.bfloat16), torch.arange(3)
    table, at = torch.zeros(9, 64), torch.arange(3).int()
    norm = torch.ones(128), torch.ones(128)

    def name(*told: Any, given: tuple[Any, ...] = (None,) * 4) -> str:
        axes = dict(appending._axes(appending.Append(*keys, *given, *told)))
        return VariantSpec(op="append_index_k", **axes).name

    assert name("free", False, True, 1e-6) == "append_index_k_xbf16_ii64_sm90a"
    assert name("free", True, False, 1e-6, given=(at, table, None, None)) == (
        "append_index_k_xbf16_ii64_hd1_interleaved_posi32_sm90a"
    )
    assert name("free", False, True, 1e-6, given=(at.long(), table.bfloat16(), *norm)) == (
        "append_index_k_xbf16_ii64_neox_layer_csbf16_sm90a"
    )
    assert name("free", False, False, 1e-6, True, given=(at.long(), table, norm[0], None)) == (
        "append_index_k_xbf16_ii64_interleaved_rms_last_sm90a"
    )


def test_keys_lie_apart_from_the_cache() -> None:
    cache = pool()
    k = cache.view(-1)[: 3 * 256].view(torch.bfloat16).view(3, 128)
    with pytest.raises(ValueError, match="k: expected memory apart from cache"):
        append_index_k(cache, k, torch.arange(3))
    assert appending.SCALES.index("ue8m0") == 1, "the kernel's flag"

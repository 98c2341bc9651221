"""Fake quantisation against the reference, and the kernels in the same loop against both."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.dims import CACHE_TOPS
from profiles.model import attention, fake
from profiles.model.attention import Blocks, attend_plainly
from profiles.model.fake import SETTINGS, Setting, attend_quantised
from profiles.peer_libraries import PeerLibrary
from snapmla.testing.reference import reference_from_unquantised
from snapmla.testing.rounding import FP64, MIMIC, MIMIC_HW_FULL
from tests.support.needs import needs_kernels

SCALE = 0.1
CONFIGS = {
    **{name: setting.config for name, setting in SETTINGS.items() if setting.scales == "exact"},
    "running": replace(MIMIC, p_scale="running"),
    "static": replace(MIMIC, p_scale="static", p_terms=2),
    "quantised mass": replace(MIMIC, normaliser="quantised"),
    "blocks of 32": replace(MIMIC, p_block=32, promote_tokens=32),
    "a scale per query token": replace(MIMIC, q_granularity="token"),
    "own RoPE": replace(MIMIC, rope_quantised="own"),
    "nothing": FP64,
}


def problem(n: int = 3, heads: int = 4, length: int = 150, seed: int = 0) -> list[Tensor]:
    """q_nope (n, h, 512), q_rope, c_kv (L, 512), k_rope; scales of tokens differ by e each."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(torch.randn(length, 1, generator=generator))
    return [
        torch.randn(n, heads, 512, generator=generator) * 0.3,
        torch.randn(n, heads, 64, generator=generator),
        torch.randn(length, 512, generator=generator) * spread,
        torch.randn(length, 64, generator=generator) * 5,
    ]


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", CONFIGS)
def test_whole_sequences_are_the_reference(name: str) -> None:
    inputs, setting = problem(), Setting(CONFIGS[name], "")
    expected, _ = reference_from_unquantised(
        *(x[None] for x in inputs), SCALE, config=setting.config
    )
    assert distance(attend_quantised(*inputs, SCALE, setting, torch.float64), expected[0]) < 1e-12
    assert distance(attend_quantised(*inputs, SCALE, setting), expected[0]) < 2e-5


def test_power_of_two_scales() -> None:
    """Against the definition: the next power of two, and everything else as the kernels do."""
    setting = SETTINGS["pow2"]
    q_nope, q_rope, c_kv, k_rope = problem()
    c_kv[7] = 0.0
    c_kv[7, 3] = 448.0 / 8  # a scale that is a power of two stays
    content, rope, scale = setting.cache(c_kv, k_rope)
    wanted = torch.exp2(torch.ceil(torch.log2(c_kv.abs().amax(-1) / 448)))
    assert torch.equal(scale, wanted) and scale[7] == 0.125
    assert torch.equal(content.float(), (c_kv / wanted[:, None]).to(torch.float8_e4m3fn).float())
    assert torch.equal(rope, (k_rope / wanted[:, None]).bfloat16())
    log2 = torch.log2(setting.query(q_nope, q_rope)[2])
    assert torch.equal(log2, log2.round())
    truth = attend_plainly(*(x[None].double() for x in problem()), SCALE)[0]
    found = attend_quantised(*problem(), SCALE, setting)
    assert 1e-3 < distance(found, truth) < 0.06


def test_phased_scales_do_not_round_equal_latents_alike() -> None:
    """Errors of equal tokens add under a scale of their own, and average under many phases."""
    *_, c_kv, k_rope = problem(length=256)
    same = c_kv[:1].expand(256, -1)
    content, rope, scale = SETTINGS["phased"].cache(same, k_rope)
    factor = scale / SETTINGS["plain"].cache(same, k_rope)[2]
    assert 1 <= factor.min() < 1.01 and 1.98 < factor.max() <= 2
    back = rope.float() * scale[:, None]
    assert float((back - k_rope).abs().max()) < 2**-8 * float(k_rope.abs().max())
    means = [
        (kept[0].float() * kept[2][:, None]).mean(0)
        for kept in ((content, rope, scale), SETTINGS["plain"].cache(same, k_rope))
    ]
    assert distance(means[0], same[0]) < 0.5 * distance(means[1], same[0])


def test_our_scales_keep_the_largest_element_and_round_equal_latents_unlike() -> None:
    *_, c_kv, k_rope = problem(length=256)
    same = c_kv[:1].expand(256, -1)
    content, rope, scale = SETTINGS["ours"].cache(same, k_rope)
    assert sorted(content.float().abs().amax(-1).unique().tolist()) == sorted(CACHE_TOPS)
    restored = content.float() * scale[:, None]
    largest = same.float().abs().amax(-1)
    assert float((restored.abs().amax(-1) / largest - 1).abs().max()) < 2**-22
    assert float((rope.float() * scale[:, None] - k_rope).abs().max()) < 2**-8 * float(
        k_rope.abs().max()
    )
    kept, _, plain = SETTINGS["plain"].cache(same, k_rope)
    alike = distance((kept.float() * plain[:, None]).mean(0), same[0])
    assert distance(restored.mean(0), same[0]) < 0.5 * alike


def test_scales_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="scales: expected exact, powers, phased"):
        Setting(MIMIC, "", "random")
    with pytest.raises(ValueError, match="scales: phased are for granularity token alone"):
        Setting(SETTINGS["C"].config, "", "phased")


def test_chunks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = problem(n=6)
    whole = [attend_quantised(*inputs, SCALE, s, torch.float64) for s in SETTINGS.values()]
    plain = attend_plainly(*(x[None].double() for x in inputs), SCALE)
    monkeypatch.setitem(fake.CHUNK_ELEMENTS, "cpu", 5 * 150)  # five rows: tokens are cut
    for setting, expected in zip(SETTINGS.values(), whole, strict=True):
        assert distance(attend_quantised(*inputs, SCALE, setting, torch.float64), expected) < 1e-12
    assert distance(attend_plainly(*(x[None].double() for x in inputs), SCALE), plain) < 1e-12


def test_plain_attention_is_the_truth() -> None:
    inputs = [x[None].double() for x in problem()]
    expected, _ = reference_from_unquantised(*inputs, SCALE, config=FP64)
    assert distance(attend_plainly(*inputs, SCALE), expected) < 1e-12


def test_modelled_accumulators_are_refused() -> None:
    with pytest.raises(ValueError, match="exact accumulation"):
        attend_quantised(*problem(), SCALE, Setting(MIMIC_HW_FULL, ""))


def test_what_an_attention_stores_is_what_it_attends_to() -> None:
    """Exact attention over ``stored`` is fake quantisation with an exact P."""
    inputs = [x[None] for x in problem()]
    for name in ("ours", "A", "B", "C", "D", "plain", "pow2", "phased", "c128"):
        (backend,) = attention.backends([name], torch.device("cpu"), None)
        stored = backend.stored(tuple(inputs))  # type: ignore[arg-type]
        exact = replace(SETTINGS[name], config=replace(SETTINGS[name].config, p_scale="none"))
        expected = attend_quantised(*problem(), SCALE, exact, torch.float64)
        assert distance(attend_plainly(*stored, SCALE)[0], expected) < 2e-5, name


# ---------------------------------------------------------------------------------- kernels


def test_blocks_are_the_tokens_of_a_tail() -> None:
    blocks = Blocks.of(2, 16, 100, torch.device("cpu"))
    assert blocks.s_q == 8 and blocks.lengths.tolist() == [92, 100, 92, 100]
    assert blocks.table.tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    x = torch.arange(32).view(2, 16)
    assert blocks.split(x).tolist() == x.view(4, 8).tolist()
    assert Blocks.of(1, 7, 100, torch.device("cpu")).s_q == 7
    assert Blocks.of(1, 11, 100, torch.device("cpu")).s_q == 1


@needs_kernels
@pytest.mark.parametrize(
    ("name", "twin", "apart"),
    [
        ("kernel", "ours", 1e-2),  # and P at ties: the tensor core's logits have 13 bits less
        pytest.param("kernel_high", "high", 2.5e-3, marks=pytest.mark.whole_matrix),
    ],
)
def test_our_kernels_in_the_loop(name: str, twin: str, apart: float) -> None:
    """Two sequences, sixteen tokens each, against the fake quantisation that stands for them."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    inputs = (normal(2, 16, 4, 512), normal(2, 16, 4, 64), normal(2, 70, 512), normal(2, 70, 64))
    scale = 2.0 / math.sqrt(576)
    got = attention.kernels(**attention.OURS[name])(*inputs, scale)
    want = attention.fake(SETTINGS[twin])(*inputs, scale)
    truth = attend_plainly(*inputs, scale)
    rows = [distance(a, b) for a, b in zip(got.flatten(0, 2), want.flatten(0, 2), strict=True)]
    assert statistics.median(rows) < 2.5e-3, "bf16 results"
    assert distance(got, want) < apart
    assert 5e-3 < distance(got, truth) < 8e-2
    assert distance(got[1], want[0]) > 0.5, "sequences that could be exchanged prove nothing"


def stand_in(
    query: Tensor,
    pages: Tensor,
    d_v: int,
    lengths: Tensor,
    table: Tensor,
    scale: float,
    causal: bool,
    *schedule_and_scales: object,
) -> tuple[Tensor, None]:
    """FlashMLA's calls, exactly: each request gathers its pages; scales of FP8 come last."""
    assert d_v == 512 and causal and pages.shape[1:] == (64, 1, 576) and query.is_contiguous()
    factors = [x for x in schedule_and_scales if isinstance(x, Tensor) and x.shape == (1,)]
    q_scale, k_scale = factors or (torch.ones(1), torch.ones(1))
    found = []
    for q, length, row in zip(query.float() * q_scale, lengths.tolist(), table.long()):
        cache = (pages.float()[row].flatten(0, 2) * k_scale)[:length]
        parts = (q[None, ..., :512], q[None, ..., 512:], cache[None, :, :512], cache[None, :, 512:])
        found.append(attend_plainly(*parts, scale)[0])
    return torch.stack(found).bfloat16(), None


@pytest.mark.parametrize("name", ["flashmla_bf16", "flashmla_fp8"])
def test_flash_mla_is_called_as_it_wants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a stand-in takes its place: pages, requests, order and scales of a call."""
    ops = SimpleNamespace(
        dense_decode_fwd=stand_in, fwd_kvcache_mla_fp8=stand_in,
        get_mla_decoding_metadata_dense_fp8=lambda lengths, rows, kv_heads: (None, None),
    )  # fmt: skip
    for library in ("_flashmla_C", "_flashmla_extension_C"):
        monkeypatch.setattr(torch.ops, library, ops, raising=False)
    monkeypatch.setattr(PeerLibrary, "load", lambda self: None)
    attend = attention.flash_mla(PeerLibrary(name, None))
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return 3 * torch.randn(shape, generator=generator).bfloat16()

    inputs = (normal(2, 16, 4, 512), normal(2, 16, 4, 64), normal(2, 70, 512), normal(2, 70, 64))
    got, truth = attend(*inputs, 0.01), attend_plainly(*inputs, 0.01)
    assert distance(got, truth) < (4e-3 if name == "flashmla_bf16" else 6e-2)
    (backend,) = attention.backends([name], torch.device("cpu"), None)
    assert distance(got, attend_plainly(*backend.stored(inputs), 0.01)) < 4e-3


def test_who_cannot_run_says_why() -> None:
    found = {b.name: b for b in attention.backends(attention.NAMES, torch.device("cpu"), None)}
    assert set(found) == set(attention.NAMES)
    assert found["flashmla_fp8"].attend is None and found["flashmla_fp8"].reason == "needs a GPU"
    assert all(b.attend is not None or b.reason for b in found.values())
    assert all(found[name].attend is not None for name in ("bf16", *SETTINGS))
    with pytest.raises(ValueError, match="attention: expected one of bf16"):
        attention.backends(["none"], torch.device("cpu"), None)


def test_a_foreign_kernel_is_tried_before_it_counts() -> None:
    cpu = torch.device("cpu")
    assert attention.sane(attend_plainly, cpu) < 1e-6
    swapped = lambda q, r, c, k, scale: attend_plainly(q, r, c, k, 2 * scale)
    assert attention.sane(swapped, cpu) > 0.15

"""The reference against itself, against recorded hardware and against the figures it must show."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from snapmla.testing import metrics, reference
from snapmla.testing.reference import mla_decode_reference, reference_from_unquantised
from snapmla.testing.rounding import (
    FP8,
    FP64,
    MIMIC,
    MIMIC_HW,
    MIMIC_HW_FULL,
    SNAPMLA,
    TABLE_2,
    QuantConfig,
    dequantize_rows,
    quantize_rows,
)
from tests.support import cases
from tests.support.ties import Tied

quick = settings(max_examples=25, deadline=None)


def decode(inputs: cases.DecodeInputs, config: QuantConfig = FP64, **options):
    return mla_decode_reference(
        *inputs.stored,
        inputs.softmax_scale,
        causal=inputs.case.causal,
        config=config,
        **options,
    )


# ---------------------------------------------------------------------------- accumulation


def drift(config: QuantConfig, mean: float, length: int = 4096) -> float:
    """Error of near-uniform attention over a biased latent, against fp64 on the same inputs."""
    inputs = cases.build(
        cases.DecodeCase(lengths=(length,), heads=4, logit_std=0.1, latent_mean=mean, seed=11)
    )
    return metrics.relative_l2(decode(inputs, config)[0], decode(inputs)[0])


def test_unpromoted_accumulation_drifts_and_promotion_stops_it() -> None:
    """As measured end to end: 2.6e-2 at 4K tokens a split and mean 0.5, 7e-2 at mean 2."""
    unpromoted = replace(MIMIC_HW_FULL, promote_tokens=0)
    assert 1.3e-2 < drift(unpromoted, 0.5) < 4e-2
    assert 4e-2 < drift(unpromoted, 2.0) < 1.1e-1
    assert drift(unpromoted, 0.5, 1024) < 0.5 * drift(unpromoted, 0.5)
    for mean in (0.5, 2.0):
        assert drift(MIMIC_HW_FULL, mean) < 2.5e-3
        assert drift(MIMIC_HW_FULL, mean) < 1.3 * drift(MIMIC_HW_FULL, mean, 1024)


def test_promotion_group_sets_the_error() -> None:
    """The error of the accumulator alone: about 4e-4, 1.7e-3 at 128, 256 tokens and mean 2."""
    inputs = cases.build(
        cases.DecodeCase(lengths=(2048,), heads=4, logit_std=0.1, latent_mean=2.0, seed=3)
    )
    errors = []
    for tokens in (64, 128, 256, 512):
        config = replace(MIMIC, p_block=tokens, promote_tokens=tokens)
        exact = decode(inputs, config)[0]
        errors.append(
            metrics.relative_l2(decode(inputs, replace(config, pv_accumulation="hopper"))[0], exact)
        )
    assert errors == sorted(errors)
    assert errors[0] < 3e-4 and errors[2] < 3e-3 < errors[3]


def test_rope_last_is_what_keeps_logits_right() -> None:
    """With RoPE logits of std 20 the LSE is 20 times worse if RoPE enters the chain first."""
    inputs = cases.build(
        cases.DecodeCase(lengths=(256,), heads=8, logit_std=2.0, rope_logit_std=20.0, seed=5)
    )
    truth = decode(inputs)[1]
    one_chain = replace(MIMIC_HW, qk_promote_channels=512)
    last = metrics.lse_error(decode(inputs, one_chain)[1], truth)
    first = metrics.lse_error(decode(inputs, replace(one_chain, rope_first=True))[1], truth)
    assert first > 5 * last
    ours = metrics.lse_error(decode(inputs, MIMIC_HW)[1], truth)
    assert MIMIC_HW.qk_promote_channels == 256 and ours < last
    finer = replace(MIMIC_HW, qk_promote_channels=128)
    assert metrics.lse_error(decode(inputs, finer)[1], truth) < last


# ---------------------------------------------------------------------------- metrics


# ---------------------------------------------------------------------------- quantisation


@quick
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e3, 1e30]),
    st.sampled_from([0.0, 1e-3, 1.0, 1e3, 1e30]),
)
def test_quantised_rows_never_overflow(seed: int, content: float, rope: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    c = torch.randn(5, 512, generator=generator) * content
    r = torch.randn(5, 64, generator=generator) * rope
    k8, kr, scale = quantize_rows(c, r)
    assert torch.isfinite(k8.float()).all() and torch.isfinite(kr.float()).all()
    assert (scale >= 2.0**-80).all()
    back, rope_back = dequantize_rows(k8, kr, scale, torch.float32)
    top = c.abs().amax(-1, keepdim=True)
    # half a unit in the last place of e4m3 (2^-4 relative), or of its smallest subnormal
    bound = c.abs() * 2.0**-4 + scale[:, None] * 2.0**-10 + top * 1e-6
    assert ((back - c).abs() <= bound).all()
    assert ((rope_back - r).abs() <= r.abs() * 2.0**-8 + 2.0**-126).all()
    assert (k8.float().abs().amax(-1) <= 448).all()


def test_quantise_special_rows() -> None:
    c, r = torch.randn(6, 512), torch.randn(6, 64)
    c[0, 5], c[1, 500], r[2, 0], r[3, 63] = math.nan, math.inf, math.nan, -math.inf
    c[4] = 0
    r[4, 0] = 1e3
    k8, kr, scale = quantize_rows(c, r)
    assert (k8[:4].view(torch.uint8) == 0x7F).all()
    assert torch.isnan(scale[:4]).all() and torch.isnan(kr[:4].float()).all()
    assert scale[4] == 1e3 * 2.0**-40 and (k8[4].float() == 0).all()
    assert torch.isfinite(k8[4:].float()).all()
    assert (k8[5].float().abs().max() == 448) and scale[5] == c[5].abs().max() * (1.0 / 448)


def test_token_granularity_shares_the_largest_scale() -> None:
    q, r = torch.randn(2, 3, 4, 512), torch.randn(2, 3, 4, 64)
    _, _, per_head = quantize_rows(q, r)
    _, _, per_token = quantize_rows(q, r, shared=1)
    assert per_token.shape == (2, 3) and torch.equal(per_token, per_head.amax(-1))
    q[1, 2, 0, 7] = math.nan
    k8, _, scale = quantize_rows(q, r, shared=1)
    assert torch.isnan(scale[1, 2]) and torch.isnan(k8[1, 2].float()).all()
    assert torch.isfinite(scale[1, 1])


# ---------------------------------------------------------------------------- decode


@pytest.mark.parametrize(
    ("mean", "length", "logit_std", "expected"),
    [
        (0.0, 64, 0.1, 2.7e-2), (0.0, 64, 1.0, 1.7e-2), (0.0, 1024, 0.1, 2.6e-2),
        (0.5, 64, 0.1, 7.1e-3), (0.5, 1024, 0.1, 1.9e-3), (0.5, 1024, 1.0, 2.5e-3),
        (2.0, 64, 0.1, 3.4e-3), (2.0, 1024, 0.1, 1.2e-3),
    ],
)  # fmt: skip
def test_mimic_reproduces_the_cost_of_e4m3_p(
    mean: float, length: int, logit_std: float, expected: float
) -> None:
    """The brief's table for exact arithmetic with block-wise e4m3 P."""
    case = cases.DecodeCase(
        lengths=(length,) * 2, heads=16, logit_std=logit_std, rope_logit_std=0.0, latent_mean=mean
    )
    inputs = cases.build(case)
    truth = decode(inputs)[0]
    error = metrics.relative_l2(decode(inputs, MIMIC)[0], truth)
    assert error == pytest.approx(expected, rel=0.35)
    two = metrics.relative_l2(decode(inputs, replace(MIMIC, p_terms=2))[0], truth)
    assert two < error / 15


@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.id)
def test_truth_is_softmax_attention(case: cases.DecodeCase) -> None:
    """The chunked fp64 truth equals three lines of textbook attention on the same inputs."""
    inputs = cases.build(case)
    out, lse = decode(inputs)
    assert torch.isfinite(out).all()
    for i, length in enumerate(case.lengths):
        pages = inputs.block_table[i, : -(-length // case.page_size)].long()
        raw = inputs.content.view(torch.uint8)[pages].flatten(0, 1)[:length]
        sigma = inputs.scale[pages].flatten()[:length].double()[:, None]
        content = raw.view(FP8).double() * sigma
        rope = inputs.rope[pages].flatten(0, 1)[:length].double() * sigma
        scale = inputs.q_scale[i].double().reshape(case.s_q, -1, 1)
        q, qr = inputs.q8[i].double() * scale, inputs.q_rope_scaled[i].double() * scale
        s = inputs.softmax_scale * (q @ content.T + qr @ rope.T)  # (s_q, h, L)
        if case.causal:
            ends = length - case.s_q + 1 + torch.arange(case.s_q)
            hidden = torch.arange(length) >= ends[:, None, None]
            s = s.masked_fill(hidden, -torch.inf)
        want_lse = torch.logsumexp(s, -1)
        weight = torch.exp(s - want_lse[..., None].clamp_min(-1e30))
        torch.testing.assert_close(out[i], weight @ content, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(lse[i], want_lse.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("config", [MIMIC, MIMIC_HW, MIMIC_HW_FULL], ids=["exact", "qk", "full"])
@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.id)
def test_mimics_meet_the_gates_of_a_kernel(case: cases.DecodeCase, config: QuantConfig) -> None:
    inputs = cases.build(case)
    (out, lse), (truth, true_lse) = decode(inputs, config), decode(inputs)
    floor = metrics.relative_l2(decode(inputs, MIMIC)[0], truth)
    assert metrics.relative_l2(out, truth) <= 1.1 * floor + 1e-3
    assert metrics.lse_error(lse, true_lse) <= 2e-4 + 1e-3 * 5 * case.logit_std


def test_layouts_pages_and_poison_do_not_matter() -> None:
    base = cases.DecodeCase(lengths=(0, 1, 130, 200), heads=3, s_q=2, seed=4)
    want = decode(cases.build(base), MIMIC_HW_FULL)
    for layout in cases.LAYOUTS:
        for page_size in (16, 128):
            for poison in (False, True):
                case = dataclasses.replace(base, layout=layout, page_size=page_size, poison=poison)
                got = decode(cases.build(case), MIMIC_HW_FULL)
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_subsets_equal_the_whole() -> None:
    inputs = cases.build(cases.DecodeCase(lengths=(70, 200, 130), heads=6, s_q=2, seed=9))
    out, lse = decode(inputs, MIMIC_HW)
    part, part_lse = decode(inputs, MIMIC_HW, batches=(2, 0), heads=(5, 1))
    # fp64 matrix products of other shapes may add in another order
    torch.testing.assert_close(part, out[[2, 0]][:, :, [5, 1]], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(part_lse, lse[[2, 0]][:, [5, 1]], rtol=1e-13, atol=1e-14)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = cases.build(cases.DecodeCase(lengths=(1000,), heads=4, s_q=2, logit_std=3.0, seed=2))
    configs = (FP64, MIMIC, MIMIC_HW_FULL, replace(MIMIC, p_scale="running"), SNAPMLA)
    whole = [decode(inputs, config) for config in configs]
    monkeypatch.setattr(reference, "_chunk_tokens", lambda config, device: 128)
    for config, (out, lse) in zip(configs, whole, strict=True):
        again = decode(inputs, config)
        torch.testing.assert_close(again[0], out, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(again[1], lse, rtol=1e-9, atol=1e-9)


def test_empty_rows_and_lse_base() -> None:
    inputs = cases.build(cases.DecodeCase(lengths=(0, 2), heads=2, s_q=4))
    out, lse = decode(inputs, MIMIC_HW)
    assert (out[0] == 0).all() and torch.isneginf(lse[0]).all()
    assert (out[1, :2] == 0).all() and torch.isneginf(lse[1, :, :2]).all()
    assert torch.isfinite(lse[1, :, 2:]).all() and (out[1, 2:] != 0).any()
    _, other = decode(inputs, MIMIC_HW, lse_base="2", empty_lse="+inf")
    assert torch.isposinf(other[0]).all()
    torch.testing.assert_close(other[1, :, 2:] * math.log(2), lse[1, :, 2:])
    with pytest.raises(ValueError, match="lse_base"):
        decode(inputs, lse_base="10")


@pytest.mark.parametrize("config", [FP64, MIMIC, MIMIC_HW, MIMIC_HW_FULL, SNAPMLA])
def test_nan_token_reaches_only_rows_that_attend_to_it(config: QuantConfig) -> None:
    inputs = cases.build(cases.DecodeCase(lengths=(70, 70), heads=2, s_q=3, page_size=64))
    page, offset = int(inputs.block_table[0, 1]), 69 % 64  # the last token of sequence 0
    clean = decode(inputs, config)
    inputs.content.view(torch.uint8)[page, offset] = 0x7F
    inputs.rope[page, offset] = math.nan
    inputs.scale[page, offset] = math.nan
    out, lse = decode(inputs, config)
    assert torch.isnan(out[0, 2]).all() and torch.isnan(lse[0, :, 2]).all()
    torch.testing.assert_close(out[0, :2], clean[0][0, :2])
    torch.testing.assert_close(out[1], clean[0][1])
    torch.testing.assert_close(lse[0, :, :2], clean[1][0, :, :2])


@pytest.mark.parametrize("logits", cases.SWINGS, ids=lambda f: f.__name__)
def test_swinging_block_maxima_are_finite_and_right(logits) -> None:
    inputs = cases.build(cases.DecodeCase(lengths=(512,), heads=2, logits=logits))
    truth, true_lse = decode(inputs)
    assert torch.isfinite(truth).all()
    for config in (MIMIC, MIMIC_HW, MIMIC_HW_FULL, replace(MIMIC, p_terms=2)):
        out, lse = decode(inputs, config)
        assert metrics.relative_l2(out, truth) < 3e-2
        assert metrics.lse_error(lse, true_lse) < 1e-3
        assert metrics.one_minus_cosine(out, truth) < 1e-3


def test_papers_recurrence_overflows_where_ours_does_not() -> None:
    """gamma = exp(dm) sigma_p / sigma_p' dies when a block lies some 88 nats below the last one."""
    inputs = cases.build(cases.DecodeCase(lengths=(512,), heads=2, logits=cases.falling_logits))
    paper = replace(SNAPMLA, pv_accumulation="hopper", arithmetic="fp32")
    assert not torch.isfinite(decode(inputs, paper)[0]).all()
    assert torch.isfinite(decode(inputs, MIMIC_HW_FULL)[0]).all()


@pytest.mark.parametrize("at", [0.0, 0.7])
def test_sink_keeps_its_tail(at: float) -> None:
    """A tail of weights around 1e-5 keeps its mass within 2 %, wherever the sink is."""
    case = cases.sink_case(1 << 14, at, heads=2, alike=True)  # eight scales would blur the loss
    inputs = cases.build(case)
    truth = decode(inputs)[0][0, 0, :, 1]
    assert (truth > 0.05).all()
    for config in (MIMIC, MIMIC_HW_FULL):
        tail = decode(inputs, config)[0][0, 0, :, 1]
        assert ((tail / truth - 1).abs() < 0.02).all()
    lost = decode(inputs, replace(MIMIC, p_scale="running"))[0][0, 0, :, 1]
    assert ((lost / truth - 1).abs() > 0.02).all() == (at == 0.0)


def test_inverted_order_shows_the_scale_hazard() -> None:
    """The paper, appendix C: requantising P0 to P1's scale loses what monotone order keeps."""
    inputs = cases.build(cases.DecodeCase(lengths=(1024,), heads=8, logit_std=2.0, seed=1))
    truth = decode(inputs)[0]
    monotone = decode(inputs, SNAPMLA)[0]
    inverted = decode(inputs, replace(SNAPMLA, order="inverted"))[0]
    torch.testing.assert_close(monotone[..., :256], inverted[..., :256])
    right = slice(256, 512)
    bad = metrics.relative_l2(inverted[..., right], truth[..., right])
    assert bad > 5 * metrics.relative_l2(monotone[..., right], truth[..., right])


def table_2_errors(rope_logit_std: float, content_size: float, outlier: float) -> dict[str, float]:
    """Relative L2 of every Table 2 configuration against fp64 on the unquantised inputs.

    ``outlier`` is the value of one channel of one token, which no query looks at and which is left
    out of the comparison.
    """
    case = cases.DecodeCase(
        lengths=(512,), heads=32, rope_logit_std=rope_logit_std, rope_outlier=1e3, logit_std=0.5
    )
    inputs = cases.build(case, keep_source=True)
    c, q = inputs.c_kv[None].float(), inputs.q_nope.float()
    c[0, 5, 511] = outlier
    q[..., 511] = 0
    sources = (q / content_size, inputs.q_rope, c * content_size, inputs.k_rope[None])
    out = {
        name: reference_from_unquantised(*sources, inputs.softmax_scale, config=config)[0]
        for name, config in {"truth": FP64, **TABLE_2}.items()
    }
    truth = out.pop("truth")[..., :511]
    return {name: metrics.relative_l2(x[..., :511], truth) for name, x in out.items()}


def test_table_2_ranks_the_configurations() -> None:
    """Figure 4: RoPE in e4m3 (A) explodes; scales coarser than a token (B, C, D) miss its range."""
    plain = table_2_errors(rope_logit_std=1.0, content_size=1.0, outlier=0.0)
    assert max(plain.values()) < 1.5 * plain["SnapMLA"] < 0.08
    wide_rope = table_2_errors(rope_logit_std=10.0, content_size=1.0, outlier=0.0)
    assert wide_rope["A"] > 3 * wide_rope["SnapMLA"]
    small = table_2_errors(rope_logit_std=1.0, content_size=1e-3, outlier=0.0)
    assert small["B"] > 5 * small["SnapMLA"]
    outlier = table_2_errors(rope_logit_std=1.0, content_size=1.0, outlier=1e5)
    assert outlier["C"] > 2 * outlier["SnapMLA"]
    assert outlier["D"] > 1.02 * plain["D"]  # one block of 64 suffers


def test_stored_and_unquantised_paths_agree() -> None:
    case = cases.DecodeCase(lengths=(200,), heads=4, s_q=2, sink=True, rope_outlier=1e3)
    inputs = cases.build(case, keep_source=True)
    sources = (inputs.c_kv[None], inputs.k_rope[None])
    for config in (MIMIC, MIMIC_HW_FULL):
        stored = decode(inputs, config)
        direct = reference_from_unquantised(
            inputs.q_nope, inputs.q_rope, *sources, inputs.softmax_scale, config=config
        )
        assert torch.equal(stored[0], direct[0]) and torch.equal(stored[1], direct[1])
    with pytest.raises(ValueError, match="granularity"):
        reference_from_unquantised(
            inputs.q_nope, inputs.q_rope, *sources, 1.0,
            config=replace(MIMIC_HW, granularity="channel"),
        )  # fmt: skip


@pytest.mark.parametrize("granularity", ["none", "tensor", "token", "channel", "block"])
def test_every_granularity_is_close_on_plain_inputs(granularity: str) -> None:
    inputs = cases.build(cases.DecodeCase(lengths=(192,), heads=4), keep_source=True)
    sources = (inputs.q_nope, inputs.q_rope, inputs.c_kv[None], inputs.k_rope[None])
    truth = reference_from_unquantised(*sources, inputs.softmax_scale)[0]
    for rope_quantised in ("none", "own"):
        config = QuantConfig(granularity=granularity, rope_quantised=rope_quantised)
        out = reference_from_unquantised(*sources, inputs.softmax_scale, config=config)[0]
        assert metrics.relative_l2(out, truth) < (0.08 if rope_quantised == "none" else 0.15)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"granularity": "row"}, "granularity"),
        ({"p_scale": "block"}, "p_scale"),
        ({"p_terms": 3}, "p_terms"),
        ({"p_block": 48}, "p_block"),
        ({"promote_tokens": 96}, "promote_tokens"),
        ({"p_max": 500.0}, "p_max"),
        ({"qk_promote_channels": 96}, "qk_promote_channels"),
        ({"arithmetic": "bf16"}, "arithmetic"),
    ],
)
def test_config_rejects_what_it_cannot_do(changes: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        QuantConfig(**changes)


def test_a_p_at_a_tie_rounded_the_other_way() -> None:
    """A move is what it does to the mimic; of packed queries in its row; of P in one term."""
    tied = Tied.make()
    before, move, changes = tied.out, tied.move, []
    for factor in (1 + 2.0**-20, 1 - 2.0**-20):
        tied.p(factor)
        changes.append(tied.out[move.row] - before[move.row])
    assert min(float(x.norm()) for x in changes) < 0.03 * float(move.step.norm())
    change = max(changes, key=lambda x: float(x.norm()))  # sums are cut at 13 bits, too
    assert metrics.relative_l2(move.step, change) < 0.03

    moves: list[reference.Move] = []
    q, cache = tied.q, tied.cache
    packed = [x.flatten(0, 1) for x in (q.nope.view(torch.uint8), q.rope, q.scale)]
    out, _ = mla_decode_reference(
        packed[0].view(FP8), *packed[1:], cache.content, cache.rope, cache.named_tensors["scale"],
        tied.block_table, tied.cache_seqlens, 192**-0.5, config=MIMIC_HW_FULL,
        cu_seqlens_q=torch.tensor([0, 2, 4]), moves=moves,
    )  # fmt: skip
    _, token, head = move.row
    (found,) = (m for m in moves if m.row == (2 + token, head))
    assert torch.equal(out, before.flatten(0, 1)) and torch.equal(found.step, move.step)
    for config in (FP64, replace(MIMIC_HW_FULL, p_terms=2)):
        none: list[reference.Move] = []
        tied.mimic(none, config)
        assert not none
    tied.scales[tied.token] *= 1 + 2.0**-17  # 64 ulps from the tie
    tied.mimic(none)
    assert not [m for m in none if m.row == move.row]


def test_case_lists() -> None:
    """Every (heads, s_q) meets every distribution, layout and page size; ids are unique."""
    listed = list(cases.correctness_cases())
    assert len(listed) == 10 * 4 * 11 and len({(c.id, c.seed) for c in listed}) == len(listed)
    assert {(c.layout, c.page_size) for c in listed} == {
        (layout, page) for layout in cases.LAYOUTS for page in PAGE_SIZES
    }
    assert all(set(cases.RAGGED) <= set(c.lengths) for c in listed)
    assert len(list(cases.correctness_cases(full=True))) == 3 * len(listed)


@pytest.mark.gpu
def test_cuda_and_cpu_agree() -> None:
    case = cases.DecodeCase(lengths=(0, 65, 700), heads=5, s_q=2, sink=True)
    inputs = cases.build(case)
    there = dataclasses.replace(
        inputs,
        **{
            f.name: getattr(inputs, f.name).cuda()
            for f in dataclasses.fields(inputs)
            if isinstance(getattr(inputs, f.name), torch.Tensor)
        },
    )
    for config in (FP64, MIMIC, MIMIC_HW_FULL):
        for got, want in zip(decode(there, config), decode(inputs, config), strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)

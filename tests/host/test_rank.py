"""The dispatcher: which kernel, why not the others, and what its cost model and data are worth."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import snapmla
from codegen import matrix, toolchain
from dsl_kernels import registry
from dsl_kernels.families import ARCHS, FAMILIES, Axis, Family
from dsl_kernels.families.family import OUT_DTYPE
from dsl_kernels.families.fp8_decode import ON_REQUEST, ROW_TILES, pipelines_of
from dsl_kernels.spec import VariantSpec, decode_spec
from profiles import dispatch_data, roofline
from profiles.shapes import DecodeShape
from snapmla import rank
from snapmla.errors import VariantError
from snapmla.rank import calls, costs, verdicts
from snapmla.rank.cards import Card
from snapmla.rank.decode import REFERENCE, DecodeOp, Features, Problem
from snapmla.rank.dense_decode import DENSE_DECODE
from snapmla.rank.fp8_decode import FP8_DECODE
from snapmla.rank.verdicts import Size
from snapmla.runtime import variants

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """What a test changes must not have been judged before, nor be remembered after it."""
    for kept in (calls.choose_known, verdicts.judge, costs.costs_of):
        kept.cache_clear()
    yield
    for kept in (calls.choose_known, verdicts.judge, costs.costs_of):
        kept.cache_clear()


def chosen(heads: int, s_q: int, page_size: int = 64, **wishes: Any) -> tuple[str, int]:
    spec = rank.choose(CPU, heads, s_q, page_size, **wishes)
    assert spec == decode_spec(spec.pipeline, spec.row_tile, page_size, "bf16")
    return spec.pipeline, spec.row_tile


def problem_of(rows: int, card: Card | None, out_dtype: str = "bf16", s_q: int = 1) -> Problem:
    assert card is not None
    return Problem(FP8_DECODE, rows // s_q, s_q, 64, out_dtype, card)


def predict(
    problem: Problem, pipeline: str, row_tile: int, batch: int, seqlen: int
) -> tuple[float | None, str]:
    spec = decode_spec(pipeline, row_tile, 64, problem.out_dtype)
    return verdicts.predict(problem, spec, Size(batch, seqlen))


@pytest.mark.parametrize(
    ("heads", "s_q", "tile"),
    [(1, 1, 16), (16, 1, 16), (17, 1, 32), (16, 2, 32), (33, 1, 64), (64, 1, 64), (65, 1, 128),
     (128, 1, 128), (96, 2, 64), (128, 2, 128), (128, 8, 128)],
)  # fmt: skip
def test_choice(heads: int, s_q: int, tile: int) -> None:
    """192 rows are three blocks of 64: 44 parts of 132 SMs, where two of 128 leave 33."""
    assert chosen(heads, s_q) == ("etap", tile)


@pytest.mark.parametrize(
    "wish", [{"row_tile": [16]}, {"row_tile": True}, {"pipeline": ["etap"]}, {"accuracy": {}}]
)
def test_a_wish_that_is_no_key_is_refused_by_its_name(wish: dict[str, Any]) -> None:
    """Known choices are kept by value and type: what cannot be a key goes through the checks."""
    for _ in range(2):
        chosen(16, 1)
        with pytest.raises(ValueError, match=f"^{next(iter(wish))}: expected one of") as error:
            rank.choose(CPU, 16, 1, 64, **wish)
        assert error.value.__context__ is None


def test_choice_obeys_wishes() -> None:
    assert chosen(16, 1, pipeline="dual_wg") == ("dual_wg", 64)
    assert chosen(16, 1, row_tile=64) == ("etap", 64)
    assert chosen(16, 1, pipeline="dual_wg", row_tile=128) == ("dual_wg", 128)


def test_wishes_that_do_not_go_together() -> None:
    with pytest.raises(ValueError) as caught:
        rank.choose(CPU, 16, 1, 64, pipeline="dual_wg", row_tile=16)
    assert str(caught.value) == (
        "row_tile: expected 64 or 128 with pipeline 'dual_wg', got 16 (it puts rows on the MMA's "
        "M = 64; the nearest is row_tile=64, or leave row_tile out)"
    )


@pytest.mark.parametrize(
    ("heads", "s_q", "tile"), [(1, 1, 16), (16, 1, 16), (17, 1, 32), (64, 1, 32), (128, 2, 32)]
)
def test_choice_of_two_terms(heads: int, s_q: int, tile: int) -> None:
    """High accuracy of pipeline etap; more rows than 32 are several blocks."""
    wish = {"pipeline": "etap", "accuracy": "high"}
    spec = rank.choose(CPU, heads, s_q, 64, out_dtype="f32", **wish)
    assert spec == decode_spec("etap", tile, 64, "f32").replace(p_terms=2)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"pipeline": "etap", "row_tile": 64},
            "^row_tile: expected 16 or 32 with pipeline 'etap' and accuracy 'high', got 64",
        ),
        (
            {"row_tile": 128},
            "^row_tile: expected 16 or 32 or 64 with pipeline 'f16' and accuracy 'high', got 128",
        ),
        ({"pipeline": "dual_wg"}, "^accuracy: expected 'standard' with pipeline 'dual_wg', got h"),
        ({"cache": "bf16"}, "^accuracy: expected 'standard' with a 16-bit cache, got high"),
        (
            {"accuracy": "fast"},
            "^accuracy: expected 'standard' or 'high' with an FP8 cache on sm_90a, got fast",
        ),
        ({"accuracy": "hi"}, "^accuracy: expected one of 'standard', 'high', 'fast', got 'hi'"),
    ],
)
def test_wishes_beside_high_accuracy(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank.choose(CPU, 16, 1, 64, **{"accuracy": "high", **wish})


def test_high_accuracy_is_exact_logits() -> None:
    """Pipeline f16: by that, or its name, in the row tile that pads least, and in no other list."""
    high, named = {"accuracy": "high"}, {"pipeline": "f16"}
    for wish in (high, named, {**high, **named}):
        found = [chosen(heads, 1, **wish) for heads in (5, 17, 40, 128)]
        assert found == [("f16", 16), ("f16", 32), ("f16", 64), ("f16", 64)]
    assert "f16 row_tile" not in str(snapmla.explain(16, card="H200"))
    asked = snapmla.explain(16, card="H200", pipeline="f16")
    assert asked.chosen is not None and asked.chosen.variant == "decode_f16_r16_p64_obf16_sm90a"
    with pytest.raises(ValueError, match="^row_tile: expected 16 or 32 or 64 with pipeline 'f16'"):
        rank.choose(CPU, 16, 1, 64, row_tile=128, pipeline="f16")
    with pytest.raises(ValueError, match="^pipeline: expected 'ws' or 'pair' on sm_100a, got f16"):
        rank.calls.choose_on(rank.card_named("B200"), 16, 1, 64, pipeline="f16")
    with pytest.raises(ValueError, match="^pipeline: expected one of 'etap', got"):
        rank.choose(CPU, 16, 1, 64, pipeline="f17")


def test_no_exact_logits_on_blackwell() -> None:
    """One sentence."""
    message = "^accuracy: expected 'standard' on sm_100a, got high .*nothing there has 16-bit"
    with pytest.raises(ValueError, match=message):
        rank.calls.choose_on(rank.card_named("B200"), 16, 1, 64, accuracy="high")


def test_explain_says_what_exact_logits_cost() -> None:
    """Measured where a table has them; the ratio is the model's for both."""
    one, high = (snapmla.explain(64, card="H200", accuracy=a) for a in ("standard", "high"))
    assert one.chosen is not None and high.chosen is not None
    assert (high.chosen.source, high.chosen.us) == ("measured", 159.9)
    assert high.chosen.variant == "decode_f16_r64_p64_obf16_sm90a"
    text = str(high)
    assert ", accuracy high" in text and "exact logits: 1.4" in text
    assert "1.4" in text and "terms of P" not in text and "accuracy" not in str(one)
    assert "rejected: its logits are not exact, as accuracy='high' wants them" in text


def test_explain_says_what_the_second_term_costs() -> None:
    """By the model: no table has it, so no measured point may be shown for it."""
    one, two = (
        snapmla.explain(16, card="H200", accuracy=a, pipeline="etap") for a in ("standard", "high")
    )
    assert one.chosen is not None and two.chosen is not None
    assert one.chosen.us is not None and two.chosen.us is not None
    assert (one.chosen.source, two.chosen.source) == ("measured", "model")
    assert two.chosen.variant == "decode_etap_r16_p64_obf16_pt2_sm90a"
    assert 1.0 < two.chosen.us / one.chosen.us < 1.1
    assert "2 terms of P" in str(two) and "the second term of P: 1.0" in str(two)
    assert "term" not in str(one)
    assert "etap has no two terms of P with a row tile of 64: the softmax of 64 rows" in str(two)
    with pytest.raises(
        ValueError, match="^accuracy: expected one of 'standard', 'high', 'fast', got"
    ):
        snapmla.explain(16, accuracy="hi")


def test_no_kernel_for_the_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    blackwell = rank.card_named("B200")
    assert blackwell is not None
    monkeypatch.setattr("snapmla.rank.calls.card_of", lambda device: blackwell)
    monkeypatch.setattr(DecodeOp, "exists", lambda op, pipeline, arch: arch == "sm_90a")
    with pytest.raises(VariantError, match="^sm_100a: no decode kernel exists .* on sm_90a .*cpu"):
        rank.choose(CPU, 16, 1, 64)


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors stand for a B200's."""
    card = rank.card_named("B200")
    monkeypatch.setattr("snapmla.rank.calls.card_of", lambda device: card)


@pytest.mark.parametrize(("heads", "s_q"), [(1, 1), (16, 1), (20, 4), (64, 1), (128, 4)])
def test_choice_on_blackwell(blackwell: None, heads: int, s_q: int) -> None:
    """Blocks of 64 rows, whatever the rows: nothing was timed that would speak for the pair."""
    want = decode_spec("ws", 64, 64, "f32", "sm_100a")
    assert rank.choose(CPU, heads, s_q, 64, out_dtype="f32") == want
    found = snapmla.explain(heads, s_q, card="B200")
    assert found.chosen is not None and found.chosen.variant == "decode_ws_r64_p64_obf16_sm100a"
    want = decode_spec("pair", 128, 64, "f32", "sm_100a")
    assert rank.choose(CPU, heads, s_q, 64, out_dtype="f32", pipeline="pair") == want


@pytest.mark.parametrize(
    ("wish", "error", "message"),
    [
        (
            {"pipeline": "etap"},
            ValueError,
            "^pipeline: expected 'ws' or 'pair' on sm_100a, got etap",
        ),
        ({"row_tile": 32}, ValueError, "^row_tile: expected 64 or 128 on sm_100a, got 32 .*M = 64"),
    ],
)
def test_wishes_that_blackwell_does_not_grant(
    blackwell: None, wish: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rank.choose(CPU, 16, 1, wish.pop("page_size", 64), **wish)


def test_features_are_what_can_be_built() -> None:
    """What pipelines declare is what their modules build, point by point, and all that is built."""
    if not toolchain.have_compiler():
        pytest.skip("needs nvidia-cutlass-dsl")
    family = FP8_DECODE.family
    points = {
        (pipeline, tile, page, out, terms): registry.feasible(
            decode_spec(pipeline, tile, page, out, arch).replace(p_terms=terms)
        )
        for arch in ARCHS
        for pipeline in FP8_DECODE.features
        if FP8_DECODE.exists(pipeline, arch)
        for tile in FP8_DECODE.values("row_tile")
        for page in FP8_DECODE.values("page_size")
        for out in FP8_DECODE.values("out_dtype")
        for terms in FP8_DECODE.values("p_terms")
    }
    declared = {
        (name, tile, page, out, terms)
        for name, features in FP8_DECODE.features.items()
        for terms in FP8_DECODE.values("p_terms")
        for tile in features.tiles(terms)
        for page in features.page_sizes
        for out in features.out_dtypes
    }
    assert declared == {point for point, reason in points.items() if reason is None}
    for arch in ARCHS:
        built = {p.spec for p in matrix.matrix(arch, f"{family.op}_*") if p.reason is None}
        specs = {decode_spec(*point, arch).replace(p_terms=terms) for *point, terms in declared}
        assert built and built <= specs


# ------------------------------------------------------------------------------ 16-bit caches


@pytest.mark.parametrize(
    ("heads", "s_q"),
    [(1, 1), (3, 7), (8, 33), (16, 2), (20, 4), (40, 1), (64, 1), (96, 2), (128, 4)],
)
def test_row_tiles_of_a_16_bit_cache(heads: int, s_q: int) -> None:
    """FP8's, but that row blocks of 64 take the place of pairs; until a table has its own times."""
    for card in ("H200", "H100 SXM"):
        found = snapmla.explain(heads, s_q, card=card, cache_dtype=torch.float16)
        fp8 = snapmla.explain(heads, s_q, card=card)
        assert found.chosen is not None and fp8.chosen is not None
        assert found.chosen.row_tile == min(fp8.chosen.row_tile, 64)
        assert found.chosen.variant == f"dense_decode_split_r{found.chosen.row_tile}_p64_df16_sm90a"
    spec = rank.choose(CPU, heads, s_q, 16, cache="bf16")
    assert (spec.page_size, spec.dtype) == (16, "bf16") and spec.cluster == spec.row_tile // 128 + 1


def test_explain_of_a_16_bit_cache() -> None:
    """Bytes of 16 bits, KV heads as sequences of their own, whose times these are."""
    found = snapmla.explain(16, card="H200", batch=4, cache_dtype=torch.bfloat16, num_kv_heads=2)
    one = snapmla.explain(8, card="H200", batch=8, cache_dtype=torch.bfloat16)
    assert found.roof_us == one.roof_us and found.verdicts == one.verdicts
    card = rank.card_named("H200")
    assert card is not None
    nbytes = 8 * 16384 * 1152 + 8 * 8 * (1152 + 1028)
    assert found.roof_us == pytest.approx(nbytes / card.read_gbs * 1e-3)
    text = str(found)
    assert "16 heads, s_q 1 (8 rows)" in text and "2 KV heads" in text and "bfloat16" not in text
    assert "no table was fitted for decode over a 16-bit cache yet: times are estimates" in text
    large = snapmla.explain(16, card="H200", cache_dtype=torch.bfloat16, page_size=192)
    assert large.chosen is not None and "_p64_dbf16_" in large.chosen.variant
    assert "pages of 192" in str(large)
    with pytest.raises(TypeError, match="^out_dtype: expected torch.float16, got torch.bfloat16"):
        snapmla.explain(16, cache_dtype=torch.float16, out_dtype=torch.bfloat16, card="H200")


def test_measured_times_of_a_16_bit_cache_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a table has them, the stand-ins are forgotten."""
    own = dataclasses.replace(_h200_costs(), tiles={("split", 64): costs.Tile(1.0, 1.0)})
    monkeypatch.setattr("snapmla.rank.decode.costs_of", lambda op, arch: own)
    found = snapmla.explain(16, card="H200", cache_dtype=torch.bfloat16)
    assert found.chosen is not None and found.chosen.row_tile == 64
    assert "are estimates" not in str(found)


@pytest.mark.parametrize(
    ("heads", "s_q", "page", "kernel"),
    [
        (1, 1, 16, "ws_r64"),
        (16, 1, 64, "ws_r64"),
        (16, 4, 32, "ws_r64"),
        (20, 4, 64, "pair_r128"),
        (128, 4, 192, "pair_r128"),
    ],
)
def test_a_16_bit_cache_on_blackwell(
    blackwell: None, heads: int, s_q: int, page: int, kernel: str
) -> None:
    """More than 64 rows go to pairs of CTAs, by counted clocks of the shared-memory port; times
    that nobody measured are called predicted."""
    found = snapmla.explain(heads, s_q, page_size=page, card="B200", cache_dtype=torch.float16)
    assert found.chosen is not None and found.chosen.us is not None
    size = 64 if page == 192 else page
    assert found.chosen.variant == f"dense_decode_{kernel}_p{size}_df16_sm100a"
    assert found.chosen.source == "model" and "no B200 has run decode over a 16-bit" in str(found)
    assert "times are predicted" in str(found) and "are estimates" not in str(found)


def test_predicted_times_of_a_16_bit_cache_on_blackwell() -> None:
    """DRAM bounds 64 rows; the shared-memory port two blocks of them, and a pair less so."""
    tokens = {
        heads: snapmla.explain(
            heads, batch=64, seqlen=65536, card="B200", cache_dtype=torch.bfloat16
        )
        for heads in (64, 128)
    }
    us = {
        (heads, v.pipeline): v.us
        for heads, found in tokens.items()
        for v in found.verdicts
        if v.us is not None
    }
    read = 64 * 65536 * 1152 / 7480e3
    few, blocks, pair = us[64, "ws"], us[128, "ws"], us[128, "pair"]
    assert read < few < 1.02 * read
    # 2 x 64 x 1024 tiles on 148 SMs, 64 x 512 tiles on 74 pairs of them
    assert blocks == pytest.approx(2 * 64 * 1024 / 148 * 2108 / 1965, rel=0.02)
    assert pair == pytest.approx(64 * 512 / 74 * 2960 / 1965, rel=0.02)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"pipeline": "split"}, "^pipeline: expected 'ws' or 'pair' on sm_100a, got split"),
        ({"row_tile": 32}, "^row_tile: expected 64 or 128 on sm_100a, got 32 .*M = 64"),
    ],
)
def test_wishes_of_a_16_bit_cache_on_blackwell(
    blackwell: None, wish: dict[str, Any], message: str
) -> None:
    lengths = torch.ones(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        snapmla.plan_decode(
            lengths, 16, 1, page_size=64, max_pages=3, cache_dtype=torch.bfloat16, **wish
        )


def test_features_of_a_16_bit_cache_are_what_is_built() -> None:
    if not toolchain.have_compiler():
        pytest.skip("needs nvidia-cutlass-dsl")
    op = DENSE_DECODE.family.op
    declared = {
        VariantSpec(op=op, arch=arch, pipeline=name, row_tile=tile, page_size=page, dtype=dtype)
        for arch in ARCHS
        for name in DENSE_DECODE.pipelines(arch)
        for features in [DENSE_DECODE.features[name]]
        for tile in features.row_tiles
        for page in features.page_sizes
        for dtype in features.out_dtypes
    }
    points = [p for arch in ARCHS for p in matrix.matrix(arch, f"{op}_*")]
    assert declared == {p.spec for p in points if p.reason is None}
    refused = [p for p in points if p.reason is not None]
    said = {"ws": "ws puts 64 rows on M", "pair": "pair puts 128 rows on M of two CTAs"}
    assert all(said[p.spec.pipeline] in str(p.reason) for p in refused)


@pytest.mark.parametrize("card", [c.name for c in rank.cards()])
@pytest.mark.parametrize(("heads", "s_q"), [(16, 1), (128, 2)])
def test_roof_is_the_benchmarks_roof(card: str, heads: int, s_q: int) -> None:
    shape = DecodeShape(32, 4096, heads, s_q)
    fmt = roofline.FORMATS["snapmla"]
    on_file = roofline.card_by_name(card).ceilings
    want = roofline.roof_us(shape.bytes(fmt), shape.flops, on_file, fmt)
    found = rank.card_named(card)
    assert found is not None
    roof = problem_of(heads * s_q, found, s_q=s_q).roof_us(Size(32, 4096))
    assert roof == pytest.approx(want, rel=1e-9)
    assert found.source == ("measured" if card in ("H200", "H100 SXM") else "datasheet")


def test_model_fits_the_tables() -> None:
    """Within 15 % of every committed row of ours, with the measured override off."""
    _, rows = dispatch_data.read_tables()
    card = rank.card_named("H200")
    assert card is not None and len(rows) > 50
    nameless = dataclasses.replace(card, name="")
    for row in rows:
        problem = problem_of(row.rows, nameless)
        us, source = predict(problem, row.pipeline, row.row_tile, row.batch, row.seqlen)
        assert source == "model" and us is not None
        assert us == pytest.approx(row.us, rel=0.15), row


def test_measured_points_override_the_model() -> None:
    problem = problem_of(16, rank.card_named("H200"))
    low, source = predict(problem, "etap", 16, 16, 4096)
    high, _ = predict(problem, "etap", 16, 16, 8192)
    assert source == "measured" and low is not None and high is not None
    middle, source = predict(problem, "etap", 16, 16, 6144)
    assert source == "measured" and middle == pytest.approx((low + high) / 2)
    assert predict(problem, "etap", 16, 17, 4096)[1] == "model"
    f32 = dataclasses.replace(problem, out_dtype="f32")
    assert predict(f32, "etap", 16, 16, 4096)[1] == "model"
    h100 = dataclasses.replace(problem, card=rank.card_named("H100"))
    assert predict(h100, "etap", 16, 16, 4096)[1] == "model"


def test_h20_is_tensor_bound() -> None:
    """An H20's tensor core is 3.95 times slower than an H100's SM for SM; memory is not."""
    h20, h100 = rank.card_named("H20"), rank.card_named("H100")
    assert h20 is not None and h100 is not None
    assert h20.tensor_slowdown == pytest.approx(3.95, abs=0.02)
    assert h100.tensor_slowdown == pytest.approx(1.0)
    times = {}
    for card in (h20, h100):
        for rows in (16, 64):
            problem = problem_of(rows, card)
            times[card.name, rows] = predict(problem, "etap", rows, 32, 16384)[0]
    assert times["H20", 64] / times["H20", 16] > times["H100 SXM", 64] / times["H100 SXM", 16]


def test_data_file_comes_from_the_tables() -> None:
    """Made by the script, from the tables as they are."""
    text = dispatch_data.TARGET.read_text()
    stale = (
        "the dispatcher's data are not those of the tables: run `python -m profiles.dispatch_data`"
    )
    assert json.loads(text)["costs"][0]["tables"] == dispatch_data.read_tables()[0], stale
    assert text == dispatch_data.render(dispatch_data.make()), stale


def test_explain_lists_every_candidate() -> None:
    found = snapmla.explain(16, 1, batch=32, seqlen=16384, card="H200")
    assert {(v.pipeline, v.row_tile) for v in found.verdicts} == {
        (p, t) for p in pipelines_of("sm_90a") if p not in ("f16", *ON_REQUEST) for t in ROW_TILES
    }
    assert [v.chosen for v in found.verdicts].count(True) == 1
    assert found.chosen == found.verdicts[0] and found.chosen.us == pytest.approx(84, rel=0.02)
    assert all(v.reason for v in found.verdicts[1:])
    assert all(VariantSpec.from_name(v.variant).name == v.variant for v in found.verdicts)
    text = str(found)
    rate = roofline.card_by_name("H200").ceilings.read_gbs
    roof = DecodeShape(32, 16384, 16, 1).bytes(roofline.FORMATS["snapmla"]) / rate / 1e3
    assert f"roof {roof:.1f} us: {rate:.0f} GB/s" in text
    assert "on H200" in text and "(measured)" in text
    slow = next(v for v in found.verdicts if (v.pipeline, v.row_tile) == ("etap", 32))
    assert f"{slow.us / found.chosen.us:.2f}x the time of etap row_tile 16" in text
    assert text.count("chosen") == 1


def test_the_papers_form_is_asked_for() -> None:
    """It serves who names it, in the row tiles that it has, at a time of its own."""
    usual, asked = (
        snapmla.explain(16, 1, batch=32, seqlen=16384, card="H200", pipeline=pipeline)
        for pipeline in (None, "dual_wg")
    )
    assert "dual_wg" not in str(usual)
    assert "dual_wg has no row tile of 16: it puts rows on the MMA's M = 64" in str(asked)
    assert asked.chosen is not None and usual.chosen is not None
    assert (asked.chosen.pipeline, asked.chosen.row_tile) == ("dual_wg", 64)
    assert asked.chosen.us > 1.4 * usual.chosen.us


@pytest.fixture
def two_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's form takes part, asked for or not."""
    free = dataclasses.replace(FP8_DECODE.features["dual_wg"], asked=False)
    monkeypatch.setitem(FP8_DECODE.features, "dual_wg", free)  # type: ignore[arg-type]


def test_explain_says_what_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [decode_spec("etap", 32, 64, "bf16")]
    monkeypatch.setattr("snapmla.runtime.variants.available", lambda: there)
    found = snapmla.explain(16, card="H200")
    assert {v.row_tile for v in found.verdicts if v.built} == {32}
    assert str(found).splitlines()[2].endswith("chosen (not built here)")
    known = {(v.pipeline, v.row_tile) for v in found.verdicts if v.us is not None}
    assert known == {("etap", rows) for rows in (16, 32, 64, 128)}
    # all of them but the one that is; nothing is said of what has no time
    assert sum("not built here" in line for line in str(found).splitlines()) == 3


def test_explain_of_wishes_cards_and_architectures() -> None:
    asked = snapmla.explain(16, row_tile=64, pipeline="etap", card="H20")
    assert asked.chosen is not None and asked.chosen.row_tile == 64
    assert "row_tile=64 was asked for" in str(asked) and "(datasheet)" in str(asked)
    paper = snapmla.explain(16, row_tile=64, pipeline="dual_wg", card="H20")
    assert "pipeline='dual_wg' was asked for" in str(paper)
    nobody = snapmla.explain(16, pipeline="dual_wg", row_tile=16, card="H200")
    assert nobody.chosen is None and all(v.reason for v in nobody.verdicts)
    assert snapmla.explain(16, device="cpu").problem.card.name == "H200"


def test_names_of_cards_agree() -> None:
    """Those that are printed, taken, listed by an error and told by the docstring."""
    with pytest.raises(ValueError, match="expected one of") as error:
        snapmla.explain(16, card="A100")
    for card in rank.cards():
        for name in (card.name, card.name.split()[0], card.name.lower()):
            assert snapmla.explain(16, card=name).problem.card is card
        assert f", on {card.name}\n" in str(snapmla.explain(16, card=card.name))
        for name in (card.name, card.name.split()[0]):
            assert repr(name) in str(error.value)
            assert f"``{name}``" in (snapmla.explain.__doc__ or "")


def test_explain_says_when_the_choice_loses_at_this_size(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Problem.measured_us

    def biased(problem: Problem, spec: VariantSpec, size: Size) -> float | None:
        quick = (spec.pipeline, spec.row_tile) == ("etap", 32) and size.batch == 1
        return 0.5 * problem.model_us(spec, size) if quick else real(problem, spec, size)

    monkeypatch.setattr(Problem, "measured_us", biased)
    found = snapmla.explain(16, batch=1, seqlen=4096, card="H200")
    assert found.chosen is not None and found.chosen.row_tile == 16
    other = next(v for v in found.verdicts if (v.pipeline, v.row_tile) == ("etap", 32))
    assert other.reason is not None and "ask for it by row_tile and pipeline" in other.reason


@pytest.mark.usefixtures("two_pipelines")
def test_explain_of_a_tie() -> None:
    """On an H20 both pipelines wait for the tensor core: the first one is taken, and says why."""
    found = snapmla.explain(16, 4, card="H20")
    other = next(v for v in found.verdicts if (v.pipeline, v.row_tile) == ("dual_wg", 64))
    assert found.chosen is not None and found.chosen.us is not None and other.us is not None
    assert (found.batch, found.seqlen) == REFERENCE
    assert found.chosen.pipeline == "etap" and other.us < found.chosen.us
    assert other.reason == "within 3 % of etap row_tile 64, nearer than the model can tell"


@pytest.mark.parametrize(
    ("name", "card"),
    [("NVIDIA H200", "H200"), ("NVIDIA H20-3e", "H20"), ("NVIDIA H100 80GB HBM3", "H100 SXM"),
     ("NVIDIA H800", "H800 SXM"), ("NVIDIA B200", "B200")],
)  # fmt: skip
def test_device_names(name: str, card: str) -> None:
    found = rank.card_named(name)
    assert found is not None and found.name == card


@pytest.mark.parametrize(
    ("name", "sms", "source", "known"),
    [("NVIDIA H200", 132, "measured", "H200"),
     ("NVIDIA H100 80GB HBM3", 132, "measured", "H100 SXM"),
     ("NVIDIA H200 MIG 1g.18gb", 16, "assumed from H200", None),
     ("NVIDIA H100 PCIe", 114, "assumed from H100 SXM", None),
     ("NVIDIA H200 NVL", 132, "assumed from H200", None),
     ("NVIDIA GH200 480GB", 132, "assumed from H100 SXM", None)],
)  # fmt: skip
def test_card_of_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str, sms: int, source: str, known: str | None
) -> None:
    """Figures of a card are claimed for that very card only."""
    properties = types.SimpleNamespace(name=name, multi_processor_count=sms)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("snapmla.runtime.variants.arch_of", lambda device: "sm_90a")
    rank.card_of.cache_clear()
    card = rank.card_of(torch.device("cuda", 3))
    rank.card_of.cache_clear()
    assert (card.name, card.sms, card.source) == (known or name, sms, source)
    problem = problem_of(16, card)
    measured = predict(problem, "etap", 16, 32, 16384)[1] == "measured"
    assert measured == (name == "NVIDIA H200")


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA A100-SXM4-80GB", "T4"])
def test_unknown_devices_are_not_taken_for_known_ones(name: str) -> None:
    assert rank.card_named(name) is None


def _h200_costs() -> costs.Costs:
    found = costs.costs_of("decode", "sm_90a")
    assert found is not None
    return found


def test_a_pipeline_nobody_measured_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _h200_costs()
    tiles = {k: v for k, v in known.tiles.items() if k != ("etap", 16)}
    points = {k: v for k, v in known.points.items() if k[:2] != ("etap", 16)}
    fewer = dataclasses.replace(known, tiles=tiles, points=points)
    monkeypatch.setattr("snapmla.rank.decode.costs_of", lambda op, arch: fewer)
    found = snapmla.explain(16, card="H200")
    assert found.chosen is not None and found.chosen.row_tile == 32
    unknown = next(v for v in found.verdicts if (v.pipeline, v.row_tile) == ("etap", 16))
    assert unknown.us is None and unknown.reason == "nothing is known of its time"


@pytest.mark.usefixtures("two_pipelines")
@pytest.mark.parametrize(("advantage", "winner"), [(1.01, "etap"), (1.10, "dual_wg")])
def test_ties_go_to_the_first_pipeline(
    monkeypatch: pytest.MonkeyPatch, advantage: float, winner: str
) -> None:
    def us(problem: Problem, spec: VariantSpec, size: Size) -> float:
        return 100.0 if spec.pipeline == "etap" else 100.0 / advantage

    monkeypatch.setattr(Problem, "model_us", us)
    assert chosen(64, 1)[0] == winner


def test_slow_memory_bounds_the_model() -> None:
    """Where nothing but memory is slow, time is bytes at the rate that the tables reach."""
    card = rank.card_named("H100")
    assert card is not None
    slow = dataclasses.replace(card, name="", read_gbs=500.0)
    us, _ = predict(problem_of(16, slow), "etap", 16, 32, 16384)
    floor = 32 * 16384 * 644 / (500e9 * _h200_costs().read_fraction) * 1e6
    assert us is not None and floor < us < 1.05 * floor


def test_more_blocks_than_sms_take_waves() -> None:
    card = rank.card_named("H100")
    assert card is not None
    times = []
    for sms in (64, 16):
        small = dataclasses.replace(card, name="", sms=sms)
        problem = problem_of(1024, small, s_q=8)
        times.append(predict(problem, "etap", 16, 4, 4096)[0])
    assert times[0] is not None and times[1] is not None
    assert times[1] / times[0] == pytest.approx(4.0, rel=0.1)


@pytest.mark.usefixtures("two_pipelines")
def test_a_pipeline_without_features_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FP8_DECODE.features, "etap")  # type: ignore[arg-type]
    found = snapmla.explain(16, card="H200")
    assert found.chosen is not None and found.chosen.pipeline == "dual_wg"
    assert "etap declares no features yet" in str(found)


def test_parts_count_clusters() -> None:
    """A tile of 128 rows is a cluster of two CTAs; every row block has its own."""
    spec = {tile: decode_spec("etap", tile, 64, "bf16") for tile in ROW_TILES}
    assert [rank.parts_of(132, 128, spec[tile]) for tile in (32, 64, 128)] == [33, 66, 66]
    assert rank.parts_of(132, 129, spec[128]) == 33
    assert rank.parts_of(4, 1024, spec[128]) == 1


# ---------------------------------------------------------------------------- another op


TOY = Family(
    "toy_decode",
    (
        Axis("pipeline", "", ("wide", "narrow")),
        Axis("row_tile", "r", (16, 64), 64),
        Axis("page_size", "p", (64,), 64),
        OUT_DTYPE,
        Axis("cluster", "c", (1,), 1, named=False),
    ),
    module=lambda arch, values: "toy" if arch == "sm_90a" else None,
    points=lambda arch: iter(()),
    token_tile=lambda arch, values: 128,
)
TOY_DECODE = DecodeOp(
    TOY,
    features={
        "wide": Features((64,), "it is wide", "", (64,)),
        "narrow": Features((16, 64), "any", "", (64,)),
    },
    token_bytes=1152,
    tensor_cycles=lambda spec: 1000.0,
    effective_tflops=lambda card: card.bf16_tflops,
)
TOY_COSTS = {
    "op": "toy_decode", "card": "H200", "read_fraction": 0.9,
    "tiles": [
        {"pipeline": "wide", "row_tile": 64, "fixed_us": 10.0, "tile_us": 8.0},
        {"pipeline": "narrow", "row_tile": 16, "fixed_us": 10.0, "tile_us": 3.0},
    ],
    "measured": [
        {"pipeline": "wide", "row_tile": 64, "rows": 64, "batch": 32, "seqlen": 16384, "us": 999.0},
    ],
}  # fmt: skip


def test_another_op_is_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features and figures of a second op, and its block of costs, join the ranking as they are."""
    monkeypatch.setitem(FAMILIES, "toy_decode", TOY)
    blocks = costs.data("decode_costs.json")["costs"]
    monkeypatch.setattr(costs, "data", lambda name: {"costs": [TOY_COSTS, *blocks]})
    card = rank.card_named("H200")
    assert card is not None
    problem = Problem(TOY_DECODE, 64, 1, 64, "bf16", card)
    found = verdicts.explain(problem, REFERENCE)
    assert [(v.pipeline, v.row_tile) for v in found.verdicts][:2] == [("wide", 64), ("narrow", 16)]
    assert found.chosen is not None and (found.chosen.us, found.chosen.source) == (
        999.0,
        "measured",
    )
    # 32 * 128 tiles of 128 tokens on 132 SMs, each 8 us
    model = problem.model_us(VariantSpec(op="toy_decode", pipeline="wide"), REFERENCE)
    assert model == pytest.approx(10.0 + 32 * 128 / 132 * 8.0)
    reasons = {(v.pipeline, v.row_tile): v.reason for v in found.verdicts}
    assert reasons["wide", 16] == "wide has no row tile of 16: it is wide"
    assert reasons["narrow", 64] == "nothing is known of its time"
    assert f"{card.bf16_tflops:.0f} TFLOP/s (measured)" in str(found)
    assert chosen(16, 1) == ("etap", 16)  # nothing of it reaches the FP8 cache's kernels


def test_planning_where_no_decode_kernel_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated or launched, and with a way out."""
    monkeypatch.setattr(variants, "arch_of", lambda device: "sm_100a")
    monkeypatch.setattr(DecodeOp, "exists", lambda op, pipeline, arch: arch == "sm_90a")
    rank.card_of.cache_clear()
    try:
        with pytest.raises(VariantError, match=r"sm_100a: no decode kernel.* on sm_90a .*cpu"):
            snapmla.plan_decode(torch.ones(2, dtype=torch.int32), 16, 1, page_size=64, max_pages=3)
    finally:
        rank.card_of.cache_clear()

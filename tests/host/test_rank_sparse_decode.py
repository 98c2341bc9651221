"""Sparse decode's ranking: which row tile, why, by which table; wishes; kernels of a model."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import snapmla
from codegen import matrix
from dsl_kernels.spec import VariantSpec
from profiles import dispatch_data
from snapmla import rank
from snapmla.errors import VariantError
from snapmla.rank import costs, verdicts
from snapmla.rank.sparse_decode import ANY_PAGE, PIPELINES, SPARSE_OPS, SparseProblem
from snapmla.rank.verdicts import Size

CARDS = {card.name: card for card in rank.cards()}
FORMATS = tuple(SPARSE_OPS)
MOST = {"H200": 0.45, "H100 SXM": 0.6}  # a model's error, of sizes that memory bounds, too


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    """What a test changes must not have been judged before, nor be remembered after it."""
    for kept in (verdicts.judge, costs.costs_of):
        kept.cache_clear()
    yield
    for kept in (verdicts.judge, costs.costs_of):
        kept.cache_clear()


def problem_of(heads: int, card: str, fmt: str = "fp8", **more: int) -> SparseProblem:
    out = "bf16"
    return SparseProblem(SPARSE_OPS[fmt], heads, 1, ANY_PAGE, out, CARDS[card], **more)


@pytest.mark.parametrize("card", ["H200", "H100 SXM"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_least_row_tile_that_takes_all_heads_wins(card: str, fmt: str) -> None:
    """By the tables of both cards; where times are a tie, as of 32 heads, too."""
    for heads in range(1, 129):
        spec = rank.choose_sparse(CARDS[card], heads, cache=fmt)
        want = next((tile for tile in (16, 32, 64) if tile >= heads), 64)
        assert (spec.op, spec.pipeline, spec.row_tile) == ("sparse_decode", PIPELINES[fmt], want)


@pytest.mark.parametrize(("heads", "tile"), [(1, 16), (16, 16), (17, 32), (64, 32), (128, 32)])
def test_row_tiles_of_two_terms(heads: int, tile: int) -> None:
    spec = rank.choose_sparse(CARDS["H200"], heads, accuracy="high", pipeline="etap")
    assert (spec.pipeline, spec.row_tile, spec.p_terms) == ("etap", tile, 2)


@pytest.mark.parametrize(("heads", "tile"), [(1, 16), (17, 32), (33, 64), (128, 64)])
def test_high_accuracy_is_exact_logits(heads: int, tile: int) -> None:
    for wish in ({"accuracy": "high"}, {"pipeline": "f16"}):
        spec = rank.choose_sparse(CARDS["H200"], heads, **wish)
        assert (spec.pipeline, spec.row_tile, spec.p_terms) == ("f16", tile, 1)
    assert rank.longest_item(spec) == 16384
    assert rank.longest_item(rank.choose_sparse(CARDS["H200"], heads)) == 0


@pytest.mark.parametrize("size", [None, rank.Size(1, 2048), rank.Size(256, 2048)])
@pytest.mark.parametrize("heads", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("card", ["H200", "H100 SXM"])
def test_fast_rounds_the_query_where_standard_has_64_rows(
    card: str, heads: int, size: rank.Size | None
) -> None:
    """Elsewhere it is standard's kernel; who names a row tile or the pipeline gets that."""
    options: dict[str, Any] = {"cache": "fp8_ds_mla", "size": size}
    usual = rank.choose_sparse(CARDS[card], heads, **options)
    fast = rank.choose_sparse(CARDS[card], heads, accuracy="fast", **options)
    pipeline = "mix8" if usual.row_tile == 64 else "mix16"
    assert fast == usual.replace(pipeline=pipeline)
    wishes: tuple[dict[str, Any], ...] = (
        {"row_tile": 64, "accuracy": "fast"}, {"pipeline": "mix8"},
    )  # fmt: skip
    for wish in wishes:
        named = rank.choose_sparse(CARDS[card], heads, **wish, **options)
        assert named.name == "sparse_decode_mix8_r64_obf16_sm90a"


def test_fast_is_explained() -> None:
    options: dict[str, Any] = {"topk": 2048, "batch": 128, "card": "H200"}
    options["cache_dtype"] = "fp8_ds_mla"
    usual, fast = (snapmla.explain(128, accuracy=a, **options) for a in ("standard", "fast"))
    assert usual.chosen is not None and fast.chosen is not None and usual.chosen.us
    assert fast.chosen.us and 0.8 < fast.chosen.us / usual.chosen.us < 0.95
    assert "accuracy fast" in str(fast) and "mix8" not in str(usual)
    assert "mix8 rounds the query to e4m3" in str(fast) and "less 13 %" in str(fast)
    few = snapmla.explain(16, accuracy="fast", **options)
    assert "mix16 with a row tile of 16 is faster here" in str(few)


def test_ties_go_to_less_padding_and_then_to_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wider tile that is faster by less than the model tells apart pads more; beyond that, and
    where no tile pads, time decides."""
    tiles = {("etap", 16): (1.0, 1.0), ("etap", 32): (1.0, 1.0), ("etap", 64): (1.0, 1.0)}
    found = costs.costs_of("sparse_decode", "sm_90a", "H200")
    assert found is not None
    own = costs.Costs(
        found.card, 9.0, {key: costs.Tile(*tile) for key, tile in tiles.items()}, {}
    )  # fmt: skip
    where = "snapmla.rank.sparse_decode.costs_of"
    monkeypatch.setattr(where, lambda op, arch, card: own)

    def chosen(heads: int) -> int:
        verdicts.judge.cache_clear()
        return rank.choose_sparse(CARDS["H200"], heads).row_tile

    tiles["etap", 64] = own.tiles["etap", 64] = costs.Tile(1.0, 1.98)
    # by tensor-core time: five blocks of 16 against three of 32 and two of 64
    own.tiles["etap", 16] = costs.Tile(1.0, 1.0)
    own.tiles["etap", 32] = costs.Tile(1.0, 5 / 3)
    own.tiles["etap", 64] = costs.Tile(1.0, 5 / 2 - 0.02)
    assert chosen(65) == 16  # 15 rows of padding, 31, 63
    own.tiles["etap", 64] = costs.Tile(1.0, 5 / 2 - 0.2)
    assert chosen(65) == 64
    own.tiles["etap", 64] = costs.Tile(1.0, 4 - 0.02)
    own.tiles["etap", 32] = costs.Tile(1.0, 2.0)
    assert chosen(64) == 64  # none pads
    assert chosen(16) == 16  # whatever wider ones take


@pytest.mark.parametrize("table", dispatch_data.SPARSE_TABLES)
def test_every_row_of_a_table_is_a_point_and_near_the_model(table: str) -> None:
    """The least time of a size and row tile is the point, the card's own come first; the model is
    within an eighth of three quarters of them, and within ``MOST`` of all."""
    card, out, errors = dispatch_data.SPARSE_TABLES[table], "bf16", []
    _, rows = dispatch_data.read_sparse(table)
    least: dict[tuple[str, int, int, int, int], float] = {}
    for row in rows:
        key = row.pipeline, row.row_tile, row.rows, row.batch, row.seqlen
        least[key] = min(row.us, least.get(key, row.us))
    assert len(least) == 318
    for (pipeline, row_tile, heads, tokens, entries), us in least.items():
        fmt = "fp8" if pipeline == "etap" else "fp8_ds_mla"
        problem, size = problem_of(heads, card, fmt), Size(tokens, entries)
        spec = SPARSE_OPS[fmt].spec("sm_90a", pipeline, row_tile, ANY_PAGE, out)
        assert verdicts.predict(problem, spec, size) == (pytest.approx(us), "measured")
        model = problem.model_us(spec, size)
        assert model is not None
        errors.append(abs(model / us - 1))
    errors.sort()
    assert errors[len(errors) * 3 // 4] < 0.125 and errors[-1] < MOST[card], errors[-5:]


@pytest.mark.parametrize("table", dispatch_data.SPARSE_TABLES)
def test_the_choice_is_near_the_fastest_that_was_measured(table: str) -> None:
    """Row tile, and whether lists are cut, of every size: 15 % from the least at most."""
    card = rank.card_named(dispatch_data.SPARSE_TABLES[table])
    assert card is not None
    _, rows = dispatch_data.read_sparse(table)
    times: dict[tuple[str, int, int, int], dict[tuple[int, bool], float]] = defaultdict(dict)
    for row in rows:
        times[row.pipeline, row.rows, row.batch, row.seqlen][row.row_tile, row.is_cut] = row.us
    regrets = []
    for (pipeline, heads, tokens, entries), us in times.items():
        cache, size = "fp8" if pipeline == "etap" else "fp8_ds_mla", Size(tokens, entries)
        spec = rank.choose_sparse(card, heads, cache=cache, size=size)
        parts = rank.parts_of_lists(card.sms, heads, tokens, spec)
        load = rank.Load(tokens, parts, -(-entries // spec.token_tile))
        cut = not rank.stays_whole(card, spec, load)
        regrets.append(us[spec.row_tile, cut] / min(us.values()))
    assert len(regrets) == 142 and max(regrets) < 1.15, sorted(regrets)[-5:]
    assert statistics.mean(regrets) < 1.01


def test_cards_that_nobody_measured_take_the_h200s_times() -> None:
    for name in ("H800 SXM", "H20"):
        found, measured = problem_of(16, name)._costs()
        assert measured and found is not None and found.card.name == "H200"
    assert problem_of(16, "B200")._costs() == (None, False)


def test_explain() -> None:
    """A query token is a sequence; each candidate has a time and a reason."""
    found = snapmla.explain(32, 2, topk=2048, batch=64, cache_dtype="fp8_ds_mla", card="H200")
    lines = str(found).splitlines()
    assert lines[0] == (
        "sparse decode: 128 query tokens x topk 2048, 32 heads, a cache of format 'fp8_ds_mla', "
        "bf16 out, on H200"
    )
    assert (found.batch, found.seqlen) == (128, 2048)
    assert [(v.pipeline, v.row_tile, v.chosen) for v in found.verdicts] == [
        ("mix16", 32, True), ("mix16", 16, False), ("mix16", 64, False),
    ]  # fmt: skip
    _, rows = dispatch_data.read_sparse("sparse_tiles")
    at = "mix16", 32, 32, 128, 2048
    times = [r.us for r in rows if (r.pipeline, r.row_tile, r.rows, r.batch, r.seqlen) == at]
    assert found.verdicts[0].us == min(times) and found.verdicts[0].source == "measured"
    assert (found.verdicts[1].reason or "").endswith("x the time of mix16 row_tile 32")
    assert found.verdicts[2].reason == "a row tile of 32 holds all heads"
    # 128 tokens x 2048 entries x 656 bytes and their queries and results at 4608 GB/s
    nbytes = 128 * 2048 * 656 + 128 * 32 * (656 + 1028)
    assert found.roof_us == pytest.approx(nbytes / 4608e3, rel=1e-6)
    high = snapmla.explain(128, topk=64, accuracy="high", out_dtype=torch.float32, card="H100")
    assert high.chosen is not None and high.chosen.row_tile == 64
    assert high.chosen.variant == "sparse_decode_f16_r64_of32_sm90a"
    assert ", accuracy high" in str(high)
    two = snapmla.explain(128, topk=64, accuracy="high", pipeline="etap", card="H100")
    assert two.chosen is not None and two.chosen.variant == "sparse_decode_etap_r32_obf16_pt2_sm90a"
    assert "the second term of P" in str(two)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"topk": 0}, "topk: expected 1 or more, got 0"),
        ({"cache_dtype": torch.bfloat16}, "cache_dtype: expected one of 'fp8', 'fp8_ds_mla'"),
        ({"num_kv_heads": 2}, "num_kv_heads: expected 1, got 2"),
        ({"pipeline": "mix16"}, "pipeline: expected 'etap' on sm_90a, got mix16"),
        ({"pipeline": "dual_wg"}, "pipeline: expected one of "),
        ({"row_tile": 128}, "row_tile: expected one of 16, 32, 64, got 128"),
        (
            {"row_tile": 64, "accuracy": "high", "pipeline": "etap"},
            "row_tile: expected 16 or 32 with pipeline 'etap' and acc",
        ),
        ({"cache_dtype": "fp8_ds_mla", "pipeline": "f16"}, "pipeline: expected 'mix16' on sm_90a"),
        ({"cache_dtype": "fp8_ds_mla", "accuracy": "high"}, "accuracy: expected 'standard' on"),
        (
            {"cache_dtype": "fp8_v4", "accuracy": "fast"},
            "accuracy: expected 'standard' with a cache",
        ),
        (
            {"accuracy": "fast"},
            "accuracy: expected 'standard' or 'high' with an FP8 cache on sm_90a",
        ),
        ({"out_dtype": torch.float32, "cache_dtype": "fp8_ds_mla"}, "out_dtype: expected torch.b"),
    ],
)
def test_wrong_wishes(wish: dict[str, object], message: str) -> None:
    given = {"topk": 64, "card": "H200", **wish}
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        chosen = snapmla.explain(16, **given).chosen  # type: ignore[arg-type]
        assert chosen is None
        known = ("pipeline", "row_tile", "accuracy")
        rank.choose_sparse(
            CARDS["H200"], 16, cache=str(given.get("cache_dtype", "fp8")),
            **{k: v for k, v in wish.items() if k in known},  # type: ignore[arg-type]
        )  # fmt: skip


@pytest.mark.parametrize(
    ("cache", "serves"),
    [
        (
            "fp8_ds_mla",
            "there FlashMLA's own flash_mla_with_kvcache\\(indices=\\) serves these rows",
        ),
        ("fp8_v4", "there FlashMLA's own flash_mla_with_kvcache\\(indices=\\) serves these pages"),
        ("fp8_v41_planar", "there FlashMLA 07a1089 serves these pages"),
        ("fp8_v41_rows", "there FlashMLA since 2e5429f serves these rows"),
        ("fp8_nope", "there FlashMLA's copy in SGLang serves these rows"),
    ],
)
def test_blackwell_has_none_of_bytes_yet(cache: str, serves: str) -> None:
    """One sentence that says what serves there today."""
    none = "^sm_100a: no kernel for sparse decode exists for this architecture yet; "
    with pytest.raises(VariantError, match=none + serves):
        rank.choose_sparse(CARDS["B200"], 16, cache=cache)


@pytest.mark.parametrize("heads", [1, 16, 64, 65, 128])
def test_choice_on_blackwell(heads: int) -> None:
    """One kernel for all heads, in blocks of 64; no time of it is known."""
    card = CARDS["B200"]
    spec = rank.choose_sparse(card, heads)
    assert spec.name == "sparse_decode_ws_r64_obf16_sm100a"
    assert rank.choose_sparse(card, heads, pipeline="ws", row_tile=64) == spec
    found = snapmla.explain(heads, topk=2048, batch=8, card="B200", out_dtype=torch.float32)
    assert found.chosen is not None and found.chosen.us is None
    assert found.chosen.variant == "sparse_decode_ws_r64_of32_sm100a"
    others = {v.row_tile: v.reason for v in found.verdicts if not v.chosen}
    assert others.keys() == {16, 32}
    assert all("it puts heads on the MMA's M = 64" in str(why) for why in others.values())
    assert not rank.stays_whole(card, spec, rank.Load(1, 148, 32))


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"pipeline": "etap"}, "^pipeline: expected 'ws' on sm_100a, got etap"),
        ({"pipeline": "f16"}, "^pipeline: expected 'ws' on sm_100a, got f16"),
        ({"row_tile": 16}, "^row_tile: expected 64 on sm_100a, got 16"),
        ({"accuracy": "high"}, "^accuracy: expected 'standard' on sm_100a, got high .*nothing"),
    ],
)
def test_wishes_that_blackwell_does_not_grant(wish: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank.choose_sparse(CARDS["B200"], 16, **wish)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_pipeline_of_a_cache(arch: str) -> None:
    """Where none is named: the one that the dispatcher takes, or SM90's if there is none."""
    for fmt in FORMATS:
        own = "ws" if (arch, fmt) == ("sm_100a", "fp8") else PIPELINES[fmt]
        assert rank.pipeline_of(arch, fmt) == own
    assert rank.pipeline_of(arch, "f16") is None


def test_features_are_what_can_be_built() -> None:
    """By default, or of the formats of 528 bytes and of mix8 when they are asked for."""
    built = {
        spec
        for arch in ("sm_90a", "sm_100a")
        for spec in matrix.default_specs(arch)
        if spec.op == "sparse_decode"
    }
    built |= {
        VariantSpec(
            op="sparse_decode", pipeline="mix16", row_tile=tile, out_dtype="bf16", cache_dtype=fmt
        )
        for tile in (16, 32, 64)
        for fmt in ("fp8_v41_planar", "fp8_v41_rows", "fp8_nope")
    }
    rounded = VariantSpec.from_name("sparse_decode_mix8_r64_obf16_sm90a")
    assert rounded not in built
    built.add(rounded)
    assert not any(map(matrix.exclusion, built))
    said: set[VariantSpec] = set()
    for op in SPARSE_OPS.values():
        for pipeline, features in op.features.items():
            arch = "sm_100a" if pipeline == "ws" else "sm_90a"
            said |= {
                op.spec(arch, pipeline, tile, ANY_PAGE, out)
                for tile in features.row_tiles
                for out in features.out_dtypes
            }
    assert said == built

"""The benchmark's arithmetic, presets, reports and supervision; nothing here needs a GPU."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from codegen import artifacts, toolchain
from profiles import (
    bench,
    card_data,
    check,
    contenders,
    index_step,
    page,
    pools,
    report,
    roofline,
    shapes,
    supervise,
    timing,
)
from profiles.index_step import Step
from profiles.roofline import FORMATS, Ceilings
from profiles.shapes import DecodeShape, HelperShape
from profiles.tables import index_cost

# The ceilings of the hand-made figures below; those on file follow the newest table.
H200 = dataclasses.replace(
    roofline.card_by_name("NVIDIA H200"), ceilings=Ceilings(4715.0, 670.0, 1280.0, "by hand")
)
SNAP = FORMATS["snapmla"]

# b, L, h, s_q -> roof in microseconds, as worked out by hand from 644 bytes a token at 4715 GB/s
# and 1215 TFLOP/s (cache bytes only, hence the small allowance).
ROOFS = {
    (32, 16384, 16, 1): 71.6, (32, 16384, 16, 2): 71.6, (32, 16384, 32, 1): 71.6,
    (32, 16384, 32, 2): 71.6, (32, 16384, 64, 1): 71.6, (32, 16384, 64, 2): 120,
    (32, 16384, 128, 1): 120, (32, 16384, 128, 2): 240, (32, 4096, 128, 1): 30,
    (32, 8192, 128, 1): 60, (32, 32768, 128, 1): 240, (32, 65536, 128, 1): 481,
    (16, 1024, 16, 1): 2.2, (16, 4096, 16, 1): 9, (16, 16384, 16, 1): 35.8,
    (16, 65536, 16, 1): 143, (1, 131072, 16, 1): 17.9, (1, 131072, 128, 1): 30,
}  # fmt: skip


def test_effective_peak_and_eq7() -> None:
    assert H200.ceilings.effective_tflops(SNAP) == pytest.approx(1215, abs=1)
    assert H200.ceilings.effective_tflops(FORMATS["bf16"]) == pytest.approx(670)
    assert H200.ceilings.effective_tflops(FORMATS["fp8_tensor"]) == pytest.approx(1280)
    assert H200.eq7_tflops == pytest.approx(1868, abs=1)
    assert roofline.card_by_name("h20").eq7_tflops == pytest.approx(279.6, abs=0.1)
    assert roofline.ridge_rows(H200.ceilings, SNAP) == pytest.approx(76, abs=0.5)


def test_cards_are_told_apart() -> None:
    assert roofline.card_by_name("NVIDIA H20").name == "H20"
    assert roofline.card_by_name("NVIDIA H200").name == "H200"
    assert roofline.card_by_name("NVIDIA H100 80GB HBM3").name == "H100 SXM"
    assert [c.name for c in roofline.CARDS if c.ceilings.source == "measured"] == [
        "H200",
        "H100 SXM",
    ]
    with pytest.raises(ValueError, match="A100"):
        roofline.card_by_name("NVIDIA A100")


@pytest.mark.parametrize(("row", "expected"), ROOFS.items(), ids=str)
def test_roof_agrees_with_the_hand_made_table(row: tuple[int, ...], expected: float) -> None:
    b, length, h, s_q = row
    flops = roofline.decode_flops(b * length, h, s_q)
    cache_only = roofline.roof_us(b * length * 644.0, flops, H200.ceilings, SNAP)
    assert cache_only == pytest.approx(expected, rel=0.02)
    shape = DecodeShape(b, length, h, s_q)
    whole = roofline.roof_us(shape.bytes(SNAP), shape.flops, H200.ceilings, SNAP)
    assert cache_only <= whole <= cache_only * 1.06


def test_bytes_count_queries_and_outputs() -> None:
    rows = 3 * 2 * 16
    got = roofline.decode_bytes(SNAP, tokens=1000, batch=3, num_heads=16, s_q=2, out_bytes=4)
    assert got == 1000 * 644 + rows * (644 + 512 * 4 + 4)
    assert roofline.append_bytes(4096) == 4096 * (1152 + 4 + 644)
    assert HelperShape("rope_append_kv", tokens=4096).bytes == 4096 * (1152 + 8 + 644 + 8 + 256)
    rope_q = HelperShape("rope_quantize_q", batch=8, num_heads=16, mode="token_head")
    assert rope_q.bytes == 8 * (16 * (1152 + 644) + 8 + 256)
    assert roofline.fetch_dequant_bytes(131072) == 131072 * (644 + 1152)
    assert roofline.merge_states_bytes(2, 32 * 128) == 3 * 32 * 128 * 1028
    assert roofline.merge_states_bytes(8, 10, 4) == 9 * 10 * 2052
    assert roofline.quantize_q_bytes(128 * 128, 128 * 128) == 128 * 128 * (1152 + 644)
    assert roofline.quantize_q_bytes(128 * 128, 128) == 128 * 128 * (1152 + 640) + 512


def test_a_probe_only_raises_ceilings() -> None:
    probe = Ceilings(4800.0, 600.0, 1300.0, "probe")
    used = H200.ceilings.raised_by(probe)
    assert (used.read_gbs, used.bf16_tflops, used.fp8_tflops) == (4800.0, 670.0, 1300.0)
    assert H200.ceilings.raised_by(None) is H200.ceilings


def test_dequantisation_model() -> None:
    alone, shared = roofline.dequant_cost(64, 1), roofline.dequant_cost(64, 2)
    assert alone.mma_bf16 == 34 and alone.dequant == 50 and alone.bound == 50
    assert shared.dequant == 25 and shared.bound == 34
    assert alone.mma_native == 18
    # 132 SMs at 1000 MHz, one token each: exactly `bound` cycles
    assert alone.floor_us(1, 132, 132, 1000.0) == pytest.approx(0.05)
    assert any("dequantisation 50" in line for line in roofline.dequant_lines(H200))


# ------------------------------------------------------------------------------- shapes, presets


def test_presets_enumerate_the_figures() -> None:
    assert {tuple(vars(s).values())[:4] for s in shapes.preset("h200-table")} == set(ROOFS)
    assert len(shapes.preset("h200-table")) == 18
    fig5 = shapes.preset("snapmla-fig5")
    assert {s.num_heads for s in fig5} == {16, 64, 128} and len(fig5) == 12
    assert {s.seqlen for s in fig5} == {16384, 32768, 65536, 131072}
    fig6 = shapes.preset("snapmla-fig6")
    assert {(s.num_heads, s.s_q) for s in fig6} == {
        (h, q) for h in (16, 32, 64, 128) for q in (1, 2)
    }
    assert {(s.batch, s.seqlen) for s in fig6} == {(32, 16384)}
    etap = shapes.preset("etap-fig1")
    assert {(s.batch, s.seqlen) for s in etap} == {
        (b, 512 << i) for b in (16, 32) for i in range(8)
    }
    assert {s.op for s in shapes.preset("helpers")} == set(shapes.helper_modes())
    with pytest.raises(ValueError, match="h200-table"):
        shapes.preset("nothing")


@pytest.mark.parametrize("name", shapes.PRESETS)
def test_labels_parse_back(name: str) -> None:
    for shape in shapes.preset(name):
        assert shapes.parse(shape.label) == shape
        assert shape.label.replace("_", "").isalnum()


@pytest.mark.parametrize(
    "label",
    [
        "b0_L1_h1_q1", "b1_L1_h1", "append_kv_x4", "quantize_q_b1", "x", "index_topk_b1_L2",
    ],
)  # fmt: skip
def test_bad_labels_are_named(label: str) -> None:
    with pytest.raises(ValueError, match=label):
        shapes.parse(label)


def test_ragged_lengths_are_fixed_and_in_range() -> None:
    shape = DecodeShape(32, 4096, 16, 1, ragged=True)
    assert shape.lengths() == DecodeShape(32, 4096, 16, 1, ragged=True).lengths()
    assert max(shape.lengths()) == 4096 and min(shape.lengths()) >= 2048
    assert shape.tokens == sum(shape.lengths()) < 32 * 4096


def test_loops_rotate_over_more_than_the_l2_cache() -> None:
    config = timing.TimingConfig()
    for name in shapes.PRESETS:
        for shape in shapes.preset(name):
            size = shape.bytes(SNAP) if isinstance(shape, DecodeShape) else shape.bytes
            if name != "tiny" and shape.op != "plan_decode":
                assert timing.buffer_count(size, config) * size >= 200e6
    assert timing.buffer_count(2e9, config) == 2
    with pytest.raises(ValueError, match="bytes_per_call"):
        timing.buffer_count(0, config)


# ------------------------------------------------------------------------------------- contenders


def test_contender_names() -> None:
    options = contenders.SnapOptions.parse("snapmla:etap:f32:page=32:layout=paged:row_tile=64")
    assert (options.pipeline, options.out, options.page) == ("etap", "f32", 32)
    assert (options.layout, options.row_tile, options.num_parts) == ("paged", 64, None)
    assert contenders.make("snapmla", None).page_size == 64
    for bad in ("snapmla:fast", "snapmla:page=x", "flashmla", "cudnn"):
        with pytest.raises(ValueError, match=bad):
            contenders.make(bad, None)


def test_missing_peers_are_explained(tmp_path: Path) -> None:
    assert "SNAPMLA_PEERS" in str(contenders.make("flashmla_bf16", None).unavailable())
    assert "_flashmla_C" in str(contenders.make("flashmla_bf16", tmp_path).unavailable())
    large = DecodeShape(32, 16384, 16)
    assert "at most" in str(contenders.make("torch", None).refuses(large))


def test_truth_in_chunks_equals_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CHUNK_TOKENS", 7)
    q = torch.randn(2, 3, 576, dtype=torch.float64)
    k = torch.randn(20, 576, dtype=torch.float64)
    truth = check.decode_truth(q, lambda a, b: k[a:b], 20, 0.1)
    s = torch.einsum("shd,nd->shn", q, k) * 0.1
    s[0, :, 19] = -torch.inf
    want = s.softmax(-1) @ k[:, :512]
    assert torch.allclose(truth.out, want) and torch.allclose(truth.lse, s.logsumexp(-1).T)
    out, lse = truth.out[None], truth.lse[None]
    assert check.check_decode(out, lse, {0: truth}, {0: 1e-9}, True).ok
    assert not check.check_decode(out * 1.05, lse, {0: truth}, {0: 1e-2}, True).ok
    assert not check.check_decode(out, lse + 0.1, {0: truth}, {0: 1e-2}, True).ok
    assert check.check_decode(out, lse + 0.1, {0: truth}, {0: 1e-2}, False).ok
    broken = out.clone()
    broken[0, 0, 0, 0] = float("nan")
    assert not check.check_decode(broken, None, {0: truth}, {0: 1e-2}, False).ok


def test_our_gate_follows_the_mimic() -> None:
    """An uncorrelated error of 2 % on top of the mimic's is seen, whatever e4m3 P costs."""
    torch.manual_seed(0)
    k, q = torch.randn(700, 576).double(), torch.randn(1, 4, 576).double()
    truth = check.decode_truth(q, lambda a, b: k[a:b], 700, 0.04)
    size = truth.out.square().mean().sqrt()
    mimic = truth.out + 0.025 * size * torch.randn_like(truth.out)
    gates = {0: check.mimic_gate(mimic, truth)}
    assert gates[0] == pytest.approx(1.1 * 0.025 + 2.5e-3, rel=0.05) and gates[0] < check.GATE_FP8
    assert check.check_decode(mimic[None], None, {0: truth}, gates, False).ok
    wrong = mimic + 0.02 * size * torch.randn_like(truth.out)
    result = check.check_decode(wrong[None], None, {0: truth}, gates, False)
    assert not result.ok and result.error < check.GATE_FP8
    assert not check.check_decode(mimic[None], None, {0: truth}, {0: float("nan")}, False).ok


def test_rows_without_visible_tokens_agree() -> None:
    truth = check.decode_truth(torch.ones(2, 1, 576).double(), lambda a, b: torch.ones(1, 576).double(), 1, 1.0)  # fmt: skip  # noqa: E501
    assert truth.lse[0, 0] == -torch.inf and not truth.out[0].any()
    assert check.check_decode(truth.out[None], truth.lse[None], {0: truth}, {0: 1e-9}, True).ok


def test_pools_store_what_they_are_given() -> None:
    device = torch.device("cpu")
    x = pools.Latents(mean=0.5, amplitude=0.3).chunk(0, 256, device)
    assert torch.equal(x, pools.Latents(mean=0.5, amplitude=0.3).chunk(0, 256, device))
    made = [
        pools.RowsPool(256, device),
        pools.Fp8TensorPool(256, device),
        pools.SnapPool(256, device, page_size=32, layout="paged"),
    ]
    ids = torch.tensor([3, 255, 31, 32])
    for pool, allowed in zip(made, (0.0, 0.04, 0.04), strict=True):
        pool.store(0, x[:128])
        pool.store(128, x[128:])
        assert check.relative_l2(pool.load(ids), x[ids]) <= allowed


# ---------------------------------------------------------------------------------------- reports


def _row(backend: str, us: float, *, peer: bool, ok: bool = True) -> dict:
    row = {"backend": backend, "peer": peer, "us": us, "status": "ok" if ok else "wrong"}
    return {**row, "check_ok": ok, "error": 1e-2, "mhz": 1700.0, "out_bytes": 2}


def _enriched() -> list[dict]:
    rows = []
    for label, ours, fp8 in (("b32_L16384_h64_q1", 100.0, 125.0), ("b16_L1024_h16_q1", 15.0, 12.0)):
        for raw in (
            {**_row("snapmla", ours, peer=False), "format": "snapmla"},
            {**_row("flashmla_fp8", fp8, peer=True), "format": "fp8_tensor"},
            {**_row("flashmla_bf16", 150.0, peer=True, ok=False), "format": "bf16"},
        ):
            rows.append(report.enrich(raw, label, H200, H200.ceilings))
    return rows


def test_derived_figures() -> None:
    ours = _enriched()[0]
    assert ours["roof_us"] == pytest.approx(72.3, abs=0.1)
    assert ours["roof_fraction"] == pytest.approx(0.723, abs=1e-3)
    assert ours["tflops"] == pytest.approx(730, abs=1)
    assert ours["eq7_fraction"] == pytest.approx(730 / 1868, abs=1e-3)
    assert ours["dequant_model_us"] == pytest.approx(50 * 32 * 16384 / 132 / 1700, rel=1e-6)
    assert ours["reproduce"].endswith("--shape b32_L16384_h64_q1 --backends snapmla")


def test_checks_of_the_indexer_can_fail() -> None:
    """Scores and choices that are right, and one that is not, without a kernel."""
    torch.manual_seed(1)
    step = Step(index_step.pool_of(8, "cpu"), 64, 2, 2, 100, 8, 2)
    table = step.tables[1]
    scores = torch.zeros(4, 128)
    chosen, positions = torch.full((4, 8), -1), torch.full((4, 8), -1)
    for row in range(4):
        want, _ = index_step.exact(step, table, row)
        scores[row, : len(want)] = want.float()
        best = want.topk(8).indices.sort().values
        positions[row] = best
        chosen[row] = table[row // 2, best // 64] * 64 + best % 64
    assert index_step.scored(step, lambda _: scores).ok
    assert index_step.chosen(step, lambda _: chosen, True).ok
    assert index_step.chosen(step, lambda _: positions.flip(1), False).ok
    assert not index_step.chosen(step, lambda _: chosen.flip(1), True).ok, "out of order"
    assert not index_step.chosen(step, lambda _: table[0, 1] * 64 + chosen % 64, True).ok
    worst = index_step.exact(step, table, 3)[0].argmin()
    positions[3, 0] = worst
    assert not index_step.chosen(step, lambda _: positions, False).ok
    scores[3, 5] *= 1.01
    assert not index_step.scored(step, lambda _: scores).ok


@pytest.mark.parametrize("s_q", [1, 20])
def test_scores_that_differ_from_the_first_contenders_are_wrong(s_q: int) -> None:
    """In any row of a decode step, also where no row is held against float64."""
    torch.manual_seed(2)
    b = 8 if s_q == 1 else 1
    one = index_cost.Logits((index_step.pool_of(16, "cpu"), None), (32, b, s_q, 90))
    step, scores = one.step, torch.zeros(b * s_q, 90)
    for row in range(len(scores)):
        want, _ = index_step.exact(step, step.tables[-1], row)
        scores[row, : len(want)] = want.float()
    assert set(index_step.rows_of(step)) == ({0, 2, 4, 7} if s_q == 1 else {0, 6, 12, 19})
    assert one.check("unit 1", [lambda: scores]) < 1e-6
    near = scores + 1e-6 * scores.abs().max()
    assert one.check("DeepGEMM", [lambda: near]) < 1e-5
    with pytest.raises(ValueError, match="off the first contender's"):
        one.check("unit 2", [lambda: near])
    far = scores.clone()
    far[3, 5] += 1e-4 * scores.abs().max()
    for name in ("unit 2", "DeepGEMM"):
        with pytest.raises(ValueError, match="off the first contender's"):
            one.check(name, [lambda: far])


def test_summary_leaves_wrong_rows_out() -> None:
    (entry,) = report.summarise(_enriched())
    assert (entry["ours"], entry["peer"]) == ("snapmla", "flashmla_fp8")
    assert (entry["rows"], entry["faster"]) == (2, 1)
    assert entry["worst"] == pytest.approx(0.8) and entry["worst_shape"] == "b16_L1024_h16_q1"
    assert entry["geomean"] == pytest.approx(1.0)


def test_helper_rows_are_held_against_the_copy() -> None:
    label = HelperShape("append_kv", tokens=4096).label
    rows = [
        report.enrich(_row("snapmla", 4.0, peer=False), label, H200, H200.ceilings),
        report.enrich(_row("torch_copy", 3.0, peer=True), label, H200, H200.ceilings),
    ]
    ours, _ = report.with_copy_fractions(rows)
    assert ours["copy_fraction"] == 0.75 and ours["gbs"] == pytest.approx(1843, abs=1)


def _job(labels: list[str]) -> supervise.RunConfig:
    return supervise.RunConfig(shapes=labels, backends=["snapmla", "flashmla_fp8"], peers="/x/y")


def test_reports_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = supervise.Outcome(machine={"gpu": "NVIDIA H200", "torch": "2.11"})
    outcome.jobs["b32_L16384_h64_q1"] = [
        {**_row("snapmla", 100.0, peer=False), "format": "snapmla", "lse_error": float("nan")},
    ]
    job = _job(["b32_L16384_h64_q1", "b16_L1024_h16_q1"])
    made = bench.make_report("some", job, outcome)
    assert made["notes"] == ["not finished: b16_L1024_h16_q1"]
    json_path, md_path = report.save(made, tmp_path)
    again = json.loads(json_path.read_text(), parse_constant=pytest.fail)
    assert again["rows"][0]["lse_error"] == "nan" and "/x/y" not in json_path.read_text()
    text = md_path.read_text()
    shape = DecodeShape(32, 16384, 64, 1)
    on_file = roofline.card_by_name("NVIDIA H200").ceilings
    roof = roofline.roof_us(shape.bytes(SNAP), shape.flops, on_file, SNAP)
    assert f"{roof:.0f} %" in text and "python -m profiles.bench --shape b32_L16384_h64_q1" in text
    assert report.short_table(again)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    before = json_path.read_bytes()
    monkeypatch.setattr(artifacts.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        artifacts.write_atomic(json_path, "half")
    assert json_path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["some.json", "some.md"]


def test_how_a_page_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the committed pages do, which the commands wrote."""
    monkeypatch.setattr(sys, "argv", ["x", "--calls", "9", "--out", "folder"])
    monkeypatch.setenv("SNAPMLA_COMMIT", "abc")
    facts = {"gpu": "NVIDIA H200", "tvm_ffi": None, "cuda": "13.0", "torch": "2.11"}
    machine = page.told(facts, ("gpu", "cuda", "tvm_ffi", "driver"))
    *lines, when, where, note, end = page.head("Title", "profiles.x", machine, "a note")
    assert lines == ["# Title", "", "`python -m profiles.x --calls 9`", ""]
    assert re.fullmatch(r"- commit abc, \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", when)
    assert [where, note, end] == ["- gpu NVIDIA H200, cuda 13.0", "- a note", ""]
    for name in ("merge_cost", "host_time", "pair-cost-h200"):
        text = (bench.supervise.ROOT / "profiles" / "results" / f"{name}.md").read_text()
        form = r"# .+\n\n`python -m profiles\.\w+.*`\n\n- commit .{40}, \S+Z\n- gpu .+\n- .+\n\n\|"
        assert re.match(form, text)


def test_a_page_keeps_the_rows_of_a_run_that_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows() -> Iterator[str]:
        yield "| 1 | 2 |"
        yield "| 3 | 4 |"
        raise KeyboardInterrupt

    path = tmp_path / "page.md"
    with pytest.raises(KeyboardInterrupt):
        page.write_rows(path, ["# Title", ""], ("one", "other"), rows())
    assert path.read_text() == "# Title\n\n| one | other |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n"
    assert capsys.readouterr().out == "| 1 | 2 |\n| 3 | 4 |\n"


def test_the_recorded_command_names_no_folder() -> None:
    words = ["h200-table", "--out", "/a", "--peers=/b", "--quick", "--peers", "/c"]
    assert bench.command_line(words) == "python -m profiles.bench h200-table --quick"


# -------------------------------------------------------------------------------------- supervision

FAKE_WORKER = """
import json, os, sys, time
config = json.load(open(sys.argv[1]))
sink = open(sys.argv[2], "a", buffering=1)
emit = lambda kind, **f: sink.write(json.dumps({"kind": kind, **f}) + "\\n")
emit("machine", gpu="NVIDIA H200")
for shape in config["shapes"]:
    rows = []
    for backend in config["backends"]:
        banned = config["banned"]
        reason = banned.get(f"{shape}|{backend}") or banned.get(f"*|{backend}")
        if reason:
            rows.append({"backend": backend, "status": "failed", "note": reason})
            continue
        emit("start", job=shape, backend=backend, stage="check")
        if backend == "crashes":
            os._exit(9)
        if backend == "hangs" and shape == "s1":
            time.sleep(600)
        rows.append({"backend": backend, "status": "ok"})
    emit("job", job=shape, rows=rows)
emit("end")
"""


def _supervise(tmp_path: Path, backends: list[str], labels: list[str]) -> supervise.Outcome:
    script = tmp_path / "fake.py"
    script.write_text(FAKE_WORKER)
    config = supervise.RunConfig(shapes=labels, backends=backends)
    limits = supervise.Limits(quiet=1.5, total=60)
    worker = (sys.executable, str(script))
    return supervise.run(config, limits, tmp_path / "log", worker=worker)


def test_a_crash_costs_one_contender_on_one_row(tmp_path: Path) -> None:
    outcome = _supervise(tmp_path, ["good", "crashes"], ["s1", "s2", "s3", "s4", "s5"])
    assert list(outcome.jobs) == ["s1", "s2", "s3", "s4", "s5"]
    for rows in outcome.jobs.values():
        assert [r["status"] for r in rows] == ["ok", "failed"]
        assert "exit code 9" in rows[1]["note"]
    assert len(outcome.notes) == supervise.STRIKES  # after that it is left out at once


def test_a_hang_is_ended(tmp_path: Path) -> None:
    outcome = _supervise(tmp_path, ["hangs", "good"], ["s1", "s2"])
    assert [r["status"] for r in outcome.jobs["s1"]] == ["failed", "ok"]
    assert [r["status"] for r in outcome.jobs["s2"]] == ["ok", "ok"]
    assert "no sign of life" in outcome.notes[0]


# ---------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("preset", shapes.PRESETS)
def test_dry_run(preset: str) -> None:
    result = CliRunner().invoke(bench.app, [preset, "--dry-run"])
    assert result.exit_code == 0, result.output
    for shape in shapes.preset(preset):
        assert shape.label in result.output


def test_bad_requests_are_explained() -> None:
    for words, expected in (
        (["--dry-run"], "nothing to run"),
        (["nosuch", "--dry-run"], "nosuch"),
        (["tiny", "--backends", "cudnn", "--device", "cpu"], "cudnn"),
        (["tiny", "--dry-run", "--card", "A100"], "A100"),
    ):
        result = CliRunner().invoke(bench.app, words)
        assert result.exit_code == 2 and expected in result.output


def test_torch_row_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SNAPMLA_PEERS", raising=False)
    words = ["--shape", "b2_L96_h16_q2", "--backends", "torch,flashmla_bf16", "--device", "cpu"]
    result = CliRunner().invoke(bench.app, [*words, "--out", str(tmp_path), "--name", "row"])
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "row.json").read_text())
    by_name = {r["backend"]: r for r in made["rows"]}
    assert by_name["torch"]["status"] == "ok" and by_name["torch"]["error"] < 5e-3
    assert by_name["flashmla_bf16"]["status"] == "skipped"


@pytest.mark.slow
def test_our_rows_on_the_software_gpu(tmp_path: Path) -> None:
    if not toolchain.have_compiler():
        pytest.skip("needs nvidia-cutlass-dsl")
    words = ["--shape", "b1_L70_h16_q1", "--shape", "append_kv_n32", "--backends", "snapmla"]
    words += ["--device", "cpu", "--out", str(tmp_path), "--name", "ours"]
    result = CliRunner().invoke(bench.app, words)
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "ours.json").read_text())
    assert [r["status"] for r in made["rows"]] == ["ok"] * 3
    assert made["rows"][0]["kernel"].startswith("etap")


def test_measured_cards_are_what_their_tables_measured() -> None:
    """A ceiling on file that no committed run comes near is no measurement."""
    data = json.loads(card_data.CARDS.read_text())
    assert card_data.as_text(data) == card_data.CARDS.read_text()
    tables = [json.loads(p.read_text()) for p in sorted(card_data.RESULTS.glob("*-table.json"))]
    seen = {roofline.card_by_name(t["machine"]["gpu"]).name: t for t in tables}
    on_file = {c["name"]: c for c in data["cards"]}
    assert {n for n, c in on_file.items() if c["source"] == "measured"} == set(seen)
    for name, table in seen.items():
        for key, value in card_data.measured(table).items():
            want = value if isinstance(value, str) else pytest.approx(value, rel=0.03)
            assert on_file[name][key] == want, (name, key)


def test_a_table_becomes_a_cards_entry() -> None:
    data = json.loads(card_data.CARDS.read_text())
    probe = {"read_gbs": 3210.4, "bf16_tflops": 612.7, "fp8_tflops": 1201.2}
    rows = [
        {"op": "decode", "peer": peer, "status": "ok", "us": 1.0, "mhz": mhz}
        for peer, mhz in ((False, 1800.0), (False, 1700.0), (False, 1755.0), (True, 100.0))
    ]
    report = {"name": "x", "machine": {"gpu": "NVIDIA H20"}, "rows": rows}
    with pytest.raises(ValueError, match="no probed ceilings"):
        card_data.updated(data, {**report, "ceilings": {"probe": None}})
    new = card_data.updated(data, {**report, "ceilings": {"probe": probe}})
    changed = [(a, b) for a, b in zip(data["cards"], new["cards"]) if a != b]
    ((_, card),) = changed
    assert card["name"] == "H20" and card["source"] == "measured" and card["load_mhz"] == 1755
    assert (card["read_gbs"], card["bf16_tflops"], card["fp8_tflops"]) == (3210, 613, 1201)

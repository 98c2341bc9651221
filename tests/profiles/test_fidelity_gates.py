"""The study's acceptance on made-up results: each gate holds, fails alone, or is not measured."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from profiles.fidelity import __main__ as cli
from profiles.fidelity import figures, gates, high
from profiles.fidelity.dials import AMPLITUDES, DIALS
from profiles.fidelity.study import MEASURES, SCOPES

MODELS = ("full", "small-2", "small-3")
LAYERS, SEEDS = 3, 3
BASE = {
    "ours": 1.0, "ours2": 0.9, "paper": 1.02, "A": 1.3, "B": 1.1, "C": 1.1, "D": 1.04,
    "plain": 1.05, "pow2": 1.05, "phased": 0.95, "c128": 0.97, "bf16": 0.05, "kernel": 1.0,
    "kernel2": 0.9, "high": 0.9, "kernel_high": 0.9, "flashmla_bf16": 0.1, "flashmla_fp8": 1.6,
}  # fmt: skip
Results = dict[tuple[str, str], dict[str, Any]]


def result(model: str, part: str, data: Any) -> dict[str, Any]:
    return {
        "model": model, "part": part, "device": "NVIDIA H200", "seconds": 60.0, "data": data,
        "trained_length": 16_384,
    }  # fmt: skip


def layers() -> dict[str, Any]:
    data = {}
    rows = [(dial.name, dial.kind, dial.value) for dial in DIALS]
    rows += [(f"amplitude {value:g}", "amplitude", value) for value in AMPLITUDES]
    for name, kind, value in rows:
        errors = {}
        for attention, factor in BASE.items():
            if kind == "gain" and not 1e-2 < value < 1e3 and attention == "B":
                factor *= 20
            table = [
                [0.02 * factor * (1 + 0.1 * layer + 0.001 * seed) for layer in range(LAYERS)]
                for seed in range(SEEDS)
            ]
            errors[attention] = {measure: copy.deepcopy(table) for measure in MEASURES}
        data[name] = {"kind": kind, "value": value, "errors": errors}
    return data


def whole(lengths: tuple[int, ...]) -> dict[str, Any]:
    return {
        str(length): {
            name: {
                "nll": [2.0] * SEEDS, "agree": [0.99] * SEEDS,
                "kl": [1e-3 * factor * (1 + 0.001 * seed) for seed in range(SEEDS)],
            }
            for name, factor in BASE.items()
        }
        for length in lengths
    }  # fmt: skip


def drifting() -> dict[str, Any]:
    growth = dict.fromkeys(BASE, 1.05) | {"flashmla_fp8": 9.0}
    lengths = {"1024": 0.0, "8192": 0.5, "65536": 1.0}
    return {
        constant: {
            name: {
                kind: {
                    length: [[0.01 * growth[name] ** part] * LAYERS] * SEEDS
                    for length, part in lengths.items()
                }
                for kind in ("total", "own")
            }
            for name in BASE
        }
        for constant in ("0.0", "0.5", "2.0")
    }


def statistics() -> dict[str, Any]:
    rows = {
        part: [[0.1 * (i + 1), 1.0, 2.0, 3.0, 4.0] for i in range(LAYERS)]
        for part in ("content", "rope")
    } | {
        f"{part}_{what}": [1e-3] * LAYERS for part in ("content", "rope") for what in ("mse", "l2")
    }
    dials = {d.name: rows | {"kind": d.kind, "value": d.value} for d in DIALS}
    return {"quantiles": [0.5, 0.9, 0.99, 0.999, 1.0], "dials": dials}


@pytest.fixture(scope="module")
def stored() -> bytes:
    """What passes every gate, as a copy of it is quickest made."""
    needles = {n: {"1024": {"0.0": [1.0] * 3, "1.0": [0.5] * 3}} for n in ("bf16", "ours", "A")}
    parts: dict[str, Callable[[], Any]] = {
        "training": dict, "statistics": statistics, "layers": layers, "drift": drifting,
        "perplexity": lambda: whole((1024, 16_384, 65_536)),
        "bias": lambda: {c: whole((1024, 16_384)) for c in ("0.0", "2.0")},
        "needles": lambda: needles,
        "greedy": lambda: {"steps": 16, "first": {n: [[16, 3]] * 3 for n in BASE}},
    }  # fmt: skip
    every = {(m, part): result(m, part, make()) for m in MODELS for part, make in parts.items()}
    return pickle.dumps(every)


@pytest.fixture
def good(stored: bytes) -> Results:
    """What passes every gate; a test may spoil it."""
    found: Results = pickle.loads(stored)
    return found


def verdicts(results: Results) -> dict[str, bool | None]:
    return {gate.__name__: gate(gates.Results(results.values())).passed for gate in gates.GATES}


def test_all_gates_hold_on_good_results(good: Results) -> None:
    found = verdicts(good)
    assert found == dict.fromkeys(found, True)
    page = gates.page(gates.gates(good.values()))
    assert page.count("| holds |") == len(gates.GATES) and "FAILS" not in page
    assert "full: twice ours at no constant tried" in page
    assert "full, flashmla_fp8: error at 64K / at 1K 9.00 of its arithmetic" in page


def test_nothing_measured_is_no_pass() -> None:
    found = verdicts({})
    assert found == dict.fromkeys(found, None)


def _layer(data: Any, dial: str, name: str, factor: float) -> None:
    """One layer of one attention, in every seed and measure."""
    for table in data[dial]["errors"][name].values():
        for seed in table:
            seed[1] *= factor


BREAKS: dict[str, tuple[str, str, Callable[[Any], None]]] = {
    "a layer in which A is better": (
        "rope_outliers", "layers", lambda d: _layer(d, "rope 1000", "A", 0.76)),
    "a layer in which B is better": (
        "extreme_gains", "layers", lambda d: _layer(d, "gain 1e-2", "B", 0.0445)),
    "a layer in which D is better by six percent": (
        "close_to_best", "layers", lambda d: _layer(d, "channels 16", "D", 0.91)),
    "a kernel that is off": (
        "kernels_like_fake", "perplexity",
        lambda d: [row["kernel2"].update(kl=[2e-3] * 3) for row in d.values()]),
    "ours drifts": (
        "drift", "drift",
        lambda d: d["2.0"]["kernel"]["own"].update({"65536": [[0.014] * LAYERS] * SEEDS})),
    "theirs does not": (
        "drift", "drift",
        lambda d: d["2.0"]["flashmla_fp8"]["own"].update({"65536": [[0.04] * LAYERS] * SEEDS})),
    "another sign in one model": (
        "signs", "perplexity", lambda d: d["1024"]["C"].update(kl=[0.5e-3, 0.5e-3, 0.5e-3])),
    "too few seeds": (
        "signs", "perplexity",
        lambda d: [row.update(kl=row["kl"][:2]) for row in d["1024"].values()]),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAKS)
def test_a_gate_fails_alone(good: Results, what: str) -> None:
    gate, part, spoil = BREAKS[what]
    spoil(good[gates.MAIN if what == "theirs does not" else "small-2", part]["data"])
    assert {name for name, passed in verdicts(good).items() if passed is not True} == {gate}
    assert verdicts(good)[gate] is False


def test_beyond_the_trained_length_kernels_may_differ(good: Results) -> None:
    good["full", "perplexity"]["data"]["65536"]["kernel"]["kl"] = [1.0] * 3
    assert verdicts(good)["kernels_like_fake"] is True


def test_the_page_of_high_accuracy(good: Results) -> None:
    """Each dial and each length has a line, what was not measured none of the columns."""
    parts = [
        {**good["small-2", part], "commit": "abc", "torch": "2", "seeds": [1, 2, 3]}
        for part in high.PARTS
    ]
    lines = high.page(*parts).splitlines()
    (natural,) = (line for line in lines if line.startswith("| natural |"))
    assert natural.split(" | ")[1:5] == ["1.10e-03", "2.20e-02", "1.98e-02", "1.98e-02"]
    assert sum(line.startswith("| 2.0, ") for line in lines) == 2 * 3
    for each in parts[0]["data"].values():
        del each["errors"]["kernel_high"]
    assert len(high.page(*parts).splitlines()) == len(lines)
    shown = high.layer_lines(parts[0]["data"])
    assert "| high |" not in shown[2] and "| high, mimic |" in shown[2]


def test_signs_inside_the_spread_do_not_count(good: Results) -> None:
    row = good["small-2", "perplexity"]["data"]["1024"]
    row["C"]["kl"] = [0.5e-3, 1.4e-3, 0.6e-3]
    assert verdicts(good)["signs"] is True


def test_half_measured_is_not_a_pass(good: Results) -> None:
    for (_, part), each in good.items():
        if part == "perplexity":
            for row in each["data"].values():
                del row["kernel2"]
        if part == "drift":
            del each["data"]["2.0"]["flashmla_fp8"]
    del good["small-3", "perplexity"], good["small-3", "layers"]
    found = verdicts(good)
    missing = {name for name, passed in found.items() if passed is None}
    assert missing == {"kernels_like_fake", "drift", "signs"}


def test_minutes_are_those_on_a_gpu(good: Results) -> None:
    good["full", "layers"]["seconds"] = 2400.0
    assert verdicts(good)["minutes"] is False
    good["full", "layers"]["device"] = "CPU (software GPU)"
    assert verdicts(good)["minutes"] is True


def test_drift_that_shows_in_kl_names_the_constant(good: Results) -> None:
    row = good["full", "bias"]["data"]["2.0"]["16384"]
    row["flashmla_fp8"]["kl"] = [5e-3] * 3
    gate = gates.drift_in_kl(gates.Results(good.values()))
    assert "full: twice ours from 2.0 sigma on" in gate.figures


# ---------------------------------------------------------------------------------- figures


def test_figures_are_small_and_the_same_again(good: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawn = figures.draw(good.values(), tmp_path / "a")
    assert [path.stem for path in drawn] == list(figures.FIGURES)
    assert sum(path.stat().st_size for path in drawn) <= 1_000_000
    only = [each for (_, part), each in good.items() if part == "greedy"]
    (again,) = figures.draw(only, tmp_path / "b")
    assert again.read_bytes() == (tmp_path / "a" / "greedy.svg").read_bytes()


def test_figures_know_every_part() -> None:
    """Without matplotlib too: a part with no figure is one that says so here."""
    parts = {part for part, _ in figures.FIGURES.values()}
    assert parts == set(cli.PARTS) - {"bias"}, "the bias is told in a sentence of the page"


# --------------------------------------------------------------------------------- commands


def test_results_are_written_and_read_back(good: Results, tmp_path: Path) -> None:
    for each in good.values():
        cli.write_result(tmp_path, each)
    read = {(each["model"], each["part"]): each for each in cli.read_results(tmp_path)}
    assert read == good
    assert [gate.passed for gate in cli.report(tmp_path)] == [True] * len(gates.GATES)
    assert (tmp_path / "gates.md").read_text().count("| holds |") == len(gates.GATES)


def test_all_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Training first, then parts; what is in the folder does not run again."""
    ran: list[str] = []

    def training(name: str, *arguments: Any) -> bool:
        ran.append(f"train {name}")
        return True

    def evaluated(study: Any, part: str) -> dict[str, Any]:
        ran.append(f"{study} {part}")
        return result(study, part, {})

    monkeypatch.setattr(cli, "trained", training)
    monkeypatch.setattr(cli, "study_of", lambda name, size, work: name)
    monkeypatch.setattr(cli, "evaluate", evaluated)
    models = {"m": ("small", 1), "n": ("small", 2)}
    cli.write_result(tmp_path, result("m", "layers", {}))
    run = lambda limit: cli.run_all(models, ["layers", "drift"], tmp_path, tmp_path, limit)
    assert not run(0.0) and ran == []
    assert run(1e9) and ran[2:] == ["m drift", "n layers", "n drift"]
    assert run(1e9) and ran[5:] == ["train m", "train n"]


def test_what_a_rehearsal_may_not_show(good: Results) -> None:
    mine = {
        (m, part): {**each, "model": "rehearsal"} for (m, part), each in good.items() if m == "full"
    }
    training = mine["full", "training"]
    training["losses"] = [[0, 6.0], [190, 2.8]]
    assert cli.off(gates.Results(mine.values())) == []
    training["losses"] = [[0, 6.0], [190, 5.8]]
    _layer(mine["full", "layers"]["data"], "rope 100", "ours", 1.01)
    _layer(mine["full", "layers"]["data"], "gain 1e3", "B", 1e-3)
    for row in mine["full", "perplexity"]["data"].values():
        row["kernel"]["kl"] = [1.0] * 3
    said = cli.off(gates.Results(mine.values()))
    words = ("the loss fell", "rope 100: ours errs", "B is not worse", "the kernel is not like")
    assert [next(w for w in words if line.startswith(w)) for line in said] == list(words)


def test_every_size_has_a_scope() -> None:
    assert set(SCOPES) == {size for size, _ in (cli.MODELS | cli.REHEARSAL).values()}
    assert len(cli.MODELS) == gates.MODELS and len(SCOPES["full"].seeds) == gates.SEEDS
    assert all(str(n) in map(str, SCOPES["full"].drift_lengths) for n in (gates.NEAR, gates.FAR))


def test_without_a_gpu_the_study_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("profiles.device.visible", lambda: 0)
    for words in (["all"], ["train", "full"], ["evaluate", "small-2"]):
        done = CliRunner().invoke(cli.app, [*words, "--work", str(tmp_path / "w")])
        assert done.exit_code == 1 and not (tmp_path / "w").exists()
        assert "profiling needs a CUDA device" in str(done.exception)
    done = CliRunner().invoke(cli.app, ["train", "huge"])
    assert done.exit_code == 2 and "expected one of full, small-2, small-3" in done.output

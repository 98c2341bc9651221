"""The sanitizer's page: what the tools print, read back; which pairs are explained; what fails.

The texts have the form in which compute-sanitizer 2025 prints (its manual, and public reports of
kernels whose line information names Python files).
"""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer

from profiles import sanitizer, sanitizer_pairs
from profiles.sanitizer import Finding, Record, Run
from tests.support.planting import line_of

KERNEL = "kernel_cutlass_kernel_dsl_kernelssm90decodeDecode_object_at__tensorptri32_0"
SM90 = sanitizer_pairs.SOURCES / "sm90"
ETAP, MIX = "sparse_decode_etap_r16_obf16_sm90a", "sparse_decode_mix16_r16_obf16_kvfp8_v4_sm90a"
SUMMED = "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
CLEAN = {
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
    "memcheck": "========= ERROR SUMMARY: 0 errors\n",
    "synccheck": "========= ERROR SUMMARY: 0 errors\n",
}


def place(file: str, text: str, after: str = "") -> str:
    """``file.py:12``: where that text stands now."""
    [path] = SM90.rglob(file)
    return line_of(path, text, after)


READ_INV = place("transposed.py", "inverse = inv_s[x, lane % 4]")
WRITE_INV = place("across_warps.py", "inv_s[row_position(ctid")
IN = "in /b/dsl_kernels/sm90"
RACE = f"""========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at {KERNEL}+0x5ad20 {IN}/{READ_INV}
=========     and Write access at {KERNEL}+0x41b0 {IN}/{WRITE_INV} [512 hazards]
=========     and Write access at {KERNEL}+0x41c0 {IN}/{WRITE_INV} [8 hazards]
=========
RIGHT: relative L2 7e-03
{SUMMED}"""
SYNC = f"""========= COMPUTE-SANITIZER
========= Warpgroup MMA sequence error: mismatching warpgroup instruction pc between warps
=========     at {KERNEL}+0x2f70 in /b/dsl_kernels/sm90/mha/mha_fwd.py:398
=========     by thread (128,0,0) in block (0,0,0)
=========         Host Frame: main [0x12] in python3
=========
========= Warpgroup MMA sequence error: mismatching warpgroup instruction pc between warps
=========     at {KERNEL}+0x2f70 in /b/dsl_kernels/sm90/mha/mha_fwd.py:398
=========     by thread (160,0,0) in block (0,0,0)
=========
RIGHT: all
========= ERROR SUMMARY: 2 errors
"""
MEM = f"""========= Invalid __global__ write of size 4 bytes
=========     at {KERNEL}+0x160
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f1f5ce00001 is misaligned
RIGHT: all
========= ERROR SUMMARY: 1 error
"""


def test_pairs_of_racecheck() -> None:
    [found] = sanitizer.parse(RACE)
    assert found.what == "race: read ~ write" and found.places == (READ_INV, WRITE_INV)
    assert found.functions == ("transposed.py:write_rows", "across_warps.py:finish_rows")
    assert "INV_RING" in found.why


def test_errors_of_the_other_tools() -> None:
    """Each error once, with its line where there is one."""
    [found] = sanitizer.parse(SYNC)
    assert found.what.startswith("Warpgroup MMA sequence error") and not found.why
    assert found.places == ("mha_fwd.py:398",)
    [found] = sanitizer.parse(MEM)
    assert (found.what, found.places) == ("Invalid __global__ write of size 4 bytes", ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("========= COMPUTE-SANITIZER\nRIGHT: all\n", "printed no summary"),
        ("========= Program hit an error\n========= ERROR SUMMARY: 3 errors\n", "counts 3 errors"),
    ],
)
def test_a_report_that_is_not_understood_is_no_success(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sanitizer.parse(text)
    assert sanitizer.verdict(ETAP, "memcheck", text, 0, 1.0).state == "failed"


def test_a_line_of_another_architecture_is_not_taken() -> None:
    line = place("block_softmax.py", "for v in cutlass.range_constexpr(32):")
    assert sanitizer_pairs.function_at(f"/b/{line}", "sm_90a") == "block_softmax.py:logits"
    assert sanitizer_pairs.function_at("/usr/lib/elsewhere.py:3") == "elsewhere.py:?"


def test_a_line_of_a_familys_declaration_is_not_taken() -> None:
    """Whose file has the kernel's name, and whose functions may have its lines."""
    words = place("index_logits.py", "tiles = words[TILES]")
    assert sanitizer_pairs.function_at(words) == "index_logits.py:_compute"
    [kernel] = sanitizer_pairs.files_named("index_logits.py")
    assert kernel.is_relative_to(SM90)


def verdict(text: str, tool: str = "racecheck", code: int = 0) -> Run:
    return sanitizer.verdict(ETAP, tool, text, code, 1.0)


def test_what_becomes_of_a_run() -> None:
    assert verdict(RACE).good and verdict("RIGHT: x\n" + CLEAN["racecheck"]).good
    assert verdict(SYNC, "synccheck").state == "error"
    other = RACE.replace(WRITE_INV, place("across_warps.py", "sums[row, wwarp] = total"))
    assert verdict(other).good  # of the same function
    assert verdict(RACE.replace(WRITE_INV, "across_warps.py:1")).state == "error"
    assert verdict(RACE.replace("Read access", "Write access")).state == "error"  # and no reader
    assert verdict("WRONG: LSE\n" + CLEAN["memcheck"]).state == "wrong"
    assert verdict(CLEAN["memcheck"], code=1).state == "failed"


def record(*runs: Run, missing: Any = ()) -> Record:
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "580"}
    return Record("abc", "2026-01-01", machine, list(runs), list(missing))


def test_page_and_exit_code(tmp_path: Path) -> None:
    clean = [verdict("RIGHT: x\n" + text, tool) for tool, text in CLEAN.items()]
    explained = dataclasses.replace(verdict(RACE), variant=MIX)
    good = record(*clean, explained)
    sanitizer.write(good, tmp_path)
    text = (tmp_path / "sanitizer-h100.md").read_text()
    assert f"| sparse_decode | `{ETAP}` | 0 | 0 | 0 |" in text
    assert f"| not run | not run | {READ_INV} ~ {WRITE_INV} |" in text
    assert "4 runs: 4 clean or explained, 0 not, 0 not run" in text and "INV_RING" in text
    assert "- commit abc, 2026-01-01; line numbers are of that commit" in text
    assert "`across_warps.py:finish_rows` -> `transposed.py:write_rows`" in text
    assert f"### {sanitizer_pairs.ONE_LANE.title}" in text
    assert sanitizer_pairs.LANDED.title not in text, "of which there is no pair"
    assert "Not explained" not in text
    assert Record.load(tmp_path / "sanitizer-h100.json") == good

    for bad in (record(), record(*clean, verdict(SYNC, "synccheck")),
                record(*clean, missing=[("memcheck", MIX)])):  # fmt: skip
        with pytest.raises(typer.Exit):
            sanitizer.write(bad, tmp_path)
    text = sanitizer.page(record(verdict(SYNC, "synccheck"), missing=[("memcheck", MIX)]))
    assert "**1 errors**" in text and "at mha_fwd.py:398" in text
    assert f"- `{MIX}`, memcheck: not run" in text


def test_a_page_again_asks_for_explanations_anew(tmp_path: Path) -> None:
    known = verdict(RACE).findings[0]
    stale = Finding(known.what, known.places, known.functions)
    with pytest.raises(typer.Exit):
        sanitizer.write(record(Run(ETAP, "racecheck", "error", 1.0, [stale])), tmp_path)
    sanitizer.again(tmp_path / "sanitizer-h100.json")
    assert Record.load(tmp_path / "sanitizer-h100.json").good


def test_the_committed_page_is_what_its_record_and_the_explanations_say() -> None:
    results = Path(sanitizer.__file__).with_name("results")
    for path in results.glob("sanitizer-*.json"):
        kept = Record.load(path)
        for finding in (f for run in kept.runs for f in run.findings):
            why = sanitizer_pairs.explanation(finding.functions, finding.what)
            assert finding.why == why, f"{path.name}: draw it again (profiles.sanitizer page)"
        assert path.with_suffix(".md").read_text() == sanitizer.page(kept)


def test_one_variant_of_every_form() -> None:
    names = [
        "decode_etap_r16_p16_obf16_sm90a", "decode_etap_r16_p64_obf16_sm90a",
        "decode_etap_r32_p64_obf16_sm90a", "decode_etap_r64_p64_of32_sm90a", "merge_obf16_sm90a",
        "merge_of32_sm90a", "sparse_decode_etap_r16_obf16_stamps1_sm90a", MIX, "merge_obf16_sm100a",
        "mha_fwd_d128_dbf16_sm90a", "mha_fwd_d192_dbf16_split_sm90a",
    ]  # fmt: skip
    *attention, helper = sanitizer.chosen(names, "sm_90a")
    assert helper == "merge_obf16_sm90a"  # what a limit cuts off
    assert set(attention) == {
        "decode_etap_r16_p64_obf16_sm90a", "decode_etap_r64_p64_of32_sm90a", MIX,
        "mha_fwd_d128_dbf16_sm90a", "mha_fwd_d192_dbf16_split_sm90a",
    }  # fmt: skip


def test_runs_end_in_time_and_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a process in the tool's place: one is clean, one hangs, one does not begin."""
    text = "echo RIGHT: x; echo '========= ERROR SUMMARY: 0 errors'"
    said = {"memcheck": ["bash", "-c", text], "synccheck": ["sleep", "60"]}
    monkeypatch.setattr(sanitizer, "command", lambda tool, variant: said[tool])
    todo = [("memcheck", ETAP), ("synccheck", ETAP)]
    runs = sanitizer.run_all(todo, jobs=2, each=1.0, limit=30, logs=tmp_path)
    assert {run.tool: run.state for run in runs} == {"memcheck": "ok", "synccheck": "time"}
    assert (tmp_path / f"{ETAP}.memcheck.log").read_text().startswith("RIGHT")
    assert not sanitizer.run_all(todo, jobs=1, each=1.0, limit=5, logs=tmp_path)


def test_the_part_of_gpu_run() -> None:
    script = Path(sanitizer.__file__).with_name("gpu_run.sh")
    listed = subprocess.run(["bash", script], capture_output=True, text=True, check=False).stdout
    assert "sanitizer[:ARG,ARG...]" in listed

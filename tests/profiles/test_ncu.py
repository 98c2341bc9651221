"""``make profile``: what ncu wrote on an H200, read back; arguments for every variant."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from codegen import artifacts
from codegen.artifacts import Record
from codegen.precompile import Report
from dsl_kernels.spec import VariantSpec
from profiles import ncu
from snapmla.runtime import variants
from snapmla.testing.workloads import samples

REPORT = (artifacts.ROOT / "tests" / "data" / "ncu_h200.csv").read_text()


def test_table_of_a_real_report() -> None:
    rows = dict(ncu.table(ncu.parse(REPORT)))
    assert rows["duration"] == "10.2 us"
    assert rows["tensor pipe"] == "1.5 % of peak" and rows["DRAM"] == "2.2 % of peak"
    assert rows["registers"] == "128" and rows["grid"] == "132" and rows["block"] == "512"
    assert rows["shared memory"] == "0 static + 222,208 dynamic B"
    assert rows["stalls, % of warp samples"] == (
        "long scoreboard 29.1, wait 21.7, barrier 13.2, short scoreboard 5.6, no instruction 4.6"
    )


def test_page_has_a_column_for_each_variant() -> None:
    rows = ncu.table(ncu.parse(REPORT))
    page = ncu.markdown({"a": rows, "b": rows[:1]}, ncu.Sizes(2, 64, 1), "A card").splitlines()
    assert page[2:4] == ["A card.", "Batch 2, 64 tokens, s_q 1; clocks as they are."]
    assert page[4].endswith("`python -m profiles.ncu --batch 2 --tokens 64 --s-q 1 a b`")
    assert page[6:9] == ["| | a | b |", "|---|---|---|", "| duration | 10.2 us | 10.2 us |"]
    assert page[-1].endswith(" no instruction 4.6 |  |")


def test_stall_shares_count_every_sample_once() -> None:
    found = ncu.stalls(ncu.parse(REPORT))
    selected = ncu.parse(REPORT)[ncu.STALL.format("selected")][1]
    assert isinstance(selected, float)
    total = sum(share for _, share in found)
    assert 0.5 < total < 1 and "selected" not in dict(found)
    assert (1 - total) == pytest.approx(selected / 8.92, rel=0.01)


def test_clock_and_rates() -> None:
    found = {
        "gpu__time_duration.sum": ("ns", 1000.0),
        "sm__cycles_elapsed.max": ("cycle", 1755.0),
        "dram__bytes_read.sum": ("byte", 4.0e6),
    }
    assert dict(ncu.table(found)) == {
        "duration": "1.0 us, 1,755 cycles",
        "SM clock": "1755 MHz",
        "DRAM read": "4.0 MB, 4.00 TB/s",
    }


@pytest.mark.parametrize(
    "report", ["", "==ERROR== ERR_NVGPUCTRPERM - no permission\n", '"ID","a"\n"","ns"\n']
)
def test_no_kernel_is_an_error(report: str) -> None:
    with pytest.raises(ValueError, match="no kernel was profiled") as caught:
        ncu.parse(report)
    assert ("ERR_NVGPUCTRPERM" in str(caught.value)) is ("ERR" in report)


@pytest.mark.parametrize(("batch", "tiles", "parts"), [(1, 1, 132), (32, 256, 132), (3, 10, 4)])
def test_even_split_covers_every_tile_once(batch: int, tiles: int, parts: int) -> None:
    items, part_begin, split_begin, slots = samples.split_evenly(batch, 5, tiles, parts)
    covered = [(b, t) for b, first, last, *_ in items for t in range(first, last)]
    assert sorted(covered) == [(b, t) for b in range(batch) for t in range(tiles)]
    assert len(part_begin) == parts + 1 and part_begin[-1] == len(items)
    loads = [
        sum(last - first for _, first, last, *_ in items[part_begin[p] : part_begin[p + 1]])
        for p in range(parts)
    ]
    assert max(loads) - min(loads) <= 1
    for b in range(batch):
        mine = [item for item in items if item[0] == b]
        wanted = list(range(split_begin[b], split_begin[b + 1])) if len(mine) > 1 else [-1]
        assert [item[3] for item in sorted(mine, key=lambda item: item[1])] == wanted
    assert slots == max(1, split_begin[-1])
    assert all(item[4:6] == [5 * item[0], 5 * item[0] + 5] for item in items)


def test_script_passes_the_sizes_and_opens_the_profiler(tmp_path: Path) -> None:
    """The generated script, with a stand-in for ncu that writes down how it is called."""
    fake = tmp_path / "ncu"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$0.called"\n')
    fake.chmod(0o755)
    sizes = ncu.Sizes(batch=2, tokens=4096, s_q=3)
    script = tmp_path / "run.sh"
    script.write_text(ncu.render.ncu_script("merge_obf16_sm90a", ["a.sum", "b"], sizes.options()))
    environment = {**os.environ, "NCU": str(fake), "PYTHON": "python"}
    subprocess.run(["bash", script, tmp_path / "r.csv"], check=True, env=environment)
    called = (tmp_path / "ncu.called").read_text().splitlines()
    after = called[called.index("python") :]
    assert after == [
        "python", "-m", "profiles.ncu", "merge_obf16_sm90a", "--workload", "--batch", "2",
        "--tokens", "4096", "--s-q", "3",
    ]  # fmt: skip
    assert "a.sum,b" in called and str(tmp_path / "r.csv") in called
    assert called[called.index("--profile-from-start") + 1] == "off"
    assert subprocess.run(["bash", script], capture_output=True, env=environment).returncode


@pytest.mark.parametrize(
    "name",
    [
        "decode_etap_r16_p32_obf16_sm90a", "decode_etap_r64_p64_obf16_sm90a",
        "merge_of32_sm90a", "append_kv_xf16_ii64_sm90a", "quantize_q_xf16_token_sm90a",
        "quantize_q_xf32_token_head_sm90a", "fetch_dequant_xbf16_pages_sm90a",
        "fetch_dequant_xf16_indices_sm90a", "fetch_dequant_xbf16_ragged_sm90a",
        "fetch_dequant_xbf16_indices_ii64_sm90a", "merge_states_xf32_obf16_list_sm90a",
        "merge_states_xbf16_of32_stack_sm90a", "append_kv_xbf16_ii64_interleaved_rms_csbf16_sm90a",
        "quantize_q_xbf16_token_head_interleaved_sm90a", "append_kv_xbf16_ii32_kvbf16_sm90a",
        "fetch_dequant_xf16_pages_kvf16_sm90a", "dense_decode_split_r16_p16_df16_sm90a",
    ],
)  # fmt: skip
def test_workload_is_a_legal_call(built: Report, name: str) -> None:
    """The object's own argument checks accept it, and it runs (on the software GPU)."""
    spec = VariantSpec.from_name(name)
    known = ncu.arguments(spec, ncu.Sizes(batch=2, tokens=100, s_q=2), "cpu", parts=3)
    variants.kernel(spec, "cpu")(*(known[a["name"]] for a in built.records[name].arguments))
    results = [known[n] for n in ("out", "out_nope", "content", "kv") if n in known]
    assert results and any(result.to(torch.float32).abs().sum() > 0 for result in results)


def test_every_argument_has_a_value(built: Report) -> None:
    for name, record in built.records.items():
        spec = VariantSpec.from_name(name)
        device = "cpu" if spec.op == "plan_decode" else "meta"  # whose plan a kernel makes
        known = ncu.arguments(spec, ncu.Sizes(batch=1, tokens=1, s_q=1), device, parts=1)
        for argument in record.arguments:
            assert known[argument["name"]] is not None


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        ["make", "-s", "profile", "VARIANT=merge_obf16_sm90a", f"PY={ncu.sys.executable}"],
        capture_output=True, text=True, cwd=artifacts.ROOT,
    )  # fmt: skip
    assert done.returncode and done.stderr.startswith("profiling needs a CUDA device")


def test_records_carry_what_the_workload_reads(built: Report, variant_dir: Path) -> None:
    record = Record.read(variant_dir / "merge_obf16_sm90a.json")
    assert record is not None
    assert [a["name"] for a in record.arguments] == [
        "o_accum", "lse_accum", "split_begin", "units", "out", "lse", "lse_factor", "empty_lse",
    ]  # fmt: skip

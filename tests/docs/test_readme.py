"""The README is true: its example runs as written, its figures come from committed tables."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.needs import needs_compiler

README = (ROOT / "README.md").read_text()
ORDER = ["Numbers", "Install", "Example", "Format", "API", "Variants", "Limits"]
CHECK = """
assert out.shape == (b, s_q, h, 512) and out.dtype == torch.bfloat16
assert lse.shape == (b, h, s_q) and lse.dtype == torch.float32
from snapmla.testing import selfcheck
errors = selfcheck.decode_errors(out, lse, query, cache, block_table, cache_seqlens, 192**-0.5)
assert errors.right, str(errors)
print("right")
"""


def example() -> str:
    """The first Python block of the README, as it stands there."""
    found = re.search(r"```python\n(.*?)```", README, flags=re.S)
    assert found is not None
    return found[1]


@needs_compiler
def test_example_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the software GPU, in seconds, and right; a first run compiles the kernels it needs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", example() + CHECK], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "right\n"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 300


def test_example_is_short() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 18 and max(map(len, lines)) <= 100


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


def test_sections_in_the_order_a_user_needs() -> None:
    headings = re.findall(r"^## (.+)$", README, flags=re.M)
    assert headings[: len(ORDER)] == ORDER


def test_figures_come_from_the_table() -> None:
    """Times, roofs and ratios in the README are the table's."""
    report = json.loads((ROOT / "profiles/results/h200-table.json").read_text())
    assert f"`{report['commit'][:7]}`" in README, (
        "run `python docs/render.py`: there is a new table"
    )
    us = {(r["shape"], r["backend"]): r for r in report["rows"]}
    rows = re.findall(
        r"^\| (\d+) × (\d+), (\d+), (\d+) \| ([\d.]+) \((\d+) %\) \| ([\d.]+) \(([\d.]+)×\) \| "
        r"([\d.]+) \(([\d.]+)×\) \|$", README, flags=re.M,
    )  # fmt: skip
    assert len(rows) >= 6
    for b, length, h, q, ours, share, bf16, bf16_ratio, fp8, fp8_ratio in rows:
        shape = f"b{b}_L{length}_h{h}_q{q}"
        mine = us[shape, "snapmla"]
        assert f"{mine['us']:.1f}" == ours
        assert f"{100 * mine['roof_us'] / mine['us']:.0f}" == share
        for peer, time_us, ratio in (
            ("flashmla_bf16", bf16, bf16_ratio),
            ("flashmla_fp8", fp8, fp8_ratio),
        ):
            assert f"{us[shape, peer]['us']:.1f}" == time_us
            assert f"{us[shape, peer]['us'] / mine['us']:.2f}" == ratio


def test_the_lower_ratio_stands_first() -> None:
    """Of rows alone and in turn, from the table of rows alone that the README links."""
    name = re.search(
        r"in\s+turn, \d+ shapes\s+\(\[table\]\(profiles/results/([\w-]+)\.md\)", README
    )
    assert name is not None
    report = json.loads((ROOT / f"profiles/results/{name[1]}.json").read_text())
    rows = {(r["shape"], r["backend"]): r for r in report["rows"] if r.get("alone_us")}
    peers = {"FP8": "flashmla_fp8", "BF16": "flashmla_bf16"}
    found = re.findall(
        r"(FP8|BF16)(?: \(one scale per\s+tensor\))? kernel\s+([\d.]+)×\s+\(([\d.]+)×\)\s+"
        r"(alone|in\s+turn)\s+and\s+([\d.]+)×", README,
    )  # fmt: skip
    assert found
    for label, low, least, first, high in found:
        key = "alone_us" if first == "alone" else "us"
        each = [r[key] / rows[shape, "snapmla"][key] for (shape, who), r in rows.items()
                if who == peers[label]]  # fmt: skip
        assert float(low) <= float(high) and f"{min(each):.2f}" == least
        assert min(each) <= float(low) <= max(each)


def test_range_of_the_roof() -> None:
    """The sentence on 512K tokens and more."""
    report = json.loads((ROOT / "profiles/results/h200-table.json").read_text())
    found = re.search(r"(\d+) to (\d+) % of the\s+card's roof", README)
    assert found is not None
    shares = []
    for row in report["rows"]:
        shape = re.fullmatch(r"b(\d+)_L(\d+)_h\d+_q\d+", row["shape"])
        if row["backend"] == "snapmla" and shape and int(shape[1]) * int(shape[2]) >= 1 << 19:
            shares.append(round(100 * row["roof_us"] / row["us"]))
    assert (min(shares), max(shares)) == (int(found[1]), int(found[2]))


def test_layout_table_is_the_code() -> None:
    from snapmla.cache import layouts

    rows = re.findall(r"^\| `(\w+)` \| (?:three|one byte|rows)", README, flags=re.M)
    assert rows == list(layouts.LAYOUTS)


def test_api_table_names_what_there_is() -> None:
    import snapmla

    table = README.split("## API")[1].split("## Variants")[0]
    for name in re.findall(r"^\| `(\w+)` \|", table, flags=re.M):
        assert hasattr(snapmla, name) or (ROOT / "snapmla" / f"{name}.py").is_file()
    functions = {n for n in snapmla.__all__ if n.islower() and not n.startswith("__")}
    missing = functions - set(re.findall(r"`(\w+)`", table))
    assert not missing, f"the README's API table lacks {missing}"

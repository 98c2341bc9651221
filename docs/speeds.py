"""The tables of ``performance.md``: our speed beside the best peer, from committed results.

A row reads one page of ``profiles/results``, or its JSON, and sums up the ratios that it finds
there: the time of the fastest peer of a shape divided by ours, of one run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "profiles" / "results"
HEAD = (
    "| what | best peer | timed | shapes | mean | least | most | card, results |",
    "|---|---|---|---|---|---|---|---|",
)
ALONE, TURN, CALLS, ENGINE = "alone", "in turn", "call by call", "an engine each"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
Ratios = Callable[[Path], list[float]]


class Unread(Exception):
    """A result has nothing where a row looks for ratios; says which and where."""


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield header and rows of each table of a Markdown page."""
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.M):
        lines = [[c.strip() for c in line.strip().strip("|").split("|")]
                 for line in block.splitlines()]  # fmt: skip
        if len(lines) > 2 and all(set(cell) <= set("-: ") for cell in lines[1]):
            yield lines[0], lines[2:]


def cells(*columns: str, behind: Sequence[str] = (), rows: str = "") -> Ratios:
    """Read the least ratio of each row of the first table that has the columns.

    Args:
        columns: names of columns that hold ratios.
        behind: names of columns; the ratio is in the next column whose name begins with "ratio".
        rows: pattern that a row, written as ``a | b | c``, has to match.
    """

    def read(path: Path) -> list[float]:
        for header, lines in tables(path.read_text("utf-8")):
            if not {*columns, *behind} <= set(header):
                continue
            places = [header.index(name) for name in columns]
            for name in behind:
                start = header.index(name)
                places.append(next(i for i in range(start, len(header))
                                   if header[i].startswith("ratio")))  # fmt: skip
            kept = [line for line in lines if re.search(rows, " | ".join(line))]
            found = [[NUMBER.match(line[i]) for i in places] for line in kept]
            return [min(float(cell[0]) for cell in line if cell) for line in found if any(line)]
        return []

    return read


def timed(key: str, ours: str, *peers: str, shapes: str = "") -> Ratios:
    """Read a table's JSON: the fastest peer's time of a shape by ours, of rows that passed.

    Args:
        key: ``us`` (in turn) or ``alone_us``.
        ours, peers: backends.
        shapes: pattern that a shape has to match.
    """

    def read(path: Path) -> list[float]:
        found: dict[str, dict[str, float]] = {}
        for row in json.loads(path.with_suffix(".json").read_text("utf-8"))["rows"]:
            good = row["status"] == "ok" and row["check_ok"] and row.get(key)
            if good and re.search(shapes, row["shape"]):
                found.setdefault(row["shape"], {})[row["backend"]] = row[key]
        both = [us for us in found.values() if ours in us and us.keys() & set(peers)]
        return [min(us[p] for p in peers if p in us) / us[ours] for us in both]

    return read


def pairs(column: str, ours: str, peer: str) -> Ratios:
    """Read a table with a row for each contender (``who``): the peer's time by ours.

    Args:
        column: times; the columns in front of ``who`` say which rows belong together.
        ours, peer: what ``who`` says.
    """

    def read(path: Path) -> list[float]:
        for header, lines in tables(path.read_text("utf-8")):
            if not {"who", column} <= set(header):
                continue
            who, at = header.index("who"), header.index(column)
            us = {(tuple(line[:who]), line[who]): float(line[at]) for line in lines}
            return [us[key, peer] / time for (key, name), time in us.items()
                    if name == ours and (key, peer) in us]  # fmt: skip
        return []

    return read


def said(pattern: str) -> Ratios:
    """Read the ratios that a page says in words: the group of each match."""
    return lambda path: [float(x) for x in re.findall(pattern, path.read_text("utf-8"))]


def divided(peer: str, ours: str) -> Ratios:
    """Read the figures behind two rows of a table of two columns and more; the first by ours."""

    def read(path: Path) -> list[float]:
        times = {line[0]: line[1] for _, lines in tables(path.read_text("utf-8")) for line in lines}
        return [float(times[peer]) / float(times[ours])] if {peer, ours} <= times.keys() else []

    return read


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        what: calls that are timed.
        peer: the fastest of whom they are timed beside.
        how: how the contenders share the card; ``performance.md`` explains the words.
        page: result, its path below ``profiles/results`` without a suffix.
        ratios: reads it.
    """

    what: str
    peer: str
    how: str
    page: str
    ratios: Ratios

    def line(self) -> str:
        """Make the row of Markdown.  Raises Unread where the page has no such ratio."""
        path = RESULTS / f"{self.page}.md"
        found = self.ratios(path)
        card = re.search(r"NVIDIA (\w+)", path.read_text("utf-8"))
        if not found or card is None:
            raise Unread(f"profiles/results/{self.page}.md: no ratio for {self.what!r}")
        mean = math.exp(sum(map(math.log, found)) / len(found))
        link = f"{card[1]}, [{path.stem}](../profiles/results/{self.page}.md)"
        figures = f"{len(found)} | **{mean:.2f}** | {min(found):.2f} | {max(found):.2f}"
        return f"| {self.what} | {self.peer} | {self.how} | {figures} | {link} |"


FLASHMLA, FA3, COPY = "FlashMLA", "FlashAttention-3", "a copy of as many bytes"
DEEPGEMM, VLLM = "DeepGEMM", "vLLM's operators"
FP8 = timed("us", "snapmla", "flashmla_fp8", "flashmla_bf16", "fa3")
BF16 = timed("us", "snapmla:cache=bf16", "flashmla_bf16", "fa3", "etap")
SHORT, LONG = r"x (?:5000|8192|12000|16384)\b", r"x (?:32768|33000|100000|131072|300000)\b"
AREAS: dict[str, tuple[Row, ...]] = {
    "dense decode": (
        Row("FP8 cache", "FlashMLA FP8", ALONE, "power-alone",
            timed("alone_us", "snapmla", "flashmla_fp8", "flashmla_bf16")),
        Row("FP8 cache", "FlashMLA FP8", TURN, "h200-table", FP8),
        Row("FP8 cache", "FlashMLA FP8", TURN, "h100-table", FP8),
        Row("BF16 cache", f"{FLASHMLA}, {FA3}, ETAP", TURN, "dense-table", BF16),
        Row("BF16 cache, FlashMLA's own shapes", f"{FLASHMLA}, {FA3}", TURN, "flashmla-dense",
            BF16),
    ),
    "sparse decode": (
        Row("`fp8_ds_mla` (656 bytes)", FLASHMLA, ALONE, "sparse-cost-h200",
            cells("ratio alone", rows=r"\| rows \|")),
        Row("`fp8_ds_mla`", FLASHMLA, TURN, "sparse-cost-h200", cells(behind=["rows"])),
        Row("`fp8_ds_mla`", FLASHMLA, TURN, "sparse-cost-h100", cells(behind=["rows"])),
        Row("`fp8` (644 bytes), FlashMLA over its 656", FLASHMLA, ALONE, "sparse-cost-h200",
            cells("ratio alone", rows=r"\| native \|")),
        Row("`fp8_v4`, two lists", FLASHMLA, ALONE, "sparse_v4_cost",
            cells("ratio alone", rows=r"\| snapmla \|")),
        Row("`fp8_v4`, two lists", FLASHMLA, TURN, "sparse_v4_cost", cells(behind=["snapmla"])),
        Row("BF16 rows", f"{FLASHMLA}, {FA3}", TURN, "sparse_rows_cost",
            cells(behind=["FA3 µs", "FlashMLA µs"])),
    ),
    "indexer": (
        Row("top-k, rows of up to 16K scores", VLLM, TURN, "dsa_cost", cells("vLLM", rows=SHORT)),
        Row("top-k, rows of 32K scores and more", VLLM, TURN, "dsa_cost", cells("vLLM", rows=LONG)),
        Row("top-k, rows of 8K to 128K scores", VLLM, TURN, "dsa_cost-h100", cells("ratio")),
        Row("index logits, one query token", DEEPGEMM, TURN, "index_cost",
            cells("ratio", rows=r", \d+ × 1 × ")),
        Row("index logits, two to four", DEEPGEMM, TURN, "index_cost",
            cells("ratio", rows=r", \d+ × [234] × ")),
        Row("index logits, prompts", DEEPGEMM, TURN, "index_cost", cells("ratio", rows="prompt")),
        Row("both, of exact width", f"{DEEPGEMM} and vLLM", TURN, "dsa_step_cost", cells("ratio")),
        Row("both, logits as wide as an engine's", f"{DEEPGEMM} and vLLM", TURN,
            "dsa_step_cost-wide", cells("ratio", rows=" of 163840")),
    ),
    "prefill": (
        Row("dense, long prompts", FA3, ALONE, "mha_alone",
            cells("ratio alone", rows=r"^2 x .*\| snapmla \|")),
        Row("dense, 192/128 channels", f"{FA3}, cuDNN", TURN, "mha_cost",
            cells(behind=["FA3 µs", "cuDNN µs"], rows=r"\| 192 \|")),
        Row("dense, 128/128", f"{FA3}, cuDNN", TURN, "mha_cost",
            cells(behind=["FA3 µs", "cuDNN µs"], rows=r"\| 128 \| (?:causal|full)")),
        Row("dense, 256/256", f"{FA3}, cuDNN", TURN, "mha_cost",
            cells(behind=["FA3 µs", "cuDNN µs"], rows=r"\| 256 \|")),
        Row("a chunk over a cached prefix, `kv_b_proj` included", FA3, TURN, "mha_cost",
            cells("ratio (gate)")),
        Row("gradients, 192/128", "FlashAttention-4, cuDNN", TURN, "mha_bwd_cost",
            cells("to the faster", rows=r"\| 192 \|")),
        Row("gradients, 128/128", "FlashAttention-4", TURN, "mha_bwd_cost",
            cells("to the faster", rows=r"\| 128 \| (?:causal|full)")),
        Row("sparse, BF16 rows", FLASHMLA, ALONE, "sparse_prefill_alone",
            cells("ratio alone", rows=r"\| snapmla \|")),
        Row("sparse, BF16 rows", FLASHMLA, TURN, "sparse_prefill_cost", cells("ratio")),
        Row("sparse, BF16 rows", FLASHMLA, TURN, "sparse_prefill_cost-h100", cells("ratio")),
        Row("sparse, `fp8` cache; FlashMLA over BF16 rows", FLASHMLA, TURN,
            "sparse_prefill_cache_cost", cells(behind=["FlashMLA BF16 µs"])),
    ),
    "step": (
        Row("`append_kv`, `fp8_ds_mla`", VLLM, TURN, "append_cost", pairs("µs", "ours", "vLLM")),
        Row("`append_kv`, with RoPE too", COPY, TURN, "helpers",
            timed("us", "snapmla", "torch_copy", shapes="append_kv")),
        Row("`quantize_q`, with RoPE too", COPY, TURN, "helpers",
            timed("us", "snapmla", "torch_copy", shapes="quantize_q")),
        Row("`fetch_dequant`", COPY, TURN, "helpers",
            timed("us", "snapmla", "torch_copy", shapes="fetch_dequant")),
        Row("`merge_states`", COPY, TURN, "helpers",
            timed("us", "snapmla", "torch_copy", shapes="merge_states")),
        Row("host time of a planned call by FlashMLA's name", FLASHMLA, CALLS, "host_time",
            divided("FlashMLA's own operator, planned",
                    "FlashMLA's name, a planned object, results given (2 launches)")),
        Row("attention of 61 layers of DeepSeek-V3.2", f"{VLLM}, DeepGEMM, FlashMLA", TURN,
            "v32_step_cost", cells("vLLM / today")),
        Row("a whole step in vLLM, dense, 27 layers", "FlashMLA FP8", ENGINE, "engine/engine",
            said(r"FP8 [\d.]+ \(([\d.]+) x\)")),
        Row("a whole step in vLLM, sparse, 27 layers", FLASHMLA, ENGINE, "engine/engine-sparse",
            said(r"ours [\d.]+ ms, its [\d.]+ \(([\d.]+) x\)")),
    ),
}  # fmt: skip


def blocks() -> dict[str, str]:
    """Make the tables by marker.  Raises Unread."""
    return {
        f"speed of {area}": "\n".join([*HEAD, *(row.line() for row in rows)])
        for area, rows in AREAS.items()
    }

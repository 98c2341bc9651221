"""``snapmla`` (``python -m snapmla``): what an installation can do, what a model needs, and a
dumped call once more."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from dsl_kernels.families.formats import FORMATS
from snapmla import checks, dispatch, dump, info, repro
from snapmla.errors import SnapMLAError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)
console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)


@app.command("info")
def info_command(
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Card, driver, versions, variants, and what is missing.

    Exit status 1 if a GPU that is here cannot decode or, without a GPU, neither can the CPU.
    """
    try:
        found = info.collect()
    except ValueError as error:  # a variable without meaning
        print(error, file=sys.stderr)
        raise typer.Exit(1) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(found) | {"good": found.good}, indent=1))
    else:
        _show(found)
    raise typer.Exit(0 if found.good else 1)


def _show(found: info.Info) -> None:
    """The report as tables."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    package, versions = found.package, found.versions
    commit = f", commit {package['commit'][:12]}" if package["commit"] else ""
    table.add_row("snapmla", f"{package['version']}{commit}, {package['kind']}")
    table.add_row("", package["directory"])
    for name, version in versions.items():
        table.add_row(name, version or "not installed")
    table.add_row("driver", f"CUDA {found.driver}" if found.driver else "none")
    for card, decodes in zip(found.cards, found.decodes, strict=True):
        verdict = "decodes" if decodes else "CANNOT DECODE"
        table.add_row("GPU", f"{card.name}, {card.capability}: {verdict}")
    if not found.cards:
        runs = "runs CPU tensors" if found.software_gpu else "cannot run here"
        table.add_row("GPU", f"none; the software GPU {runs}")
    for name, value in found.settings.items():
        table.add_row(name, value)
    console.print(table)
    console.print("\nvariants, in the order of the search:")
    for folder in found.folders:
        total = sum(folder.variants.values())
        there = f"{total} variants" if folder.refused is None else "not used"
        console.print(f"  {folder.what}: {there}\n    {folder.path}")
        for name, count in sorted(folder.variants.items()):
            console.print(f"      {name:28} {count}")
    if found.missing:
        console.print("\nmissing:")
    for text in found.missing:
        console.print(f"  {text}")
    if found.absent:
        console.print("\nnot built here, so that calls of them are refused:")
    for text in found.absent:
        console.print(f"  {text}")


_Numbers = list[int] | None
_FORMATS = (
    f"of the cache: {', '.join(dispatch.DENSE_FORMATS)}; with --sparse "
    f"{', '.join(dispatch.SPARSE_FORMATS)}; of a --config that names none what engines keep of "
    "that model, else fp8"
)


@app.command("needs")
def needs_command(
    heads: Annotated[list[int], typer.Option(help="query heads on one GPU (may be repeated)")],
    page: Annotated[_Numbers, typer.Option(help="tokens of a page (may be repeated): 64")] = None,
    s_q: Annotated[_Numbers, typer.Option(help="query tokens (may be repeated): 1")] = None,
    dtype: Annotated[str | None, typer.Option(help=_FORMATS)] = None,
    kv_heads: Annotated[int, typer.Option(help="of a 16-bit cache")] = 1,
    accuracy: Annotated[
        str,
        typer.Option(help="of an FP8 cache: standard or high; of fp8_ds_mla with --sparse fast"),
    ] = "standard",
    out: Annotated[str, typer.Option(help="results over an FP8 cache: bf16 or f32")] = "bf16",
    rows: Annotated[str, typer.Option(help="queries and new tokens: bf16, f16 or f32")] = "bf16",
    index: Annotated[
        list[str] | None, typer.Option(help="slots: i32 or i64 (both; with --rope i64)")
    ] = None,
    rope: Annotated[
        str, typer.Option(help="neox or interleaved: rope_append_kv and rope_quantize_q")
    ] = dispatch.PLAIN,
    table: Annotated[str, typer.Option(help="cos_sin_cache: f32, bf16 or f16")] = "f32",
    norm: Annotated[bool, typer.Option("--norm", help="rope_append_kv normalises")] = False,
    prefill: Annotated[bool, typer.Option("--prefill", help="and fetch_dequant")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="and merge_states")] = False,
    flash_mla: Annotated[bool, typer.Option("--flash-mla", help="and FlashMLA's names")] = False,
    arch: Annotated[str, typer.Option(help="sm_90a or sm_100a")] = "sm_90a",
    card: Annotated[str | None, typer.Option(help="as snapmla.explain knows it: H200")] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="decode(..., indices=): DeepSeek V3.2, V4, GLM-5")
    ] = False,
    indexer: Annotated[
        bool | None, typer.Option(help="snapmla.dsa chooses the tokens (as --sparse)")
    ] = None,
    index_heads: Annotated[
        _Numbers, typer.Option(help="of the indexer (as --config says, or all that there are)")
    ] = None,
    index_rope: Annotated[
        str, typer.Option(help="neox or interleaved: append_index_k normalises and rotates")
    ] = dispatch.PLAIN,
    hadamard: Annotated[
        bool, typer.Option("--hadamard", help="append_index_k transforms keys, for SGLang")
    ] = False,
    index_fetch: Annotated[bool, typer.Option("--index-fetch", help="and fetch_index_k")] = False,
    mha: Annotated[bool, typer.Option("--mha", help="and mha_prefill")] = False,
    split_keys: Annotated[
        bool, typer.Option("--split-keys", help="mha_prefill(..., split_keys=True), too")
    ] = False,
    head_dim: Annotated[
        _Numbers,
        typer.Option(help="of mha_prefill's q: 192, 128 or 256 (as --config says, or 192)"),
    ] = None,
    sparse_prefill: Annotated[
        bool, typer.Option("--sparse-prefill", help="and sparse_prefill")
    ] = False,
    config: Annotated[
        Path | None, typer.Option(help="a model's config.json: sparse if it has index_topk")
    ] = None,
    as_filter: Annotated[
        bool, typer.Option("--filter", help="on one line, for make's FILTER=")
    ] = False,
) -> None:
    """Print the kernels that a model needs, one a line.

    make wheels FILTER="$(snapmla needs --heads 16 --filter)" builds wheels of these and no others.
    Exit status 2 if there is no such model.
    """
    try:
        told = dispatch.Facts() if config is None else dispatch.facts_of(_json(config))
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    options = {
        "index_heads": tuple(index_heads or told.index_heads),
        "head_dims": tuple(head_dim or told.head_dims),
    }
    try:
        model = dispatch.Model(
            tuple(heads), tuple(s_q or (1,)), tuple(page or (64,)),
            dtype or told.dtype or dispatch.Model.dtype, kv_heads, accuracy, out, rows,
            tuple(index or (dispatch.INDICES if rope == dispatch.PLAIN else ("i64",))), rope,
            table, norm, prefill, merge, flash_mla, arch, card, sparse or told.sparse, indexer,
            index_rope=index_rope, hadamard=hadamard, index_fetch=index_fetch, mha=mha,
            split_keys=split_keys, sparse_prefill=sparse_prefill,
            **{name: value for name, value in options.items() if value},
        )  # fmt: skip
        names = [spec.name for spec in dispatch.needs(model)]
    except (SnapMLAError, ValueError) as error:
        print(_by_option(error), file=sys.stderr)
        raise typer.Exit(2) from None
    if dtype is None and told.dtype is not None:
        print(_kept(told.dtype), file=sys.stderr)
    print(",".join(names) if as_filter else "\n".join(names))


# Arguments of the library that an option here has another name for.
_OPTIONS = {"num_heads": "heads", "page_size": "page", "num_kv_heads": "kv-heads"}


def _by_option(error: Exception) -> Exception:
    """The same error with its argument called as the command's option."""
    words = inspect.signature(needs_command).parameters
    names = {word: word.replace("_", "-") for word in words} | _OPTIONS
    return checks.renamed(error, {name: f"--{option}" for name, option in names.items()})


def _kept(dtype: str) -> str:
    """Sentence on the format that a model's engines keep."""
    kept = FORMATS[dtype].token_bytes
    own = FORMATS[dispatch.Model.dtype]
    return (
        f"kernels over {dtype}, {kept} bytes a token, as vLLM and SGLang keep this model's cache "
        f"(--dtype {own.name} names those over snapmla's own {own.token_bytes} bytes)"
    )


def _json(path: Path) -> object:
    """What a file holds.  Raises ValueError of one that cannot be read."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


@app.command("repro")
def repro_command(
    file: Annotated[Path, typer.Argument(help="what SNAPMLA_DUMP wrote")],
    software: Annotated[
        bool, typer.Option("--software", help="on the software GPU, even if there is a GPU")
    ] = False,
    reference: Annotated[bool, typer.Option(help="compare a decode with fp64")] = True,
    save: Annotated[Path | None, typer.Option(help="write the results there (torch.save)")] = None,
) -> None:
    """Run a dumped call again and say what is wrong with it.

    Exit status 1 if it fails, if the hazard check of the software GPU finds anything, or if results
    differ from those in the file or from the reference; 2 if it cannot be run.
    """
    where = "cuda" if torch.cuda.is_available() and not software else "cpu"
    try:
        call, outcome = repro.repeat(file, where, reference=reference)
    except (dump.DumpError, SnapMLAError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    console.print(f"{call.variant}, {', '.join(f'{k} {v}' for k, v in call.facts.items())}")
    for text in call.notes:
        console.print(text)
    if call.error:
        console.print(f"then: {call.error.strip().splitlines()[-1]}")
    place = "the GPU" if where == "cuda" else "the software GPU"
    console.print(f"now, on {place}: {_verdict(outcome)}")
    for text in (*outcome.hazards, *outcome.differs):
        console.print(text)
    if outcome.compared and not outcome.differs:
        console.print("results: the bits in the file")
    if outcome.reference is not None:
        verdict = "right" if outcome.right else "WRONG"
        console.print(f"against the reference: {verdict}, {outcome.reference}")
    if save is not None:
        torch.save({name: value.cpu() for name, value in outcome.results.items()}, save)
    raise typer.Exit(0 if outcome.good else 1)


def _verdict(outcome: repro.Outcome) -> str:
    """Verdict on the call's end, with the number of NaN among results."""
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {outcome.error}"
    floats = {k: v for k, v in outcome.results.items() if v.is_floating_point()}
    nans = {name: int(value.isnan().sum()) for name, value in floats.items()}
    bad = [f"{count} NaN in {name}" for name, count in nans.items() if count]
    return f"returned{', ' + ', '.join(bad) if bad else ''}, {len(outcome.hazards)} hazards"


if __name__ == "__main__":
    app(prog_name="snapmla")

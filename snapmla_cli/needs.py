"""``snapmla needs``: the kernels that a model's calls load."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dsl_kernels.formats.registered import DEFAULT, FORMATS

_Numbers = list[int] | None
UNROTATED = "applied"  # as ``snapmla.rank.PLAIN``, which would import torch
DENSE, SPARSE = (
    tuple(FORMATS),
    tuple(name for name in FORMATS if name != "f16"),
)  # as the dispatcher has them
_FORMATS = (
    f"of the cache: {', '.join(DENSE)}; with --sparse {', '.join(SPARSE)}; of a --config that "
    f"names none what engines keep of that model, else {DEFAULT}"
)


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
    ] = UNROTATED,
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
    ] = UNROTATED,
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
    from snapmla import rank
    from snapmla.errors import SnapMLAError

    try:
        told = rank.Facts() if config is None else rank.facts_of(_json(config))
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    options = {
        "index_heads": tuple(index_heads or told.index_heads),
        "head_dims": tuple(head_dim or told.head_dims),
    }
    try:
        model = rank.Model(
            tuple(heads), tuple(s_q or (1,)), tuple(page or (64,)),
            dtype or told.dtype or rank.Model.dtype, kv_heads, accuracy, out, rows,
            tuple(index or (rank.INDICES if rope == rank.PLAIN else ("i64",))), rope,
            table, norm, prefill, merge, flash_mla, arch, card, sparse or told.sparse, indexer,
            index_rope=index_rope, hadamard=hadamard, index_fetch=index_fetch, mha=mha,
            split_keys=split_keys, sparse_prefill=sparse_prefill,
            **{name: value for name, value in options.items() if value},
        )  # fmt: skip
        names = [spec.name for spec in rank.needs(model)]
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
    from snapmla import checks

    words = inspect.signature(needs_command).parameters
    names = {word: word.replace("_", "-") for word in words} | _OPTIONS
    return checks.renamed(error, {name: f"--{option}" for name, option in names.items()})


def _kept(dtype: str) -> str:
    """Sentence on the format that a model's engines keep."""
    kept = FORMATS[dtype].token_bytes
    own = FORMATS[DEFAULT]
    return (
        f"kernels over {dtype}, {kept} bytes a token, as vLLM and SGLang keep this model's cache "
        f"(--dtype {own.name} names those over snapmla's own {own.token_bytes} bytes)"
    )


def _json(path: Path) -> object:
    """JSON of a file.  Raises ValueError of one that cannot be read."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None

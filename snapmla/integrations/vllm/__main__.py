"""``python -m snapmla.integrations.vllm``: will vLLM of this installation run on snapmla?"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from dsl_kernels.formats.ds_mla import NAME as FORMAT
from dsl_kernels.spec import VariantSpec
from snapmla.indexer import shapes
from snapmla.indexer.index_logits import unit_choices
from snapmla.integrations import findings, surfaces
from snapmla.integrations.findings import Finding, card
from snapmla.integrations.vllm import heads, refuse, surface
from snapmla.rank.calls import choose_sparse
from snapmla.rank.cards import cards
from snapmla.runtime import env
from snapmla.tools import info

app = typer.Typer(add_completion=False, help=__doc__)
GROUP = "vllm.general_plugins"
ROWS = "sm_90a"  # target of kernels for rows of 656 bytes
INSTEAD = ": elsewhere vLLM's own FLASHMLA_SPARSE serves these models"


def release() -> Finding:
    """Release of vLLM that is installed."""
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "vllm: not installed")
    known = sorted(surface.recorded())
    if found in known:
        return Finding(True, f"vllm {found}, which the backend was run with")
    releases = " and ".join(known)
    return Finding(None, f"vllm {found}: known releases are {releases}, others were not looked at")


def names() -> Iterator[Finding]:
    """Findings on the parts of vLLM that the backend uses, compared with a record of them.

    It is the record of the installed release if there is one, else the newest.
    """
    try:
        found = surface.read()
    except Exception as error:  # an import of vLLM may fail in any way
        yield Finding(False, f"vllm cannot be imported: {type(error).__name__}: {error}")
        return
    records = surface.recorded()
    known = records.get(importlib.metadata.version("vllm")) or records[max(records)]
    said = surface.differences(found, known)
    yield from (Finding(*each) for each in said)
    if not said:
        count = len(surface.RELIED) + len(surface.RELIED_SPARSE) + len(surface.REFUSED)
        yield Finding(True, f"{count} names and signatures of vllm are as known")


def not_served() -> Finding:
    """Finding that lists the layers and models of vLLM at which the backend stops the engine."""
    classes = (name.partition(":")[2].partition(".") for name in surface.REFUSED)
    layers = dict.fromkeys(kind for kind, dot, _ in classes if dot)
    return Finding(
        True,
        "refused, each in a sentence: MLA layers that are not MLAAttention with its own forward "
        f"({', '.join(layers)}): for those {refuse.INSTEAD}; models with index_topk (DSA) have a "
        "backend of their own, SNAPMLA_SPARSE (0.26: FLASHMLA_SPARSE with SNAPMLA_VLLM_SPARSE=1)",
    )


def flashmla_names() -> Finding:
    """Finding on FlashMLA's names: if those inside of vLLM become ours."""
    name, known = env.VLLM_FLASHMLA.name, " and ".join(sorted(surface.recorded()))
    if not env.VLLM_FLASHMLA.enabled():
        off = "DeepSeek-V4 and other models that call FlashMLA run on vLLM's kernels"
        return Finding(True, f"{name} is off: {off}")
    if surface.known_release() is None:
        return Finding(False, f"{name}=1 is for vllm {known}: here its kernels stay vLLM's own")
    return Finding(True, f"{name}=1: FlashMLA's names inside of vLLM are snapmla's")


def entry_point() -> Finding:
    """Finding on the plugin in vLLM's processes."""
    return findings.entry_point(GROUP, "VLLM_PLUGINS")


def needed(arch: str) -> list[VariantSpec]:
    """Kernels that the backend calls, whatever the model: those of a decode step with slots as vLLM
    counts them (int64), and the one that fetches cached prefixes, which it packs."""
    step = [spec for spec in info.needed(arch) if spec.op != "append_kv"]
    return [
        VariantSpec(op="append_kv", arch=arch, index_dtype="i64"),
        *step,
        VariantSpec(op="fetch_dequant", arch=arch, mode="ragged"),
    ]


def needed_sparse() -> list[VariantSpec]:
    """Kernels that the sparse backend and its indexer call, of any model's heads and lengths."""
    card = next(card for card in cards() if card.arch == ROWS)
    tiles = (choose_sparse(card, count, cache=FORMAT) for count in (16, 32, 64, 128))
    return [
        VariantSpec(op="append_kv", arch=ROWS, index_dtype="i64", cache_dtype=FORMAT),
        VariantSpec(op="plan_decode", arch=ROWS),
        VariantSpec(op="fetch_dequant", arch=ROWS, mode="ragged", cache_dtype=FORMAT),
        VariantSpec(op="append_index_k", arch=ROWS, index_dtype="i64"),
        *(
            VariantSpec(op="index_logits", arch=ROWS, heads=count, unit_rows=rows)
            for count in refuse.INDEX_HEADS
            for rows in unit_choices(count)
        ),
        VariantSpec(op="index_rows", arch=ROWS),
        *(VariantSpec(op="select_topk", arch=ROWS, **shape._asdict()) for shape in shapes.ALL),
        *dict.fromkeys(tiles),
    ]


def needed_flashmla() -> list[VariantSpec]:
    """Kernels behind FlashMLA's names, of the heads that vLLM's layers have or pad to."""
    return findings.behind_flashmla(heads.WRITTEN)


def kernels(sparse: bool = False, flashmla: bool = False) -> Iterator[Finding]:
    """The kernels that a backend calls: built, to be compiled at first use, or missing."""
    if flashmla:
        return findings.kernels(needed_flashmla(), ROWS)
    if sparse:
        return findings.kernels(needed_sparse(), ROWS)
    return findings.kernels(needed(findings.arch()), findings.arch())


def looks(sparse: bool, flashmla: bool) -> Iterator[Finding]:
    """Findings of ``check``, in order."""
    yield (installed := release())
    if installed.ok is not False:
        yield from names()
        yield not_served()
        yield flashmla_names()
    yield entry_point()
    yield card(ROWS, instead=INSTEAD) if sparse or flashmla else card()
    yield from kernels(sparse, flashmla)


@app.command()
def check(
    sparse: Annotated[bool, typer.Option(help="with DSA models, by SNAPMLA_SPARSE")] = False,
    flashmla: Annotated[bool, typer.Option(help="by SNAPMLA_VLLM_FLASHMLA alone")] = False,
) -> None:
    """Say whether this installation will work, and why not; exit code 1 if not."""
    findings.told(looks(sparse, flashmla))


@app.command()
def record() -> None:
    """Add the vLLM that is installed to the record (for who maintains the backend)."""
    surfaces.keep(surface.RECORD, importlib.metadata.version("vllm"), surface.read())


if __name__ == "__main__":
    app(prog_name=f"{os.path.basename(sys.executable)} -m snapmla.integrations.vllm")

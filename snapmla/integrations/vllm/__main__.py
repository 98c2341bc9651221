"""``python -m snapmla.integrations.vllm``: will vLLM of this installation run on snapmla?"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator

import typer

from dsl_kernels.spec import VariantSpec
from snapmla import info
from snapmla.errors import SnapMLAError
from snapmla.integrations import findings
from snapmla.integrations.findings import Finding, card
from snapmla.integrations.vllm import refuse, surface

app = typer.Typer(add_completion=False, help=__doc__)
GROUP = "vllm.general_plugins"
ARCH = "sm_90a"


def release() -> Finding:
    """Which vLLM is installed."""
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "vllm: not installed")
    known = sorted(surface.recorded())
    if found in known:
        return Finding(True, f"vllm {found}, which the backend was run with")
    return Finding(None, f"vllm {found}: the backend was run with {' and '.join(known)}")


def names() -> Iterator[Finding]:
    """What the backend uses of vLLM, against the record of that release or the newest."""
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
        count = len(surface.RELIED) + len(surface.REFUSED)
        yield Finding(True, f"{count} names and signatures of vllm are as known")


def not_served() -> Finding:
    """What the backend stops the engine at, of models that vLLM has."""
    classes = (name.partition(":")[2].partition(".") for name in surface.REFUSED)
    layers = dict.fromkeys(kind for kind, dot, _ in classes if dot)
    return Finding(
        True,
        "refused, each in a sentence: MLA layers that are not MLAAttention with its own forward "
        f"({', '.join(layers)}), and models with index_topk (DSA): for those {refuse.INSTEAD}",
    )


def entry_point() -> Finding:
    """Whether vLLM's processes will find the plugin."""
    return findings.entry_point(GROUP, "VLLM_PLUGINS")


def needed() -> list[VariantSpec]:
    """Kernels that the backend calls, whatever the model: those of a decode step with slots as vLLM
    counts them (int64), and the one that fetches cached prefixes, which it packs."""
    step = [spec for spec in info.needed(ARCH) if spec.op != "append_kv"]
    return [
        VariantSpec(op="append_kv", arch=ARCH, index_dtype="i64"),
        *step,
        VariantSpec(op="fetch_dequant", arch=ARCH, mode="ragged"),
    ]


def kernels() -> Iterator[Finding]:
    """The kernels that the backend calls: built, to be compiled at first use, or missing."""
    return findings.kernels(needed(), ARCH)


@app.command()
def check() -> None:
    """Say whether this installation will work, and why not; exit code 1 if not."""
    try:
        found = [release()]
        if found[0].ok is not False:
            found += [*names(), not_served()]
        found += [entry_point(), card(), *kernels()]
    except (SnapMLAError, ValueError) as error:  # or a variable without meaning
        found.append(Finding(False, str(error)))
    for finding in found:
        typer.echo(finding)
    raise typer.Exit(any(finding.ok is False for finding in found))


@app.command()
def record() -> None:
    """Add the vLLM that is installed to the record (for who maintains the backend)."""
    records = surface.recorded() if surface.RECORD.exists() else {}
    records[importlib.metadata.version("vllm")] = surface.read()
    surface.RECORD.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    app(prog_name=f"{os.path.basename(sys.executable)} -m snapmla.integrations.vllm")

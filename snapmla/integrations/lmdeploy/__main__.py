"""``python -m snapmla.integrations.lmdeploy``: will this installation's LMDeploy run on snapmla?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterator

import typer

from dsl_kernels.cache_records import v4
from dsl_kernels.cache_records.ds_mla import FORMAT
from dsl_kernels.spec import VariantSpec
from snapmla import env
from snapmla.dispatch.model import Model
from snapmla.dispatch.needs import needs
from snapmla.errors import SnapMLAError
from snapmla.flash_mla import name as naming
from snapmla.integrations import findings
from snapmla.integrations.findings import Finding
from snapmla.integrations.lmdeploy import surface

app = typer.Typer(add_completion=False, help=__doc__)
SERVED = "sm_90a"
DENSE, SPARSE = (8, 16, 32, 64, 128), (16, 64, 128)  # heads: as they are; V4's, V3.2's padded
WHEEL = "snapmla_as_flash_mla"  # its module


def release() -> Finding:
    """Release of LMDeploy that is installed."""
    try:
        found = importlib.metadata.version("lmdeploy")
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "lmdeploy: not installed")
    known = sorted(surface.recorded())
    if found in known:
        return Finding(True, f"lmdeploy {found}, whose calls were run")
    return Finding(None, f"lmdeploy {found}: the calls of {' and '.join(known)} were run")


def names() -> Iterator[Finding]:
    """What is used of LMDeploy, against the record of that release or the newest."""
    records = surface.recorded()
    known = records.get(importlib.metadata.version("lmdeploy")) or records[max(records)]
    said = surface.differences(surface.read(), known)
    yield from (Finding(*each) for each in said)
    if not said:
        yield Finding(True, f"{len(known)} methods and calls of lmdeploy are as known")


def switch() -> Iterator[Finding]:
    """Finding on ``import flash_mla``: if it is ours in the engine's processes."""
    name = env.AS_FLASH_MLA.name
    if importlib.util.find_spec(WHEEL) is None:
        yield Finding(
            False,
            "the wheel snapmla-as-flash-mla is not installed: `python -m codegen name-wheel` in a "
            "checkout makes it",
        )
    else:
        yield Finding(True, "the wheel snapmla-as-flash-mla is installed")
    other = naming.owner()
    if other is not None:
        yield Finding(False, f"flash_mla is {other}'s module here: uninstall it first")
    if env.AS_FLASH_MLA.get().strip().lower() in (*env.ON, "tensors"):
        yield Finding(True, f"{name} is set: `import flash_mla` finds snapmla")
    else:
        yield Finding(False, f"{name} is not set: the engine runs as if snapmla were not there")


def needed() -> list[VariantSpec]:
    """Kernels behind FlashMLA's names, of the heads that LMDeploy's layers call them with."""
    models = (
        *(Model(SPARSE, dtype=cache, sparse=True, indexer=False, sparse_prefill=True, indices=())
          for cache in (FORMAT, v4.RECORD.name)),
        Model(DENSE, dtype="bf16"),
    )  # fmt: skip
    around = ("append_kv", "fetch_dequant")  # which LMDeploy does by itself
    found = (spec for model in models for spec in needs(model))
    return list(dict.fromkeys(spec for spec in found if spec.op not in around))


@app.command()
def check() -> None:
    """Say whether this installation will work, and why not; exit code 1 if not."""
    try:
        found = [release()]
        if found[0].ok is not False:
            found += names()
        found += [*switch(), findings.card(SERVED), *findings.kernels(needed(), SERVED)]
    except (SnapMLAError, ValueError) as error:  # or a variable without meaning
        found.append(Finding(False, str(error)))
    for finding in found:
        typer.echo(finding)
    raise typer.Exit(any(finding.ok is False for finding in found))


@app.command()
def record() -> None:
    """Add the LMDeploy that is installed to the record (for who maintains this)."""
    records = surface.recorded() if surface.RECORD.exists() else {}
    records[importlib.metadata.version("lmdeploy")] = surface.read()
    surface.RECORD.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    app(prog_name=f"{os.path.basename(sys.executable)} -m snapmla.integrations.lmdeploy")

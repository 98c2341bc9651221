"""``python -m snapmla.integrations.lmdeploy``: will this installation's LMDeploy run on snapmla?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator

import typer

from dsl_kernels.spec import VariantSpec
from snapmla.compat.flash_mla import name as naming
from snapmla.integrations import findings, surfaces
from snapmla.integrations.findings import Finding
from snapmla.integrations.lmdeploy import surface
from snapmla.runtime import env

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
    """Findings on the parts of LMDeploy that are used, compared with a record of them.

    It is the record of the installed release if there is one, else the newest.
    """
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
    return findings.behind_flashmla(SPARSE, DENSE)


def looks() -> Iterator[Finding]:
    """Findings of ``check``, in order."""
    yield (installed := release())
    if installed.ok is not False:
        yield from names()
    yield from switch()
    yield findings.card(SERVED)
    yield from findings.kernels(needed(), SERVED)


@app.command()
def check() -> None:
    """Say whether this installation will work, and why not; exit code 1 if not."""
    findings.told(looks())


@app.command()
def record() -> None:
    """Add the LMDeploy that is installed to the record (for who maintains this)."""
    surfaces.keep(surface.RECORD, importlib.metadata.version("lmdeploy"), surface.read())


if __name__ == "__main__":
    app(prog_name=f"{os.path.basename(sys.executable)} -m snapmla.integrations.lmdeploy")

"""``python -m snapmla.integrations.vllm``: will vLLM of this installation run on snapmla?"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
import typer

from dsl_kernels.spec import decode_spec
from snapmla import env, runtime
from snapmla.errors import SnapMLAError
from snapmla.integrations.vllm import surface

app = typer.Typer(add_completion=False, help=__doc__)
GROUP = "vllm.general_plugins"
PAGE, ROW_TILES = 64, (16, 32, 64, 128)


class Finding(NamedTuple):
    """One thing that was looked at; ``ok`` None: it may work or not."""

    ok: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok     ", None: "maybe  ", False: "MISSING"}[self.ok]
        return f"{mark} {self.text}"


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
        yield Finding(True, f"{len(surface.RELIED)} names and signatures of vllm are as known")


def entry_point() -> Finding:
    """Whether vLLM's processes will find the plugin."""
    found = [e for e in importlib.metadata.entry_points(group=GROUP) if e.name == "snapmla"]
    if not found:
        return Finding(False, f"no entry point {GROUP}: snapmla: install snapmla as a package")
    wanted = os.environ.get("VLLM_PLUGINS")
    if wanted is not None and "snapmla" not in wanted.split(","):
        return Finding(False, f"VLLM_PLUGINS={wanted} leaves snapmla out")
    return Finding(True, f"entry point {GROUP}: {found[0].value}")


def card() -> Finding:
    """The GPU."""
    if not torch.cuda.is_available():
        return Finding(False, "no CUDA device")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    fits = capability == (9, 0)
    wanted = "" if fits else "; the backend is for sm_90"
    return Finding(fits, f"{name}, sm_{capability[0]}{capability[1]}{wanted}")


def kernels() -> Finding:
    """The variants that decode pages of 64 tokens: built, or to be compiled at first use."""
    specs = [decode_spec("etap", rows, PAGE, "bf16", "sm_90a") for rows in ROW_TILES]
    missing = [spec.name for spec in specs if runtime.find(spec) is None]
    if not missing:
        return Finding(True, f"{len(specs)} decode kernels are built")
    text = f"not built: {', '.join(missing)}"
    if env.NO_JIT.enabled():
        return Finding(False, f"{text}, and SNAPMLA_NO_JIT forbids to compile them")
    return Finding(None, f"{text}; compiled at first use if nvidia-cutlass-dsl is installed")


@app.command()
def check() -> None:
    """Say whether this installation will work, and why not; exit code 1 if not."""
    try:
        found = [release()]
        if found[0].ok is not False:
            found += names()
        found += [entry_point(), card(), kernels()]
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

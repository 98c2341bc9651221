"""``python -m snapmla.integrations.sglang``: will SGLang of this installation run on snapmla?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from dsl_kernels.spec import VariantSpec
from snapmla.integrations import findings, surfaces
from snapmla.integrations.findings import Finding
from snapmla.integrations.flashmla_switch import SERVED
from snapmla.integrations.sglang import flashmla, refuse, surface
from snapmla.runtime import env
from snapmla.tools import info

app = typer.Typer(add_completion=False, help=__doc__)
GROUP = "sglang.srt.plugins"
INSTEAD = ": elsewhere SGLang's own kernels serve these models"


def release() -> Finding:
    """Release of SGLang that is installed."""
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return Finding(False, "sglang: not installed")
    known = sorted(surface.recorded())
    if found in known:
        return Finding(True, f"sglang {found}, which the plugin was run with")
    releases = " and ".join(known)
    return Finding(
        None, f"sglang {found}: known releases are {releases}, others were not looked at"
    )


def names() -> Iterator[Finding]:
    """Findings on the parts of SGLang that the plugin uses, compared with a record of them.

    It is the record of the installed release if there is one, else the newest.
    """
    records = surface.recorded()
    known = records.get(importlib.metadata.version("sglang")) or records[max(records)]
    said = surface.differences(surface.read(), known)
    yield from (Finding(*each) for each in said)
    if not said:
        yield Finding(True, f"{len(known)} names and signatures of sglang are as known")


def multi_head() -> Finding:
    """Finding on the package by which SGLang computes prompts as multi-head attention."""
    name, needs = refuse.MULTI_HEAD[findings.arch()]
    if importlib.util.find_spec(needs) is None:
        return Finding(False, f"{needs} is not installed: SGLang's {name}, which computes prompts")
    return Finding(True, f"{needs} is installed: SGLang's {name} computes prompts")


def not_served() -> Finding:
    """Finding that lists the settings whose values the plugin refuses."""
    settings = ", ".join(dict.fromkeys(setting.name for setting in refuse.SETTINGS))
    return Finding(True, f"values of these settings are refused, each in a sentence: {settings}")


def flashmla_names() -> Finding:
    """Finding on FlashMLA's names: if those inside of SGLang become ours."""
    name = env.SGLANG_FLASHMLA.name
    if not env.SGLANG_FLASHMLA.enabled():
        off = "DeepSeek-V4 and other models that call FlashMLA run on SGLang's kernels"
        return Finding(True, f"{name} is off: {off}")
    why = flashmla.refused()
    if why is not None:
        return Finding(False, f"{why}: here its kernels stay SGLang's own")
    return Finding(True, f"{name}=1: FlashMLA's names inside of SGLang are snapmla's")


def needed_flashmla() -> list[VariantSpec]:
    """Kernels behind FlashMLA's names, of the heads that SGLang's layers pad to."""
    return findings.behind_flashmla()


def needed(arch: str) -> list[VariantSpec]:
    """Kernels that the plugin calls, whatever the model: those of a decode step with slots as
    SGLang counts them (int64), and those that fetch tokens of a cached prefix."""
    step = [spec for spec in info.needed(arch) if spec.op != "append_kv"]
    return [
        VariantSpec(op="append_kv", arch=arch, index_dtype="i64"),
        *step,
        *(
            VariantSpec(op="fetch_dequant", arch=arch, mode="indices", index_dtype=width)
            for width in ("i32", "i64")
        ),
    ]


def looks(flashmla: bool) -> Iterator[Finding]:
    """Findings of ``check``, in order."""
    yield (installed := release())
    if installed.ok is not False:
        yield from names()
        yield flashmla_names()
        if not flashmla:
            yield multi_head()
            yield not_served()
    yield findings.entry_point(GROUP, "SGLANG_PLUGINS")
    if flashmla:
        yield findings.card(SERVED, instead=INSTEAD)
        yield from findings.kernels(needed_flashmla(), SERVED)
    else:
        yield findings.card()
        yield from findings.kernels(needed(findings.arch()), findings.arch())


@app.command()
def check(
    flashmla: Annotated[bool, typer.Option(help="by SNAPMLA_SGLANG_FLASHMLA alone")] = False,
) -> None:
    """Say whether this installation will work, and why not; exit code 1 if not."""
    findings.told(looks(flashmla))


@app.command()
def record() -> None:
    """Add the SGLang that is installed to the record (for who maintains the plugin)."""
    surfaces.keep(surface.RECORD, importlib.metadata.version("sglang"), surface.read())


if __name__ == "__main__":
    app(prog_name=f"{os.path.basename(sys.executable)} -m snapmla.integrations.sglang")

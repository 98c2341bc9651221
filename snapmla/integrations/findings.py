"""Findings about an installation, one sentence each, that the plugins' ``check`` commands share."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

import torch
import typer

from dsl_kernels.families import ARCHS
from dsl_kernels.formats import ds_mla, v4
from dsl_kernels.spec import VariantSpec
from snapmla.errors import SnapMLAError, VariantError
from snapmla.rank.model import Model
from snapmla.rank.needs import needs
from snapmla.runtime import env, variants

PADDED = (64, 128)  # heads of FlashMLA's kernels


class Finding(NamedTuple):
    """One thing that was looked at; ``ok`` None: it may work or not."""

    ok: bool | None
    text: str

    def __str__(self) -> str:
        mark = {True: "ok     ", None: "maybe  ", False: "MISSING"}[self.ok]
        return f"{mark} {self.text}"


def told(looks: Iterable[Finding]) -> NoReturn:
    """Prints findings as they come and exits: with code 1 if one of them is not ok.

    An error of ours, or of a variable without meaning, is the last of them.
    """
    found: list[Finding] = []
    try:
        for finding in looks:
            found.append(finding)
            typer.echo(finding)
    except (SnapMLAError, ValueError) as error:
        found.append(Finding(False, str(error)))
        typer.echo(found[-1])
    raise typer.Exit(any(finding.ok is False for finding in found))


def entry_point(group: str, filter_name: str) -> Finding:
    """Finding on the plugin in an engine's processes; ``filter_name``: a variable of theirs."""
    found = [e for e in importlib.metadata.entry_points(group=group) if e.name == "snapmla"]
    if not found:
        return Finding(False, f"no entry point {group}: snapmla: install snapmla as a package")
    wanted = os.environ.get(filter_name)
    if wanted is not None and "snapmla" not in wanted.split(","):
        return Finding(False, f"{filter_name}={wanted} leaves snapmla out")
    return Finding(True, f"entry point {group}: {found[0].value}")


def arch() -> str:
    """Target of this machine's GPU; the first there is without one that kernels run on."""
    found = None
    if torch.cuda.is_available():
        found = variants.arch_of_capability(*torch.cuda.get_device_capability())
    return found or ARCHS[0]


def card(*served: str, instead: str = "") -> Finding:
    """The GPU.

    Args:
        served: targets that a backend has kernels for; none: all.
        instead: what serves on others.
    """
    if not torch.cuda.is_available():
        return Finding(False, "no CUDA device")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    target, served = variants.arch_of_capability(*capability), served or ARCHS
    text = f"{name}, sm_{capability[0]}{capability[1]}"
    if target in served:
        return Finding(True, text)
    wanted = " and ".join(each.rstrip("a") for each in served)
    return Finding(False, f"{text}; the backend is for {wanted}{instead}")


def kernels(specs: list[VariantSpec], arch: str) -> Iterator[Finding]:
    """The kernels that a backend calls: built, to be compiled at first use, or missing."""
    missing = [spec for spec in specs if variants.find(spec) is None]
    refusal = variants.jit_refusal()
    if missing:
        names = ", ".join(spec.name for spec in missing)
        text = f"{len(missing)} of {len(specs)} kernels are not built ({names})"
        if refusal is None:
            yield Finding(None, f"{text}: each is compiled at its first use, which takes seconds")
            return
        yield Finding(
            False,
            f"{text}, and {refusal}: install the kernels' wheel that `make wheels ARCH={arch}` "
            f"makes in a checkout, or let {env.VARIANT_DIR.name} name a directory that has them",
        )
    wrong = [] if refusal is None else list(_unusable(s for s in specs if s not in missing))
    yield from (Finding(False, text) for text in wrong)
    if not missing and not wrong:
        yield Finding(True, f"{len(specs)} kernels are built: {_ops(specs)}")


def behind_flashmla(
    heads: tuple[int, ...] = PADDED, dense: tuple[int, ...] = ()
) -> list[VariantSpec]:
    """Kernels behind FlashMLA's names (SM90).

    Args:
        heads: of the engine's calls; by default those that layers pad to.
        dense: of its calls of dense decode, if those have others.
    """
    models = (
        Model(heads, dtype=cache, sparse=True, indexer=False, sparse_prefill=True, indices=())
        for cache in (ds_mla.NAME, v4.FORMAT.name)
    )
    found = [
        spec for model in (*models, Model(dense or heads, dtype="bf16")) for spec in needs(model)
    ]
    around = ("append_kv", "fetch_dequant")  # which engines do by themselves
    return list(dict.fromkeys(spec for spec in found if spec.op not in around))


def _unusable(specs: Iterable[VariantSpec]) -> Iterator[str]:
    """Reason why kernels that are there cannot be loaded; asked if nothing would be compiled."""
    for spec in specs:
        try:
            variants.find_or_build(spec, need_library=True)
        except VariantError as error:
            yield str(error)


def _ops(specs: list[VariantSpec]) -> str:
    """Ops of variants, in order and each once, separated by commas."""
    return ", ".join(dict.fromkeys(spec.op for spec in specs))

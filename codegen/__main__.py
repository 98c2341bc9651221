"""Command line of codegen: matrix, precompile, build, try, audit, bundle, wheels and others."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from codegen import artifacts, cross, toolchain, tryout
from codegen import compile as compiler
from codegen import link as linker
from codegen import matrix as mx
from codegen.artifacts import ROOT, Record
from codegen.family_audit import FamilyAudit
from codegen.precompile import precompile as run_precompile
from codegen.progress import showing
from dsl_kernels.families import ARCHS
from dsl_kernels.spec import VariantSpec

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False
)
# Names, paths and compilers' messages are printed as they are: [brackets] are no markup.
console = Console(width=None if Console().is_terminal else 140, markup=False, emoji=False)

Arch = Annotated[str, typer.Option(help=f"target: one of {', '.join(ARCHS)}")]
Filter = Annotated[str, typer.Option("--filter", help="globs over variant names, by commas")]
Cuda = Annotated[
    str, typer.Option("--cuda", help="CUDA major to build for, 12 or 13; default: the driver's")
]
Kind = Annotated[
    str, typer.Option("--kind", help="kind of kernels alone: " + ", ".join(mx.kinds()))
]
Machine = Annotated[str, typer.Option(help="CPU of the servers: " + ", ".join(cross.TARGETS))]
Out = Annotated[Path | None, typer.Option(help="directory of variants (default build/variants)")]


def _fail(message: str) -> typer.Exit:
    console.print(message, style="red", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _check_arch(arch: str) -> None:
    if arch not in ARCHS:
        raise _fail(f"--arch: expected one of {', '.join(ARCHS)}, got {arch!r}")


def _check_filter(arch: str, pattern: str) -> None:
    """Refuses a filter with a part that names nothing: what was meant would be missing."""
    if (wrong := mx.no_match(arch, pattern)) is not None:
        raise _fail(f"--filter (make's FILTER=): {wrong}")


def _check_kind(kind: str) -> None:
    if kind and kind not in mx.kinds():
        raise _fail(f"--kind (make's KIND=): expected one of {', '.join(mx.kinds())}, got {kind!r}")


def _need_compiler() -> None:
    if not toolchain.have_compiler():
        raise _fail("nvidia-cutlass-dsl is not installed: pip install 'snapmla[compile]'")


def _default_dir() -> Path:
    try:
        return artifacts.default_dir()
    except RuntimeError as error:
        raise _fail(str(error)) from None


@contextlib.contextmanager
def _writing(out_dir: Path) -> Iterator[None]:
    """Turns what the file system refuses (read-only, full, not a directory) into one sentence."""
    try:
        yield
    except OSError as error:
        raise _fail(
            f"{out_dir} cannot be written: {error}; {artifacts.ENV_DIR} names another directory"
        ) from None


def _use_cuda(cuda: str) -> Path:
    """Selects the toolkit flavour; returns the directory where its variants belong.

    A flavour that would not be picked here anyway has a directory of its own, so that the variants
    that this machine uses stay as they are.
    """
    try:
        usual = toolchain.flavour()
        if cuda:
            os.environ[toolchain.ENV_CUDA] = cuda
        chosen = toolchain.flavour()
    except ValueError as error:
        raise _fail(str(error)) from None
    folder = _default_dir()
    return folder if chosen == usual else folder.with_name(f"{folder.name}-{chosen}")


def _spec(name: str) -> VariantSpec:
    try:
        return mx.named(name)
    except ValueError as error:
        raise _fail(str(error)) from None


@app.command("matrix")
def matrix_command(arch: Arch = "sm_90a", pattern: Filter = "*") -> None:
    """Print the counted matrix and the reason for each point that is not built."""
    _check_arch(arch)
    _check_filter(arch, pattern)
    ask = toolchain.have_compiler()
    found = mx.matrix(arch, pattern, ask_kernels=ask)
    if not ask:
        console.print("no compiler here: the kernel modules' own limits are not listed")
    table = Table("variant", "built", "reason", title=f"variant matrix, {arch}")
    counts: dict[str, list[int]] = {}
    for point in found:
        family = dict(point.spec.values).get("pipeline", point.spec.op)
        counts.setdefault(family, [0, 0])[point.reason is not None] += 1
        mark = Text("yes", "green") if point.reason is None else Text("no", "yellow")
        table.add_row(point.spec.name, mark, point.reason or "")
    console.print(table)
    summary = Table("family", "built", "pruned", title="count")
    for family, (kept, pruned) in counts.items():
        summary.add_row(family, str(kept), str(pruned))
    totals = [sum(c[i] for c in counts.values()) for i in (0, 1)]
    summary.add_section()
    summary.add_row("total", *map(str, totals))
    console.print(summary)


@app.command("precompile")
def precompile_command(
    arch: Arch = "sm_90a",
    pattern: Filter = "*",
    cuda: Cuda = "",
    out: Out = None,
    jobs: Annotated[int | None, typer.Option(help="worker processes", min=1)] = None,
    link: Annotated[bool, typer.Option(help="also link loadable libraries")] = True,
    force: Annotated[bool, typer.Option(help="rebuild what is up to date")] = False,
    kind: Kind = "",
) -> None:
    """Build the default matrix (or the part that matches --filter) ahead of time."""
    _check_arch(arch)
    _check_kind(kind)
    _need_compiler()
    _check_filter(arch, pattern)
    started = time.perf_counter()
    usual = _use_cuda(cuda)
    out_dir = out or usual
    found = mx.matrix(arch, pattern, kind=kind)
    specs = [p.spec for p in found if p.reason is None]
    with _writing(out_dir), showing(console, f"{arch} -> {out_dir}", len(specs)) as shown:

        def progress(name: str, outcome: Record | list[str]) -> None:
            shown.finished(name, failed=isinstance(outcome, list))

        try:
            report = run_precompile(
                specs, out_dir, jobs=jobs, linked=link, force=force, progress=progress,
                begin=shown.begin,
            )  # fmt: skip
        except KeyboardInterrupt:
            console.print("interrupted: the next run goes on from here", highlight=False)
            raise typer.Exit(130) from None
    _show_failures(report.failed)
    console.print(
        f"{len(report.built)} built, {len(report.reused)} up to date, {len(report.failed)} failed, "
        f"{len(found) - len(specs)} pruned; {time.perf_counter() - started:.1f} s"
    )
    if link and (unlinked := linker.refusal()) is not None:
        console.print(unlinked, highlight=False, soft_wrap=True)
    if report.failed:
        raise typer.Exit(1)


def _show_failures(failed: dict[str, list[str]]) -> None:
    """Failures by reason: one broken line of a kernel fails all of its variants alike."""
    by_reason: dict[str, list[str]] = {}
    for name, reasons in failed.items():
        by_reason.setdefault("; ".join(reasons), []).append(name)
    for reason, names in by_reason.items():
        console.print(reason, style="red", highlight=False, soft_wrap=True)
        console.print("  " + ", ".join(names), highlight=False, soft_wrap=True)


@app.command("build")
def build_command(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", show_default=False)],
    out: Out = None,
) -> None:
    """Build variants by name unless they are up to date; what the run-time compiler calls."""
    _need_compiler()
    specs, out_dir = [_spec(name) for name in names], out or _default_dir()
    with _writing(out_dir):
        try:
            for spec in specs:
                compiler.ensure(spec, out_dir)
        except (compiler.BuildError, RuntimeError) as error:
            raise _fail(str(error)) from None
    if (unlinked := linker.refusal()) is not None:
        console.print(unlinked, highlight=False, soft_wrap=True)


@app.command("try")
def try_command(name: str, out: Out = None) -> None:
    """Recompile one variant, print its resources and what its audit finds."""
    _need_compiler()
    spec, out_dir = _spec(name), out or _default_dir()
    with _writing(out_dir):
        good = tryout.run(spec, out_dir, console)
    if not good:
        raise typer.Exit(1)


@app.command("audit")
def audit_command(arch: Arch = "sm_90a", pattern: Filter = "*", out: Out = None) -> None:
    """Audit what is built of the default matrix, by family; exit code 1 if any may not ship."""
    _check_arch(arch)
    _need_compiler()
    _check_filter(arch, pattern)
    out_dir = out or _default_dir()
    specs = mx.default_specs(arch, pattern)
    families: dict[str, FamilyAudit] = {}
    for spec in specs:
        found = artifacts.paths(out_dir, spec)
        record = Record.read(found["json"])
        if record is not None and record.key != compiler.draft(spec).key:
            record = None
        name = " ".join(filter(None, (spec.op, dict(spec.values).get("pipeline"))))
        families.setdefault(name, FamilyAudit()).add(spec, record, found["so"])
    _show_audit(f"{arch}, {out_dir}", families)
    failed = {k: v for family in families.values() for k, v in family.problems.items()}
    absent = [name for family in families.values() for name in family.absent]
    _show_failures(failed)
    if absent:
        some = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
        console.print(
            f"{len(absent)} not built from these sources ({some}): "
            f"`python -m codegen precompile --arch {arch}`",
            style="red", highlight=False, soft_wrap=True,
        )  # fmt: skip
    if failed or absent:
        raise typer.Exit(1)


def _show_audit(title: str, families: dict[str, FamilyAudit]) -> None:
    """A row for each family, and their sum."""
    table = Table(
        "family", "variants", "built", "may ship", "registers", "shared KB", "libraries MB",
        title=title,
    )  # fmt: skip
    counts = [0, 0, 0]
    for name, family in families.items():
        built = family.variants - len(family.absent)
        own = [family.variants, built, built - len(family.problems)]
        counts = [a + b for a, b in zip(counts, own, strict=True)]
        megabytes = f"{family.library_bytes / 1e6:.2f}"
        table.add_row(
            name, *map(str, own), str(family.registers), f"{family.smem / 1e3:.1f}", megabytes
        )
    table.add_section()
    everything = sum(family.library_bytes for family in families.values())
    table.add_row("total", *map(str, counts), "", "", f"{everything / 1e6:.2f}")
    console.print(table)


def _packed(arch: str, pattern: str, cuda: str, kind: str = "") -> tuple[list[VariantSpec], Path]:
    """Variants whose builds a command takes, and the usual folder of these; checks options."""
    _check_arch(arch)
    _check_kind(kind)
    _need_compiler()
    _check_filter(arch, pattern)
    usual = _use_cuda(cuda)
    return mx.default_specs(arch, pattern, kind=kind), usual


@app.command("bundle")
def bundle_command(
    arch: Arch = "sm_90a",
    pattern: Filter = "*",
    cuda: Cuda = "",
    out: Out = None,
    into: Annotated[Path, typer.Option(help="where bundles go")] = ROOT / "build" / "bundle",
) -> None:
    """Pack host package and up-to-date variants for a server without the compiler."""
    from codegen import bundle

    specs, usual = _packed(arch, pattern, cuda)
    try:
        with _writing(into):
            made = bundle.make(specs, out or usual, into)
    except bundle.BundleError as error:
        raise _fail(str(error)) from None
    console.print(
        f"{made.variants} variants, {made.size / 1e6:.1f} MB unpacked\n{made.directory}\n"
        f"{made.archive}  {made.archive.stat().st_size / 1e6:.1f} MB",
        highlight=False,
        soft_wrap=True,
    )


@app.command("wheels")
def wheels_command(
    arch: Arch = "sm_90a",
    pattern: Filter = "*",
    cuda: Cuda = "",
    out: Out = None,
    into: Annotated[Path, typer.Option(help="where wheels go")] = ROOT / "build" / "wheels",
    kind: Kind = "",
    machine: Annotated[
        str, typer.Option(help="CPU of the servers, if not this one's: " + ", ".join(cross.TARGETS))
    ] = "",
) -> None:
    """Build wheels of the host package and of up-to-date variants, of all kinds or of one."""
    from codegen import bundle, wheels

    specs, usual = _packed(arch, pattern, cuda, kind)
    try:
        with _writing(into):
            folder = out or (_target(machine).folder(usual) if machine else usual)
            made = wheels.make(specs, folder, into, kind, machine, usual)
    except (bundle.BundleError, wheels.WheelError) as error:
        raise _fail(str(error)) from None
    for path in (made.host, made.kernels):
        size = path.stat().st_size / 1e6
        console.print(f"{path}  {size:.1f} MB", highlight=False, soft_wrap=True)
    some = "" if made.variants >= made.total else f" of {made.total}"
    console.print(
        f"{made.variants}{some} variants; install both: pip install "
        f"{shlex.join(map(str, (made.host, made.kernels)))}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@app.command("kernels-wheel")
def kernels_wheel_command(
    arch: Arch = "sm_90a",
    pattern: Filter = "*",
    cuda: Cuda = "",
    into: Annotated[Path, typer.Option(help="where the wheel goes")] = ROOT / "build" / "wheels",
    machine: Annotated[
        str, typer.Option(help="CPU of the servers, if not this one's: " + ", ".join(cross.TARGETS))
    ] = "",
) -> None:
    """Build the wheel of variants that `make release` takes: a whole one has no label."""
    from codegen import bundle, wheels

    specs, usual = _packed(arch, pattern, cuda)
    folder = _target(machine).folder(usual) if machine else usual
    try:
        with _writing(into):
            path, variants, total = wheels.make_kernels(
                specs, folder, into, "", machine, usual, for_index=True
            )
    except (bundle.BundleError, wheels.WheelError) as error:
        raise _fail(str(error)) from None
    size = path.stat().st_size / 1e6
    console.print(
        f"{path}  {variants} of {total} variants, {size:.1f} MB", highlight=False, soft_wrap=True
    )


@app.command("release")
def release_command(
    arch: Annotated[str, typer.Option(help="architectures, by commas")] = ",".join(ARCHS),
    cuda: Annotated[str, typer.Option(help="CUDA majors, by commas")] = ",".join(
        map(str, toolchain.MAJORS)
    ),
    machine: Annotated[str, typer.Option(help="CPUs of the servers, by commas")] = ",".join(
        ("x86_64", *cross.TARGETS)
    ),
    pattern: Filter = "*",
    into: Annotated[Path, typer.Option(help="emptied first")] = ROOT / "build" / "release",
) -> None:
    """Build and check all that a release uploads; nothing is uploaded, no tag is made."""
    from codegen import bundle, release, wheels

    _need_compiler()
    archs = arch.split(",")
    for each in archs:
        _check_arch(each)
        _check_filter(each, pattern)
    try:
        wanted = release.targets(archs, map(int, cuda.split(",")), machine.split(","))
        with _writing(into):
            made = release.make(wanted, pattern, into)
    except (ValueError, bundle.BundleError, wheels.WheelError, release.ReleaseError) as error:
        raise _fail(str(error)) from None
    for path in made:
        console.print(
            f"{path}  {path.stat().st_size / 1e6:.1f} MB", highlight=False, soft_wrap=True
        )
    if pattern != "*":
        console.print("a part of the matrix: its wheels have labels, which no index takes")
    console.print(
        "checked: twine, auditwheel, symbols; try it: "
        f"python -m http.server --bind 127.0.0.1 --directory {into}, then, where torch is, "
        "pip install --index-url http://127.0.0.1:8000/simple "
        f"'snapmla[{wanted[0].extra}]'",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


@app.command("hub")
def hub_command(
    arch: Arch = "sm_90a",
    pattern: Filter = "*",
    cuda: Cuda = "",
    out: Out = None,
    into: Annotated[Path, typer.Option(help="where the folder goes")] = ROOT / "build" / "hub",
    version: Annotated[int, typer.Option(help="of the kernel on the Hub", min=1)] = 1,
    machine: Annotated[
        str, typer.Option(help="CPU of the servers, if not this one's: " + ", ".join(cross.TARGETS))
    ] = "",
) -> None:
    """Write a folder of up-to-date variants that Hugging Face's `kernels` loads."""
    from codegen import bundle, hub

    specs, usual = _packed(arch, pattern, cuda)
    folder = out or (_target(machine).folder(usual) if machine else usual)
    try:
        with _writing(into):
            made = hub.make(specs, folder, into, version, machine, usual)
    except bundle.BundleError as error:
        raise _fail(str(error)) from None
    console.print(f"{made}\nkernels.get_local_kernel(Path({str(made)!r})) loads it",
                  highlight=False, soft_wrap=True)  # fmt: skip


@app.command("name-wheel")
def name_wheel_command(
    into: Annotated[Path, typer.Option(help="where the wheel goes")] = ROOT / "build" / "wheels",
) -> None:
    """Build snapmla-as-flash-mla, by which `import flash_mla` finds snapmla if asked to."""
    from codegen import wheels

    try:
        with _writing(into):
            path = wheels.make_name_wheel(into)
    except wheels.WheelError as error:
        raise _fail(str(error)) from None
    console.print(f"{path}; beside snapmla: pip install {shlex.quote(str(path))}, then set "
                  "SNAPMLA_AS_FLASH_MLA=1", highlight=False, soft_wrap=True)  # fmt: skip


def _target(machine: str) -> cross.Target:
    """Target that ``--machine`` names; ends the command with a sentence if there is none."""
    if machine not in cross.TARGETS:
        known = ", ".join(cross.TARGETS)
        raise _fail(f"--machine (make's MACHINE=): expected one of {known}, got {machine!r}")
    return cross.TARGETS[machine]


@app.command("cross")
def cross_command(
    arch: Arch = "sm_90a",
    pattern: Filter = "*",
    cuda: Cuda = "",
    native: Annotated[
        Path | None, typer.Option(help="variants of this machine (default build/variants)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="default: beside them, -MACHINE behind")] = None,
    machine: Machine = "aarch64",
    jobs: Annotated[int, typer.Option(help="worker processes", min=1)] = 2,
    kind: Kind = "",
) -> None:
    """Build the host half of variants, which are built here, for servers with another CPU."""
    target = _target(machine)
    specs, usual = _packed(arch, pattern, cuda, kind)
    if (reason := cross.refusal(target)) is not None:
        raise _fail(reason)
    model = native or usual
    out_dir = out or target.folder(model)
    what = f"{arch}, {machine} -> {out_dir}"
    with _writing(out_dir), showing(console, what, len(specs)) as shown:
        report = cross.build_all(specs, model, out_dir, target, jobs, shown.finished)
    _show_failures(report.failed)
    console.print(
        f"{len(report.built)} built, {len(report.reused)} up to date, {len(report.failed)} failed",
        highlight=False,
    )
    if report.failed:
        raise typer.Exit(1)


@app.command("header")
def header_command(name: str, out: Out = None) -> None:
    """Print the C header of one built variant."""
    from codegen import render

    spec, out_dir = _spec(name), out or _default_dir()
    record = Record.read(artifacts.paths(out_dir, spec)["json"])
    if record is None:
        raise _fail(f"{spec.name} is not built in {out_dir}: run `python -m codegen build {name}`")
    print(render.header(record), end="")


@app.command("docs")
def docs_command() -> None:
    """Write docs/variants.md from the matrix."""
    from codegen import render

    _need_compiler()
    if not artifacts.is_checkout():
        raise _fail(f"docs are written in a source checkout, {ROOT} is no source checkout")
    render.write_page()
    console.print(f"wrote {render.PAGE}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()

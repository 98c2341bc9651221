"""Compiles one variant, audits it and writes its artifacts.

``build`` runs the compiler in the calling process and is meant for worker processes
(``codegen.precompile``) and one-shot commands: it redirects file descriptors 1 and 2 while the
compiler runs, because ptxas' remarks come from native code.  ``ensure`` is what many processes may
call at once for the same directory: one builds, the others wait and find it built.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from codegen import abi, artifacts, audit, closure, link, toolchain
from codegen.artifacts import Record
from dsl_kernels import registry
from dsl_kernels.blocks import budget as bud
from dsl_kernels.spec import VariantSpec

# Line info does not change the SASS (compared); it feeds ncu's source view and softgpu's reports.
OPTIONS = "--enable-tvm-ffi --generate-line-info --keep-ptx --keep-cubin remarks{ptx}"
# The DSL compiles the host half for the building CPU; ours must run on any server's.
_HOST_CPUS = {"x86_64": ("x86-64-v2", "+sse4.2,+popcnt,+cx16")}
HOST_CPU, _HOST_FEATURES = _HOST_CPUS.get(platform.machine(), ("", ""))


class BuildError(RuntimeError):
    """A variant did not compile, or compiled into something that must not ship.

    Attributes:
        problems: one sentence each.
        record: what was measured, None if the compiler failed.
    """

    def __init__(self, spec: VariantSpec, problems: list[str], record: Record | None = None):
        super().__init__(f"{spec.name}: " + "; ".join(problems))
        self.problems = problems
        self.record = record

    def __reduce__(self) -> Any:  # crosses process boundaries
        return _rebuild_error, (str(self), self.problems, self.record)


def _rebuild_error(text: str, problems: list[str], record: Record | None) -> BuildError:
    error = BuildError.__new__(BuildError)
    RuntimeError.__init__(error, text)
    error.problems, error.record = problems, record
    return error


def draft(spec: VariantSpec) -> Record:
    """The part of the record that is known before compiling; its ``key`` decides up-to-dateness."""
    source_hash, sources = closure.sources(spec)
    record = Record(
        name=spec.name,
        symbol=spec.symbol,
        spec=spec.fields(),
        key="",
        source_hash=source_hash,
        sources=sources,
        dsl_version=toolchain.dsl_version() or "none",
        flavour=toolchain.flavour(),
        options=OPTIONS,
        host_cpu=HOST_CPU,
    )
    identity = [artifacts.FORMAT, record.spec, source_hash, record.dsl_version, record.flavour]
    identity += [_builders()]
    text = json.dumps([*identity, OPTIONS, HOST_CPU], sort_keys=True)
    record.key = hashlib.sha256(text.encode()).hexdigest()[:24]
    return record


@functools.cache
def _builders() -> str:
    """Hash of the code, beside the kernels, that decides what a build is."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for name in ("compile.py", "abi.py", "audit.py", "fences.py"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def up_to_date(spec: VariantSpec, out_dir: Path, linked: bool) -> Record | None:
    """The existing record if its artifacts are intact, match the sources and may ship, else None.

    ``make try`` leaves records of builds with audit problems; those are never up to date.
    """
    record = Record.read(artifacts.paths(out_dir, spec)["json"])
    if record is None or record.key != draft(spec).key or audit.problems(record):
        return None
    if not artifacts.intact(out_dir, record, "o", "ptx"):
        return None
    if linked and not _linked(record, out_dir):
        return None
    return record


def _linked(record: Record, out_dir: Path) -> bool:
    """True if the library is as this machine would link it, or cannot be linked here anyway."""
    wanted = link.identity()
    return wanted is None or (record.link == wanted and artifacts.intact(out_dir, record, "so"))


def ensure(
    spec: VariantSpec, out_dir: Path, *, linked: bool = True, force: bool = False
) -> tuple[Record, bool]:
    """Brings one variant up to date unless another process just did; (record, was it built?).

    Objects that are fresh and only linked otherwise are relinked, not compiled.

    Args:
        force: compile even what is up to date.

    Raises:
        BuildError: as ``build``.
        RuntimeError: the linker failed.
    """
    with artifacts.lock(out_dir, spec.name):
        known = closure.has_source(spec) and not force
        record = up_to_date(spec, out_dir, False) if known else None
        if record is None:
            return build(spec, out_dir, linked=linked), True
        files = artifacts.paths(out_dir, spec)
        if not linked or _linked(record, out_dir):
            return record, False
        record.link = link.link(files["o"], files["so"], record.target, record.flavour)
        artifacts.finish(out_dir, record)
        return record, True


def set_target(arch: str) -> None:
    """Prepares this process to compile for ``arch``; call before the compiler is imported."""
    os.environ["CUTE_DSL_ARCH"] = arch
    for name in ("CUTE_DSL_KEEP", "CUTE_DSL_DUMP_DIR", "CUTE_DSL_COMPILER_OPT"):
        os.environ.pop(name, None)


def build(spec: VariantSpec, out_dir: Path, *, linked: bool = True, strict: bool = True) -> Record:
    """Compiles ``spec`` into ``out_dir`` (see ``codegen.artifacts``) and returns its record.

    Args:
        linked: also link the ``.so``, if this machine can.
        strict: raise on audit problems; False writes the artifacts anyway (``make try``).

    Raises:
        BuildError: infeasible spec, compiler error, or audit problems when ``strict``.
    """
    set_target(spec.arch)
    started = time.perf_counter()
    files = artifacts.paths(out_dir, spec)
    out_dir.mkdir(parents=True, exist_ok=True)
    try:
        record = draft(spec)
    except ValueError as error:
        raise BuildError(spec, [str(error)]) from error
    log: list[str] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="snapmla-") as tmp,
            _captured(Path(tmp, "log.txt"), log),
        ):
            made = _compile(spec, Path(tmp))
            audit.read_host(record, made.obj)
            obj = made.obj.read_bytes()
        record.arguments, record.declared = made.arguments, made.declared
        record.shared_plan = made.shared_plan
        audit.read_ptxas(record, log[0])
        audit.read_ptx(record, made.ptx)
        audit.read_counts(record, made.ptx)
        audit.read_host_module(record, made.module)
        audit.read_target(record, made.cubin)
        audit.read_sass(record, made.cubin)
    except Exception as error:
        text = "".join(log)
        artifacts.write_atomic(files["log"], f"{text}\n{error}\n")
        raise BuildError(spec, [str(error) or type(error).__name__]) from error
    record.compile_seconds = round(time.perf_counter() - started, 2)
    artifacts.write_atomic(files["log"], log[0])
    found = audit.problems(record)
    if found and strict:
        raise BuildError(spec, found, record)
    # The record goes first and comes last: a build killed in between leaves none.
    files["json"].unlink(missing_ok=True)
    files["so"].unlink(missing_ok=True)
    artifacts.write_atomic(files["o"], obj)
    artifacts.write_atomic(files["ptx"], made.ptx)
    if linked:
        record.link = link.link(files["o"], files["so"], record.target, record.flavour)
    artifacts.finish(out_dir, record)
    return record


@dataclass(frozen=True)
class _Made:
    """Output of the compiler: object, PTX, cubin, lowered host module, ABI, shared memory."""

    obj: Path
    ptx: str
    cubin: bytes
    module: str
    arguments: list[dict[str, Any]]
    declared: dict[str, Any] | None
    shared_plan: list[list[Any]] = field(default_factory=list)


def _compile(spec: VariantSpec, tmp: Path) -> _Made:
    """Runs the compiler; files go under ``tmp``."""
    toolchain.import_compiler()
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    function, fakes = registry.build(spec)
    arguments = abi.describe(function, fakes)  # before compiling: it refuses what is out of order
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    target = toolchain.target_of(spec.arch)
    options = f"{OPTIONS} --gpu-arch {target} --dump-dir={shlex.quote(str(tmp))}"
    with _relative_sources(), _storage_noted() as storage:
        compiled = cute.compile(function, *fakes.values(), stream, options=options)
    module = str(compiled.ir_module)
    _limit_host_code(compiled.ir_module)
    path = tmp / "variant.o"
    compiled.export_to_c(str(path), function_name=spec.symbol)
    ptx, cubin = compiled.__ptx__, compiled.__cubin__
    if not ptx or not cubin:
        raise RuntimeError("the compiler kept no PTX or cubin")
    plan = shared_plan(storage, registry.budget(spec))
    return _Made(path, ptx, cubin, module, arguments, _declared(spec), plan)


@contextlib.contextmanager
def _relative_sources() -> Iterator[None]:
    """Line info names files relative to the checkout: builds of two checkouts are the same.

    The DSL takes file names from code objects and has no option that maps prefixes.
    """
    ir: Any = importlib.import_module("cutlass._mlir.ir")
    real, root = ir.Location.file, f"{artifacts.ROOT}{os.sep}"

    def relative(filename: str, *rest: Any, **named: Any) -> Any:
        return real(filename.removeprefix(root), *rest, **named)

    ir.Location.file = staticmethod(relative)
    try:
        yield
    finally:
        ir.Location.file = real


Storage = list[tuple[str, int, int]]  # name, bytes, offset of each array of a struct


@contextlib.contextmanager
def _storage_noted() -> Iterator[list[Storage]]:
    """The structs that kernels allocate in shared memory while they are traced, in order.

    The allocator asks one function for a struct's fields, which emits nothing: with another method
    of it replaced, line information would name this file.
    """
    module: Any = importlib.import_module("cutlass.memory.smem")
    real, noted = module._extract_struct_fields, []

    def fields(struct: Any) -> Storage:
        noted.append(real(struct))
        return noted[-1]

    module._extract_struct_fields = fields
    try:
        yield noted
    finally:
        module._extract_struct_fields = real


def shared_plan(allocated: Sequence[Storage], budget: Any) -> list[list[Any]]:
    """[name, offset] of each array in a kernel's storage, where it allocates one struct alone.

    Barriers that the budget knows as ``<name>_full`` and ``<name>_empty`` have a name each,
    ``<name>_bar.full[0]``: the software GPU's reports say it.  The struct is laid out by the trace.

    Args:
        allocated: structs that the kernels allocated; one may be traced several times.
        budget: the variant's ``Budget``, or None.
    """
    if not allocated or any(struct != allocated[0] for struct in allocated):
        return []
    copies = {} if budget is None else {b.name: b.copies for b in budget.barriers}
    plan: list[list[Any]] = []
    for name, _, at in allocated[0]:
        ring = name.removesuffix("_bar")
        sides = [
            f"{name}.{side}[{i}]"
            for side in ("full", "empty")
            for i in range(copies.get(f"{ring}_{side}", 0) if ring != name else 0)
        ]
        plan += [[x, int(at) + 8 * i] for i, x in enumerate(sides or [name])]
    return plan


def _limit_host_code(module: Any) -> None:
    """Restricts every host function of a lowered module to ``HOST_CPU``'s instructions.

    The DSL has an option for the host's target, but not together with TVM-FFI; LLVM's function
    attributes override the target machine that it sets up.
    """
    if not HOST_CPU:
        return
    ir: Any = importlib.import_module("cutlass._mlir.ir")
    with module.context:
        cpu = ir.StringAttr.get(HOST_CPU)
        features = ", ".join(f'"{feature}"' for feature in _HOST_FEATURES.split(","))
        target = ir.Attribute.parse(f"#llvm.target_features<[{features}]>")
        for op in module.body.operations:
            if op.operation.name == "llvm.func":
                op.operation.attributes["target_cpu"] = cpu
                op.operation.attributes["target_features"] = target


def _declared(spec: VariantSpec) -> dict[str, Any] | None:
    """The module's budget in the form that the audit compares."""
    budget = registry.budget(spec)
    if budget is None:
        return None
    return {
        "threads": budget.threads,
        "warpgroup_registers": sorted({g.registers for g in budget.groups if g.registers}),
        "barrier_counts": {str(count): n for count, n in budget.barrier_counts().items()},
        "smem": budget.smem,
        "tmem_columns": budget.tmem_columns,
        "opcodes": budget.opcodes(),
        **_mma_counts(budget),
        "under_softmax": budget.under_softmax(),
    }


def _mma_counts(budget: bud.Budget) -> dict[str, Any]:
    """Instructions of each kind of MMA, where the issuing warp's loop is all there is of them: on
    SM100.  SM90's warpgroups all have theirs."""
    if budget.arch != "sm_100a":
        return {}
    counts: Counter[str] = Counter()
    for mma in budget.mmas:
        counts[bud.MMA_OPCODE[budget.arch][mma.dtype]] += mma.k // bud.MMA_K[mma.dtype]
    return {"mma_counts": dict(sorted(counts.items()))}


@contextlib.contextmanager
def _captured(path: Path, log: list[str]) -> Iterator[None]:
    """Sends file descriptors 1 and 2 to ``path``; appends what was written to ``log``."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with open(path, "wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, old in enumerate(saved, start=1):
                os.dup2(old, fd)
                os.close(old)
            log.append(path.read_text(errors="replace"))

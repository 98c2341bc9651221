"""Compiles one variant, audits it and writes its artifacts.

``build`` runs the compiler in the calling process and is meant for worker processes
(``codegen.precompile``) and one-shot commands: it redirects file descriptors 1 and 2 while the
compiler runs, because ptxas' remarks come from native code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codegen import artifacts, audit, closure, link, toolchain
from codegen.artifacts import Record
from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec

# Line info does not change the SASS (compared); it feeds ncu's source view and softgpu's reports.
OPTIONS = "--enable-tvm-ffi --generate-line-info --keep-ptx --keep-cubin remarks{ptx}"


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
        spec=dataclasses.asdict(spec),
        key="",
        source_hash=source_hash,
        sources=sources,
        dsl_version=toolchain.dsl_version() or "none",
        flavour=toolchain.flavour(),
        options=OPTIONS,
    )
    identity = [artifacts.FORMAT, record.spec, source_hash, record.dsl_version, record.flavour]
    text = json.dumps([*identity, OPTIONS], sort_keys=True)
    record.key = hashlib.sha256(text.encode()).hexdigest()[:24]
    return record


def up_to_date(spec: VariantSpec, out_dir: Path, linked: bool) -> Record | None:
    """The existing record if its artifacts are complete, match the sources and may ship, else None.

    ``make try`` leaves records of builds with audit problems; those are never up to date.
    """
    files = artifacts.paths(out_dir, spec)
    record = Record.read(files["json"])
    if record is None or record.key != draft(spec).key or audit.problems(record):
        return None
    if not (files["o"].is_file() and files["ptx"].is_file()):
        return None
    if linked and link.mode() is not None and not (record.link and files["so"].is_file()):
        return None
    return record


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
            obj, ptx, cubin, module = _compile(spec, Path(tmp))
        audit.read_ptxas(record, log[0])
        audit.read_ptx(record, ptx)
        audit.read_host_module(record, module)
        audit.read_sass(record, cubin)
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
    artifacts.write_atomic(files["ptx"], ptx)
    record.link = link.link(files["o"], files["so"]) if linked else None
    artifacts.write_atomic(files["json"], record.to_json())
    return record


def _compile(spec: VariantSpec, tmp: Path) -> tuple[bytes, str, bytes, str]:
    """(object, PTX, cubin, text of the lowered host module)."""
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    function, fakes = registry.build(spec)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"{OPTIONS} --gpu-arch {spec.arch} --dump-dir={tmp}"
    compiled = cute.compile(function, *fakes, stream, options=options)
    path = tmp / "variant.o"
    compiled.export_to_c(str(path), function_name=spec.symbol)
    ptx, cubin = compiled.__ptx__, compiled.__cubin__
    if not ptx or not cubin:
        raise RuntimeError("the compiler kept no PTX or cubin")
    return path.read_bytes(), ptx, cubin, str(compiled.ir_module)


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

"""Digests of code as it runs: without comments, docstrings, line numbers and mangled names.

``source`` is of a file of ours, ``ptx`` of a variant's PTX and ``sass`` of its kernels.  Two builds
whose digests are equal execute the same instructions, whatever their sources are called and say.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from codegen import same_sass

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LENGTH = 24  # hexadecimal digits of a digest

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_LINE_INFO = re.compile(r"^\s*\.(?:loc|file)\b.*$", re.MULTILINE)
_SECTION = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


def digest_of(*parts: bytes | str) -> str:
    """A short digest of texts, of which each ends where the next begins."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()[:LENGTH]


# ---------------------------------------------------------------------------- sources


def documented(tree: ast.AST) -> Iterator[tuple[list[ast.stmt], ast.Constant]]:
    """Bodies of a module, its classes and its functions that open with a docstring, and that."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield node.body, value


def source(path: Path) -> str:
    """Digest of a file: of Python its syntax tree without docstrings, else its bytes."""
    return source_of(path.suffix, path.read_bytes())


@functools.lru_cache(maxsize=4096)
def source_of(suffix: str, data: bytes) -> str:
    """The same of its contents; all bytes count if ``suffix`` is not ``.py``."""
    if suffix != ".py":
        return digest_of(data)
    with _collector_off():  # which would walk every tree again and again
        tree = ast.parse(data)
        for body, _ in documented(tree):
            body[0] = ast.Pass()  # as a function may consist of its docstring
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                node.body = [s for s in node.body if not isinstance(s, ast.Pass)]
        return digest_of(_dumped(tree))


def _dumped(tree: ast.AST) -> str:
    """The tree as text, the same in every version of Python that knows its nodes."""
    parts: list[str] = []

    def add(node: object) -> None:
        if isinstance(node, ast.AST):
            parts.append(f"{type(node).__name__}(")
            for name in node._fields:
                value = getattr(node, name, None)
                if value is not None and value != [] and name not in ("ctx", "kind"):
                    parts.append(f"{name}=")
                    add(value)
            parts.append(")")
        elif isinstance(node, list):
            parts.append("[")
            for item in node:
                add(item)
            parts.append("]")
        else:
            parts.append(f"{node!r},")

    add(tree)
    return "".join(parts)


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


# ---------------------------------------------------------------------------- instructions


def stripped(text: str) -> str:
    """PTX without comments, line and debug information; kernels are named by their order."""
    text = _COMMENT.sub("", text)
    text = _SECTION.sub("", _LINE_INFO.sub("", text))
    names = list(dict.fromkeys(_ENTRY.findall(text)))
    for name in sorted(names, key=len, reverse=True):  # one may begin another's
        text = text.replace(name, f"kernel_{names.index(name)}")
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def ptx(path: Path) -> str:
    """Digest of a variant's stripped PTX."""
    return digest_of(stripped(path.read_text()))


def sass(library: Path) -> str:
    """Digest of the instructions of a library's or an object's kernels.

    Raises:
        ValueError: there is no cubin.
        RuntimeError: no nvdisasm, or it failed.
    """
    return digest_of(*("\n".join(lines) for lines in same_sass.kernels(library)))

"""The state of the project that a re-layout is held to: ``profiles/results/baseline.json``.

    python -m profiles.baseline code             code lines, signatures, schemas, imports
    python -m profiles.baseline tests            collected test ids (a minute)
    python -m profiles.baseline seconds [FILE]   CPU seconds by test file, from ``make test``
    python -m profiles.baseline digests FOLDER   SASS and stripped PTX of built variants
    python -m profiles.baseline compare OLD      what differs from another such file

Each command renews its part of the record, with the commit it was taken at, and the page beside it.
A code line is one that is no comment, no docstring and not blank.  Ids of tests lie in
``baseline-tests.txt.xz``, sorted; the record holds their count and digest by file.  No binary of a
variant is kept: an old build is made again from the commit.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import json
import lzma
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen import artifacts, digests
from codegen.artifacts import ROOT, write_atomic
from profiles.page import commit

RECORD = ROOT / "profiles" / "results" / "baseline.json"
IDS = RECORD.with_name("baseline-tests.txt.xz")
SECONDS = ROOT / "build" / "test-seconds.json"  # tests/conftest.py writes it
PACKAGES = ("dsl_kernels", "codegen", "softgpu", "snapmla", "profiles", "tests", "docs", "examples")
APART = (  # folders that are counted by themselves
    "snapmla/testing", "snapmla/integrations", "profiles/engine", "profiles/published",
    "profiles/studies", "tests/support",
)  # fmt: skip
PUBLIC = (  # modules that users import from (docs/api_page.py)
    "snapmla", "snapmla.parallel", "snapmla.flash_mla", "snapmla.flash_mla_fp8", "snapmla.dsa",
    "snapmla.dsa.deep_gemm_names", "snapmla.dsa.vllm_names", "snapmla.mha",
    "snapmla.mha.flash_attention_names", "snapmla.layouts", "snapmla.reference",
    "snapmla.selfcheck",
)  # fmt: skip

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Json = dict[str, Any]


# ---------------------------------------------------------------------------- code


def code_lines(text: str) -> int:
    """Lines of Python that are no comment, no docstring and not blank."""
    tree = ast.parse(text)
    left_out: set[int] = set()
    for _, value in digests.documented(tree):
        left_out.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    quoted: set[int] = set()  # inside of strings, where # begins no comment
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            quoted.update(range(node.lineno + 1, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(
        n not in left_out and (n in quoted or line.strip()[:1] not in ("", "#"))
        for n, line in lines
    )


def sources(root: Path) -> dict[str, Path]:
    """Python files of the packages, by their path below ``root``."""
    found = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return {str(path.relative_to(root)): path for path in sorted(found)}


def folder_of(file: str) -> str:
    """The row of the table in which a file is counted."""
    own = [folder for folder in APART if file.startswith(f"{folder}/")]
    return own[0] if own else file.split("/")[0]


def imports(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """Modules of ours that each file imports, also inside functions and for types alone."""
    names = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in files}
    graph = {}
    for file, path in files.items():
        package = file.removesuffix(".py").split("/")[:-1]
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                inner = {f"{base}.{alias.name}" for alias in node.names}
                found |= inner & names or {base}
        graph[file] = sorted(found & names)
    return graph


def signatures() -> dict[str, str]:
    """Of what users import: functions, and the public methods of classes."""
    found: dict[str, str] = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        own = (n for n, v in vars(module).items() if getattr(v, "__module__", "") == name)
        for public in getattr(module, "__all__", None) or [n for n in own if n[0] != "_"]:
            value = getattr(module, public)
            found |= _signatures(f"{name}.{public}", value)
    return dict(sorted(found.items()))


def _signatures(name: str, value: Any) -> dict[str, str]:
    if not callable(value):
        return {name: type(value).__name__}
    try:
        found = {name: str(inspect.signature(value))}
    except (TypeError, ValueError):
        found = {name: "callable"}
    if inspect.isclass(value):
        for method in sorted(n for n in dir(value) if not n.startswith("_")):
            of = inspect.getattr_static(value, method)
            of = getattr(of, "__func__", of)
            found[f"{name}.{method}"] = (
                str(inspect.signature(of)) if inspect.isfunction(of) else type(of).__name__
            )
    return found


@app.command()
def code() -> None:
    """Count code lines, take signatures, operator schemas and imports."""
    from snapmla.torch_ops import SCHEMAS

    gc.disable()  # trees of all files: the collector would walk them again and again
    files = sources(ROOT)
    lines = {file: code_lines(path.read_text()) for file, path in files.items()}
    folders = Counter[str]()
    for file, n in lines.items():
        folders[folder_of(file)] += n
    _write(
        "code",
        {
            "folders": dict(sorted(folders.items())),
            "lines": lines,
            "sources": {file: digests.source(path) for file, path in files.items()},
            "signatures": signatures(),
            "schemas": sorted(SCHEMAS),
            "imports": imports(files),
        },
    )


# ---------------------------------------------------------------------------- tests


@app.command()
def tests() -> None:
    """Collect the ids of all tests, those of ``--whole-matrix`` left out."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", "tests")
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    ids = sorted(s for s in done.stdout.splitlines() if s.startswith("tests/") and "::" in s)
    if done.returncode or not ids:
        typer.echo(done.stdout[-2000:] + done.stderr[-2000:])
        raise typer.Exit(1)
    by_file: dict[str, list[str]] = {}
    for each in ids:
        by_file.setdefault(each.split("::")[0], []).append(each)
    IDS.write_bytes(lzma.compress("\n".join([*ids, ""]).encode(), preset=9))
    counted = {
        file: {"tests": len(some), "digest": digests.digest_of(*some)}
        for file, some in by_file.items()
    }
    _write("tests", {"tests": len(ids), "files": counted})


@app.command()
def seconds(
    file: Annotated[Path, typer.Argument(help="what make test wrote, or a junit file")] = SECONDS,
) -> None:
    """Take CPU seconds by test file from a run of ``make test``; a junit file has its clock's."""
    if file.suffix == ".xml":
        found = {"unit": "seconds on the clock", "files": junit_seconds(file)}
    else:
        found = {"unit": "CPU seconds", **json.loads(file.read_text())}
    _write("seconds", found)


def junit_seconds(path: Path) -> dict[str, float]:
    """Seconds of a junit file by test file; of a test in a class, the file is its module."""
    by_file: dict[str, float] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        words = case.get("classname", "").split(".")
        while len(words) > 1 and words[-1][:1].isupper():
            words.pop()
        file = "/".join(words) + ".py"
        by_file[file] = by_file.get(file, 0.0) + float(case.get("time", 0))
    return {file: round(n, 2) for file, n in sorted(by_file.items(), key=lambda x: -x[1])}


# ---------------------------------------------------------------------------- instructions


def variant_digests(folder: Path, jobs: int = 1) -> dict[str, Json]:
    """Stripped PTX, SASS and registers of every variant in a folder, by name."""
    records = list(artifacts.records(folder))
    stems = [folder / record.name for record in records]
    with ProcessPoolExecutor(jobs) as pool:
        pairs = list(pool.map(_instructions, stems))
    return {
        record.name: {"ptx": ptx, "sass": sass, "registers": record.registers, "key": record.key}
        for record, (ptx, sass) in zip(records, pairs, strict=True)
    }


def _instructions(stem: Path) -> tuple[str, str]:
    return digests.ptx(stem.with_suffix(".ptx")), digests.sass(stem.with_suffix(".o"))


@app.command("digests")
def digests_of(
    folder: Annotated[Path, typer.Argument(help="of built variants")],
    out: Annotated[Path | None, typer.Option(help="write them alone, to this file")] = None,
    at: Annotated[str, typer.Option("--commit", help="that they were built at")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="processes")] = 1,
) -> None:
    """Digest every variant of a folder, or take what another machine digested (a JSON file)."""
    if folder.is_file():
        part = json.loads(folder.read_text())
    else:
        part = {"commit": at or commit(), "variants": variant_digests(folder, jobs)}
        versions = {r.name: f"{r.dsl_version}, {r.flavour}" for r in artifacts.records(folder)}
        part["compilers"] = sorted(set(versions.values()))
    if not part["variants"]:
        typer.echo(f"{folder}: no variant in it")
        raise typer.Exit(1)
    if out is not None:
        write_atomic(out, json.dumps(part, indent=1) + "\n")
        typer.echo(f"{len(part['variants'])} variants; wrote {out}")
        return
    _write("digests", part, str(part["commit"]))


# ---------------------------------------------------------------------------- record and page


def _write(part: str, found: Json, at: str = "") -> None:
    """Renews a part of the record, and the page."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[part] = {"commit": at or commit(), **found}
    write_atomic(RECORD, json.dumps(record, indent=0, sort_keys=True) + "\n")
    write_atomic(RECORD.with_suffix(".md"), page(record))
    typer.echo(f"wrote {RECORD.relative_to(ROOT)}")


def page(record: Json) -> str:
    """The record as Markdown, without what only programs compare."""
    lines = ["# Baseline of a re-layout", "", "`python -m profiles.baseline` writes it.", ""]
    if code := record.get("code"):
        folders = code["folders"]
        lines += [f"Code at {code['commit']}: no docstring, comment or blank line counts.", ""]
        lines += ["| folder | files | code lines |", "|---|---|---|"]
        files = Counter(map(folder_of, code["lines"]))
        lines += [f"| {folder} | {files[folder]} | {n} |" for folder, n in folders.items()]
        arrows = sum(map(len, code["imports"].values()))
        lines += ["", f"{len(code['signatures'])} public signatures, {len(code['schemas'])} "]
        lines[-1] += f"schemas of operators, {arrows} imports between modules."
        lines += [""]
    if found := record.get("tests"):
        lines += [f"Tests at {found['commit']}: {found['tests']} ids in {len(found['files'])} "]
        lines[-1] += "files."
        lines += ["", *_table("tests", {f: t["tests"] for f, t in found["files"].items()})]
    if found := record.get("seconds"):
        lines += [f"Time of the tests at {found['commit']}, {found['unit']}:", ""]
        lines += _table(found["unit"], found["files"])
    if found := record.get("digests"):
        lines += [f"Digests at {found['commit']}: {len(found['variants'])} variants, built by "]
        lines[-1] += "; ".join(found.get("compilers", [])) + "."
        lines += [""]
    return "\n".join(lines)


def _table(unit: str, by_file: Mapping[str, float]) -> list[str]:
    """Sums by folder of tests."""
    sums: dict[str, float] = {}
    for file, n in by_file.items():
        folder = "/".join(file.split("/")[:-1][:2])
        sums[folder] = sums.get(folder, 0) + n
    rows = [f"| {folder} | {n:.0f} |" for folder, n in sorted(sums.items())]
    return [f"| folder | {unit} |", "|---|---|", *rows, ""]


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="an earlier baseline.json")],
    new: Annotated[Path, typer.Argument(help="a later one")] = RECORD,
) -> None:
    """Tell what differs in signatures, schemas and instructions; exit code 1 if anything does."""
    before, after = (json.loads(path.read_text()) for path in (old, new))
    differs = [*_differences(before, after)]
    typer.echo("\n".join(differs) or "signatures, schemas and instructions are equal")
    raise typer.Exit(1 if differs else 0)


def _differences(before: Json, after: Json) -> Iterable[str]:
    for kind in ("signatures", "schemas"):
        some = [record.get("code", {}).get(kind, {}) for record in (before, after)]
        first, second = (s if isinstance(s, dict) else dict.fromkeys(s, "") for s in some)
        for name in sorted({*first, *second}):
            if first.get(name) != second.get(name):
                yield f"{kind}: {name}: {first.get(name)} -> {second.get(name)}"
    first, second = (record.get("digests", {}).get("variants", {}) for record in (before, after))
    for name in sorted({*first, *second}):
        for what in ("ptx", "sass"):
            sides = [side.get(name, {}).get(what, "missing") for side in (first, second)]
            if sides[0] != sides[1]:
                yield f"{what}: {name}: {sides[0]} -> {sides[1]}"


if __name__ == "__main__":
    app()

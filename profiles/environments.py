"""The wheels in clean environments: ``python -m profiles.environments``.

For each release of torch an environment is made outside of the checkout, with each release of
apache-tvm-ffi in turn, and the wheels of the host package and of a few kernels, which are made here
first.  ``environment_job.py`` runs in it: import, ``info``, a plan, a decode on the software GPU
against float64, a library that refuses a call.  Then the environment is deleted, as a torch with
CUDA has 5 GB.

Rows are added to ``profiles/results/environments.json``; ``environments.md`` is the table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen import wheels
from codegen.artifacts import ROOT, default_dir, write_atomic
from dsl_kernels.spec import VariantSpec, decode_spec
from profiles.page import commit

RESULTS = ROOT / "profiles" / "results"
JOB = Path(__file__).with_name("environment_job.py")
SPECS = [
    VariantSpec(op="plan_decode"), VariantSpec(op="append_kv"),
    VariantSpec(op="quantize_q", mode="token_head"), decode_spec("etap", 16, 64, "bf16"),
]  # fmt: skip
NEEDS = ("numpy", "typer", "rich")  # of the host wheel, beside torch and TVM FFI
Row = dict[str, Any]


def pip(python: Path, *words: str) -> None:
    """Raises RuntimeError with pip's last lines."""
    done = subprocess.run(
        [str(python), "-m", "pip", "-q", "--disable-pip-version-check", "install", *words],
        capture_output=True, text=True, env=_clean(),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"pip install {' '.join(words)}: {done.stderr.strip()[-400:]}")


def _clean() -> dict[str, str]:
    """The environment without what leads into this checkout."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("SNAPMLA", "PYTHON"))}


def run(python: Path, made: wheels.Wheels, asked: Row, variants: Path, folder: Path) -> Row:
    """One row: installs the wheels over what is there, and runs the job."""
    pip(python, f"apache-tvm-ffi=={asked['tvm_ffi']}")
    pip(python, "--no-deps", "--force-reinstall", str(made.host), str(made.kernels))
    job = folder / JOB.name
    shutil.copyfile(JOB, job)
    done = subprocess.run(
        [str(python), str(job), str(variants)], cwd=folder, capture_output=True, text=True,
        env=_clean() | {"XDG_CACHE_HOME": str(folder / "cache")},
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    found: Row = json.loads(lines[-1]) if done.returncode in (0, 1) and lines else {}
    if found and not found.pop("where").startswith(str(folder)):
        raise RuntimeError("the environment's snapmla is not the one that was imported")
    why = (
        "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["failed"])[-1][-200:]
    )
    return asked | found | {"failed": why}


def environment(torch: str, releases: list[str], made: wheels.Wheels, variants: Path) -> list[Row]:
    """Rows of a release of torch, in an environment of its own that is deleted afterwards."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="snapmla-environment-") as tmp:
        folder = Path(tmp).resolve()
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        pip(python, f"torch=={torch}", *NEEDS)
        for release in releases:
            asked = {"torch": torch, "tvm_ffi": release, "commit": commit(),
                     "time": time.strftime("%Y-%m-%d")}  # fmt: skip
            rows.append(run(python, made, asked, variants, folder))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def place(row: Row) -> list[list[int]]:
    """Of a row in the table: by releases."""
    return [[int(n) for n in re.findall(r"\d+", row[name])] for name in ("torch", "tvm_ffi")]


def page(rows: list[Row]) -> str:
    """The table as Markdown."""
    lines = [
        "# Environments that the wheels ran in", "",
        "`python -m profiles.environments`, on x86-64 without a GPU: the host wheel and a wheel of "
        f"{len(SPECS)} kernels,", "installed by pip into an environment of its own. What ran: "
        "import, `info`, a plan, append, quantise and a decode of",
        "two sequences with 16 heads on the software GPU (relative L2 to float64), a compiled "
        "library that refuses a call.", "",
        "| torch | apache-tvm-ffi | Python | numpy | decode's error | library | commit, day |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        what = [row["torch"], row["tvm_ffi"], row.get("python", ""), row.get("numpy", "")]
        ran = [f"{row['error']:.1e}", "refuses"] if not row["failed"] else [row["failed"], ""]
        lines.append(f"| {' | '.join([*what, *ran])} | {row['commit'][:7]}, {row['time']} |")
    return "\n".join([*lines, ""])


def main(
    torch: Annotated[list[str], typer.Option(help="releases, as pip knows them")],
    ffi: Annotated[list[str], typer.Option(help="releases of apache-tvm-ffi, with each torch")],
    variants: Annotated[Path | None, typer.Option(help="built variants, with PTX")] = None,
    out: Annotated[Path, typer.Option(help="folder of the JSON and the page")] = RESULTS,
) -> None:
    """Runs the wheels in clean environments; exit code 1 if one fails."""
    folder = (variants or default_dir()).resolve()
    path = out / "environments.json"
    rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    good = True
    with tempfile.TemporaryDirectory() as tmp:
        made = wheels.make(SPECS, folder, Path(tmp))
        for release in torch:
            found = environment(release, ffi, made, folder)
            good = good and not any(row["failed"] for row in found)
            names = {(row["torch"], row["tvm_ffi"]) for row in found}
            rows = [row for row in rows if (row["torch"], row["tvm_ffi"]) not in names] + found
            rows.sort(key=place)
            write_atomic(path, json.dumps(rows, indent=1) + "\n")
            write_atomic(out / "environments.md", page(rows))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)

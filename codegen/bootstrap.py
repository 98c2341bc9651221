"""Makes the project's virtual environment; run as a script, with the standard library only.

    python3 codegen/bootstrap.py .venv

Creates the environment if it is missing and installs the project into it, editable, with the
compiler and the test tools.  A stamp file makes the next call return at once, until pyproject.toml
or the constraints change or the checkout is moved; what a killed call left is completed.  Without a
GPU, torch is pinned to the version that the tests were last run with (constraints/cpu.txt); on a
GPU machine whose Python has torch already, that one is used.

pip takes torch from its usual index, and from TORCH_INDEX if that names another one.  Where that
gives a build with CUDA, gigabytes, it is said before anything is fetched.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints"


def have_gpu() -> bool:
    """True if a CUDA device answers."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def has_pip(python: Path) -> bool:
    """True if an environment is whole: pip comes last when it is created."""
    command = [str(python), "-m", "pip", "--version"]
    return python.is_file() and subprocess.run(command, capture_output=True).returncode == 0


def has_torch(python: Path) -> bool:
    """True if an environment has torch already, its own or the system's."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([str(python), "-c", code]).returncode == 0


def pinned_torch() -> str:
    """The version in constraints/cpu.txt."""
    (line,) = re.findall(r"^torch==(\S+)$", (CONSTRAINTS / "cpu.txt").read_text(), re.MULTILINE)
    return str(line)


def index_options() -> list[str]:
    """Options that make pip look at TORCH_INDEX as well; none if that is not set."""
    index = os.environ.get("TORCH_INDEX", "")
    return ["--extra-index-url", index] if index else []


def torch_brings_cuda(python: Path) -> bool:
    """True if the torch that pip would install for the CPU is a build with CUDA nevertheless.

    On Linux a version without a CPU build of its own (``+cpu``) has CUDA.  False if pip cannot say.
    """
    command = [str(python), "-m", "pip", "index", "versions", "torch", *index_options()]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    if found is None or sys.platform != "linux":
        return False
    return f"{pinned_torch()}+cpu" not in found[1].split(", ")


def announce(python: Path, gpu: bool) -> None:
    """Says what is fetched if it is large."""
    if has_torch(python):
        return
    if gpu:
        print("torch and its CUDA libraries come along: about 5 GB", flush=True)
    elif torch_brings_cuda(python):
        print(
            f"no GPU here, but pip finds no torch {pinned_torch()} without CUDA for Python "
            f"{sys.version_info[0]}.{sys.version_info[1]}: about 5 GB come along; without them: "
            "Ctrl-C and make setup TORCH_INDEX=, the index of CPU builds that pytorch.org names",
            flush=True,
        )


def stamp() -> str:
    """Changes when what must be installed changes."""
    digest = hashlib.sha256(f"{sys.version} {ROOT}".encode())
    for path in (ROOT / "pyproject.toml", *sorted(CONSTRAINTS.glob("*.txt"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main(target: Path) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (whatever python3 is runs this file)
        sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]} (set PYTHON=)")
    mark = target / ".snapmla"
    if mark.is_file() and mark.read_text() == stamp():
        return
    gpu = have_gpu()
    python = target / "bin" / "python"
    if not has_pip(python):
        print(f"creating {target}", flush=True)
        reuse_torch = gpu and importlib.util.find_spec("torch") is not None
        half = (target / "pyvenv.cfg").is_file()  # a killed call's: cannot be created over
        venv.create(target, clear=half, with_pip=True, system_site_packages=reuse_torch)
    constraints = CONSTRAINTS / ("test.txt" if gpu else "cpu.txt")
    announce(python, gpu)
    command = [str(python), "-m", "pip", "install", "-q", "-c", str(constraints), *index_options()]
    print(f"installing into {target} (constraints: {constraints.name})", flush=True)
    subprocess.run([*command, "-e", f"{ROOT}[compile,dev]"], check=True, cwd=ROOT)
    mark.write_text(stamp())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv").absolute())

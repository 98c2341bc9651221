"""``make wheels``: both installed into an environment of their own, outside of the checkout."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from codegen import link, matrix, toolchain, wheels
from codegen.precompile import precompile
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import env

pytestmark = [
    pytest.mark.skipif(
        not toolchain.have_compiler() or link.identity() is None, reason="needs DSL and C compiler"
    ),
    # not find_spec("pip"), by which setuptools' own finder takes this process for pip
    pytest.mark.skipif(not list(importlib.metadata.distributions(name="pip")), reason="needs pip"),
]
SPECS = [
    VariantSpec(op="merge"),
    VariantSpec(op="append_kv"),
    VariantSpec(op="quantize_q", mode="token_head"),
]
NAME = wheels.name_of("sm_90a", toolchain.flavour() if toolchain.have_compiler() else "none")
MODULE = NAME.replace("-", "_")
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def made(variant_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> wheels.Wheels:
    """Wheels with three variants, up to date after ``--precompile``."""
    precompile(SPECS, variant_dir)
    try:
        return wheels.make(SPECS, variant_dir, tmp_path_factory.mktemp("wheels"))
    except wheels.WheelError as error:
        if "wheels need" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def home(made: wheels.Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds both wheels, and sees this one's torch and TVM FFI."""
    root = tmp_path_factory.mktemp("home") / "venv"
    venv.create(root, with_pip=False)
    python = root / "bin" / "python"
    (purelib,) = (root / "lib").glob("python*/site-packages")
    # by a path file: what is installed there editable stays out, its own path files are not read
    (purelib / "others.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    command += ["--no-index", "--no-compile", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, str(made.host), str(made.kernels)], capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return root


def run(home: Path, *command: str) -> Done:
    """Runs a command of the environment, outside of the checkout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SNAPMLA", "PYTHON"))}
    clean["XDG_CACHE_HOME"] = str(home / "none")
    return subprocess.run(
        [str(home / "bin" / command[0]), *command[1:]], capture_output=True, text=True,
        cwd=home.parent, env=clean,
    )  # fmt: skip


def test_what_they_are(made: wheels.Wheels) -> None:
    """The host's for any machine; the kernels' for a platform, whose C library may be old.

    Names tell them from ``pip wheel .``'s and from wheels with other kernels.
    """
    assert made.host.name == f"snapmla-{env.__version__}+host-py3-none-any.whl"
    total = [s.name for s in matrix.default_specs("sm_90a")]
    label = wheels.label([spec.name for spec in SPECS], total)
    assert label.startswith(f"3of{len(total)}.s") and made.total == len(total)
    head = f"{MODULE}-{env.__version__}+{label}-py3-none-manylinux_2_"
    found = re.fullmatch(rf"{re.escape(head)}(\d+)_(\w+)\.whl", made.kernels.name)
    assert found is not None and 17 <= int(found[1]) <= 28, made.kernels.name
    assert made.variants == len(SPECS)
    host, kernels = (zipfile.ZipFile(path) for path in (made.host, made.kernels))
    top = {name.partition("/")[0] for name in host.namelist() if ".dist-info/" not in name}
    assert top == {"snapmla", "snapmla_cli", "softgpu", "dsl_kernels"}
    assert {"softgpu/runtime.c", "snapmla/data/cards.json", "snapmla/py.typed"} <= set(
        host.namelist()
    )
    for name in host.namelist():
        if name.endswith(".py"):
            assert "import cutlass" not in host.read(name).decode(), f"{name}: device code"
    top = {name.partition("/")[0] for name in kernels.namelist() if ".dist-info/" not in name}
    assert top == {MODULE}
    for wheel in (host, kernels):
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        text = wheel.read(metadata).decode()
        assert "License-Expression: Apache-2.0" in text
        assert (f"Requires-Dist: snapmla=={env.__version__}\n" in text) == (wheel is kernels)
        assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    headers = [n for n in kernels.namelist() if n.endswith(".h")]
    assert len(headers) == len(SPECS)


def test_equal_contents_make_equal_wheels(
    made: wheels.Wheels, variant_dir: Path, tmp_path: Path
) -> None:
    again = wheels.make(SPECS, variant_dir, tmp_path)
    assert again.kernels.read_bytes() == made.kernels.read_bytes()


def test_labels() -> None:
    """Valid in a version, equal for equal sets, and a part's less than the whole's."""
    names = [f"v{i}" for i in range(134)]
    full, part = wheels.label(names, names), wheels.label(names[:4], names)
    assert full == "full" and re.fullmatch(r"4of134\.s[0-9a-f]{8}", part)
    assert part == wheels.label(names[3::-1], names)
    assert part != wheels.label(names[1:5], names)
    assert wheels.label([*names, "outside"], names) == full
    assert part < "full", "letters are greater: pip takes the whole of two"


USE = f"""
import importlib.metadata, sys
import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants as runtime

assert snapmla.__file__.startswith(sys.prefix), snapmla.__file__
assert snapmla.__version__ + "+host" == importlib.metadata.version("snapmla")
for name in ("snapmla", "{NAME}"):
    files = importlib.metadata.distribution(name).files
    top = {{f.parts[0] for f in files if f.parts[0] != ".."}}
    assert not top & {{"codegen", "tests", "profiles", "docs", "examples"}}, top
for spec in map(VariantSpec.from_name, {[spec.name for spec in SPECS]}):
    artifact = runtime.find_or_build(spec, need_library=True)
    assert str(artifact.library).startswith(sys.prefix), artifact.library
try:
    runtime.load(artifact, "cuda")(1)
except TypeError as error:
    assert "q_nope" in str(error)
plugins = importlib.metadata.entry_points(group="vllm.general_plugins", name="snapmla")
print(*(plugin.load().__name__ for plugin in plugins))
snapmla.explain(16, 1, card="H200")
assert not {{"codegen", "cutlass"}} & set(sys.modules)
"""


def test_installed_they_find_one_another(home: Path) -> None:
    done = run(home, "python", "-c", USE)
    assert done.returncode == 0 and done.stdout == "register\n", done.stdout + done.stderr


def test_the_command_tells_what_is_there_and_what_is_missing(home: Path) -> None:
    """Three variants decode nothing, on whatever machine."""
    done = run(home, "snapmla", "info", "--json")
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["package"]["kind"] == "wheel"
    assert found["package"]["commit"] == wheels.commit()
    (folder,) = (f for f in found["folders"] if NAME in f["what"])
    assert folder["variants"] == {
        "sm_90a merge": 1, "sm_90a append_kv": 1, "sm_90a quantize_q": 1,
    }  # fmt: skip
    assert folder["refused"] is None
    assert any("a source checkout and `pip install .` have it" in text for text in found["missing"])


@pytest.fixture
def other_sources(home: Path) -> Iterator[None]:
    """The kernels are of another tree than the host."""
    (note,) = (home / "lib").glob("python*/site-packages/snapmla_kernels_sm90*/build.json")
    before = note.read_text()
    note.write_text(json.dumps({**json.loads(before), "sources": "0", "version": "0.0.9"}))
    yield
    note.write_text(before)


def test_kernels_of_other_sources_are_refused(home: Path, other_sources: None) -> None:
    code = (
        "from snapmla import VariantError\nfrom snapmla.runtime import variants as runtime\n"
        "from dsl_kernels.spec import VariantSpec\n"
        "try: runtime.find_or_build(VariantSpec(op='merge'), need_library=True)\n"
        "except VariantError as error: print(error)"
    )
    done = run(home, "python", "-c", code)
    words = (
        f"{NAME} 0.0.9 was built from other kernel sources than snapmla "
        f"{env.__version__}: install both from one release"
    )
    assert done.stdout.count("\n") == 1 and words in done.stdout, done.stdout + done.stderr


def test_a_backend_that_is_too_old_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "68.1.2")
    with pytest.raises(wheels.WheelError, match=r"^wheels need setuptools>=77: pip install '"):
        wheels.make(SPECS, Path("none"), Path("none"))

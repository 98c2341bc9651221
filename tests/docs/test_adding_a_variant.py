"""docs/adding-a-variant.md, walked through in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsl_kernels import registry
from dsl_kernels.spec import VariantSpec
from tests.support import ROOT
from tests.support.needs import needs_compiler

PAGE = (ROOT / "docs" / "adding-a-variant.md").read_text("utf-8")
VARIANT = "decode_etap_r16_p256_obf16_sm90a"
PACKED = ("codegen", "docs", "dsl_kernels", "profiles", "snapmla", "softgpu", "tests")
pytestmark = needs_compiler


def diffs() -> list[tuple[str, str, str]]:
    """(file, old lines, new lines) of the page's diffs."""
    found = []
    for path, body in re.findall(r"^```diff (\S+)\n(.*?)^```", PAGE, flags=re.S | re.M):
        old, new = (
            "".join(f"{line[1:]}\n" for line in body.splitlines() if line[0] in kinds)
            for kinds in ("- ", "+ ")
        )
        found.append((path, old, new))
    return found


def apply(root: Path, path: str, old: str, new: str) -> None:
    text = (root / path).read_text("utf-8")
    assert text.count(old) == 1, f"{path} does not hold once:\n{old}"
    (root / path).write_text(text.replace(old, new), "utf-8")


def complaining() -> list[str]:
    """Node ids of the first table, but for the test that needs the whole matrix built."""
    table = PAGE.split("## 2. Who complains")[1].split("The others widen")[0]
    named = re.findall(r"^\| `(tests/\S+::\w+)`", table, flags=re.M)
    return [name for name in named if "test_bundle" not in name]


def python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in the copy, and nothing of this checkout."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SNAPMLA_", "PYTEST_"))}
    clean |= {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, env=clean, capture_output=True, text=True
    )


def outcomes(root: Path, names: list[str]) -> dict[str, list[str]]:
    """What pytest says of tests in the copy: short name -> ids that failed."""
    done = python(root, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    failed = re.findall(r"^FAILED (\S+)", done.stdout, flags=re.M)
    return {name: [f for f in failed if f.startswith(name)] for name in names}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout without what was built, in which the page's first diff is applied."""
    target = tmp_path_factory.mktemp("checkout") / "snapmla"
    target.mkdir()
    for name in PACKED:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"):
        shutil.copyfile(path, target / path.name)
    apply(target, *diffs()[0])
    return target


@pytest.mark.slow
@pytest.mark.whole_matrix
def test_the_new_value_compiles_and_is_right(copy: Path) -> None:
    counted = python(copy, "-m", "codegen", "matrix", "--filter", "decode_*_p256_*")
    total = next(line for line in counted.stdout.splitlines() if "total" in line)
    promised = re.search(r"(\d+) more are built, (\d+) pruned", PAGE)
    assert promised is not None and re.findall(r"\d+", total) == list(promised.groups())
    done = python(copy, "-m", "codegen", "try", VARIANT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    done = python(copy, "-m", "snapmla.testing", "run", VARIANT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert VARIANT in PAGE and "relative L2" in done.stdout


@pytest.mark.whole_matrix
def test_the_tests_that_complain(copy: Path) -> None:
    """Those that the page names fail after its first diff, and pass after the others."""
    names = complaining()
    assert len(names) == 3
    before = outcomes(copy, names)
    assert all(before.values()), before
    for diff in diffs()[1:]:
        apply(copy, *diff)
    assert python(copy, "-m", "codegen", "docs").returncode == 0
    after = outcomes(copy, names)
    assert not any(after.values()), after


def test_what_the_kernel_refuses() -> None:
    spec = VariantSpec.from_name("decode_etap_r64_p64_obf16_st5_sm90a")
    assert f"{registry.feasible(spec)}\n```" in PAGE
    assert registry.feasible(VariantSpec.from_name("decode_etap_r64_p64_obf16_st3_sm90a")) is None


def test_named_tests_exist() -> None:
    for path, test in re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE):
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path} has no {test}"


def test_sentences_that_name_the_sizes() -> None:
    """The files that the page lists hold the words, and no other file of the package does."""
    listed = PAGE.split("## 3. What no test can know")[1].split("Then `make docs`")[0]
    named = {name for name in re.findall(r"`([\w/.]+\.(?:py|md))`", listed)}
    words = re.compile(r"16,\s+32,\s+64\s+or\s+128")
    pages = [ROOT / "README.md", ROOT / "docs" / "formats.md", *(ROOT / "snapmla").rglob("*.py")]
    assert named == {str(p.relative_to(ROOT)) for p in pages if words.search(p.read_text("utf-8"))}

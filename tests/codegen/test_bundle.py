"""``make bundle``: unpacked somewhere else, without compiler, codegen or software GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from codegen import artifacts, bundle, link, matrix, toolchain
from codegen.__main__ import app
from codegen.precompile import Report
from dsl_kernels.spec import VariantSpec
from snapmla.errors import UnsupportedDeviceError
from snapmla.runtime import env, variants
from snapmla.tools import bundle as server

pytestmark = pytest.mark.skipif(
    not toolchain.have_compiler() or link.identity() is None, reason="needs DSL and C compiler"
)
# What a server need not have: not to be found in ``serve``.
ABSENT = ("cutlass", "codegen", "softgpu", "typer", "rich", "filelock", "jinja2", "matplotlib")
GUARD = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in {ABSENT!r}
        return None if absent else self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def hopper(specs: list[VariantSpec]) -> list[VariantSpec]:
    """What is packed: the run's variants of sm_90a."""
    return [spec for spec in specs if spec.arch == "sm_90a"]


@pytest.fixture(scope="module")
def made(
    built: Report,
    hopper: list[VariantSpec],
    variant_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> bundle.Bundle:
    return bundle.make(hopper, variant_dir, tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def unpacked(made: bundle.Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of the unpacked archive, in a folder of its own."""
    folder = tmp_path_factory.mktemp("server")
    # an argument of Python 3.11.4
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(made.archive) as tar:
        tar.extractall(folder, **options)
    (root,) = folder.iterdir()
    return root


def serve(root: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code as on the server: the bundle on the path, this checkout not."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SNAPMLA", "PYTHON"))}
    clean |= {"PYTHONPATH": str(root), "XDG_CACHE_HOME": str(root / "none"), **environment}
    return subprocess.run(
        [sys.executable, "-c", GUARD + code], capture_output=True, text=True, cwd=root.parent,
        env=clean,
    )  # fmt: skip


def test_size_and_contents(made: bundle.Bundle, hopper: list[VariantSpec], unpacked: Path) -> None:
    files = [p for p in unpacked.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) == made.size <= 75_000_000
    names = {p.relative_to(unpacked).as_posix() for p in files}
    libraries = {n for n in names if n.endswith(".so")}
    assert len(libraries) == made.variants == len(hopper)
    assert not [n for n in names if n.endswith((".o", ".ptx", ".log", ".pyc"))]
    assert {"README.md", "LICENSE", "requirements.txt", "snapmla/variants/bundle.json"} <= names
    assert {"snapmla/py.typed", "dsl_kernels/py.typed"} <= names
    for path in files:
        if path.suffix == ".py":
            assert "import cutlass" not in path.read_text(), path
        if path.suffix in (".py", ".md", ".json", ".txt", ".h"):
            assert str(artifacts.ROOT) not in path.read_text(), f"{path}: a path of this machine"
    headers = {n for n in names if n.startswith("include/snapmla/")}
    assert len(headers) == made.variants


@pytest.mark.whole_matrix
def test_readme_tells_the_size(made: bundle.Bundle) -> None:
    text = " ".join((artifacts.ROOT / "README.md").read_text().split())
    found = re.search(r"\((\d+) MB in all, (\d+) MB as archive\)", text)
    assert found is not None
    assert abs(made.size / 1e6 - int(found[1])) < 1.5
    assert abs(made.archive.stat().st_size / 1e6 - int(found[2])) < 1


def test_requirements_are_the_projects_own(unpacked: Path) -> None:
    project = (artifacts.ROOT / "pyproject.toml").read_text()
    lines = (unpacked / "requirements.txt").read_text().split()
    assert {x.split(">")[0] for x in lines} == {"torch", "apache-tvm-ffi", "numpy"}
    assert all(f'"{line}"' in project for line in lines)


def test_lists_its_variants_without_the_compiler(
    made: bundle.Bundle, hopper: list[VariantSpec], unpacked: Path
) -> None:
    code = (
        "import runpy; import snapmla\n"
        "from snapmla.runtime import variants as runtime\n"
        "print(snapmla.__file__); print(len(runtime.available()), 'variants')\n"
        f"assert not set(sys.modules) & set({ABSENT!r})\n"
        "runpy.run_module('snapmla.bundle', run_name='__main__')"
    )
    done = serve(unpacked, code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(unpacked / "snapmla" / "__init__.py") in done.stdout
    assert f"{made.variants} variants" in done.stdout
    decodes = sum(spec.op == "decode" for spec in hopper)
    assert f"{'decode':14} {decodes}\n" in done.stdout and "damaged" not in done.stdout
    assert (
        done.stdout.endswith(
            f"no CUDA device: nothing was run; libraries compared with their checksums: "
            f"{made.variants}, wrong: 0\n"
        )
        or torch.cuda.is_available()
    )


def test_a_bundle_tells_of_its_own_variants(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of a wheel's beside it, and not of what SNAPMLA_VARIANT_DIR names."""
    for folder, op in (("own/variants", "merge"), ("other", "plan_decode")):
        spec, place = VariantSpec(op=op), tmp_path / folder
        place.mkdir(parents=True)
        (place / f"{spec.name}.so").touch()
        entry = {"name": spec.name, "sha256": hashlib.sha256(b"").hexdigest()}
        (place / variants.BUNDLE).write_text(json.dumps({"variants": [entry]}))
    monkeypatch.setattr(
        env, "variant_dirs", lambda: [tmp_path / "other", tmp_path / "own/variants"]
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert server.main() == 0
    out = capsys.readouterr().out
    assert (
        "plan_decode" in out
        and "merge" in out
        and "compared with their checksums: 2, wrong: 0\n" in out
    )
    monkeypatch.setattr(env, "PACKAGE", tmp_path / "own")
    assert server.main() == 0
    out = capsys.readouterr().out
    assert (
        "plan_decode" not in out
        and "merge" in out
        and "compared with their checksums: 1, wrong: 0\n" in out
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(server, "decode_once", lambda device: 0.0)
    monkeypatch.setattr(variants, "loaded", lambda: [VariantSpec(op="plan_decode")])
    assert server.main() == 0
    assert f"with kernels of {tmp_path / 'other'}, which is no part" in capsys.readouterr().out
    (tmp_path / "own" / "variants" / "merge_obf16_sm90a.so").write_bytes(b"half")
    assert server.main() == 1
    assert "compared with their checksums: 1, wrong: 1\n" in capsys.readouterr().out


def test_the_reference_runs_on_a_server(unpacked: Path) -> None:
    """Messages say that it runs anywhere."""
    code = (
        "import torch; from snapmla import metrics, reference\n"
        "q = torch.randn(1, 1, 2, 512), torch.randn(1, 1, 2, 64)\n"
        "kv = torch.randn(1, 40, 512), torch.randn(1, 40, 64)\n"
        "configs = reference.FP64, reference.MIMIC_HW_FULL\n"
        "run = reference.reference_from_unquantised\n"
        "truth, mimic = (run(*q, *kv, 0.04, config=config)[0] for config in configs)\n"
        "print(0 < metrics.relative_l2(mimic, truth) < 0.1)"
    )
    done = serve(unpacked, code)
    assert done.returncode == 0 and done.stdout == "True\n", done.stdout + done.stderr
    assert not list(unpacked.rglob("selfcheck.py")), "needs the software GPU"


def test_damage_is_reported(unpacked: Path) -> None:
    library = unpacked / "snapmla" / "variants" / "merge_obf16_sm90a.so"
    intact = library.read_bytes()
    code = "import runpy; runpy.run_module('snapmla.bundle', run_name='__main__')"
    try:
        library.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        done = serve(unpacked, code)
        assert done.returncode == 1
        assert "damaged: merge_obf16_sm90a.so differs from its checksum" in done.stdout
        library.unlink()
        done = serve(unpacked, code)
        assert done.returncode == 1 and "merge_obf16_sm90a.so is missing" in done.stdout
    finally:
        library.write_bytes(intact)


def test_library_is_loaded_from_the_bundle(unpacked: Path) -> None:
    code = (
        "from snapmla.runtime import variants as runtime\n"
        "from dsl_kernels.spec import VariantSpec\n"
        "spec = VariantSpec(op='merge')\n"
        "artifact = runtime.find_or_build(spec, need_library=True)\n"
        "print(artifact.library)\n"
        "try: runtime.load(artifact, 'cuda')(1)\n"
        "except TypeError as error: print('TypeError', 'o_accum' in str(error))"
    )
    done = serve(unpacked, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        str(unpacked / "snapmla" / "variants" / "merge_obf16_sm90a.so"), "TypeError", "True",
    ]  # fmt: skip


LACKING = [
    ("op='merge', arch='sm_100a'", True, "all variants there are for sm_90a, not for sm_100a"),
    ("op='decode', pipeline='etap', stages=3", True, "the compiler is not installed"),
    ("op='decode', pipeline='etap', stages=3", True, "nearest one there is decode_etap_r64_p64"),
    ("op='merge'", False, "needs a build by `python -m codegen precompile`, not a bundle"),
]


def test_what_it_lacks_is_one_sentence(unpacked: Path) -> None:
    code = (
        "from snapmla import VariantError\nfrom snapmla.runtime import variants as runtime\n"
        "from dsl_kernels.spec import VariantSpec\n"
    ) + "".join(
        f"try: runtime.find_or_build(VariantSpec({spec}), need_library={library})\n"
        "except VariantError as error: print(error)\n"
        for spec, library, _ in LACKING
    )
    done = serve(unpacked, code)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    for sentence, (_, _, words) in zip(said, LACKING, strict=True):
        assert words in sentence


def test_records_are_those_of_the_build(built: Report, unpacked: Path) -> None:
    listed = json.loads((unpacked / "snapmla" / "variants" / bundle.RECORDS).read_text())
    assert bundle.RECORDS == variants.BUNDLE
    for entry in listed["variants"]:
        assert entry["key"] == built.records[entry["name"]].key
        assert entry["source_hash"] == built.records[entry["name"]].source_hash


def test_command_refuses_what_is_not_built(tmp_path: Path) -> None:
    arguments = ["bundle", "--out", str(tmp_path), "--into", str(tmp_path / "bundles")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "variants are missing or outdated" in result.output
    assert "run `make precompile ARCH=sm_90a`" in result.output
    assert not list((tmp_path / "bundles").glob("*")), "something half was left"


def test_archive_depends_on_its_contents_only(
    built: Report, variant_dir: Path, tmp_path: Path
) -> None:
    """Not on when, where and by whom it was packed."""
    specs = matrix.default_specs("sm_90a", "merge_o*")
    made = [bundle.make(specs, variant_dir, tmp_path / name) for name in ("a", "b")]
    with tarfile.open(made[0].archive) as tar:
        members = tar.getmembers()
    assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {(0, 0, "", "", 0)}
    assert {m.mode for m in members} == {0o755, 0o644}
    assert [m.name for m in members] == sorted(m.name for m in members)
    first, second = (each.archive.read_bytes() for each in made)
    assert first == second and first[4:8] == bytes(4), "a time in the gzip header"


def test_only_a_checkout_makes_bundles(
    built: Report, variant_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "is_checkout", lambda: False)
    with pytest.raises(bundle.BundleError, match="made from a source checkout"):
        bundle.make(matrix.default_specs("sm_90a", "merge_o*"), variant_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = CliRunner().invoke(app, ["docs"])
    assert result.exit_code == 1 and "no source checkout" in result.output


@pytest.mark.parametrize("text", ["", "[]", '{"variants": 3}', '{"variants": [{}]}'])
def test_a_damaged_list_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / variants.BUNDLE).write_text(text)
    assert server.damaged(tmp_path) == (0, [f"{variants.BUNDLE} cannot be read"])


def test_a_gpu_that_nothing_was_built_for_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(device: torch.device) -> float:
        raise UnsupportedDeviceError("a card is sm_80: kernels are built for sm_90")

    monkeypatch.setattr(server, "decode_once", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    assert server.main() == 1
    assert capsys.readouterr().out.endswith(
        "decode: a card is sm_80: kernels are built for sm_90\n"
    )


def test_too_large_is_refused(
    built: Report, variant_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "LIMIT", 100_000)
    with pytest.raises(bundle.BundleError, match="bytes, the limit is 100,000"):
        bundle.make(matrix.default_specs("sm_90a", "merge_o*"), variant_dir, tmp_path)
    assert not list(tmp_path.iterdir())

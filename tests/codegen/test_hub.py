"""codegen.hub: the folder for Hugging Face's ``kernels``, and its package without ours.

With ``--whole-matrix`` a folder is made and loaded in a process that cannot import ``snapmla``: as
``kernels`` does it and, where that package is installed (``pip install kernels``), by it.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import bundle, hub, link, toolchain
from codegen.precompile import precompile
from dsl_kernels.spec import VariantSpec, decode_spec

pytestmark = pytest.mark.skipif(
    not toolchain.have_compiler() or link.identity() is None, reason="needs DSL and C compiler"
)
SPECS = [
    VariantSpec(op="append_kv"), VariantSpec(op="plan_decode"),
    decode_spec("etap", 16, 64, "bf16"),
]  # fmt: skip
LOAD = r"""
import importlib, importlib.util, json, sys
from pathlib import Path

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("snapmla", "dsl_kernels", "softgpu", "codegen"):
            raise ModuleNotFoundError(f"{name} is not here")

sys.meta_path.insert(0, Absent())
folder, how = Path(sys.argv[1]), sys.argv[2]
if how == "kernels":
    import kernels
    from kernels._rust import Digest, Metadata

    metadata = Metadata.read_from_file(folder / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
    module = kernels.get_local_kernel(folder)
else:
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

import torch, tvm_ffi

name = module.__name__
runtime, spec = (importlib.import_module(f"{name}.{m}") for m in ("runtime", "dsl_kernels.spec"))
artifact = runtime.find(spec.VariantSpec(op="append_kv"))
function = getattr(tvm_ffi.load_module(str(artifact.library)), artifact.symbol)
try:
    function()
except TypeError as error:
    print("refused:", str(error).splitlines()[0])
assert "etap row_tile 16" in module.explain(16, 1).__str__()
assert hasattr(torch.ops, name) and getattr(torch.ops, name).decode is not None
cache = module.PagedKVCache.allocate(num_pages=2, page_size=64, device="cpu")
print("loaded as", name, tuple(cache.content.shape), Path(artifact.library).parent.name)
"""


@pytest.mark.parametrize(
    ("source", "depth", "wanted"),
    [
        ("from snapmla import env, plan\n", 0, "from . import env, plan\n"),
        ("from snapmla.rank.x import (\n    A,\n)\n", 1, "from ..rank.x import (\n    A,\n)\n"),
        ("    from snapmla.a.b import c\n", 2, "    from ...a.b import c\n"),
        (
            "from dsl_kernels.formats.dims import X\n",
            0,
            "from .dsl_kernels.formats.dims import X\n",
        ),
        ("from dsl_kernels import dims\n", 2, "from ...dsl_kernels import dims\n"),
        ("from snapmla_other import x\n", 0, "from snapmla_other import x\n"),
        ('NAMESPACE = "snapmla"\n', 0, 'NAMESPACE = "_id"\n'),
        ("torch.ops.snapmla.decode(x)\n", 0, "torch.ops._id.decode(x)\n"),
        ("torch.ops.snapmlar\n", 0, "torch.ops.snapmlar\n"),
    ],
)
def test_modules_are_rewritten(source: str, depth: int, wanted: str) -> None:
    assert hub.rewritten(source, depth, "_id") == wanted


def test_nothing_of_the_host_is_imported_by_its_name() -> None:
    """In all that a folder would hold, functions included."""
    for package in hub.PACKAGES:
        for path in sorted((bundle.ROOT / package).rglob("*.py")):
            inner = path.relative_to(bundle.ROOT / package)
            if package == hub.NAME and inner.parts[0] in hub.LEFT_OUT:
                continue
            text = hub.rewritten(path.read_text(), len(inner.parts), "_id")
            for node in ast.walk(ast.parse(text)):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                wrong = [n for n in names if n.partition(".")[0] in hub.PACKAGES]
                assert not wrong, f"{path}: {wrong}"
            assert "torch.ops.snapmla" not in text, path


def test_names_of_folders() -> None:
    assert hub.folder_name("cu13", "x86_64") == "tvm-ffi01-cu130-x86_64-linux"
    assert hub.folder_name("cu12", "aarch64") == "tvm-ffi01-cu126-aarch64-linux"


@pytest.fixture(scope="module")
def folder(variant_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    precompile(SPECS, variant_dir)
    out = tmp_path_factory.mktemp("hub")
    hub.make(SPECS[:1], variant_dir, out)  # what is there is replaced
    return hub.make(SPECS, variant_dir, out, version=3)


@pytest.mark.whole_matrix
def test_metadata_lists_every_file(folder: Path) -> None:
    found = json.loads((folder / "metadata.json").read_text())
    assert found["id"].isidentifier() and found["name"] == "snapmla" and found["version"] == 3
    assert found["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    digests = found["digest"]["files"]
    assert set(digests) == files - {"metadata.json"}
    assert sum(name.endswith(".so") for name in digests) == len(SPECS)
    data = (folder / "__init__.py").read_bytes()
    assert digests["__init__.py"] == base64.b64encode(hashlib.sha256(data).digest()).decode()
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing is left behind"


@pytest.mark.whole_matrix
@pytest.mark.parametrize("how", ["as kernels", "kernels"])
def test_it_loads_without_an_installed_snapmla(folder: Path, how: str) -> None:
    if how == "kernels" and importlib.util.find_spec("kernels") is None:
        pytest.skip("needs the package kernels")
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, str(folder), how], capture_output=True, text=True,
        cwd=folder.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "refused: " in done.stdout and "(2, 64, 512) variants" in done.stdout
    assert "loaded as _snapmla_cu" in done.stdout

"""The module name ``flash_mla``: installed on request, refused where somebody has it, and engines'
calls of it replayed from a recorded table."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
from codegen import wheels
from snapmla import SnapMLAError
from snapmla.compat import flash_mla
from snapmla.compat.flash_mla import name as naming
from snapmla.testing.prefill_job import PrefillJob
from tests.host.test_flash_mla_sparse import Step as SparseStep
from tests.support import ROOT
from tests.support.dense_steps import SCALE, DenseStep
from tests.support.flash_mla_calls import DENSE, METADATA, PREFILL, SPARSE, Form
from tests.support.needs import needs_compiler

NAMES = (naming.NAME, naming.INTERFACE)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """Nobody has the name before or behind a test."""
    for each in NAMES:
        sys.modules.pop(each, None)
    yield
    for each in NAMES:
        sys.modules.pop(each, None)


def brought(folder: Path, distribution: str = "") -> Path:
    """A folder of the module path with a package of that name, perhaps of a distribution."""
    (folder / "flash_mla").mkdir(parents=True)
    (folder / "flash_mla" / "__init__.py").write_text("theirs = True\n")
    if distribution:
        info = folder / f"{distribution.replace('-', '_')}-1.0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\n")
        (info / "top_level.txt").write_text("flash_mla\n")
    return folder


# ---------------------------------------------------------------- the name


def test_the_name_gives_our_functions() -> None:
    module = snapmla.install_as_flash_mla()
    import flash_mla as found  # type: ignore[import-not-found]
    from flash_mla.flash_mla_interface import get_mla_metadata  # type: ignore[import-not-found]

    assert found is module is snapmla.install_as_flash_mla()
    assert get_mla_metadata is flash_mla.get_mla_metadata
    for name in flash_mla.__all__:
        assert getattr(found, name) is getattr(flash_mla, name)
        assert getattr(found.flash_mla_interface, name) is getattr(flash_mla, name)
    assert found.__version__ == f"1.0.0+snapmla{snapmla.__version__}"
    lengths = torch.ones(1, dtype=torch.int32)
    assert snapmla.install_as_flash_mla(tensors=True) is module
    for each in (found, found.flash_mla_interface):
        assert each.get_mla_metadata()[1] is None and each.get_mla_metadata(topk=8)[1] is None
        assert each.get_mla_metadata.__name__ == "get_either"
        with pytest.raises(TypeError, match="^num_heads_k: expected an int"):
            each.get_mla_metadata(lengths, 16)
    snapmla.install_as_flash_mla()
    assert found.get_mla_metadata(lengths, 16) == (flash_mla.FlashMLASchedMeta(), None)
    with pytest.raises(TypeError, match="^tensors: expected"):
        snapmla.install_as_flash_mla(tensors="yes")  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="flash_mla.other"):
        importlib.import_module("flash_mla.other")


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("distribution", ["", "sgl-flash-mla"])
def test_a_name_that_somebody_has_is_refused(
    distribution: str, imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = brought(tmp_path / "site", distribution)
    monkeypatch.syspath_prepend(folder)
    if imported:
        import flash_mla as theirs  # type: ignore[import-not-found]

        assert theirs.theirs
    with pytest.raises(SnapMLAError) as caught:
        snapmla.install_as_flash_mla()
    who = distribution or str(folder / "flash_mla" / "__init__.py")
    assert f"a name that nobody has here, got {who}'s module" in str(caught.value)
    import flash_mla as still  # type: ignore[import-not-found]

    assert still.theirs and not hasattr(still, naming.MARK)


# ---------------------------------------------------------------- the wheel

LAZY = """
import site, sys
site.addsitedir(sys.argv[1])
assert not {"torch", "snapmla", "flash_mla"} & set(sys.modules), "imported when Python starts"
try:
    from flash_mla.flash_mla_interface import flash_mla_with_kvcache
    import flash_mla, snapmla
    assert flash_mla_with_kvcache.theirs is snapmla.flash_mla.flash_mla_with_kvcache
    print("ours", flash_mla.__version__)
except ImportError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed."""
    folder = tmp_path_factory.mktemp("wheel")
    try:
        made = wheels.make_name_wheel(folder / "made")
    except wheels.WheelError as error:
        if "wheels need" in str(error):
            pytest.skip(str(error))
        raise
    with zipfile.ZipFile(made) as wheel:
        wheel.extractall(folder / "site")
        top = {name.partition("/")[0] for name in wheel.namelist()}
    assert made.name == f"snapmla_as_flash_mla-{snapmla.__version__}-py3-none-any.whl"
    assert top == {
        "snapmla_as_flash_mla", "snapmla_as_flash_mla.pth",
        f"snapmla_as_flash_mla-{snapmla.__version__}.dist-info",
    }  # fmt: skip
    return folder / "site"


def start(site: Path, switch: str, *folders: Path) -> str:
    """What a process says that has the wheel, with the switch set so."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SNAPMLA", "PYTHON"))}
    path = os.pathsep.join(map(str, (*folders, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", LAZY, str(site)], capture_output=True, text=True, cwd=site,
        env={**clean, "SNAPMLA_AS_FLASH_MLA": switch, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_waits_for_the_switch(site: Path) -> None:
    assert start(site, "0") == "ModuleNotFoundError No module named 'flash_mla'"
    assert start(site, "1") == f"ours 1.0.0+snapmla{snapmla.__version__}"
    assert start(site, "tensors") == f"ours 1.0.0+snapmla{snapmla.__version__}"


def test_the_wheel_shadows_nobody(site: Path, tmp_path: Path) -> None:
    """Where another distribution has the name, the import says so: nothing is taken silently."""
    said = start(site, "on", brought(tmp_path / "other", "flash-mla"))
    assert said.startswith("ImportError flash_mla: expected a name that nobody has here, got fl")
    assert "flash-mla's module" in said and "or unset SNAPMLA_AS_FLASH_MLA" in said


# ---------------------------------------------------------------- engines' calls


def call(form: Form, step: dict[str, Any]) -> Any:
    """A recorded call of the module by its name, on a step's values."""
    import flash_mla as module  # type: ignore[import-not-found]

    places, names = form.arguments(step)
    return getattr(module, form.function)(*places, **names)


def values(step: DenseStep) -> dict[str, Any]:
    """What engines know of a step."""
    _, s_q, heads, _ = step.q.shape
    return {
        "q": step.q, "k_cache": step.cache.kv, "block_table": step.block_table,
        "cache_seqlens": step.cache_seqlens, "head_dim_v": 512, "softmax_scale": SCALE,
        "num_q_tokens_per_head_k": s_q * heads, "num_heads_k": 1, "num_heads_q": heads,
    }  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("who", DENSE)
def test_dense_calls(who: str) -> None:
    """Metadata into static buffers, as for graphs, and decode of pages that they point into."""
    snapmla.install_as_flash_mla(tensors=True)
    step = DenseStep.make((40, 5), 4, 2, page_size=16, dtype=torch.float16)
    given = values(step)
    metadata, splits = call(METADATA[who], given)
    assert metadata.dtype == splits.dtype == torch.int32 and metadata.shape[1] == 8
    static, static_splits = torch.zeros_like(metadata), torch.zeros_like(splits)
    static.copy_(metadata)
    static_splits.copy_(splits)
    held = {**given, "tile_scheduler_metadata": static, "num_splits": static_splits}
    out, lse = call(DENSE[who], held)
    step.assert_right(out, lse)


@needs_compiler
@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("kind", ["LMDeploy, sparse", "LMDeploy, object"])
def test_sparse_calls(kind: str, tensors: bool) -> None:
    """Over rows of 656 bytes kept as float8_e4m3fn, with a table of slots for indices."""
    snapmla.install_as_flash_mla(tensors=tensors)
    step = SparseStep()
    b, s_q, heads, _ = step.q.shape
    given = {
        "q": step.q, "k_cache": step.rows.view(torch.float8_e4m3fn), "head_dim_v": 512,
        "block_table": torch.zeros(b, 1, dtype=torch.int32), "softmax_scale": 576**-0.5,
        "cache_seqlens": torch.full((b,), 9, dtype=torch.int32), "indices": step.indices,
        "num_q_tokens_per_head_k": s_q * heads, "num_heads_k": 1, "num_heads_q": heads,
        "topk": step.indices.shape[-1],
    }  # fmt: skip
    metadata, splits = call(METADATA[kind], given)
    step.length.fill_(step.indices.shape[-1])  # it gives no topk_length
    step.indices[0, :, step.indices.shape[-1] // 2 :] = -1
    out, lse = call(SPARSE, {**given, "tile_scheduler_metadata": metadata, "num_splits": splits})
    step.assert_right(out, lse)


@needs_compiler
@pytest.mark.parametrize("form", PREFILL, ids=lambda form: form.who.partition(" ")[0])
def test_prefill_calls(form: Form) -> None:
    """Three heads padded to 64 with what memory held, four entries to 64 with -1, as they do."""
    snapmla.install_as_flash_mla()
    torch.manual_seed(2)
    q, kv = torch.full((2, 64, 576), torch.nan).bfloat16(), torch.randn(9, 1, 576).bfloat16()
    q[:, :3] = torch.randn(2, 3, 576)
    indices = torch.full((2, 1, 64), -1, dtype=torch.int32)
    indices[..., :4] = torch.tensor([[4, 0, 8, 8], [1, 9, 2, 3]])[:, None]
    out, most, lse = call(form, {"q": q, "k_cache": kv, "indices": indices, "sm_scale": SCALE})[:3]
    job = PrefillJob(q[:, :3], kv, indices, None, None, SCALE)
    errors = job.errors((out[:, :3], most[:, :3], lse[:, :3]))
    assert errors.error <= errors.allowed and errors.lse_error < 1e-5, str(errors)

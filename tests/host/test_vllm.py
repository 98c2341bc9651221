"""``snapmla.integrations.vllm``: vLLM's own classes drive it; what it relies on is on record.

The classes need an unpacked vLLM (``python -m tests.support.fetch_vllm``; the log of the last run
is profiles/results/vllm-contract.md).  The rest never skips.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from snapmla import runtime
from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm import __main__ as commands
from snapmla.integrations.vllm import surface
from tests.support import ROOT, fetch_vllm
from tests.support.needs import needs_compiler

SOURCE = ROOT / "snapmla" / "integrations" / "vllm" / "backend.py"
MLA = "vllm.model_executor.layers.attention.mla_attention"


# ---------------------------------------------------------------------------------- vLLM's classes


@needs_compiler
@pytest.mark.parametrize("case", ["decode", "prefill", "invariant", "ranks", "refusals"])
@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_vllms_own_classes(release: str, case: str) -> None:
    path = fetch_vllm.path_of(release)
    if path is None:
        pytest.skip(f"vLLM {release} is not there: python -m tests.support.fetch_vllm")
    folders = os.pathsep.join(map(str, (ROOT, *path)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_driver", case],
        env={**os.environ, "PYTHONPATH": folders, "VLLM_LOGGING_LEVEL": "CRITICAL"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.startswith(f"vLLM {release}") and done.stdout.endswith("all right\n")


# ------------------------------------------------------------------------------------- the record


def methods() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The methods of our classes that override vLLM's, as ``Base.method``."""
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.bases:
            base = ast.unparse(node.bases[0]).removeprefix("mla.").partition("[")[0]
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    yield f"{MLA}:{base}.{item.name}", item


OVERRIDES = {name: method for name, method in methods() if name in surface.RELIED}


def test_overrides_are_on_record() -> None:
    wanted = {n.rpartition(".")[2] for n in surface.RELIED if f"{MLA}:MLACommon" in n}
    assert {name.rpartition(".")[2] for name in OVERRIDES} >= {
        "_build_decode", "build_for_cudagraph_capture", "forward_mqa", "do_kv_cache_update",
        "_compute_prefill_context", "_context_parallel_compute_prefill_context", "customize_spec",
    }  # fmt: skip
    assert {name.rpartition(".")[2] for name in OVERRIDES} <= wanted
    assert set(surface.recorded()) == set(fetch_vllm.RELEASES)


@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_takes_what_vllm_passes(release: str, name: str) -> None:
    """By position what we name in that place; by name what we name at all; the rest is taken."""
    theirs = surface.recorded()[release][name]
    if theirs is False:
        assert name in surface.OPTIONAL
        return
    assert isinstance(theirs, list)
    theirs = [p for p in theirs if p != "self"]
    ours = OVERRIDES[name].args
    positional = [a.arg for a in ours.args if a.arg not in ("self", "cls")]
    assert positional == theirs[: len(positional)]
    assert {a.arg for a in ours.kwonlyargs} <= set(theirs)
    if len(positional) + len(ours.kwonlyargs) < len(theirs) and "Builder.__init__" not in name:
        assert ours.vararg or ours.kwarg, "a parameter of vLLM's has no place"


def test_what_the_backend_uses_is_on_record() -> None:
    """Names that it imports from vLLM, and attributes of vLLM's MLA module."""
    used = set()
    for path in (SOURCE, SOURCE.with_name("__init__.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                used |= {f"{node.module}:{alias.name}" for alias in node.names}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "mla":
                used.add(f"{MLA}:{node.attr}")
    modules = {name.partition(":")[0] for name in surface.RELIED}
    for name in used:
        module, _, attribute = name.partition(":")
        if f"{module}.{attribute}" in modules:  # a module
            continue
        assert any(k == name or k.startswith(f"{name}.") for k in surface.RELIED), name


@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_records_have_what_is_needed(release: str) -> None:
    record = surface.recorded()[release]
    assert set(record) == set(surface.RELIED)
    assert {name for name, value in record.items() if value is False} <= surface.OPTIONAL


def test_differences_are_told() -> None:
    known: surface.Surface = {"m:f": ["a", "b"], "m:g": True, "m:h": ["x"]}
    assert surface.differences(known, known) == []
    found: surface.Surface = {"m:f": ["a", "new", "b"], "m:g": False, "m:h": ["x", "more"]}
    assert surface.differences(found, known) == [
        (None, "m:f: (a, b) is (a, new, b) here"), (False, "m:g: there is missing here"),
    ]  # fmt: skip
    assert surface.differences({}, known)[0] == (False, "m:f: (a, b) is missing here")


# ------------------------------------------------------------------------- register and the check


class Registry:
    """What ``register`` calls of vLLM, in modules of their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
        self.backends: list[tuple[Any, str]] = []
        self.dtypes: dict[str, Any] = {}
        members = {"CUSTOM": "custom"}

        def register_backend(backend: Any, path: str) -> None:
            self.backends.append((backend, path))
            if isinstance(backend, str) and backend not in members.values():
                members[backend] = backend

        enum = types.SimpleNamespace(CUSTOM="custom", __members__=members)
        registry = {"AttentionBackendEnum": enum, "register_backend": register_backend}
        config: dict[str, Any] = {}
        if newer:
            names = config["KV_CACHE_DTYPES"] = ["auto"]

            def register_kv_cache_dtype(name: str) -> Any:
                names.append(name)
                return lambda handler: self.dtypes.setdefault(name, handler())

            config["register_kv_cache_dtype"] = register_kv_cache_dtype
        for name, content in (
            ("vllm", {}), ("vllm.v1", {}), ("vllm.v1.attention", {}),
            ("vllm.v1.attention.backends", {}), ("vllm.config", {}),
            ("vllm.v1.attention.backends.registry", registry), ("vllm.config.cache", config),
        ):  # fmt: skip
            module = types.ModuleType(name)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("newer", [False, True])
def test_register_may_be_called_again(monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    found = Registry(monkeypatch, newer)
    plugin.register()
    plugin.register()
    path = "snapmla.integrations.vllm.backend.SnapMLABackend"
    names = ["custom", "SNAPMLA", "custom"] if newer else ["custom", "custom"]
    assert found.backends == [(name, path) for name in names]
    assert list(found.dtypes) == (["snapmla"] if newer else [])
    if newer:
        assert found.dtypes["snapmla"].torch_dtype() is torch.uint8


def test_nothing_of_vllm_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, snapmla.integrations.vllm as p; "
        "assert not any(m.split('.')[0] == 'vllm' for m in sys.modules); print(p.BACKEND)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "SNAPMLA\n", done.stderr


def test_the_entry_point_is_register() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["vllm.general_plugins"]["snapmla"]
    module, _, name = value.partition(":")
    assert getattr(sys.modules[module], name) is plugin.register


def test_check_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_vllm(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_vllm)
    monkeypatch.setattr(runtime, "find", lambda spec: None)
    monkeypatch.setenv("SNAPMLA_NO_JIT", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    done = CliRunner().invoke(commands.app, ["check"])
    assert done.exit_code == 1
    assert "MISSING vllm: not installed" in done.stdout
    assert "SNAPMLA_NO_JIT forbids" in done.stdout


def test_check_of_an_installation_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    release = fetch_vllm.RELEASES[-1]
    point = types.SimpleNamespace(name="snapmla", value="snapmla.integrations.vllm:register")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    monkeypatch.setattr(surface, "read", lambda: surface.recorded()[release])
    monkeypatch.setattr(runtime, "find", lambda spec: spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    done = CliRunner().invoke(commands.app, ["check"])
    assert done.exit_code == 0, done.stdout
    assert [line[:2] for line in done.stdout.splitlines()] == ["ok"] * 5


def test_the_record_is_written_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "surface.json"
    monkeypatch.setattr(surface, "RECORD", target)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    monkeypatch.setattr(surface, "read", lambda: {"m:f": ["a"]})
    assert CliRunner().invoke(commands.app, ["record"]).exit_code == 0
    assert json.loads(target.read_text()) == {"1.2.3": {"m:f": ["a"]}}

"""``snapmla.integrations.sglang``: SGLang's own classes drive it; what it relies on is on record.

The classes need an unpacked SGLang (``python -m tests.support.fetch_sglang``; the log of the last
run is profiles/results/sglang-contract.md).  The rest never skips.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
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

import snapmla
from snapmla.integrations import findings
from snapmla.integrations import sglang as plugin
from snapmla.integrations.sglang import __main__ as commands
from snapmla.integrations.sglang import refuse, surface
from snapmla.integrations.surfaces import read_source
from snapmla.runtime import variants
from tests.support import ROOT, fetch_sglang
from tests.support.needs import needs_compiler

FOLDER = ROOT / "snapmla" / "integrations" / "sglang"
BASES = {
    "MLATokenToKVPool": ("MLATokenToKVPool", "KVCache"),
    "AttentionBackend": ("AttentionBackend",),
}


# -------------------------------------------------------------------------------- SGLang's classes


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("release", fetch_sglang.RELEASES)
def test_sglangs_own_classes(release: str) -> None:
    """All cases of the driver: importing SGLang takes longer than most of them."""
    path = fetch_sglang.path_of(release)
    if path is None:
        pytest.skip(f"SGLang {release} is not there: python -m tests.support.fetch_sglang")
    folders = os.pathsep.join(map(str, (ROOT, *path)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.sglang_driver"],
        env={**os.environ, "PYTHONPATH": folders}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"SGLang {release}" in done.stdout and done.stdout.endswith("all right\n")


@pytest.mark.parametrize("release", fetch_sglang.RELEASES)
def test_the_record_is_of_the_release(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch_sglang.path_of(release)
    if path is None:
        pytest.skip(f"SGLang {release} is not there: python -m tests.support.fetch_sglang")
    monkeypatch.syspath_prepend(path[0])
    assert surface.differences(surface.read(), surface.recorded()[release]) == []


# ------------------------------------------------------------------------------------- the record


def methods() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The methods of our classes that override SGLang's, as ``Base.method``."""
    for path in (FOLDER / "pool.py", FOLDER / "backend.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.bases:
                for item in node.body:
                    if isinstance(item, ast.FunctionDef):
                        for base in BASES[ast.unparse(node.bases[0])]:
                            yield f"{base}.{item.name}", item


KNOWN = {name.partition(":")[2]: name for name in surface.RELIED}
OVERRIDES = {KNOWN[name]: method for name, method in methods() if name in KNOWN}


def test_overrides_are_on_record() -> None:
    names = {name.rpartition(".")[2] for name in OVERRIDES}
    assert names >= {
        "_create_buffers", "set_mla_kv_buffer", "get_mla_kv_buffer", "move_kv_cache",
        "get_cpu_copy", "load_cpu_copy", "get_key_buffer", "init_forward_metadata",
        "init_forward_metadata_out_graph", "init_cuda_graph_state", "forward_decode",
        "forward_extend",
    }  # fmt: skip
    ours = {name.partition(".")[2] for name, _ in methods()}
    assert {n for n in ours if not n.startswith("_")} - names == {"cache_of"}
    assert set(surface.recorded()) == set(fetch_sglang.RELEASES)


@pytest.mark.parametrize("release", fetch_sglang.RELEASES)
@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_takes_what_sglang_passes(release: str, name: str) -> None:
    """By position what SGLang names in that place; the rest is taken by name or by ``**``."""
    if name.endswith("AttentionBackend.__init__"):
        return
    theirs = surface.recorded()[release][name]
    assert isinstance(theirs, list)
    theirs = [p for p in theirs if p != "self"]
    ours = OVERRIDES[name].args
    positional = [a.arg for a in ours.args if a.arg not in ("self", "cls")]
    least = [p for p in theirs if p != "kwargs"]
    assert positional[: len(least)] == least[: len(positional)]
    if len(positional) < len(least) or "kwargs" in theirs:
        assert ours.kwarg, "a parameter of SGLang's has no place"


def test_what_the_plugin_uses_is_on_record() -> None:
    """Names that it imports from SGLang, and names that it hooks by their path."""
    used, hooked = set(), set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
                used |= {f"{node.module}:{alias.name}" for alias in node.names}
    targets = (("validation_hook", "check_server_args"), ("overrides", "_mla_backend_page_const"),
               ("kv_cache_configurator", "_resolve_kv_pool_class"),
               ("draft_utils", "_create_backend"))  # fmt: skip
    text = (FOLDER / "hooks.py").read_text()
    for module, name in targets:
        assert name in text
        hooked |= {k for k in surface.RELIED if f"{module}:" in k and name in k}
    assert len(hooked) == len(targets)
    modules = {name.partition(":")[0] for name in surface.RELIED}
    for name in used:
        module, _, attribute = name.partition(":")
        if f"{module}.{attribute}" in modules:  # a module
            continue
        assert any(k == name or k.startswith(f"{name}.") for k in surface.RELIED), name


@pytest.mark.parametrize("release", fetch_sglang.RELEASES)
def test_records_have_what_is_needed(release: str) -> None:
    """All is there, also every setting that is refused: of another name it would not be."""
    record = surface.recorded()[release]
    others = {*surface.RELIED_FLASHMLA, *surface.BOUND}
    assert set(record) == {*surface.RELIED, *surface.SETTINGS, *others}
    missing = {name for name, value in record.items() if value is False}
    assert missing < set(surface.BOUND)


def test_differences_are_told() -> None:
    known: surface.Surface = {"m:f": ["a", "b"], "m:g": True, "page_size": True}
    assert surface.differences(known, known) == []
    found: surface.Surface = {"m:f": ["a", "new", "b"], "m:g": False, "page_size": False}
    assert surface.differences(found, known) == [
        (None, "m:f: (a, b) is (a, new, b) here"), (False, "m:g: there is missing here"),
        (None, "page_size: there is missing here"),
    ]  # fmt: skip


def test_assignments_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lists_of_ours").mkdir()
    (tmp_path / "lists_of_ours" / "__init__.py").touch()
    text = "A = []\nclass C:\n    field: int\n    other: int = 1\n"
    (tmp_path / "lists_of_ours" / "m.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    read = lambda name: read_source(f"lists_of_ours.m:{name}")
    assert read("A") is read("C.field") is read("C.other") is True
    assert read("B") is read("C.A") is False


# ---------------------------------------------------------------------------- what stops a server


def server(**fields: Any) -> Any:
    """A server's settings, as far as they are looked at; those that are served by default."""
    served = {
        "attention_backend": "snapmla", "prefill_attention_backend": None,
        "decode_attention_backend": None, "kv_cache_dtype": "fp8_e4m3", "page_size": 64,
        "disaggregation_mode": "null", "dcp_size": 1, "attn_cp_size": 1, "kv_canary": "none",
    }  # fmt: skip
    return types.SimpleNamespace(**{**served, **fields})


def test_settings_that_are_served() -> None:
    refuse.settings(server())
    refuse.settings(server(page_size=None, disaggregation_mode=None))
    refuse.settings(server(speculative_eagle_topk=1, speculative_algorithm="EAGLE"))
    both = {"prefill_attention_backend": "snapmla", "decode_attention_backend": "snapmla"}
    refuse.settings(server(attention_backend="triton", **both))


UNSERVED = {
    "kv_cache_dtype": "auto", "page_size": 32, "disaggregation_mode": "prefill",
    "enable_pdmux": True, "enable_hierarchical_cache": True, "enable_hisparse": True,
    "enable_lmcache": True, "enable_flexkv": True, "enable_unified_cache_external_linker": True,
    "enable_unified_memory": True, "enable_kv_cache_sharding": True, "kv_canary": "log",
    "dcp_size": 2, "attn_cp_size": 2, "speculative_eagle_topk": 4,
    "speculative_algorithm": "NGRAM", "speculative_draft_attention_backend": "fa3",
    "speculative_draft_kv_cache_dtype": "bf16",
}  # fmt: skip


@pytest.mark.parametrize("name", [setting.name for setting in refuse.SETTINGS])
def test_settings_that_are_refused(name: str) -> None:
    """One sentence each: what, why, what to change."""
    value = UNSERVED[name]
    with pytest.raises(ValueError) as caught:
        refuse.settings(server(**{name: value}))
    said = str(caught.value)
    assert said.startswith(f"snapmla: {name} = {value!r} is not served: ") and "\n" not in said
    assert "--" in said or name == "speculative_algorithm"


def test_several_settings_are_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        refuse.settings(server(page_size=32, enable_hierarchical_cache=True))
    assert [line.split(" = ")[0] for line in str(caught.value).splitlines()] == [
        "snapmla: page_size", "snapmla: enable_hierarchical_cache"
    ]  # fmt: skip


def test_the_backend_stands_alone() -> None:
    for fields in (
        {"attention_backend": "fa3", "decode_attention_backend": "snapmla"},
        {"prefill_attention_backend": "fa3"},
    ):
        view = server(**fields)
        assert refuse.asked_for(view)
        with pytest.raises(ValueError, match="'fa3' for prefill and 'snapmla' for decode"):
            refuse.settings(view)
    assert not refuse.asked_for(server(attention_backend="fa3"))


def configuration(**fields: Any) -> Any:
    plain = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hf_config": types.SimpleNamespace()}
    return types.SimpleNamespace(**{**plain, **fields})


def test_models_that_are_refused() -> None:
    served = {"sparse": False, "hybrid": False}
    refuse.model(configuration(), **served)
    scaled = types.SimpleNamespace(llama_4_scaling={"beta": 0.1})
    for config, kind, said in (
        (configuration(), {"sparse": True}, "DSA"),
        (configuration(), {"hybrid": True}, "sliding-window"),
        (configuration(kv_lora_rank=256), {}, "are 256 and 64"),
        (configuration(qk_rope_head_dim=32), {}, "are 512 and 32"),
        (configuration(hf_config=scaled), {}, "llama_4_scaling"),
        (configuration(hf_text_config=scaled), {}, "llama_4_scaling"),
    ):
        with pytest.raises(ValueError, match=f"this model is not served: .*{said}"):
            refuse.model(config, **{**served, **kind})
    refuse.queries(torch.bfloat16)
    with pytest.raises(ValueError, match="--dtype bfloat16"):
        refuse.queries(torch.float16)


def test_layers_and_calls_that_are_refused() -> None:
    plain = {"layer_id": 3, "logit_cap": 0.0, "sliding_window_size": -1,
             "is_cross_attention": False}  # fmt: skip
    refuse.layer(types.SimpleNamespace(**plain))
    for name, value in (
        ("logit_cap", 30.0), ("sliding_window_size", 128), ("is_cross_attention", True),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"layer 3 asks for {name} = {value}"):
            refuse.layer(types.SimpleNamespace(**{**plain, name: value}))
    refuse.arguments({"attn_sink": None})
    with pytest.raises(ValueError, match="attn_sink, topk_indices is not served"):
        refuse.arguments({"topk_indices": 1, "attn_sink": 1, "cos_sin_cache": None})


# ---------------------------------------------------------------------------------------- a step


class Base:
    """A class of SGLang's."""


class Mode:
    """A ForwardMode: a plain extend, or a decode."""

    def __init__(self, extend: bool) -> None:
        self.is_extend_without_speculative = lambda: extend
        self.is_target_verify = self.is_draft_extend_v2 = lambda: False


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our backend of a draft model, over the names of SGLang that it imports, without SGLang."""
    runtime_context = {
        "get_spec": lambda: types.SimpleNamespace(speculative_num_draft_tokens=None),
        "get_exec": lambda: types.SimpleNamespace(
            deterministic=types.SimpleNamespace(enable_deterministic_inference=False)
        ),
        "get_parallel": lambda: types.SimpleNamespace(attn_tp_size=1),
    }
    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.constants": {"GPU_MEMORY_TYPE_KV_CACHE": "kv"},
        "sglang.srt.layers.attention.attention_registry": {"ATTENTION_BACKENDS": {}},
        "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": Base},
        "sglang.srt.mem_cache.memory_pool": {
            "KVWriteLoc": Base, "MLATokenToKVPool": Base, "unwrap_write_loc": None,
        },
        "sglang.srt.model_executor.forward_batch_info": {
            "ForwardMode": Mode, "build_inner_fb_view": None,
        },
        "sglang.srt.runtime_context": runtime_context,
    }  # fmt: skip
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    ours = ("backend", "pool")
    for part in ours:
        monkeypatch.delitem(sys.modules, f"{plugin.__name__}.{part}", raising=False)
    found = importlib.import_module(f"{plugin.__name__}.backend")
    pool = found.SnapMLATokenToKVPool()
    pool.cache_of = lambda layer: f"cache of {layer}"
    runner = types.SimpleNamespace(
        token_to_kv_pool=pool, dtype=torch.bfloat16, kv_index_translator=None,
        req_to_token_pool=types.SimpleNamespace(req_to_token=torch.arange(3 * 128).view(3, 128)),
        model_config=types.SimpleNamespace(num_attention_heads=4),
    )  # fmt: skip
    yield found.SnapMLABackend(runner, draft_step=0)
    for part in ours:
        sys.modules.pop(f"{plugin.__name__}.{part}", None)
        vars(plugin).pop(part, None)


@needs_compiler
def test_a_step_is_compared_with_its_own_offsets(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an extend's query tokens begin reaches the decode; of an even step nothing does."""
    seen: list[dict[str, Any]] = []

    def decode(*given: Any, **named: Any) -> Any:
        seen.append(named)
        return torch.zeros(*given[0].nope.shape), None

    monkeypatch.setattr(snapmla.api, "decode", decode)
    layer = types.SimpleNamespace(
        layer_id=1, tp_q_head_num=4, scaling=0.1, v_head_dim=512, logit_cap=0.0,
        sliding_window_size=-1, is_cross_attention=False,
    )  # fmt: skip
    for extend, tokens in ((True, 6), (False, 3)):
        batch = types.SimpleNamespace(
            batch_size=3, forward_mode=Mode(extend), seq_lens=torch.tensor([70, 40, 65]),
            extend_seq_lens=torch.tensor([1, 3, 2]), req_pool_indices=torch.tensor([2, 0, 1]),
        )  # fmt: skip
        backend.init_forward_metadata(batch)
        call = backend.forward_extend if extend else backend.forward_decode
        call(torch.zeros(tokens, 4 * 576), None, None, layer, batch)
    ragged, even = (named["cu_seqlens_q"] for named in seen)
    assert ragged.dtype == torch.int32 and ragged.tolist() == [0, 1, 4, 6]
    assert even is None and [named["plan"].s_q for named in seen] == [None, 1]


# ------------------------------------------------------------------------- register and the check


def test_nothing_of_sglang_is_imported_before_it_is_asked_for() -> None:
    """By the plugin's package, its refusals, its check and what reads the record."""
    assert {f"{plugin.__name__}.{part}" for part in ("refuse", "surface")} <= set(sys.modules)
    assert not any(name.partition(".")[0] == "sglang" for name in sys.modules)


def test_the_entry_point_is_register() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    value = project["entry-points"][commands.GROUP]["snapmla"]
    module, _, name = value.partition(":")
    assert getattr(sys.modules[module], name) is plugin.register


def test_check_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_sglang(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_sglang)
    monkeypatch.setattr(variants, "find", lambda spec: None)
    monkeypatch.setenv("SNAPMLA_NO_JIT", "1")
    done = CliRunner().invoke(commands.app, ["check"])
    assert done.exit_code == 1
    assert "MISSING sglang: not installed" in done.stdout
    assert "SNAPMLA_NO_JIT forbids" in done.stdout
    assert "refused" not in done.stdout, "by a plugin of an SGLang that is not there"


def test_check_of_an_installation_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    release = fetch_sglang.RELEASES[-1]
    point = types.SimpleNamespace(name="snapmla", value="snapmla.integrations.sglang:register")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(surface, "read", lambda: surface.recorded()[release])
    monkeypatch.setattr(variants, "find", lambda spec: spec)
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    done = CliRunner().invoke(commands.app, ["check"])
    assert done.exit_code == 0, done.stdout
    assert [line[:2] for line in done.stdout.splitlines()] == ["ok"] * 8
    assert "enable_hierarchical_cache" in done.stdout
    assert "9 kernels are built: append_kv, plan_decode, quantize_q, decode" in done.stdout


@pytest.mark.parametrize(
    ("capability", "name", "needs", "count"),
    [
        ((9, 0), "fa3", "sgl_kernel", 9),
        ((10, 0), "fa4", "cutlass", 6),
        ((10, 3), "fa4", "cutlass", 6),
    ],
)
def test_check_by_the_card(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], name: str, needs: str, count: int
) -> None:
    """SGLang's fa3 is for SM90, its fa4 for SM100; kernels are those of the card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert findings.card().ok
    assert commands.multi_head() == (
        False, f"{needs} is not installed: SGLang's {name}, which computes prompts"
    )  # fmt: skip
    kernels = commands.needed(findings.arch())
    assert len(kernels) == count and {spec.arch for spec in kernels} == {findings.arch()}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert findings.card() == (False, "a card, sm_120; the backend is for sm_90 and sm_100")


def test_the_record_is_written_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "surface.json"
    monkeypatch.setattr(surface, "RECORD", target)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    monkeypatch.setattr(surface, "read", lambda: {"m:f": ["a"]})
    assert CliRunner().invoke(commands.app, ["record"]).exit_code == 0
    assert json.loads(target.read_text()) == {"1.2.3": {"m:f": ["a"]}}

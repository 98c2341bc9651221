"""``snapmla.integrations.vllm``: vLLM's own classes drive it; what it relies on is on record.

The classes need an unpacked vLLM (``python -m tests.support.fetch_vllm``; the log of the last run
is profiles/results/vllm-contract.md, of sparse attention vllm-sparse-contract.md).  The rest never
skips.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
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

import snapmla
from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm import __main__ as commands
from snapmla.integrations.vllm import refuse, surface
from snapmla.runtime import env, variants
from tests.support import ROOT, fetch_vllm
from tests.support.needs import needs_compiler

SOURCE = ROOT / "snapmla" / "integrations" / "vllm" / "backend.py"
PREFILL = SOURCE.with_name("prefill.py")
SPARSE, INDEXER = SOURCE.with_name("sparse.py"), SOURCE.with_name("indexer.py")
MLA = "vllm.model_executor.layers.attention.mla_attention"
PREFILL_BASE = "vllm.v1.attention.backends.mla.prefill.base"
SPARSE_MLA = "vllm.model_executor.layers.attention.sparse_mla_attention"
# modules of vLLM by the names that our text has for them
ALIASES = {
    "mla": MLA, "sparse": SPARSE_MLA,
    "sparse_utils": "vllm.v1.attention.backends.mla.sparse_utils",
    "theirs": "vllm.model_executor.layers.sparse_attn_indexer",
}  # fmt: skip
RELIED = (*surface.RELIED, *surface.RELIED_SPARSE)


# ---------------------------------------------------------------------------------- vLLM's classes


@needs_compiler
@pytest.mark.parametrize(
    "case",
    ["decode", "prefill", "own_prefill", "invariant", "ranks", "refusals",
     pytest.param("blackwell", marks=pytest.mark.whole_matrix)],
)  # fmt: skip
@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_vllms_own_classes(release: str, case: str) -> None:
    drive("vllm_driver", release, case)


@needs_compiler
@pytest.mark.whole_matrix  # half a CPU minute each
@pytest.mark.parametrize("case", ["decode", "graphs", "prompts", "ranks", "layer", "refusals"])
@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_vllms_classes_of_sparse_attention(release: str, case: str) -> None:
    if case in ("ranks", "layer") and release != fetch_vllm.RELEASES[-1]:
        pytest.skip(f"vLLM {release} has no such thing")
    drive("vllm_sparse_driver", release, case)


def drive(driver: str, release: str, case: str) -> None:
    """A case of a driver, in a process that has the release on its path."""
    path = fetch_vllm.path_of(release)
    if path is None:
        pytest.skip(f"vLLM {release} is not there: python -m tests.support.fetch_vllm")
    folders = os.pathsep.join(map(str, (ROOT, *path)))
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{driver}", case],
        env={**os.environ, "PYTHONPATH": folders, "VLLM_LOGGING_LEVEL": "CRITICAL"},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.startswith(f"vLLM {release}") and done.stdout.endswith("all right\n")


# ------------------------------------------------------------------------------------- the record


def methods() -> Iterator[tuple[str, ast.FunctionDef]]:
    """The methods of our classes that override vLLM's, as ``Base.method``."""
    sources = ((SOURCE, MLA), (PREFILL, PREFILL_BASE), (SPARSE, SPARSE_MLA))
    for path, module in sources:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.bases:
                base = ast.unparse(node.bases[0]).removeprefix("mla.").removeprefix("sparse.")
                base = {"_Impl": "SparseMLACommonImpl"}.get(base, base.partition("[")[0])
                for item in node.body:
                    if isinstance(item, ast.FunctionDef):
                        yield f"{module}:{base}.{item.name}", item


OVERRIDES = {name: method for name, method in methods() if name in RELIED}


def test_overrides_are_on_record() -> None:
    bases = (f"{MLA}:MLACommon", f"{PREFILL_BASE}:MLAPrefillBackend.", f"{SPARSE_MLA}:SparseMLA")
    wanted = {n.rpartition(".")[2] for n in RELIED if n.startswith(bases)}
    assert {name.rpartition(".")[2] for name in OVERRIDES} >= {
        "_build_decode", "build_for_cudagraph_capture", "forward_mqa", "do_kv_cache_update",
        "_compute_prefill_context", "_context_parallel_compute_prefill_context", "customize_spec",
        "forward_mha", "_concat_k_nope_k_pe", "run_prefill_new_tokens", "run_prefill_context_chunk",
        "supports_out", "supports_compute_capability", "_forward_mqa_kernel", "build",
        "update_draft_decode_metadata",
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
    others = map(SOURCE.with_name, ("__init__.py", "invariant.py", "first_step.py", "flashmla.py"))
    for path in (SOURCE, PREFILL, SPARSE, INDEXER, *others):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                used |= {f"{node.module}:{alias.name}" for alias in node.names}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ALIASES:
                used.add(f"{ALIASES[ast.unparse(node.value)]}:{node.attr}")
    modules = {name.partition(":")[0] for name in RELIED}
    for name in used:
        module, _, attribute = name.partition(":")
        if f"{module}.{attribute}" in modules:  # a module
            continue
        assert any(k == name or k.startswith(f"{name}.") for k in RELIED), name


@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_records_have_what_is_needed(release: str) -> None:
    record = surface.recorded()[release]
    read = (*surface.REFUSED, *surface.RELIED_FLASHMLA, *surface.BOUND)
    assert set(record) == {*RELIED, *read}
    absent = {name for name, value in record.items() if value is False}
    assert absent <= surface.OPTIONAL | {*surface.REFUSED, *surface.BOUND}


def test_records_have_the_layers_that_are_refused() -> None:
    """Kimi-K3's, and DeepSeek-V3.2's in its place of each release, with its fused operators."""
    older, newer = (surface.recorded()[release] for release in fetch_vllm.RELEASES)
    v32 = ["self", "positions", "hidden_states"]
    assert older["vllm.models.deepseek_v32.nvidia.attention:DeepseekV32Attention.forward"] == v32
    there = {name for name in surface.REFUSED if newer[name]}
    assert {name.partition(":")[2] for name in there} == {
        "MultiHeadLatentAttention", "MultiHeadLatentAttention._decode_concat_cache",
        "MultiHeadLatentAttention._forward_prefill_fused",
        "MultiHeadLatentAttention._gather_context_latent", "DeepseekV32Attention.forward",
        "fused_norm_rope", "fused_q", "sparse_attn_indexer",
    }  # fmt: skip
    assert newer[surface.QUANT_MODE] == ["another name of OCTAVE_K3V4"]


def test_differences_are_told() -> None:
    known: surface.Surface = {"m:f": ["a", "b"], "m:g": True, "m:h": ["x"]}
    assert surface.differences(known, known) == []
    found: surface.Surface = {"m:f": ["a", "new", "b"], "m:g": False, "m:h": ["x", "more"]}
    assert surface.differences(found, known) == [
        (None, "m:f: (a, b) is (a, new, b) here"), (False, "m:g: there is missing here"),
    ]  # fmt: skip
    assert surface.differences({}, known)[0] == (False, "m:f: (a, b) is missing here")
    layer, mode = surface.REFUSED[0], surface.QUANT_MODE
    known = {layer: True, mode: ["another name of X"]}
    assert surface.differences({layer: False, mode: True}, known) == [
        (None, f"{layer}: there is missing here"),
        (None, f"{mode}: (another name of X) is there here"),
    ]
    assert surface.differences({layer: True, mode: False}, known)[0][0] is False


def test_what_is_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's module, which may want what is not here."""
    text = (
        "import nothing_of_this_name\nfrom . import fused as renamed\n"
        "class Layer:\n    def forward(self, x, /, y, *more, z, **rest): ...\n"
    )
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "layer.py").write_text(text)
    (tmp_path / "__init__.py").touch()
    package = tmp_path.rename(tmp_path.with_name("a_package_of_ours"))
    monkeypatch.syspath_prepend(package.parent)
    read = lambda name: surface.read_source(f"a_package_of_ours.models.layer:{name}")
    assert read("Layer.forward") == ["self", "x", "y", "more", "z", "rest"]
    assert read("Layer") is True and read("renamed") is True
    assert read("fused") is False and read("Layer.other") is False
    assert surface.read_source("a_package_of_ours.models.other:Layer") is False
    assert surface.read_source("no_package_of_this_name.layer:Layer") is False


def test_another_name_of_a_member_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("modes_of_ours")
    module.Mode = enum.IntEnum("Mode", {"OLD": 12, "CUSTOM": 12, "OWN": 13})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(surface, "RELIED", ("modes_of_ours:Mode.CUSTOM", "modes_of_ours:Mode.OWN"))
    monkeypatch.setattr(surface, "RELIED_SPARSE", ())
    found = surface.read()
    assert found["modes_of_ours:Mode.CUSTOM"] == ["another name of OLD"]
    assert found["modes_of_ours:Mode.OWN"] is True


# ---------------------------------------------------------------------------- what stops the engine


class MLAAttention:
    """vLLM's layer, as far as it is looked at."""

    use_sparse = False

    def forward(self) -> None: ...

    def forward_impl(self) -> None: ...

    def get_kv_cache_spec(self) -> None: ...


class OwnForward(MLAAttention):
    def forward(self) -> None: ...


class OwnImpl(MLAAttention):
    def forward_impl(self) -> None: ...


class OwnSpec(MLAAttention):
    def get_kv_cache_spec(self) -> None: ...


class MultiHeadLatentAttention:
    """A class of its own, with methods of the same names."""

    forward, forward_impl = MLAAttention.forward, MLAAttention.forward_impl


def replaced() -> MLAAttention:
    found = MLAAttention()
    found.forward = lambda: None  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (MultiHeadLatentAttention(), "MultiHeadLatentAttention) is no MLAAttention"),
        (OwnForward(), "OwnForward) replaces MLAAttention.forward,"),
        (OwnImpl(), "OwnImpl) replaces MLAAttention.forward_impl,"),
        (replaced(), "MLAAttention) replaces MLAAttention.forward,"),
    ],
)
def test_layers_that_may_write_the_cache_themselves(layer: Any, said: str) -> None:
    found = [("layers.0", MLAAttention()), ("layers.1", layer)]
    with pytest.raises(ValueError, match=r"layer layers\.1 \(") as caught:
        refuse.layers(found, MLAAttention)
    assert said in str(caught.value) and str(caught.value).endswith(refuse.INSTEAD)


def test_vllms_own_layer_is_served() -> None:
    refuse.layers([("layers.0", MLAAttention()), ("layers.1", OwnSpec())], MLAAttention)


def configuration(layers: dict[str, Any] | None = None, **of_model: Any) -> Any:
    """vLLM's, as far as it is looked at."""
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(**of_model),
        compilation_config=types.SimpleNamespace(
            static_forward_context=layers or {}, pass_config=types.SimpleNamespace()
        ),
    )


def test_models_of_sparse_attention() -> None:
    sparse, dense = types.SimpleNamespace(index_topk=2048), types.SimpleNamespace()
    for part in ("hf_text_config", "hf_config"):
        with pytest.raises(ValueError, match="DSA.* --kv-cache-dtype.*index_topk = 2048"):
            refuse.settings(configuration(**{"hf_config": dense, part: sparse}))
    refuse.settings(configuration(hf_text_config=dense, hf_config=dense))
    layer = MLAAttention()
    layer.use_sparse = True
    with pytest.raises(ValueError, match="DSA.*layer layers.0 is sparse"):
        refuse.layers([("layers.0", layer)], MLAAttention)


def drafting(method: str, backend: Any = None, cache: str | None = None) -> Any:
    """vLLM's configuration with speculative decoding."""
    return types.SimpleNamespace(
        attention_config=types.SimpleNamespace(backend=types.SimpleNamespace(name="CUSTOM")),
        speculative_config=types.SimpleNamespace(
            method=method, attention_backend=backend, kv_cache_dtype=cache
        ),
    )


def test_a_draft_layer_without_a_backend() -> None:
    """vLLM chooses for it by itself, among its own."""
    with pytest.raises(ValueError, match="does not hand --attention-backend") as caught:
        refuse.draft(drafting("mtp"))
    assert 'add "attention_backend": "CUSTOM" to --speculative-config' in str(caught.value)
    for served in (
        drafting("mtp", backend=object()), drafting("mtp", cache="auto"), drafting("ngram"),
        types.SimpleNamespace(speculative_config=None), types.SimpleNamespace(),
    ):  # fmt: skip
        refuse.draft(served)
    assert refuse.drafts_on_vllms(drafting("mtp")) and not refuse.drafts_on_vllms(None)
    said = refuse.draft_elsewhere(drafting("mtp"))
    assert "runs on one of vLLM's own" in said and '"attention_backend": "CUSTOM"' in said


def sparse_configuration(attention: dict[str, Any], **parallel: Any) -> Any:
    """vLLM's, as far as the sparse backend looks at it."""
    return types.SimpleNamespace(
        attention_config=types.SimpleNamespace(**attention),
        parallel_config=types.SimpleNamespace(**parallel),
    )


@pytest.mark.parametrize(
    ("attention", "parallel", "newer", "said"),
    [
        ({"hisparse_config": 1}, {}, True, "leave attention_config.hisparse_config unset"),
        ({"use_fp4_indexer_cache": True}, {}, False, "an index cache of FP4 is not read"),
        ({"indexer_kv_dtype": "mxfp4"}, {}, True, "an index cache of FP4 is not read"),
        ({}, {"prefill_context_parallel_size": 2}, True, "--prefill-context-parallel-size at 1"),
        ({}, {"decode_context_parallel_size": 2}, False, "or use vLLM 0.33"),
    ],
)
def test_what_sparse_attention_is_not_served_with(
    attention: dict[str, Any], parallel: dict[str, Any], newer: bool, said: str
) -> None:
    with pytest.raises(ValueError, match=r"^snapmla: [^\n]*$") as caught:
        refuse.sparse_settings(sparse_configuration(attention, **parallel), newer)
    assert said in str(caught.value)
    served = {"use_fp4_indexer_cache": False, "indexer_kv_dtype": "fp8", "hisparse_config": None}
    refuse.sparse_settings(sparse_configuration(served, decode_context_parallel_size=2), True)


def test_rows_of_another_kind() -> None:
    refuse.sparse_layer(576, "fp8_ds_mla")
    with pytest.raises(ValueError, match="cache is 'auto': start vLLM with --kv-cache-dtype fp8"):
        refuse.sparse_layer(576, "auto")
    with pytest.raises(ValueError, match=r"rows of 512 \+ 64 channels, this layer's have 512"):
        refuse.sparse_layer(512, "fp8_ds_mla")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_head": 48}, "has 48 heads, ours knows 32 or 64"),
        ({"head_dim": 64}, "has 64 channels of a key, ours knows 128"),
        ({"quant_block_size": 64}, "has 64 channels of a scale, ours knows 128"),
        ({"topk_tokens": 4096}, "chooses 4096 tokens is not served, 1 to 2048 are"),
        ({"k_cache": None}, "names no cache of its keys"),
    ],
)
def test_indexers_of_another_kind(change: dict[str, Any], said: str) -> None:
    known = {
        "n_head": 64, "head_dim": 128, "quant_block_size": 128, "topk_tokens": 2048,
        "k_cache": types.SimpleNamespace(prefix="layers.0"),
    }  # fmt: skip
    refuse.indexer(types.SimpleNamespace(**known))
    with pytest.raises(ValueError, match=r"^snapmla: [^\n]*$") as caught:
        refuse.indexer(types.SimpleNamespace(**known | change))
    assert said in str(caught.value)


class Generic:
    """A base class of vLLM's that notes how it was made."""

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given = given


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our backend over the names of vLLM that it imports, without vLLM."""
    bases = (
        "MLACommonBackend", "MLACommonDecodeMetadata", "MLACommonMetadata",
        "MLACommonMetadataBuilder", "MLACommonImpl",
    )  # fmt: skip
    mla = types.ModuleType(MLA)
    mla.__dict__.update({name: type(name, (Generic,), {}) for name in bases})
    mla.MLACommonDecodeMetadata = dataclasses.make_dataclass(  # type: ignore[attr-defined]
        "MLACommonDecodeMetadata", ["block_table", "seq_lens", "dcp_tot_seq_lens"]
    )
    mla.__dict__.update(MLAAttention=MLAAttention, QueryLenSupport=types.SimpleNamespace(VARLEN=1))
    attention = types.SimpleNamespace(mla_attention=mla)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.distributed.parallel_state": {"get_dcp_group": None},
        "vllm.model_executor.layers.attention": vars(attention),
        "vllm.v1.attention.backend": {
            "AttentionCGSupport": types.SimpleNamespace(UNIFORM_BATCH=1),
            "AttentionType": types.SimpleNamespace(DECODER="decoder"),
        },
        "vllm.v1.attention.backends.utils": {"get_dcp_local_seq_lens": None},
        PREFILL_BASE: {"MLADimensions": types.SimpleNamespace, "MLAPrefillBackend": Generic},
    }
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    ours = ("backend", "prefill")
    for part in ours:
        monkeypatch.delitem(sys.modules, f"{plugin.__name__}.{part}", raising=False)
    yield importlib.import_module(f"{plugin.__name__}.backend")
    for part in ours:
        sys.modules.pop(f"{plugin.__name__}.{part}", None)
        vars(plugin).pop(part, None)


def test_the_builder_looks_at_all_its_layers(backend: Any) -> None:
    """Before vLLM's own, which reads attributes that such a layer may not have."""
    layers = {"a": MLAAttention(), "b": MLAAttention(), "other": OwnForward()}
    make = lambda config, *names: backend.SnapMLAMetadataBuilder(None, names, config, None)
    for names in (("other",), ("a", "b", "other")):
        with pytest.raises(ValueError, match=r"layer other \(.*OwnForward\)"):
            make(configuration(layers), *names)
    with pytest.raises(ValueError, match="index_topk = 8"):
        make(configuration(layers, hf_config=types.SimpleNamespace(index_topk=8)), "a")
    with pytest.raises(AttributeError, match="q_data_type"):  # of vLLM's own, so beyond our checks
        make(configuration(layers), "a", "b")


def test_the_impl_looks_at_its_layer_and_model(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = lambda: backend.SnapMLAImpl(1, 576, 1.0, 1, None, None, "snapmla", None, "decoder", None)
    impl, query = make(), (torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="MultiHeadLatentAttention"):
        impl.forward_mqa(query, None, None, MultiHeadLatentAttention())
    with pytest.raises(AttributeError, match="decode"):  # of the step, which is None here
        impl.forward_mqa(query, None, None, MLAAttention())
    sparse = configuration(hf_text_config=types.SimpleNamespace(index_topk=8))
    monkeypatch.setattr(backend, "get_current_vllm_config_or_none", lambda: sparse)
    with pytest.raises(ValueError, match="index_topk = 8"):
        make()


class Steps:
    """A builder and a layer's impl of ours over three requests in pages of their own."""

    LENGTHS = (7, 4, 6)

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch, ranks: int = 1) -> None:
        found = {
            "q_data_type": torch.bfloat16, "num_heads": 4 // ranks, "page_size": 64,
            "dcp_world_size": ranks, "cp_kv_cache_interleave_size": 1,
        }  # fmt: skip
        for name, value in found.items():
            monkeypatch.setattr(backend.SnapMLAMetadataBuilder, name, value, raising=False)
        config = configuration({"a": MLAAttention()})
        self.builder = backend.SnapMLAMetadataBuilder(None, ["a"], config, torch.device("cpu"))
        ours = (1, 576, 1.0, 1, None, None, "snapmla", None, "decoder", None)
        self.impl = backend.SnapMLAImpl(*ours)
        self.impl.scale = 0.1
        self.cache = snapmla.PagedKVCache.allocate(3, 64, device="cpu")
        self.cache.content_u8.random_(0x28, 0x40)
        self.cache.rope.normal_()
        self.cache.scale.fill_(1.0)
        self.impl._cache = lambda _: self.cache
        self.table = torch.arange(3, dtype=torch.int32).view(3, 1)
        self.lengths = torch.tensor(self.LENGTHS, dtype=torch.int32)

    def built(self, offsets: torch.Tensor, whole: torch.Tensor | None = None) -> Any:
        """vLLM's metadata, as its builder asks us for the part of requests that decode."""
        decode = self.builder._build_decode(
            block_table_tensor=self.table, seq_lens_device=self.lengths,
            query_start_loc_cpu=offsets.clone(), query_start_loc_device=offsets,
            num_decode_tokens=int(offsets[-1]), dcp_tot_seq_lens_device=whole,
        )  # fmt: skip
        return types.SimpleNamespace(decode=decode)

    def run(self, step: Any) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        q = torch.randn(6, 4, 576).bfloat16().split([512, 64], -1)
        return self.impl.forward_mqa(q, None, step, MLAAttention())


@needs_compiler
def test_a_step_is_compared_with_the_batchs_own_offsets(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM rewrites them in place; rows that are another request's by now are NaN."""
    steps = Steps(backend, monkeypatch)
    offsets = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    step = steps.built(offsets)
    offsets.copy_(torch.tensor([0, 3, 4, 6]))
    out, lse = steps.run(step)
    assert out[:3].isnan().all() and lse[:3].isnan().all()
    assert out[4:].isfinite().all() and out[4:].any(-1).all() and lse[4:].isfinite().all()


@needs_compiler
def test_drafts_over_shards_see_what_the_step_says(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limits of each query token are the step's, in the memory that a graph of it reads."""
    rank = types.SimpleNamespace(rank_in_group=0)
    monkeypatch.setattr(backend, "get_dcp_group", lambda: rank)
    own = lambda seen, ranks, at, turn: (seen + ranks - 1 - at) // ranks
    monkeypatch.setattr(backend, "get_dcp_local_seq_lens", own)
    steps = Steps(backend, monkeypatch, ranks=2)
    whole, offsets = 2 * steps.lengths, torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    steps.builder._pin = True
    captured = steps.built(offsets, whole).decode.row_seqlens
    steps.builder._pin = False
    assert captured.tolist() == [[7, 7], [4, 4], [6, 6]]
    step = steps.built(offsets, whole - 1)
    limits = step.decode.row_seqlens
    assert limits.data_ptr() == captured.data_ptr()
    assert limits.tolist() == [[6, 7], [3, 4], [5, 6]]
    limits[1] = 0  # in the step, not in the plan
    out, lse = steps.run(step)
    assert not out[2:4].any() and torch.isneginf(lse[2:4]).all()
    rest = [0, 1, 4, 5]
    assert out[rest].any(-1).all() and lse[rest].isfinite().all()
    uneven = steps.built(torch.tensor([0, 1, 4, 6], dtype=torch.int32), whole).decode
    assert uneven.row_seqlens.tolist() == [7, 3, 4, 4, 6, 6]


def test_the_selector_is_told_what_to_use_instead(backend: Any) -> None:
    asked: list[Any] = [576, torch.bfloat16, "fp8_ds_mla", 64, True, False]  # as 0.26
    assert backend.SnapMLABackend.supports_combination(*asked, True, False, None) == refuse.SPARSE
    assert backend.SnapMLABackend.supports_combination(*asked, False, False, None) is None
    for wrong in ("fp8", "auto", "snapmla"):
        asked[2] = wrong
        said = backend.SnapMLABackend.supports_combination(*asked, False, False, None)
        assert said == (
            f"snapmla: a cache of {wrong!r} is not read by this backend: start vLLM with "
            "--kv-cache-dtype fp8_ds_mla"
        )
    asked[2] = None  # nobody said which
    assert backend.SnapMLABackend.supports_combination(*asked, False, False, None) is None


# ------------------------------------------------------------------------- register and the check


class Registry:
    """What ``register`` calls of vLLM, in modules of their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
        self.backends: list[tuple[Any, str]] = []
        self.dtypes: dict[str, Any] = {}
        self.prefill: list[tuple[Any, str]] = []
        members = {"CUSTOM": "custom", "FLASHMLA_SPARSE": "flashmla_sparse"}
        prefill_members = {"CUSTOM": "custom"}

        def register_backend(backend: Any, path: str) -> None:
            self.backends.append((backend, path))
            if isinstance(backend, str) and backend not in members.values():
                members[backend] = backend

        def register_prefill(backend: Any, path: str) -> None:
            self.prefill.append((backend, path))
            prefill_members.setdefault(backend, backend)

        class Names(types.SimpleNamespace):
            """The enumeration of backends."""

            def __getitem__(self, name: str) -> str:
                return members[name]

        enum = Names(CUSTOM="custom", __members__=members)
        prefill = {
            "MLAPrefillBackendEnum": types.SimpleNamespace(
                CUSTOM="custom", __members__=prefill_members
            ),
            "register_mla_prefill_backend": register_prefill,
        }
        registry = {"AttentionBackendEnum": enum, "register_backend": register_backend}
        config: dict[str, Any] = {}
        forward = types.SimpleNamespace(create_forward_context=lambda *_: None)
        if newer:
            names = config["KV_CACHE_DTYPES"] = ["auto"]

            def register_kv_cache_dtype(name: str) -> Any:
                names.append(name)
                return lambda handler: self.dtypes.setdefault(name, handler())

            config["register_kv_cache_dtype"] = register_kv_cache_dtype
        for name, content in (
            ("vllm", {"forward_context": forward}), ("vllm.v1", {}), ("vllm.v1.attention", {}),
            ("vllm.v1.attention.backends", {}), ("vllm.config", {}),
            ("vllm.v1.attention.backends.registry", registry), ("vllm.config.cache", config),
            ("vllm.v1.attention.backends.mla", {}), ("vllm.v1.attention.backends.mla.prefill", {}),
            ("vllm.v1.attention.backends.mla.prefill.registry", prefill),
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
    sparse = "snapmla.integrations.vllm.sparse.SnapMLASparseBackend"
    assert [each for each in found.backends if each[1] != sparse] == [(n, path) for n in names]
    told = [name for name, where in found.backends if where == sparse]
    assert told == ([plugin.SPARSE_BACKEND] if newer else []), "nobody's name is taken unasked"
    path = "snapmla.integrations.vllm.prefill.SnapMLAPrefillBackend"
    assert found.prefill == [(name, path) for name in names], "under the same names"
    assert list(found.dtypes) == (["snapmla"] if newer else [])
    if newer:
        assert found.dtypes["snapmla"].torch_dtype() is torch.uint8


@pytest.mark.parametrize("newer", [False, True])
def test_the_name_of_vllms_own_sparse_backend(monkeypatch: pytest.MonkeyPatch, newer: bool) -> None:
    """Taken if a switch says so, where a release leaves no other."""
    monkeypatch.setenv("SNAPMLA_VLLM_SPARSE", "1")
    found = Registry(monkeypatch, newer)
    plugin.register()
    told = [name for name, path in found.backends if path.endswith("SnapMLASparseBackend")]
    assert told == [plugin.SPARSE_BACKEND if newer else "flashmla_sparse"]
    assert "_".join(("SNAPMLA", "SPARSE")) == plugin.SPARSE_BACKEND, "as the docs have it"


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
    monkeypatch.setattr(variants, "find", lambda spec: None)
    monkeypatch.setenv("SNAPMLA_NO_JIT", "1")
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    done = CliRunner().invoke(commands.app, ["check"])
    assert done.exit_code == 1
    assert "MISSING vllm: not installed" in done.stdout
    assert "SNAPMLA_NO_JIT forbids" in done.stdout
    assert "refused" not in done.stdout, "of a vLLM that is not there"


KERNELS = (
    "append_kv_xbf16_ii64_sm90a", "plan_decode_sm90a", "quantize_q_xbf16_token_head_sm90a",
    *(f"decode_etap_r{rows}_p64_obf16_sm90a" for rows in (16, 32, 64, 128)),
    "fetch_dequant_xbf16_ragged_sm90a",
)  # fmt: skip


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only directory of variants, with all that the backend calls; no compiler."""
    monkeypatch.setattr(env, "places", lambda: [env.Place("`here`", tmp_path, True)])
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])
    monkeypatch.setattr(variants, "driver_version", lambda: None)
    monkeypatch.setattr(variants, "jit_refusal", lambda: "there is no compiler")
    for name in KERNELS:
        (tmp_path / f"{name}.so").touch()
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "flavour": "cu13"}))
    return tmp_path


def test_check_wants_every_kernel_that_is_called(folder: Path) -> None:
    (found,) = commands.kernels()
    ops = "append_kv, plan_decode, quantize_q, decode, fetch_dequant"
    assert found == (True, f"8 kernels are built: {ops}")


@pytest.mark.parametrize("name", KERNELS)
def test_check_where_nothing_is_compiled(folder: Path, name: str) -> None:
    """A wheel: what is missing is missing."""
    (folder / f"{name}.json").unlink()
    (found,) = commands.kernels()
    assert found.ok is False
    assert found.text.startswith(f"1 of 8 kernels are not built ({name}), and there is no compiler")
    assert "`make wheels ARCH=sm_90a`" in found.text and "first use" not in found.text


def test_check_where_what_is_missing_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / f"{KERNELS[0]}.json").unlink()
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    (found,) = commands.kernels()
    assert found.ok is None and f"({KERNELS[0]}): each is compiled at its first use" in found.text


def test_check_of_files_that_cannot_be_loaded(folder: Path) -> None:
    record = {"name": KERNELS[0], "flavour": "cu13", "checksums": {"so": "0"}}
    (folder / f"{KERNELS[0]}.json").write_text(json.dumps(record))
    (folder / f"{KERNELS[1]}.json").unlink()
    missing, damaged = commands.kernels()
    assert missing.ok is damaged.ok is False
    assert KERNELS[1] in missing.text and f"{KERNELS[0]}.so is damaged" in damaged.text


def test_check_on_a_b200(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own kernels are asked for; the sparse backend is not for it, and says what is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert commands.card() == (True, "NVIDIA B200, sm_100")
    (found,) = commands.kernels()
    names = "append_kv_xbf16_ii64_sm100a, plan_decode_sm100a, quantize_q_xbf16_token_head_sm100a, "
    names += "decode_ws_r64_p64_obf16_sm100a, fetch_dequant_xbf16_ragged_sm100a"
    assert found.text.startswith(f"5 of 5 kernels are not built ({names})")
    assert "`make wheels ARCH=sm_100a`" in found.text
    done = CliRunner().invoke(commands.app, ["check", "--sparse"])
    (said,) = (line for line in done.stdout.splitlines() if "B200" in line)
    assert said == (
        "MISSING NVIDIA B200, sm_100; the backend is for sm_90: elsewhere vLLM's own "
        "FLASHMLA_SPARSE serves these models"
    )


def test_check_of_an_installation_that_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = fetch_vllm.RELEASES[-1]
    point = types.SimpleNamespace(name="snapmla", value="snapmla.integrations.vllm:register")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    monkeypatch.setattr(surface, "read", lambda: surface.recorded()[release])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    done = CliRunner().invoke(commands.app, ["check"])
    assert done.exit_code == 0, done.stdout
    assert [line[:2] for line in done.stdout.splitlines()] == ["ok"] * 7
    (refused,) = (line for line in done.stdout.splitlines() if "refused" in line)
    assert "(MultiHeadLatentAttention, DeepseekV32Attention): for those start vLLM" in refused
    assert "models with index_topk (DSA) have a backend of their own, SNAPMLA_SPARSE" in refused


def test_the_record_is_written_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "surface.json"
    monkeypatch.setattr(surface, "RECORD", target)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2.3")
    monkeypatch.setattr(surface, "read", lambda: {"m:f": ["a"]})
    assert CliRunner().invoke(commands.app, ["record"]).exit_code == 0
    assert json.loads(target.read_text()) == {"1.2.3": {"m:f": ["a"]}}

"""``snapmla.integrations.vllm.flashmla``: FlashMLA's names inside of vLLM are ours.

Names are replaced in stand-ins for vLLM's modules.  Calls are vLLM's own text, of an unpacked
release (``python -m tests.support.fetch_vllm``), over caches made by hand against float64.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import logging
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from snapmla.integrations import flashmla_switch
from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm import __main__ as commands
from snapmla.integrations.vllm import first_step, flashmla, surface
from snapmla.runtime import variants
from tests.support import fetch_vllm
from tests.support import flashmla_calls as calls
from tests.support.needs import needs_compiler

OLDER, NEWER = fetch_vllm.RELEASES
V4, HY4 = "models/deepseek_v4/nvidia/flashmla.py", "models/hy_v4/nvidia/flashmla_sparse.py"
V41 = "models/deepseek_v41/nvidia/flashmla.py"
BACKENDS = "v1/attention/backends/mla"
BOTH = tuple(flashmla._KINDS)


def decode_of_theirs(*given: Any, **named: Any) -> Any:
    raise AssertionError("vLLM's kernel was called")


prefill_of_theirs = lambda *given, **named: decode_of_theirs()


class TheirMeta:
    """vLLM's dataclass: what its own kernel fills."""

    have_initialized, config, tile_scheduler_metadata, num_splits = False, None, None, None


# -------------------------------------------------------------------------------- names that go


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """vLLM's modules as a process has them: some have bound the names."""
    found: dict[str, Any] = {n: types.ModuleType(n) for n in ("vllm", surface.FLASHMLA)}
    found["vllm"].envs = types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    theirs = dict(zip(BOTH, (decode_of_theirs, prefill_of_theirs)))
    vars(found[surface.FLASHMLA]).update(theirs, get_mla_metadata=TheirMeta, FlashMLASchedMeta=1)
    first, second, *_ = surface.BINDING
    for name, bound in ((first, BOTH[:1]), (second, BOTH)):
        found[name] = types.ModuleType(name)
        vars(found[name]).update({each: theirs[each] for each in bound})
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(surface, "known_release", lambda: OLDER)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))  # one finds layers' modules
    yield found


def test_names_before_after_and_twice(modules: dict[str, Any]) -> None:
    module, (first, second, third, *_) = modules[surface.FLASHMLA], surface.BINDING
    assert not flashmla.installed()
    assert flashmla.install() and flashmla.installed()
    ours = [getattr(module, name) for name in BOTH]
    assert [each.theirs for each in ours] == [decode_of_theirs, prefill_of_theirs]
    assert getattr(modules[first], BOTH[0]) is ours[0] and not hasattr(modules[first], BOTH[1])
    assert [getattr(modules[second], name) for name in BOTH] == ours  # bound before
    assert module.get_mla_metadata is TheirMeta and module.FlashMLASchedMeta == 1
    late = sys.modules[third] = types.ModuleType(third)
    try:
        setattr(late, BOTH[0], decode_of_theirs)  # bound from elsewhere
        assert flashmla.install()  # every process does, some twice
        assert [getattr(module, name) for name in BOTH] == ours
        assert getattr(late, BOTH[0]) is ours[0]
    finally:
        del sys.modules[third]


def test_register_with_and_without_the_variable(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_register_backends", lambda: None)
    monkeypatch.setattr(first_step, "watch", lambda: None)
    monkeypatch.delenv("SNAPMLA_VLLM_FLASHMLA", raising=False)
    plugin.register()
    assert modules[surface.FLASHMLA].flash_mla_with_kvcache is decode_of_theirs
    monkeypatch.setenv("SNAPMLA_VLLM_FLASHMLA", "1")
    plugin.register()
    plugin.register()
    assert flashmla.installed()


def test_a_release_that_nobody_looked_at(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(surface, "known_release", lambda: None)
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        assert not flashmla.install() and not flashmla.installed()
    assert f"is for vllm {OLDER} and {NEWER}: FlashMLA's names stay vLLM's own" in caplog.text


@pytest.mark.parametrize(
    ("found", "known"),
    [("0.26.0", OLDER), ("0.26.3", OLDER), ("0.33.0+cu13", NEWER), ("0.30.0", None), (None, None)],
)
def test_known_releases(
    found: str | None, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surface, "installed", lambda: found)
    assert surface.known_release() == known


@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_modules_that_bind_the_names(release: str) -> None:
    """The record has those of the release, and no others of its text do."""
    record = surface.recorded()[release]
    recorded = {name for name in surface.BOUND if record[name]}
    assert recorded
    path = fetch_vllm.path_of(release)
    if path is None:
        pytest.skip(f"vLLM {release} is not there: python -m tests.support.fetch_vllm")
    found = set()
    for file in (path[0] / "vllm").rglob("*.py"):
        text = file.read_text()
        if "ops.flashmla" not in text:
            continue
        module = ".".join(file.relative_to(path[0]).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == surface.FLASHMLA:
                found |= {f"{module}:{alias.name}" for alias in node.names}
    assert {name for name in found if name.partition(":")[2] in BOTH} == recorded


# --------------------------------------------------------------------------- what is not served


def refusals() -> list[tuple[dict[str, Any], str]]:
    q, cache = torch.zeros(1, 1, 64, 576).bfloat16(), torch.zeros(1, 64, 1, 656, dtype=torch.uint8)
    call = {"q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None,
            "head_dim_v": 512, "is_fp8_kvcache": True}  # fmt: skip
    listed = call | {"indices": torch.zeros(1, 1, 64, dtype=torch.int32)}
    rows = lambda width: torch.zeros(1, 64, 1, width, dtype=torch.uint8)
    return [
        (listed | {"k_cache": rows(352)}, "rows of NVFP4 (352 bytes a token) are not read"),
        (listed | {"extra_k_cache": rows(288)}, "a second cache of FP4 (288 bytes a token)"),
        (listed | {"enable_batch_invariant": True}, "batch-invariant mode"),
        (listed | {"k_cache": rows(528)}, "three formats have 528 bytes a token"),
        (listed | {"causal": True}, "causal"),
        (call, "FlashMLA's dense FP8 cache is not built yet"),
    ]


@pytest.mark.parametrize(("told", "said"), refusals())
def test_what_is_not_served_falls_through(
    told: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """To vLLM's function with the arguments that it was given; each cause is one line."""
    seen: list[Any] = []

    def flash_mla_with_kvcache(*given: Any, **named: Any) -> str:
        seen.append((given, named))
        return "theirs"

    name = flashmla._Decode(flash_mla_with_kvcache)
    with caplog.at_level(logging.INFO, flashmla.LOGGER):
        for _ in range(2):
            meta = TheirMeta()
            assert name(**told, tile_scheduler_metadata=meta) == "theirs"
    assert name.calls == 0 and seen[0][1] == told | {"tile_scheduler_metadata": seen[0][1][
        "tile_scheduler_metadata"]}  # fmt: skip
    (line,) = lines_of(caplog)
    assert said in line and line.startswith("snapmla: vLLM's own flash_mla_with_kvcache runs")
    assert "\n" not in line


def test_other_devices_and_batch_invariance_fall_through(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 64, 576).bfloat16()
    told = {"q": q, "kv": q, "indices": None, "sm_scale": 1.0}
    plain = flashmla._Prefill(lambda **_: "theirs")
    plain.theirs.__name__ = "flash_mla_sparse_fwd"
    with monkeypatch.context() as on_blackwell:
        on_blackwell.setattr(variants, "arch_of", lambda device: "sm_100a")
        assert "this device is sm_100a" in str(plain.reason(told)) and plain(**told) == "theirs"
    assert "meta" in str(plain.reason({"q": q.to("meta")}))
    assert "q is no tensor" in str(plain.reason({"q": None}))
    assert "batch-invariant" in str(flashmla._Prefill(plain.theirs, invariant=True).reason(told))


# -------------------------------------------------------------------------------- vLLM's own calls


def text(release: str) -> Path:
    path = fetch_vllm.path_of(release)
    if path is None:
        pytest.skip(f"vLLM {release} is not there: python -m tests.support.fetch_vllm")
    return path[0] / "vllm"


def names() -> dict[str, Any]:
    """FlashMLA's names, ours, and what else those methods call."""
    return {
        "flash_mla_with_kvcache": flashmla._Decode(decode_of_theirs),
        "flash_mla_sparse_fwd": flashmla._Prefill(prefill_of_theirs),
        "logger": types.SimpleNamespace(warning_once=lambda text: None),
        "compute_global_topk_indices_and_lens": None,
        "is_quantized_kv_cache": lambda dtype: False,
        "reshape_query_for_spec_decode": lambda q, n: q.unflatten(0, (n, -1)),
        "reshape_attn_output_for_spec_decode": lambda o: o.flatten(0, 1),
        "envs": types.SimpleNamespace(VLLM_BATCH_INVARIANT=False),
    }  # fmt: skip


def v4_decode(
    file: Path, owner: str, heads: int, ratio: int, page: int, wide: int = 128, padded: int = 0
) -> None:
    """V4's decode: a window of tokens, and beside it a second cache, compressed."""
    g, tokens, known = torch.Generator().manual_seed(heads + ratio), wide // 64 + 1, names()
    window, more = calls.pages_584(4, 64, 1), calls.pages_584(40, page, 2)
    q = torch.randn(tokens, heads, 512, generator=g).bfloat16()
    sink, more_heads = torch.randn(heads, generator=g), max(padded - heads, 0)
    out = torch.full((tokens, heads + more_heads, 512), torch.nan)
    lengths, others = (torch.tensor(n[-tokens:]).int() for n in ([wide, 37, 1], [64, 0, 13]))
    lists = calls.lists_of(tokens, wide, 256, 3)
    lists[-1, 0] = 7
    second = calls.lists_of(tokens, 64, 40 * page, 4), others
    out = out.bfloat16()
    known["compute_global_topk_indices_and_lens"] = lambda *_: second
    step = types.SimpleNamespace(
        num_decodes=tokens, num_decode_tokens=tokens, decode_swa_indices=lists.unsqueeze(1),
        decode_swa_lens=lengths, is_valid_token=torch.ones(tokens, dtype=torch.bool),
        token_to_req_indices=None,
        **{f"tile_sched_{name}": TheirMeta() for name in ("swaonly", "c4a", "c128a", "c1a", "c2a")},
    )  # fmt: skip
    compressed = types.SimpleNamespace(
        block_size=page * max(ratio, 1), block_table=torch.zeros(tokens, 1),
        c128a_global_decode_topk_indices=second[0].unsqueeze(1), c128a_decode_topk_lens=second[1],
    )  # fmt: skip
    layer = types.SimpleNamespace(
        compress_ratio=ratio, topk_indices_buffer=second[0], scale=512**-0.5,
        swa_cache_layer=types.SimpleNamespace(kv_cache=window.raw), prefix="model.layers.0.attn",
        attn_sink=functional.pad(sink, (0, more_heads), value=-torch.inf),
    )  # fmt: skip
    alone = ratio < (1 if "v41" in str(file) else 2)
    forward = calls.methods(file, owner, ("_forward_decode",), known)["_forward_decode"]
    layers = 1 if wide == 64 else 2  # of a step: the second takes the first one's schedule
    for _ in range(layers):
        out.fill_(torch.nan)
        forward(
            layer, q=functional.pad(q, (0, 0, 0, more_heads)), swa_metadata=step, swa_only=alone,
            kv_cache=None if alone else more.raw, attn_metadata=compressed, output=out,
        )  # fmt: skip
        listed: list[Any] = [(window.values, lists, lengths)]
        if not alone:
            listed.append((more.values, *second))
        calls.check(out[:, :heads], calls.truth(q, listed, 512**-0.5, sink)[0])
    assert known["flash_mla_with_kvcache"].calls == layers
    kept = [m for m in vars(step).values() if hasattr(m, flashmla_switch.SCHEDULE)]
    assert len(kept) == 1 and not kept[0].have_initialized  # vLLM's own fields are left alone


@needs_compiler
@pytest.mark.parametrize(
    ("release", "heads", "ratio", "page"),
    [(OLDER, 16, 128, 2),
     *(pytest.param(*each, marks=pytest.mark.whole_matrix) for each in (
         (NEWER, 64, 1, 64), (NEWER, 64, 128, 2), (NEWER, 16, 4, 64), (OLDER, 64, 4, 64)))],
)  # fmt: skip
def test_v4(release: str, heads: int, ratio: int, page: int) -> None:
    wide = 64 if (heads, ratio) == (16, 128) else 128
    v4_decode(text(release) / V4, "DeepseekV4FlashMLAAttention", heads, ratio, page, wide)


@needs_compiler
@pytest.mark.whole_matrix
def test_v4_with_padded_heads() -> None:
    """As ``test_v4`` of 16 heads, where ``heads`` leaves the padding to vLLM."""
    file = text(OLDER) / V4
    v4_decode(file, "DeepseekV4FlashMLAAttention", 16, 128, 2, wide=64, padded=64)


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize(("ratio", "page"), [(0, 64), (2, 32)])
def test_v41_in_v4s_bytes(ratio: int, page: int) -> None:
    file = text(NEWER) / V41
    (owner,) = (
        node.name for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and "_forward_decode" in {
            getattr(each, "name", "") for each in node.body}
    )  # fmt: skip
    v4_decode(file, owner, 64, ratio, page)


@needs_compiler
@pytest.mark.parametrize(
    ("release", "file", "owner", "heads", "padded"),
    [(OLDER, f"{BACKENDS}/flashmla_sparse.py", "FlashMLASparseImpl", 16, 16),
     *(pytest.param(*each, marks=pytest.mark.whole_matrix) for each in (
         (NEWER, f"{BACKENDS}/flashmla_sparse.py", "FlashMLASparseImpl", 16, 64),
         (NEWER, HY4, "HYV4FlashMLASparseImpl", 16, 64),
         (NEWER, HY4, "HYV4FlashMLASparseImpl", 16, 16)))],
)  # fmt: skip
def test_rows_of_656_bytes(release: str, file: str, owner: str, heads: int, padded: int) -> None:
    """V3.2 and GLM-5, whose calls are one, and HY-V4 with sinks; heads as they are and padded."""
    tokens, known, cache = 3, names(), calls.pages_656(4, 64, 1)
    g = torch.Generator().manual_seed(heads)
    q = torch.randn(tokens, 1, heads, 576, generator=g).bfloat16()
    sinks = torch.randn(heads, generator=g) if owner.startswith("HY") else None
    lists = calls.lists_of(tokens, 128, 256, 3)
    wanted = ("_fp8_flash_mla_kernel", *(("_sinks_for_query",) if sinks is not None else ()))
    found = calls.methods(text(release) / file, owner, wanted, known)
    layer = types.SimpleNamespace(
        fp8_decode_padded_heads=padded, softmax_scale=576**-0.5, sinks=sinks
    )
    for name, function in found.items():
        setattr(layer, name, types.MethodType(function, layer))
    step = types.SimpleNamespace(
        dummy_block_table=torch.empty(1, 1).int(), cache_lens=torch.empty(1).int(),
        scheduler_metadata=TheirMeta(),
    )  # fmt: skip
    out, lse = layer._fp8_flash_mla_kernel(q, cache.raw, lists.unsqueeze(1), step)
    want = calls.truth(q[:, 0], [(cache.values, lists, None)], 576**-0.5, sinks)
    calls.check(out[:, 0], want[0], lse[:, :heads, 0], want[1])
    assert known["flash_mla_with_kvcache"].calls == 1


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_dense_decode_of_16_bits(release: str) -> None:
    known, heads, s_q = names(), 16, 2
    lengths = torch.tensor([130, 64]).int()
    table = torch.tensor([[3, 0, 5], [1, 2, 4]]).int()
    r = torch.Generator().manual_seed(0)
    kv = (torch.randn(6, 64, 576, generator=r) / 10).bfloat16()
    q = torch.randn(2 * s_q, heads, 576, generator=r).bfloat16()
    decode = types.SimpleNamespace(
        block_table=table, seq_lens=lengths, scheduler_metadata=TheirMeta()
    )
    step = types.SimpleNamespace(num_decodes=2, decode=decode)
    layer = types.SimpleNamespace(
        kv_lora_rank=512, scale=192**-0.5, kv_cache_dtype="auto",
        need_to_return_lse_for_decode=False,
    )  # fmt: skip
    file = text(release) / BACKENDS / "flashmla.py"
    forward = calls.methods(file, "FlashMLAImpl", ("forward_mqa",), known)["forward_mqa"]
    out, _ = forward(layer, q, kv, step, None)
    lists = torch.full((4, 192), -1)
    for t in range(4):
        seen = torch.arange(int(lengths[t // s_q]) - (s_q - 1 - t % s_q))
        lists[t, : len(seen)] = table[t // s_q].long()[seen // 64] * 64 + seen % 64
    want, _ = calls.truth(q, [(kv.flatten(0, 1).double(), lists, None)], 192**-0.5)
    calls.check(out, want)
    assert known["flash_mla_with_kvcache"].calls == 1


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_prompts_of_v4(release: str) -> None:
    """The call that V4's prefill ends in, over its own names."""
    known, r = names(), torch.Generator().manual_seed(0)
    (call,) = (
        node for node in ast.walk(ast.parse((text(release) / V4).read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "flash_mla_sparse_fwd"
    )  # fmt: skip
    tokens, heads, rows = 3, 64, 160
    q = torch.randn(tokens * heads, 512, generator=r).bfloat16()
    kv = (torch.randn(rows, 512, generator=r) / 10).bfloat16()
    lists, lengths = calls.lists_of(tokens, 128, rows, 1), torch.tensor([128, 40, 1]).int()
    lists[2, 0] = 5
    sink = torch.randn(heads, generator=r)
    space = known | {
        "q": q.view(tokens, heads, 512), "query_start": 0, "query_end": tokens,
        "kv": kv.unsqueeze(0), "combined_indices": lists, "combined_lens": lengths,
        "output": torch.full((tokens, heads, 512), torch.nan).bfloat16(),
        "self": types.SimpleNamespace(scale=512**-0.5, attn_sink=sink),
    }  # fmt: skip
    eval(compile(ast.Expression(call), "flashmla.py", "eval"), space)
    want, _ = calls.truth(space["q"], [(kv.double(), lists, lengths)], 512**-0.5, sink)
    calls.check(space["output"], want)
    assert known["flash_mla_sparse_fwd"].calls == 1


@needs_compiler
def test_the_first_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Once a layer's class and format, with the name of the layer."""
    name, cache = flashmla._Decode(decode_of_theirs), calls.pages_656(1, 64, 1)
    told = {
        "q": torch.zeros(1, 1, 16, 576).bfloat16(), "k_cache": cache.raw.unsqueeze(2),
        "block_table": None, "cache_seqlens": None, "head_dim_v": 512, "is_fp8_kvcache": True,
        "indices": torch.zeros(1, 1, 64, dtype=torch.int32),
    }  # fmt: skip

    class Layer:
        prefix = "model.layers.3.attn"

        def forward(self) -> Any:
            return name(tile_scheduler_metadata=TheirMeta(), **told)

    with caplog.at_level(logging.INFO, flashmla.LOGGER):
        Layer().forward(), Layer().forward()
    (line,) = lines_of(caplog)
    assert "Layer (model.layers.3.attn): sparse decode, fp8_ds_mla, 16 heads" in line
    assert name.calls == 2


def test_a_schedule_wants_a_scheduling_object(caplog: pytest.LogCaptureFixture) -> None:
    """Tensors of records are a step's lengths, which a schedule that is kept would not see."""
    for given in (torch.zeros(1, 8, dtype=torch.int32), None, (TheirMeta(), None)):
        with pytest.raises(TypeError, match="tile_scheduler_metadata: expected an object of get_m"):
            flashmla_switch.schedule_of(given)
    name, q = flashmla._Decode(lambda *given: "theirs"), torch.zeros(1, 1, 16, 576).bfloat16()
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        assert name(q, q, None, None, 512, q) == "theirs"
    (line,) = lines_of(caplog)
    assert "runs, not snapmla's: tile_scheduler_metadata: expected an object" in line
    meta = TheirMeta()
    assert flashmla_switch.schedule_of(meta) is flashmla_switch.schedule_of(meta)


# ------------------------------------------------------------------------------- the first step


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module of forward contexts."""
    module: Any = types.ModuleType("vllm.forward_context")
    module.active = False
    module.is_forward_context_available = lambda: module.active
    module.create_forward_context = lambda attn_metadata, vllm_config, more=None: "context"
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)
    monkeypatch.setattr(sys.modules["vllm"], "forward_context", module, raising=False)
    return module


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the switch's logger; a variant that is compiled meanwhile is told by another."""
    return [each.getMessage() for each in caplog.records if each.name == flashmla.LOGGER]


def config(path: str | None) -> Any:
    backend = None
    if path is not None:
        backend = types.SimpleNamespace(name=plugin.SPARSE_BACKEND, get_path=lambda: path)
    return types.SimpleNamespace(attention_config=types.SimpleNamespace(backend=backend))


def test_a_first_step_without_a_call_is_told_once(
    contexts: Any, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("SNAPMLA_VLLM_FLASHMLA", "1")
    monkeypatch.setitem(sys.modules, "vllm.forward_context", contexts)
    flashmla.install()
    theirs = contexts.create_forward_context
    first_step.watch()
    first_step.watch()
    ours = contexts.create_forward_context
    assert ours is not theirs and ours.theirs is theirs
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        assert ours(None, config(None)) == "context"  # memory is profiled
        assert ours({"layer": 1}, config(None), more=1) == "context"
        contexts.active = True
        ours({"layer": 1}, config(None))  # a part of the same step
        contexts.active = False
        assert not lines_of(caplog)
        ours({"layer": 1}, config(None))
        ours({"layer": 1}, config(None))
    (line,) = lines_of(caplog)
    assert "first step had no call of FlashMLA's names that snapmla computed" in line
    assert contexts.create_forward_context is theirs  # again: what was to be told is told
    first_step.watch()
    assert contexts.create_forward_context is theirs
    modules[surface.FLASHMLA].flash_mla_with_kvcache.calls = 1
    assert list(first_step.sentences({"layer": 1}, config(None), flashmla.calls())) == []


class Context:
    """vLLM's dataclass of a forward pass."""


def test_microbatches_are_one_step(
    contexts: Any, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """0.33 makes the contexts of all of a step's before it runs the first."""
    monkeypatch.setenv("SNAPMLA_VLLM_FLASHMLA", "1")
    contexts.create_forward_context = lambda attn_metadata, vllm_config: Context()
    flashmla.install()
    first_step.watch()
    make = lambda: contexts.create_forward_context({"layer": 1}, config(None))
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        both = [make(), make(), make()]
        assert len({id(each) for each in both}) == 3 and not lines_of(caplog)
        del both  # the step is over
        make()
    (line,) = lines_of(caplog)
    caplog.clear()
    first_step._over.clear()
    first_step.watch()
    kept = []  # by graphs that were captured
    while not lines_of(caplog):
        kept.append(make())
    assert len(kept) == first_step.MICROBATCHES + 1
    assert "vLLM's own kernel ran, and a line before this one says why" in line


def test_microbatches_whose_step_calls_ours(
    contexts: Any, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("SNAPMLA_VLLM_FLASHMLA", "1")
    theirs = contexts.create_forward_context = lambda attn_metadata, vllm_config: Context()
    flashmla.install()
    first_step.watch()
    make = lambda: contexts.create_forward_context({"layer": 1}, config(None))
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        both = [make(), make()]
        modules[surface.FLASHMLA].flash_mla_with_kvcache.calls = 1
        del both
        make()
    assert not lines_of(caplog) and contexts.create_forward_context is theirs


def test_no_lock_is_held_while_vllm_makes_a_context(
    contexts: Any, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A context may be asked for in there, by this thread and by one that it waits for."""
    monkeypatch.setenv("SNAPMLA_VLLM_FLASHMLA", "1")
    made: list[str] = []

    def create(attn_metadata: Any, vllm_config: Any) -> Context:
        made.append(threading.current_thread().name)
        if len(made) == 1:
            make()
            other = threading.Thread(target=make, name="other", daemon=True)
            other.start()
            other.join(5)
        return Context()

    contexts.create_forward_context = create
    flashmla.install()
    first_step.watch()
    make = lambda: contexts.create_forward_context({"layer": 1}, config(None))
    outer = threading.Thread(target=make, name="outer", daemon=True)
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        outer.start()
        outer.join(10)
    assert not outer.is_alive() and made == ["outer", "outer", "other"]


def test_our_backend_that_no_layer_takes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4 beside SNAPMLA_SPARSE: its layers choose their own attention."""
    path = "snapmla.integrations.vllm.sparse.SnapMLASparseBackend"
    ours = type("Ours", (), {"__module__": "snapmla.integrations.vllm.sparse"})()
    (said,) = first_step.sentences([{"a": object()}, {"b": object()}], config(path), 0)
    assert said.startswith("--attention-backend SNAPMLA_SPARSE is snapmla's, and no layer")
    assert "vLLM's kernels run: layers choose their own attention" in said
    assert "; SNAPMLA_VLLM_FLASHMLA=1 puts" in said
    with monkeypatch.context() as patched:
        patched.setenv("SNAPMLA_VLLM_FLASHMLA", "1")
        patched.setattr(flashmla, "installed", lambda: False)
        (said,) = first_step.sentences([{"a": object()}], config(path), 0)
        assert said.endswith("that the backend does not serve")
    assert list(first_step.sentences({"a": object(), "b": ours}, config(path), 0)) == []
    assert list(first_step.sentences({"a": object()}, config("vllm.other.Backend"), 0)) == []
    assert list(first_step.sentences({}, config(path), 0)) == []


def test_modules_import_without_vllm() -> None:
    for name in ("flashmla", "first_step"):
        assert importlib.import_module(f"{plugin.__name__}.{name}")


# ------------------------------------------------------------------------------------ the check


def test_check_says_whose_the_names_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SNAPMLA_VLLM_FLASHMLA", raising=False)
    found = commands.flashmla_names()
    assert found.ok and "SNAPMLA_VLLM_FLASHMLA is off: DeepSeek-V4" in found.text
    monkeypatch.setenv("SNAPMLA_VLLM_FLASHMLA", "1")
    monkeypatch.setattr(surface, "installed", lambda: "0.30.0")
    found = commands.flashmla_names()
    assert found.ok is False and f"is for vllm {OLDER} and {NEWER}" in found.text
    monkeypatch.setattr(surface, "installed", lambda: NEWER)
    assert commands.flashmla_names().ok
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.0")
    released = commands.release()
    assert released.ok is None
    assert released.text == (
        f"vllm 0.30.0: known releases are {OLDER} and {NEWER}, others were not looked at"
    )


def test_kernels_behind_the_names() -> None:
    names = {spec.name for spec in commands.needed_flashmla()}
    assert {
        "plan_decode_sm90a", "sparse_decode_mix16_r64_obf16_sm90a",
        "sparse_decode_mix16_r64_obf16_kvfp8_v4_sm90a", "sparse_prefill_r64_d512_sm90a",
        "sparse_prefill_r64_d576_sm90a",
    } <= names  # fmt: skip
    assert any(name.startswith("dense_decode_") for name in names)
    assert not any("append" in name or "index" in name for name in names)

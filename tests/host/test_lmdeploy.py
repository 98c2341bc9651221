"""``snapmla.integrations.lmdeploy``: LMDeploy's calls of ``flash_mla`` on ours.

The name is found as the wheel's path file has it.  Calls are LMDeploy's own text, of an unpacked
release (``python -m tests.support.fetch_lmdeploy``), over caches made by hand against float64.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
from codegen import render
from snapmla.compat import flash_mla
from snapmla.compat.flash_mla import name as naming
from snapmla.integrations import lmdeploy
from snapmla.integrations.lmdeploy import __main__ as commands
from snapmla.integrations.lmdeploy import first_step, names, surface
from tests.host.test_flash_mla_name import brought
from tests.support import fetch_lmdeploy
from tests.support import flashmla_calls as calls
from tests.support.needs import needs_compiler

(RELEASE,) = fetch_lmdeploy.RELEASES
ATTENTION = "lmdeploy/pytorch/backends/cuda/attention"
SWITCH = "SNAPMLA_AS_FLASH_MLA"
WHOLE = pytest.mark.whole_matrix
NAMES = (naming.NAME, naming.INTERFACE)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody has the name before or behind a test, and no other LMDeploy is there."""
    monkeypatch.delenv(SWITCH, raising=False)
    for each in NAMES:
        sys.modules.pop(each, None)
    finders = list(sys.meta_path)
    yield
    sys.meta_path[:] = finders
    for each in NAMES:
        sys.modules.pop(each, None)


@pytest.fixture
def wheel() -> Any:
    """The wheel's module, as Python has it when it has started."""
    module: Any = types.ModuleType("snapmla_as_flash_mla")
    exec(render.text("as_flash_mla.py.j2"), vars(module))
    module.watch()
    return module


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of ours, whatever else is told."""
    said = [r.getMessage() for r in caplog.records if r.name in ("snapmla", names.LOGGER)]
    return [line for line in said if line.startswith("snapmla: ")]


# ------------------------------------------------------------------------------------- the name


def test_without_the_variable_nothing_is_there(wheel: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="flash_mla"):
        importlib.import_module("flash_mla")
    assert sys.meta_path.count(wheel.Finder) == 1


@pytest.mark.parametrize("word", ["1", "tensors"])
def test_the_variable_is_read_at_the_import(
    word: str, wheel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set when Python starts, or by a script before the engine, or behind an import that failed."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_mla")
    monkeypatch.setenv(SWITCH, word)
    wheel.watch()
    module = importlib.import_module("flash_mla")
    assert sys.meta_path.count(wheel.Finder) == 1
    assert module is importlib.import_module("flash_mla") is lmdeploy.install()
    interface = importlib.import_module("flash_mla.flash_mla_interface")
    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        ours = getattr(module, name)
        assert isinstance(ours, names.Name) and ours is getattr(interface, name)
        assert ours.theirs is getattr(flash_mla, name) and ours.__doc__ == ours.theirs.__doc__


def test_a_name_that_was_installed_before_is_taken_over() -> None:
    module = snapmla.install_as_flash_mla()
    assert module.flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    assert lmdeploy.install() is module and isinstance(module.flash_mla_with_kvcache, names.Name)


def test_another_package_of_that_name_is_told_of(
    wheel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LMDeploy swallows an ImportError, so the sentence is a line of the log, too."""
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.syspath_prepend(brought(tmp_path / "site", "flash-mla"))
    with caplog.at_level(logging.WARNING, "snapmla"), pytest.raises(ImportError) as caught:
        importlib.import_module("flash_mla")
    (line,) = lines_of(caplog)
    assert "flash-mla's module" in line and line == f"snapmla: {caught.value}"
    assert f"or unset {SWITCH}" in line and "\n" not in line


def test_the_first_call_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Once a layer's class and format; a call that raises is none."""

    def flash_mla_with_kvcache(*given: Any, **named: Any) -> str:
        if named["indices"] is None:
            raise ValueError("a sentence")
        return "ours"

    name, cache = names.Decode(flash_mla_with_kvcache), torch.zeros(1, 64, 1, 656).byte()
    told = {"q": torch.zeros(1, 1, 16, 576), "k_cache": cache, "indices": 1}

    class FlashMLASparseImpl:
        def forward(self, **other: Any) -> Any:
            return name(**told | other)

    layer = FlashMLASparseImpl()
    with caplog.at_level(logging.INFO, names.LOGGER):
        assert [layer.forward() for _ in range(2)] == ["ours", "ours"]
        with pytest.raises(ValueError, match="a sentence"):
            layer.forward(indices=None)
    (line,) = lines_of(caplog)
    assert line.endswith("FlashMLASparseImpl: sparse decode, fp8_ds_mla, 16 heads")
    assert name.calls == 2


# -------------------------------------------------------------------------------- the first step


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """LMDeploy's class whose method begins a step."""

    class CudaOpsBackend:
        @classmethod
        def update_step_context(cls, step_context: Any) -> Any:
            return cls, step_context

    path = "lmdeploy"
    monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    for part in ("pytorch", "backends", "cuda", "op_backend"):
        module, owner = types.ModuleType(f"{path}.{part}"), sys.modules[path]
        path = f"{path}.{part}"
        monkeypatch.setitem(sys.modules, path, module)
        setattr(owner, part, module)
    sys.modules[path].CudaOpsBackend = CudaOpsBackend  # type: ignore[attr-defined]
    return CudaOpsBackend


def test_a_process_that_calls_nothing_says_so_once(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lmdeploy.install()
    there = vars(engine)["update_step_context"].__func__
    lmdeploy.install()
    assert vars(engine)["update_step_context"].__func__ is there
    decode, prompt = (types.SimpleNamespace(is_decoding=each) for each in (True, False))
    with caplog.at_level(logging.INFO, names.LOGGER):
        for step in (prompt, prompt, decode):
            assert engine.update_step_context(step) == (engine, step)
        assert not lines_of(caplog)
        for _ in range(3):
            engine.update_step_context(decode)
    assert lines_of(caplog) == [f"snapmla: {first_step.SENTENCE}"]


@pytest.mark.parametrize("missing", ["method", "module"])
def test_a_first_step_that_cannot_be_looked_at_leaves_the_names(
    missing: str, engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls are ours, and the log says it, in a release that has the method elsewhere."""
    if missing == "method":
        del engine.update_step_context
    else:
        monkeypatch.delattr(sys.modules["lmdeploy.pytorch.backends.cuda"], "op_backend")
        monkeypatch.delitem(sys.modules, "lmdeploy.pytorch.backends.cuda.op_backend")
    with caplog.at_level(logging.INFO, names.LOGGER):
        module = lmdeploy.install()
    assert isinstance(module.flash_mla_with_kvcache, names.Name)
    assert sys.modules["flash_mla"] is module
    (line,) = lines_of(caplog)
    assert line.startswith("snapmla: the first step is not looked at: ")
    assert ("update_step_context" if missing == "method" else "op_backend") in line


def test_a_process_that_calls_ours_says_nothing(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = lmdeploy.install()
    module.flash_mla_with_kvcache.calls = 1
    assert names.calls() == 1
    step = types.SimpleNamespace(is_decoding=True)
    with caplog.at_level(logging.INFO, names.LOGGER):
        for _ in range(3):
            engine.update_step_context(step)
    assert not lines_of(caplog)


# ---------------------------------------------------------------------------- LMDeploy's own text


def text(name: str) -> Path:
    path = fetch_lmdeploy.path_of(RELEASE)
    if path is None:
        pytest.skip(f"LMDeploy {RELEASE} is not there: python -m tests.support.fetch_lmdeploy")
    return path[0] / ATTENTION / f"{name}.py"


def functions(file: Path, known: dict[str, Any]) -> dict[str, Any]:
    """Functions of a file over the names that they are given."""
    space = {"torch": torch, **known}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for given in node.args.args:
                given.annotation = None
            exec(compile(ast.Module([node], []), file.name, "exec"), space)
    return space


def layer_of(methods: dict[str, Any], **values: Any) -> Any:
    """An object with LMDeploy's methods."""
    layer = types.SimpleNamespace(**values)
    for name, function in methods.items():
        setattr(layer, name, types.MethodType(function, layer))
    return layer


def metadata_of(lengths: torch.Tensor, heads: int, topk: int | None) -> Any:
    """LMDeploy's metadata of a decode step."""
    known = {"FlashMLAAttentionMetadata": types.SimpleNamespace}
    found = functions(text("mla"), known)
    return found["_build_flash_mla_metadata"](lengths, heads, 1, topk is not None, topk)


def mla(owner: str, *more: str, length: torch.Tensor, table: torch.Tensor) -> Any:
    """A layer of MLA of LMDeploy's with the functions that it took from the module, and a step."""
    module = importlib.import_module("flash_mla")
    methods = calls.methods(
        text("mla"), "FlashMLAImpl", ("_decoding_paged", "_get_scheduler_metadata"), {}
    )
    if more:
        methods |= calls.methods(text("sparse_mla"), owner, more, {})
    mapper = calls.methods(text("sparse_mla"), "FlashMLAIndexMapper", ("_map_decode_impl",), {})
    layer = layer_of(
        methods, causal=True, scale=192**-0.5, v_head_size=512, _MLA_HEAD_ALIGNMENT=64,
        _BF16_CACHE_INDEX_STRIDE=64, get_step_kernel_metadata=lambda _: None,
        flash_mla_with_kvcache=module.flash_mla_with_kvcache,
        _get_flash_mla_sparse_fwd=lambda: module.flash_mla_sparse_fwd,
        _get_max_q_seqlen=lambda q, _: 1,
    )  # fmt: skip
    to_slots = mapper["_map_decode_impl"]
    layer.index_mapper = types.SimpleNamespace(
        map_paged_decode=lambda i, t, n, size: to_slots(None, i, t, size, size, 1, 1, n != 1),
        map_strided_decode=lambda i, t, n, size, *s: to_slots(None, i, t, size, *s, n != 1),
    )
    step = types.SimpleNamespace(
        kv_seqlens=length, block_offsets=table, q_seqlens=torch.ones_like(length)
    )
    return layer, step


@needs_compiler
@WHOLE
@pytest.mark.parametrize("heads", [16, 64])
def test_dense_decode_of_16_bits(heads: int, caplog: pytest.LogCaptureFixture) -> None:
    """V2, V3, Kimi-K2; two layers of a step share its schedule."""
    lmdeploy.install()
    lengths, table = torch.tensor([130, 64]).int(), torch.tensor([[3, 0, 5], [1, 2, 4]]).int()
    r = torch.Generator().manual_seed(0)
    kv = (torch.randn(6, 64, 1, 576, generator=r) / 10).bfloat16()
    q = torch.randn(2, heads, 576, generator=r).bfloat16()
    layer, step = mla("FlashMLAImpl", length=lengths, table=table)
    built = metadata_of(lengths, heads, None)
    assert built.scheduler_depends_on_step and built.num_splits is None
    step.tile_scheduler_metadata, step.num_splits = built.tile_scheduler_metadata, None
    lists = torch.full((2, 192), -1)
    for t in range(2):
        seen = torch.arange(int(lengths[t]))
        lists[t, : len(seen)] = table[t].long()[seen // 64] * 64 + seen % 64
    want, _ = calls.truth(q, [(kv[:, :, 0].flatten(0, 1).double(), lists, None)], 192**-0.5)
    with caplog.at_level(logging.INFO, names.LOGGER):
        for _ in range(2):
            calls.check(layer._decoding_paged(q, kv, step), want)
    assert names.calls() == 2
    assert lines_of(caplog) == [f"snapmla: SimpleNamespace: dense decode, bfloat16, {heads} heads"]
    assert isinstance(built.tile_scheduler_metadata, flash_mla.FlashMLASchedMeta)
    assert len(built.tile_scheduler_metadata._plans) == 1  # ours, on what LMDeploy keeps


def test_what_a_graph_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDeploy's objects before a capture: a fresh one where lengths matter, else the same."""
    lmdeploy.install()
    wanted = ("fill_cudagraph_buffer", "prepare_cudagraph_capture")
    known = {"_build_flash_mla_metadata": None}
    found = calls.methods(text("mla"), "FlashMLAAttentionMetaBuilder", wanted, known)
    lengths = torch.ones(2, dtype=torch.int32)
    for topk, replaced in ((None, True), (128, False)):
        kept = metadata_of(lengths, 16, topk)
        first = kept.tile_scheduler_metadata
        assert found["fill_cudagraph_buffer"](None, None, {}, None, kept) is kept
        found["prepare_cudagraph_capture"](None, None, {}, None, kept)
        assert (kept.tile_scheduler_metadata is not first) is replaced
        assert isinstance(kept.tile_scheduler_metadata, flash_mla.FlashMLASchedMeta)


@needs_compiler
@WHOLE
@pytest.mark.parametrize(("tensors", "heads"), [(True, 16), (False, 64)])
def test_rows_of_656_bytes(tensors: bool, heads: int) -> None:
    """V3.2 over its FP8 cache: LMDeploy pads heads to 64 beside an object, not beside tensors."""
    lmdeploy.install(tensors=tensors)
    cache, tokens = calls.pages_656(4, 64, 1), 2
    g = torch.Generator().manual_seed(3)
    q = torch.randn(tokens, 16, 576, generator=g).bfloat16()
    table, lengths = torch.tensor([[3, 1], [0, 2]]).int(), torch.tensor([100, 128]).int()
    logical = torch.stack([torch.randperm(128, generator=g) for _ in range(tokens)]).int()
    logical = logical.where(logical < lengths[:, None], -1)
    layer, step = mla("FlashMLASparseImpl", "_decoding_sparse_fp8", length=lengths, table=table)
    built = metadata_of(lengths, 16, 128)
    step.tile_scheduler_metadata, step.num_splits = built.tile_scheduler_metadata, built.num_splits
    seen: list[int] = []
    through = layer.flash_mla_with_kvcache

    def watched(q: torch.Tensor, **named: Any) -> Any:
        seen.append(q.shape[2])
        return through(q, **named)

    layer.flash_mla_with_kvcache = watched
    rows = cache.raw.view(torch.float8_e4m3fn).unsqueeze(2)
    out = layer._decoding_sparse_fp8(q, rows, logical, step)
    at = logical.long().clamp(min=0)
    slots = (table.long().gather(1, at // 64) * 64 + at % 64).where(logical >= 0, -1)
    want, _ = calls.truth(q, [(cache.values, slots, None)], 192**-0.5)
    calls.check(out, want)
    assert seen == [heads] and names.calls() == 1


@needs_compiler
@WHOLE
def test_a_bfloat16_cache_of_v32() -> None:
    """Its default: ``flash_mla_sparse_fwd`` over the pool as rows that lie 128 bytes apart."""
    lmdeploy.install()
    g, tokens = torch.Generator().manual_seed(5), 2
    kv = (torch.randn(4, 64, 1, 576, generator=g) / 10).bfloat16()
    q = torch.randn(tokens, 16, 576, generator=g).bfloat16()
    table, lengths = torch.tensor([[3, 1], [0, 2]]).int(), torch.tensor([100, 128]).int()
    logical = torch.stack([torch.randperm(128, generator=g) for _ in range(tokens)]).int()
    logical = logical.where(logical < lengths[:, None], -1)
    layer, step = mla(
        "FlashMLASparseImpl", "_decoding_sparse_bf16", "_flash_mla_sparse_forward",
        length=lengths, table=table,
    )  # fmt: skip
    out = layer._decoding_sparse_bf16(q, kv, logical, step)
    at = logical.long().clamp(min=0)
    slots = (table.long().gather(1, at // 64) * 64 + at % 64).where(logical >= 0, -1)
    want, _ = calls.truth(q, [(kv[:, :, 0].flatten(0, 1).double(), slots, None)], 192**-0.5)
    calls.check(out, want)
    assert names.calls() == 1


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "ratio", "padded"),
    [(16, 128, False), *(pytest.param(*each, marks=WHOLE) for each in (
        (16, 0, True), (16, 128, True), (16, 4, True), (64, 4, True), (16, 0, False)))],
)  # fmt: skip
def test_v4(heads: int, ratio: int, padded: bool) -> None:
    """Its decode: a window of 128 tokens, and compressed pages of 64 or of 2 tokens; heads as they
    are, and padded to 64 with what memory held."""
    module = lmdeploy.install()
    g, tokens = torch.Generator().manual_seed(heads + ratio), 2
    window, page = calls.pages_584(4, 128, 1), 256 // (ratio or 256)
    more = calls.pages_584(12, page, 2)
    slot = torch.tensor([2, 0])
    counts, others = torch.tensor([128, 37]).int(), torch.tensor([20, 1]).int()
    q = torch.randn(1, tokens, heads, 512, generator=g).bfloat16()
    sink = torch.randn(heads, generator=g)
    wide = torch.stack([torch.randperm(128, generator=g) + 128 * t for t in range(tokens)]).int()
    second = torch.randint(12 * page, (tokens, 1, 64), generator=g).int()
    known = {
        "build_decode_compressed_sparse_indices": lambda *_: second,
        "build_decode_prefix_compressed_sparse_indices": lambda *_: second,
    }
    wanted = ("_get_compressed_kv_cache", "_pad_query_heads")
    base = calls.methods(text("v4"), "_V4AttentionExecutorBase", wanted, {})
    found = calls.methods(text("v4"), "_V4DecodeExecutor", ("forward", "_write_window"), known)
    layer = layer_of(
        {**found, "_get_compressed_kv_cache": base["_get_compressed_kv_cache"]},
        _pad_query_heads=base["_pad_query_heads"], compress_ratio=ratio, head_size=512,
        scale=512**-0.5, window_size=128, flash_mla=module, _pack_window_fp8=lambda *_: None,
        impl=types.SimpleNamespace(compressed_kv_cache_name="compressed" if ratio else None),
    )  # fmt: skip
    if not padded:
        layer._pad_query_heads = lambda q, sink: (q, sink, q.shape[2])
    kept: dict[int, Any] = {}
    step = types.SimpleNamespace(
        kv_seqlens=torch.tensor([4000, 37]).int(), block_offsets=torch.zeros(tokens, 1).int(),
        block_size=256,
        get_ratio_meta=lambda ratio: kept.setdefault(ratio, types.SimpleNamespace(
            flash_mla_sched_meta=None,
            decode=types.SimpleNamespace(indices=second, topk_length=others))),
        decode_window=types.SimpleNamespace(
            window_pos=None, indices=wide[:, None], topk_length=counts,
            is_padded=torch.zeros(tokens, dtype=torch.bool),
            disabled_indices=torch.full((tokens, 1, 128), -1).int(),
            disabled_topk_length=torch.zeros(tokens).int()),
    )  # fmt: skip
    listed: list[calls.Listed] = [
        (window.values.view(4, 128, 512)[slot].flatten(0, 1), wide, counts)
    ]
    if ratio:
        listed.append((more.values, second[:, 0], others))
    want, _ = calls.truth(q[0], listed, 512**-0.5, sink)
    index = types.SimpleNamespace(indices_in_kvcache=second[:, 0], topk_length=others)
    raw = {"compressed": more.raw.view(torch.float8_e4m3fn)}
    state = window.raw.contiguous().view(torch.float8_e4m3fn)
    for _ in range(2 if padded else 1):  # layers of a step
        out = layer.forward(
            q, torch.zeros(1, tokens, 512), sink, step, state, raw, slot,
            index_out=index if ratio == 4 else None,
        )  # fmt: skip
        calls.check(out[0], want)
    (meta,) = (each.flash_mla_sched_meta for each in kept.values() if each.flash_mla_sched_meta)
    assert isinstance(meta, flash_mla.FlashMLASchedMeta) and len(meta._plans) == 1


@needs_compiler
@WHOLE
@pytest.mark.parametrize("channels", [576, 512])
def test_prompts(channels: int) -> None:
    """The calls that prefill of V3.2 and of V4 ends in, over their own names."""
    module, g, tokens = lmdeploy.install(), torch.Generator().manual_seed(0), 3
    kv = (torch.randn(160, 1, channels, generator=g) / 10).bfloat16()
    q = torch.randn(tokens, 64, channels, generator=g).bfloat16()
    lists = calls.lists_of(tokens, 128, 160, 1)
    scale, sink, lengths = channels**-0.5, None, None
    if channels == 576:
        found = calls.methods(
            text("sparse_mla"), "FlashMLASparseImpl", ("_flash_mla_sparse_forward",), {}
        )
        layer = layer_of(
            found, scale=scale, _MLA_HEAD_ALIGNMENT=64,
            _get_flash_mla_sparse_fwd=lambda: module.flash_mla_sparse_fwd,
        )  # fmt: skip
        out = layer._flash_mla_sparse_forward(q, kv, lists[:, None])
    else:
        sink, lengths = torch.randn(64, generator=g), torch.tensor([128, 40, 1]).int()
        lists[2, 0] = 5
        (call,) = (
            node for node in ast.walk(ast.parse(text("v4").read_text()))
            if isinstance(node, ast.Call) and "flash_mla_sparse_fwd" in ast.unparse(node.func)
        )  # fmt: skip
        space = {
            "self": types.SimpleNamespace(flash_mla=module, scale=scale), "q_flat": q,
            "flat_kv": kv, "topk_indices": lists[:, None], "attn_sink": sink,
            "topk_length": lengths,
        }  # fmt: skip
        out = eval(compile(ast.Expression(call), "v4.py", "eval"), space)[0]
    want, _ = calls.truth(q, [(kv[:, 0].double(), lists, lengths)], scale, sink)
    calls.check(out, want)
    assert names.calls() == 1


# ---------------------------------------------------------------------------- what is not served


def refusals() -> list[tuple[dict[str, Any], str]]:
    q, rows = (
        torch.zeros(1, 1, 64, 576).bfloat16(),
        lambda width: torch.zeros(1, 64, 1, width).byte(),
    )
    call = {"q": q, "k_cache": rows(656), "block_table": None, "cache_seqlens": None,
            "head_dim_v": 512, "is_fp8_kvcache": True}  # fmt: skip
    listed = call | {"indices": torch.zeros(1, 1, 64, dtype=torch.int32)}
    return [
        (listed | {"k_cache": rows(352)}, "k_cache"),
        (listed | {"extra_k_cache": rows(288), "extra_indices_in_kvcache": listed["indices"]},
         "extra_indices_in_kvcache|extra_k_cache"),
        (listed | {"k_cache": rows(528)}, "three formats have 528 bytes a token"),
        (listed | {"causal": True}, "causal"),
        (call, "FlashMLA's dense FP8 cache is not built yet"),
    ]  # fmt: skip


@pytest.mark.parametrize(("told", "said"), refusals())
def test_what_is_not_served_is_one_sentence(told: dict[str, Any], said: str) -> None:
    module = lmdeploy.install()
    meta, _ = module.get_mla_metadata()
    with pytest.raises(ValueError, match=said) as caught:
        module.flash_mla_with_kvcache(**told, tile_scheduler_metadata=meta)
    assert "\n" not in str(caught.value) and names.calls() == 0


# ------------------------------------------------------------------------------------- check


def test_the_record_is_the_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each argument that LMDeploy's calls name is one of ours."""
    record = surface.recorded()[RELEASE]
    for name, named in record.items():
        if "@" in name:
            ours = getattr(flash_mla, name.partition("@")[2])
            wanted = inspect.signature(ours).parameters
            assert isinstance(named, list) and set(named) <= set(wanted)
    text("mla")
    path = fetch_lmdeploy.path_of(RELEASE)
    assert path is not None
    for each in [name for name in sys.modules if name.partition(".")[0] == "lmdeploy"]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.syspath_prepend(path[0])
    assert surface.read() == record and not surface.differences(surface.read(), record)


def test_differences_are_sentences() -> None:
    record = surface.recorded()[RELEASE]
    (step, *_), (call, *_) = ([n for n in record if mark in n] for mark in ("CudaOps", "v4@flash"))
    changed = {**record, step: False, call: ["q", "new"]}
    assert [ok for ok, _ in surface.differences(changed, record)] == [None, False]


@pytest.mark.parametrize(("on", "found"), [("", "MISSING"), ("1", "ok"), ("tensors", "ok")])
def test_check(on: str, found: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv(SWITCH, on)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: RELEASE)
    monkeypatch.setattr(surface, "read", lambda: surface.recorded()[RELEASE])
    monkeypatch.setattr(commands.findings, "kernels", lambda specs, arch: iter(()))
    with pytest.raises(SystemExit):
        commands.app(["check"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"ok      lmdeploy {RELEASE}, whose calls were run"
    assert any(line.startswith(found) and SWITCH in line for line in said)
    assert any(line.startswith("MISSING the wheel snapmla-as-flash-mla") for line in said)


def test_kernels_that_check_asks_for() -> None:
    ops = {spec.op for spec in commands.needed()}
    assert {"plan_decode", "dense_decode", "sparse_decode", "sparse_prefill"} <= ops
    assert not ops & {"append_kv", "fetch_dequant"}
    assert {spec.arch for spec in commands.needed()} == {commands.SERVED}

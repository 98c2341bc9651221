"""``snapmla.integrations.sglang.flashmla``: FlashMLA's names inside of SGLang are ours.

Calls, the module of FlashMLA's names and the registry of hooks are SGLang's own text, of an
unpacked release (``python -m tests.support.fetch_sglang``), over caches made by hand against
float64.  What needs no release has stand-ins for them.
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.metadata
import logging
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from snapmla.integrations import flashmla_switch
from snapmla.integrations import sglang as plugin
from snapmla.integrations.sglang import __main__ as commands
from snapmla.integrations.sglang import flashmla, surface
from snapmla.runtime import env
from tests.support import fetch_sglang, sglang_calls
from tests.support import flashmla_calls as calls
from tests.support.needs import needs_compiler
from tests.support.sglang_calls import V4, Dense, Found, Prompts, Sparse, TheirMeta

(RELEASE,) = fetch_sglang.RELEASES
BOTH = surface.FLASHMLA_NAMES
VARIABLE = env.SGLANG_FLASHMLA.name


def text() -> Path:
    path = fetch_sglang.path_of(RELEASE)
    if path is None:
        pytest.skip(f"SGLang {RELEASE} is not there: python -m tests.support.fetch_sglang")
    return path[0]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of the switch's logger; a variant that is compiled meanwhile is told by another."""
    return [each.getMessage() for each in caplog.records if each.name == flashmla.LOGGER]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has registered nothing, beside the release that is known."""
    monkeypatch.setattr(flashmla, "_registered", {})
    monkeypatch.setattr(surface, "known_release", lambda: RELEASE)
    monkeypatch.setenv(VARIABLE, "1")


@pytest.fixture
def sglang(fresh: None) -> Iterator[Found]:
    """SGLang's own modules, before plug-ins are loaded."""
    with sglang_calls.engine(text()) as found:
        yield found


@pytest.fixture
def hooked(sglang: Found) -> Found:
    """The same with ours."""
    assert flashmla.register()
    sglang.hooks.HookRegistry.apply_hooks()
    return sglang


# -------------------------------------------------------------------------------- names that go


def test_sglangs_registry_puts_ours_before_its_functions(sglang: Found) -> None:
    """Also where a module has bound them; a second time changes nothing."""
    theirs = {name: getattr(sglang.names, name) for name in (*BOTH, "get_mla_metadata")}
    assert sglang.bound.flash_mla_with_kvcache is theirs[BOTH[0]]
    for _ in range(2):  # every process registers, some twice
        assert flashmla.register()
        sglang.hooks.HookRegistry.apply_hooks()
        for name in BOTH:
            ours = getattr(sglang.names, name)
            assert ours is not theirs[name] and ours.__wrapped__ is theirs[name]
        assert sglang.bound.flash_mla_with_kvcache is getattr(sglang.names, BOTH[0])  # bound before
    assert sglang.names.get_mla_metadata is theirs["get_mla_metadata"]
    assert sglang.bound.get_mla_metadata is theirs["get_mla_metadata"]
    late = types.ModuleType("sglang.late")
    exec(f"from {surface.FLASHMLA} import {BOTH[0]}", vars(late))
    assert getattr(late, BOTH[0]) is getattr(sglang.names, BOTH[0])


class Kind(enum.Enum):
    """SGLang's HookType."""

    AROUND, AFTER = "around", "after"


@pytest.fixture
def registry(fresh: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is registered with a stand-in for SGLang's registry."""
    seen: list[Any] = []
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module: Any = types.ModuleType(surface.HOOKS)
    module.HookType = Kind
    module.HookRegistry = types.SimpleNamespace(register=lambda *each: seen.append(each))
    monkeypatch.setitem(sys.modules, surface.HOOKS, module)
    wheel = sglang_calls.stand_in()["flash_mla"]
    monkeypatch.setitem(sys.modules, flashmla.WHEEL, wheel)
    return seen


def test_what_is_registered(registry: list[Any]) -> None:
    """AROUND the two names, AFTER a step; once in a process."""
    assert flashmla.register() and flashmla.register()
    assert [(target, kind) for target, _, kind in registry] == [
        (f"{surface.FLASHMLA}.{BOTH[0]}", Kind.AROUND),
        (f"{surface.FLASHMLA}.{BOTH[1]}", Kind.AROUND),
        (flashmla.STEP, Kind.AFTER),
    ]
    assert not any(isinstance(hook, type) for _, hook, _ in registry)  # a class would replace
    module, _, name = flashmla.STEP.rpartition(".")
    module, _, owner = module.rpartition(".")
    assert f"{module}:{owner}.{name}" in surface.RELIED_FLASHMLA


def test_releases_and_wheels_that_are_not_there(
    registry: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        with monkeypatch.context() as other:
            other.setattr(surface, "known_release", lambda: None)
            assert not flashmla.register()
        monkeypatch.setitem(sys.modules, flashmla.WHEEL, None)
        monkeypatch.setattr(flashmla, "find_spec", lambda name: None)
        assert not flashmla.register()
    release, wheel = lines_of(caplog)
    assert release == (
        f"snapmla: {VARIABLE}=1 is for sglang {RELEASE}: FlashMLA's names stay SGLang's own"
    )
    assert "sgl-flash-mla" in wheel and not registry


@pytest.mark.parametrize("on", [True, False])
def test_the_plugin_asks_the_variable(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read each time that SGLang loads the plug-in, whatever else was registered before."""
    file = Path(plugin.__file__).with_name("hooks.py")
    (function,) = (
        node for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "register"
    )  # fmt: skip
    asked: list[bool] = []
    space = {
        "env": env, "flashmla": types.SimpleNamespace(register=lambda: asked.append(True)),
        "BACKEND": 1, "ATTENTION_BACKENDS": {1: "registered before"},
    }  # fmt: skip
    exec(compile(ast.Module([function], []), file.name, "exec"), space)
    monkeypatch.setenv(VARIABLE, "1" if on else "0")
    space["register"]()  # type: ignore[operator]
    assert asked == [True] * on


@pytest.mark.parametrize(
    ("found", "known"),
    [("0.5.23", RELEASE), ("0.5.23.post1", RELEASE), ("0.5.23+cu130", RELEASE), ("0.5.22", None),
     ("0.6.0", None), (None, None)],
)  # fmt: skip
def test_known_releases(
    found: str | None, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surface, "installed", lambda: found)
    assert surface.known_release() == known


def test_modules_that_bind_the_names() -> None:
    """The record has those that the release binds at its import; the hook finds all others."""
    record = surface.recorded()[RELEASE]
    recorded = {name for name in surface.BOUND if record[name]}
    assert recorded
    found, folder = set(), text()
    for file in (folder / "sglang").rglob("*.py"):
        source = file.read_text()
        if "flash_mla_interface" not in source or "multimodal_gen" in file.parts:
            continue
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom) and node.module == surface.FLASHMLA:
                found |= {f"{module}:{alias.name}" for alias in node.names}
    assert {name for name in found if name.partition(":")[2] in BOTH} == recorded


# --------------------------------------------------------------------------- what is not served


def refusals() -> list[tuple[dict[str, Any], str]]:
    q, cache = torch.zeros(1, 1, 64, 576).bfloat16(), torch.zeros(1, 64, 1, 656, dtype=torch.uint8)
    call = {"q": q, "k_cache": cache, "block_table": torch.zeros(1, 1).int(),
            "cache_seqlens": torch.ones(1).int(), "head_dim_v": 512,
            "is_fp8_kvcache": True}  # fmt: skip
    listed = call | {"indices": torch.zeros(1, 1, 64, dtype=torch.int32)}
    rows = lambda width: torch.zeros(1, 64, 1, width, dtype=torch.uint8)
    scale = torch.ones(1)
    eight = {"q": q.to(torch.float8_e4m3fn), "k_cache": torch.zeros(1, 64, 1, 576).to(
        torch.float8_e4m3fn), "descale_q": scale, "descale_k": scale, "is_fp8_kvcache": False,
        "causal": True}  # fmt: skip
    return [
        (listed | {"k_cache": rows(352)}, "rows of NVFP4 (352 bytes a token) are not read"),
        (listed | {"extra_k_cache": rows(288)}, "a second cache of FP4 (288 bytes a token)"),
        (listed | {"use_legacy": False}, "use_legacy=False is for V4.1's rows of 528 bytes"),
        (listed | {"kv_format": "V5"}, "kv_format"),
        (listed | {"kv_format": "V4"}, "of kv_format='V4'"),
        (listed | {"causal": True}, "causal"),
        (call | eight, "FlashMLA's dense FP8 cache is not built yet"),
    ]


def signature(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int,
    tile_scheduler_metadata: Any, num_splits: Any = None, softmax_scale: Any = None,
    causal: bool = False, descale_q: Any = None, descale_k: Any = None,
    is_fp8_kvcache: bool = False, indices: Any = None, attn_sink: Any = None,
    extra_k_cache: Any = None, extra_indices_in_kvcache: Any = None, topk_length: Any = None,
    extra_topk_length: Any = None, kv_format: Any = None, *, use_legacy: bool = True,
) -> None:  # fmt: skip
    """SGLang's."""


def test_the_signature_is_sglangs() -> None:
    record = surface.recorded()[RELEASE]
    order = record[f"{surface.FLASHMLA}:{BOTH[0]}"]
    name = flashmla._Decode(signature)
    assert list(name.names) == order


def their_name(seen: list[Any]) -> Any:
    """SGLang's function."""

    def flash_mla_with_kvcache(*given: Any, **named: Any) -> str:
        seen.append((given, named))
        return "theirs"

    flash_mla_with_kvcache.__wrapped__ = signature  # type: ignore[attr-defined]
    return flash_mla_with_kvcache


@pytest.mark.parametrize(("told", "said"), refusals())
def test_what_is_not_served_falls_through(
    told: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """To the original with the arguments that it was given; each cause is one line."""
    seen: list[Any] = []
    theirs, hook = their_name(seen), flashmla.Hook(flashmla._Decode)
    given = told | {"tile_scheduler_metadata": TheirMeta()}
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, flashmla.LOGGER):
        patch.setattr(flashmla, "deterministic", lambda: False)
        for _ in range(2):
            assert hook(theirs, **given) == "theirs"
    assert hook.calls == 0 and seen == [((), given)] * 2
    (line,) = lines_of(caplog)
    assert said in line and line.startswith("snapmla: SGLang's own flash_mla_with_kvcache runs")
    assert "\n" not in line


def test_deterministic_inference_falls_through(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashmla, "deterministic", lambda: True)
    hook, seen = flashmla.Hook(flashmla._Decode), list[Any]()
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        assert hook(their_name(seen), torch.zeros(1, 1, 64, 576), None) == "theirs"
    assert "batch-invariant mode" in lines_of(caplog)[0] and len(seen) == 1


def test_places_are_those_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """By place descale_q comes before is_fp8_kvcache there."""
    monkeypatch.setattr(flashmla, "deterministic", lambda: False)
    told: list[dict[str, Any]] = []
    hook = flashmla.Hook(flashmla._Decode)
    monkeypatch.setattr(flashmla._Decode, "ours", lambda self, each: told.append(each))
    monkeypatch.setattr(flashmla._Decode, "_first", lambda *each: None)
    q = torch.zeros(1, 1, 16, 576).bfloat16()
    hook(their_name([]), q, q, None, None, 512, TheirMeta(), None, 0.5, True, None, None, False)
    assert told[0]["causal"] is True and told[0]["is_fp8_kvcache"] is False
    assert hook.calls == 1


@pytest.mark.parametrize(
    ("metadata", "named", "legacy", "wanted"),
    [(torch.zeros(1, 8), None, True, "fp8_nope"), (TheirMeta(), None, True, "fp8_v41_planar"),
     (TheirMeta(), None, False, "fp8_v41_rows"), (TheirMeta(), "V41", False, "fp8_v41_rows"),
     (torch.zeros(1, 8), "V32_NO_ROPE", True, "V32_NO_ROPE")],
)  # fmt: skip
def test_formats_of_528_bytes(metadata: Any, named: Any, legacy: bool, wanted: str) -> None:
    told = {
        "q": torch.zeros(1, 1, 64, 512), "k_cache": torch.zeros(1, 64, 1, 528), "indices": 1,
        "tile_scheduler_metadata": metadata, "kv_format": named, "use_legacy": legacy,
    }  # fmt: skip
    assert flashmla._format(told) == wanted


# ------------------------------------------------------------------------------- SGLang's own calls


def ran(hooked: Found, case: Any, layers: int = 1) -> None:
    """A step's layers, within FlashMLA's gates."""
    before = flashmla.calls()
    case.fill(3)
    for _ in range(layers):
        case.run()
        case.check()
    assert flashmla.calls() - before == layers


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "padded"),
    [(16, 16), pytest.param(16, 64, marks=pytest.mark.whole_matrix),
     pytest.param(128, 128, marks=pytest.mark.whole_matrix)],
)  # fmt: skip
def test_v32_and_glm5(
    heads: int, padded: int, hooked: Found, caplog: pytest.LogCaptureFixture
) -> None:
    """Their call is one; the schedule is two tensors, which a graph's step copies."""
    tokens = 2 if padded == 16 else 3
    case = Sparse(text(), hooked.names, heads, padded, tokens=tokens)
    with caplog.at_level(logging.INFO, flashmla.LOGGER):
        ran(hooked, case)
    (line,) = lines_of(caplog)
    assert line == (
        f"snapmla: DeepseekSparseAttnBackend (layer 0): sparse decode, fp8_ds_mla, {padded} heads"
    )


@needs_compiler
@pytest.mark.parametrize(
    ("heads", "padded", "ratio", "page"),
    [(16, 16, 128, 2),
     *(pytest.param(*each, marks=pytest.mark.whole_matrix) for each in (
         (16, 64, 0, 64), (16, 64, 128, 2), (16, 16, 0, 64), (64, 64, 4, 64)))],
)  # fmt: skip
def test_v4(
    heads: int, padded: int, ratio: int, page: int, hooked: Found,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The window alone, and beside a second cache; heads that pad hold NaN."""
    whole = (heads, padded, ratio) != (16, 16, 128)
    sizes: dict[str, Any] = {} if whole else {"tokens": 2, "window": 64}
    case = V4(text(), hooked.names, heads, padded, ratio, page, **sizes)
    layers = 2 if whole else 1  # of a step: the second takes the first one's schedule
    with caplog.at_level(logging.INFO, flashmla.LOGGER):
        ran(hooked, case, layers)
    kept = case.step.scheduled
    assert isinstance(getattr(kept, flashmla_switch.SCHEDULE), object) and kept == TheirMeta()
    (line,) = lines_of(caplog)
    second = f", a second cache of pages of {page} tokens" if ratio else ""
    assert line.endswith(f"(layer 0): sparse decode, fp8_v4, {padded} heads{second}, sinks")


@needs_compiler
@pytest.mark.whole_matrix
def test_dense_decode_of_16_bits(hooked: Found) -> None:
    """By the module that had bound the names."""
    ran(hooked, Dense(text(), hooked.bound))


@needs_compiler
@pytest.mark.whole_matrix
def test_rows_of_16_bits(hooked: Found) -> None:
    """Prompts, and decode by flashmla_sparse; statistics are to base 2, as SGLang's."""
    case = Prompts(text(), hooked.names)
    ran(hooked, case)
    padded = torch.cat([case.q, torch.zeros_like(case.q)], 1)[:, :16]
    lists = case.lists.unsqueeze(1)
    given = {"q": padded, "kv": case.rows, "indices": lists, "sm_scale": 576**-0.5}
    out, largest, lse = hooked.names.flash_mla_sparse_fwd(**given)
    _, plain_largest, natural = hooked.names.flash_mla_sparse_fwd(**given, use_legacy=False)
    listed: list[Any] = [(case.cache.values, case.lists, None)]
    want = calls.truth(padded, listed, 576**-0.5)
    calls.check(out, want[0], natural, want[1])
    log2 = torch.tensor(2.0).log()
    torch.testing.assert_close(lse * log2, natural)
    torch.testing.assert_close(largest * log2, plain_largest)


@needs_compiler
@pytest.mark.whole_matrix
def test_prompts_of_v4(hooked: Found) -> None:
    """The call that V4's prefill ends in, over its own names."""
    file = text() / sglang_calls.ATTENTION / "deepseek_v4_backend.py"
    (call,) = (
        node for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == BOTH[1]
    )  # fmt: skip
    tokens, heads, rows = 3, 64, 160
    r = torch.Generator().manual_seed(0)
    kv = (torch.randn(rows, 1, 512, generator=r) / 10).bfloat16()
    lists, lengths = calls.lists_of(tokens, 128, rows, 1), torch.tensor([128, 40, 1]).int()
    lists[2, 0] = 5
    space = {
        BOTH[1]: hooked.names.flash_mla_sparse_fwd, "kv": kv, "combined_indices": lists,
        "q_flat": torch.randn(tokens, heads, 512, generator=r).bfloat16(),
        "combined_lens": lengths, "attn_sink": torch.randn(heads, generator=r),
        "self": types.SimpleNamespace(softmax_scale=512**-0.5, head_dim_v=512),
    }  # fmt: skip
    out, *_ = eval(compile(ast.Expression(call), file.name, "eval"), space)
    listed: list[Any] = [(kv[:, 0].double(), lists, lengths)]
    calls.check(out, calls.truth(space["q_flat"], listed, 512**-0.5, space["attn_sink"])[0])
    assert flashmla.calls() == 1


@needs_compiler
def test_the_first_call_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a layer's class and format; two tensors of metadata stay as they are."""
    monkeypatch.setattr(flashmla, "deterministic", lambda: False)
    hook, pages = flashmla.Hook(flashmla._Decode), calls.pages_656(1, 64, 1)
    records = torch.zeros(4, 8, dtype=torch.int32)
    named: dict[str, Any] = {
        "q": torch.zeros(1, 1, 16, 576).bfloat16(), "k_cache": pages.raw.unsqueeze(2),
        "cache_seqlens": torch.ones(1).int(), "head_dim_v": 512, "is_fp8_kvcache": True,
        "tile_scheduler_metadata": records, "num_splits": torch.zeros(2).int(),
        "indices": torch.zeros(1, 1, 64, dtype=torch.int32), "kv_format": "V32",
        "block_table": torch.empty(1, 0).int(), "use_legacy": True,
    }  # fmt: skip

    class Backend:
        def forward(self, layer: Any) -> Any:
            return hook(sglang_calls.their_kernel, **named)

    layer = types.SimpleNamespace(layer_id=3)
    monkeypatch.setattr(flashmla._Decode, "parameters", lambda self: ())
    with caplog.at_level(logging.INFO, flashmla.LOGGER):
        for _ in range(2):
            out, lse = Backend().forward(layer)
    (line,) = lines_of(caplog)
    assert line.endswith("Backend (layer 3): sparse decode, fp8_ds_mla, 16 heads")
    assert hook.calls == 2 and not hasattr(records, flashmla_switch.SCHEDULE)
    first = calls.truth(named["q"][0], [(pages.values, named["indices"][0], None)], 1.0)
    calls.check(out[0], first[0], lse[0].mT, first[1])


# ------------------------------------------------------------------------------- the first step


def batch(decode: bool = False, verify: bool = False) -> Any:
    mode = types.SimpleNamespace(is_decode=lambda: decode, is_target_verify=lambda: verify)
    return types.SimpleNamespace(forward_mode=mode)


def test_a_first_step_without_a_call_is_told_once(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = types.SimpleNamespace(is_draft_worker=False)
    step = flashmla.FirstStep()
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        step(None, target, batch())  # a prompt
        step(None, types.SimpleNamespace(is_draft_worker=True), batch(decode=True))
        assert not lines_of(caplog)
        for _ in range(2):
            step(None, target, forward_batch=batch(verify=True))
    (line,) = lines_of(caplog)
    assert "first step of decode had no call of FlashMLA's names that snapmla computed" in line
    assert "--kv-cache-dtype fp8_e4m3" in line and "\n" not in line
    monkeypatch.setattr(flashmla, "calls", lambda: 1)
    caplog.clear()
    flashmla.FirstStep()(None, target, batch(decode=True))
    assert not lines_of(caplog)


def test_a_step_by_sglangs_registry(hooked: Found, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        for _ in range(2):
            assert hooked.runner.forward(batch(decode=True)) == "output"
    assert len(lines_of(caplog)) == 1


def view(**fields: Any) -> Any:
    plain = {"dsa_decode_backend": None, "kv_cache_dtype": "auto", "attention_backend": "dsa",
             "decode_attention_backend": None}  # fmt: skip
    return types.SimpleNamespace(**{**plain, **fields})


def test_settings_that_keep_flashmla_from_a_call(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong --kv-cache-dtype names the right one."""
    wrong = view(dsa_decode_backend="fa3", kv_cache_dtype="bfloat16")
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        flashmla.tell(wrong)
    (line,) = lines_of(caplog)
    assert line == (
        f"snapmla: {VARIABLE}=1: decode of sparse attention (DSA) by fa3, with --kv-cache-dtype "
        "bfloat16, does not call FlashMLA: set --kv-cache-dtype fp8_e4m3, and no "
        "--dsa-decode-backend"
    )
    (dense,) = flashmla.settings(view(attention_backend="flashmla", kv_cache_dtype="fp8_e4m3"))
    assert "dense FP8 cache, which is not built: set --kv-cache-dtype bfloat16" in dense
    for fine in (
        view(), view(dsa_decode_backend="flashmla_kv", kv_cache_dtype="fp8_e4m3"),
        view(dsa_decode_backend="flashmla_sparse"), view(attention_backend="flashmla"),
    ):  # fmt: skip
        assert list(flashmla.settings(fine)) == []


def test_the_module_imports_without_sglang() -> None:
    assert importlib.import_module(f"{plugin.__name__}.flashmla")


# ------------------------------------------------------------------------------------ the check


def test_check_says_whose_the_names_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    found = commands.flashmla_names()
    assert found.ok and f"{VARIABLE} is off: DeepSeek-V4" in found.text
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(flashmla, "find_spec", lambda name: None)
    monkeypatch.setattr(surface, "installed", lambda: "0.5.22")
    found = commands.flashmla_names()
    assert found.ok is False and f"is for sglang {RELEASE}" in found.text
    monkeypatch.setattr(surface, "installed", lambda: RELEASE)
    found = commands.flashmla_names()
    assert found.ok is False and "sgl-flash-mla" in found.text
    monkeypatch.setattr(flashmla, "find_spec", lambda name: True)
    assert commands.flashmla_names().ok
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.22")
    released = commands.release()
    assert released.ok is None
    assert released.text == (
        f"sglang 0.5.22: known releases are {RELEASE}, others were not looked at"
    )


def test_kernels_behind_the_names() -> None:
    names = {spec.name for spec in commands.needed_flashmla()}
    assert {
        "plan_decode_sm90a", "sparse_decode_mix16_r64_obf16_sm90a",
        "sparse_decode_mix16_r64_obf16_kvfp8_v4_sm90a", "sparse_prefill_r64_d576_sm90a",
    } <= names  # fmt: skip
    assert not any("append" in name or "index" in name for name in names)

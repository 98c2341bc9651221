"""``snapmla.integrations.vllm.heads``: queries' heads as they are, where vLLM pads them.

Classes stand in for vLLM's; what they are asked for is the text of an unpacked release
(``python -m tests.support.fetch_vllm``).
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsl_kernels.formats import ds_mla, v4
from snapmla.integrations.vllm import flashmla, heads, surface
from snapmla.rank.cards import card_of
from snapmla.runtime import variants
from tests.support import fetch_vllm
from tests.support import flashmla_calls as calls

SPARSE, V4, V41 = surface.PADDING
CPU = card_of(torch.device("cpu"))  # as an H200


def padding(*given: Any) -> int:
    """vLLM's answer."""
    if given[-1] > 128:
        raise ValueError("vLLM takes no more")
    return 64 if given[-1] <= 64 else 128


def module_of(where: tuple[str, str, str]) -> types.ModuleType:
    """A module of vLLM's with the class that is asked."""
    module, owner, name = where
    kind = staticmethod if where is SPARSE else classmethod
    made = types.ModuleType(module)
    setattr(made, owner, type(owner, (), {name: kind(padding)}))
    return made


def asked(module: types.ModuleType, where: tuple[str, str, str]) -> Any:
    return getattr(getattr(module, where[1]), where[2])


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM where nothing forbids heads as they are."""
    found: Any = types.ModuleType("vllm")
    found.envs = types.SimpleNamespace(VLLM_BATCH_INVARIANT=False)
    found.group = types.SimpleNamespace(world_size=1)
    distributed: Any = types.ModuleType("vllm.distributed")
    distributed.get_dcp_group = lambda: found.group
    monkeypatch.setitem(sys.modules, "vllm", found)
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setattr(heads, "_card", lambda: CPU)
    monkeypatch.setattr(variants, "find", lambda spec: object())
    before = list(sys.meta_path)
    yield found
    sys.meta_path[:] = before


def test_modules_that_are_there(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in surface.PADDING:
        monkeypatch.setitem(sys.modules, where[0], module_of(where))
    heads.install()
    heads.install()
    assert sum(isinstance(each, heads._AfterImport) for each in sys.meta_path) == 1
    for where in surface.PADDING:
        ask = asked(sys.modules[where[0]], where)
        assert [ask(n) for n in (8, 16, 32, 64, 128)] == [8, 16, 32, 64, 128]
        assert [ask(n) for n in (1, 12, 24, 96)] == [64, 64, 64, 128]  # no kernel writes these
        with pytest.raises(ValueError, match="takes no more"):
            ask(129)
    module, owner, name = V41  # a class of another kernel, beside which heads count otherwise
    mega = type("Mega", (getattr(sys.modules[module], owner),), {})
    assert getattr(mega, name)(16) == 64


def test_modules_that_are_imported_later(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Layers' modules are imported when a model is chosen, behind the plugin."""
    module, owner, name = V4
    folder = tmp_path.joinpath(*module.split(".")[:-1])
    folder.mkdir(parents=True)
    folder.joinpath("flashmla.py").write_text(
        f"class {owner}:\n    @classmethod\n    def {name}(cls, n):\n        return 64\n"
    )
    folder.joinpath("other.py").write_text("")
    *parents, _ = module.split(".")
    for i in range(1, len(parents) + 1):
        package = types.ModuleType(".".join(parents[:i]))
        package.__path__ = [str(tmp_path.joinpath(*parents[:i]))]
        if i == 1:
            vars(package).update(envs=vllm.envs)
        monkeypatch.setitem(sys.modules, package.__name__, package)
    heads.install()
    there = importlib.import_module(module)
    monkeypatch.setitem(sys.modules, module, there)
    assert asked(there, V4)(16) == 16
    other = importlib.import_module(".".join([*parents, "other"]))
    monkeypatch.setitem(sys.modules, other.__name__, other)
    assert not hasattr(other, owner)


def test_where_heads_stay_padded(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = (v4.FORMAT.name, ds_mla.NAME)
    served = lambda: {heads.served(16, cache) for cache in formats}
    assert served() == {True}
    with monkeypatch.context() as patched:
        patched.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
        assert served() == {False}
    with monkeypatch.context() as patched:
        patched.setattr(vllm.group, "world_size", 2)
        assert served() == {False}
        patched.setattr(sys.modules["vllm.distributed"], "get_dcp_group", no_group)
        assert served() == {True}
    with monkeypatch.context() as patched:
        patched.setattr(variants, "find", lambda spec: None)
        patched.setattr(variants, "jit_refusal", lambda: "no compiler")
        assert served() == {False}
        patched.setattr(variants, "jit_refusal", lambda: None)
        assert served() == {True}
    with monkeypatch.context() as patched:
        patched.setattr(heads, "_card", lambda: types.SimpleNamespace(arch="sm_100a"))
        assert served() == {False}
        patched.setattr(heads, "_card", lambda: None)
        assert served() == {False}


def no_group() -> Any:
    raise AssertionError("decode context model parallel group is not initialized")


@pytest.mark.parametrize("release", fetch_vllm.RELEASES)
def test_what_the_releases_answer(release: str, vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own functions, whose names the record has."""
    path = fetch_vllm.path_of(release)
    if path is None:
        pytest.skip(f"vLLM {release} is not there: python -m tests.support.fetch_vllm")
    for where in surface.PADDING:
        module, owner, name = where
        recorded = surface.recorded()[release][f"{module}:{owner}.{name}"]
        file = path[0].joinpath(*module.split(".")).with_suffix(".py")
        assert bool(recorded) == file.exists()
        if not recorded:
            continue
        function = calls.methods(file, owner, (name,), {})[name]
        kind = staticmethod if recorded == ["num_heads"] else classmethod
        made = types.ModuleType(module)
        setattr(made, owner, type(owner, (), {name: kind(function)}))
        assert [asked(made, where)(n) for n in (8, 16, 64, 65)] == [64, 64, 64, 128]
        monkeypatch.setitem(sys.modules, module, made)
        heads.install()
        assert [asked(made, where)(n) for n in (8, 16, 64, 65)] == [8, 16, 64, 128]


@pytest.mark.parametrize(("count", "wide"), [(16, 64), (96, 128)])
def test_what_falls_through_is_padded(
    count: int, wide: int, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's kernel gets the heads that it takes, and the caller those that it has."""
    q = torch.randn(2, 1, count, 512).bfloat16()
    sink, out = torch.randn(count), torch.zeros(2, 1, count, 512).bfloat16()

    def flash_mla_with_kvcache(**told: Any) -> Any:
        assert told["q"].shape == (2, 1, wide, 512) and told["attn_sink"].shape == (wide,)
        assert (told["q"][:, :, count:] == 0).all() and told.get("out") is None
        assert (told["attn_sink"][count:] == -math.inf).all()
        return told["q"] * 2, told["attn_sink"][None, :, None].expand(2, -1, 1)

    name = flashmla._Decode(flash_mla_with_kvcache, invariant=True)
    told: dict[str, Any] = {"q": q, "k_cache": None, "indices": q, "attn_sink": sink, "out": out}
    with caplog.at_level(logging.WARNING, flashmla.LOGGER):
        found, lse = name(**told)
    assert found is out and torch.equal(out, q * 2) and lse.shape == (2, count, 1)
    assert torch.equal(lse[0, :, 0], sink) and name.calls == 0
    (line,) = (each.getMessage() for each in caplog.records)
    assert "vLLM's own flash_mla_with_kvcache runs" in line and "batch-invariant" in line

    def flash_mla_sparse_fwd(**told: Any) -> Any:
        return told["q"] * 3, *(told["q"][..., 0] for _ in range(2))

    prompts = flashmla._Prefill(flash_mla_sparse_fwd, invariant=True)
    found, most, lse = prompts(q[:, 0], q, q, 1.0)
    assert torch.equal(found, q[:, 0] * 3)
    assert torch.equal(most, q[:, 0, :, 0]) and torch.equal(lse, most)


@pytest.mark.parametrize(("release", "heads_of"), [("0.26.0", 64), ("0.33.0", 16), (None, 64)])
def test_prompts_that_fall_through(
    release: str | None, heads_of: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.33's kernel of prompts takes 16 heads; no kernel of decode does."""
    monkeypatch.setattr(heads, "_release", lambda: release)

    def flash_mla_sparse_fwd(q: Any, *given: Any, **named: Any) -> Any:
        assert q.shape[1] == heads_of
        return q * 3, q[..., 0], q[..., 0]

    name = flashmla._Prefill(flash_mla_sparse_fwd, invariant=True)
    q = torch.randn(2, 16, 512).bfloat16()
    found, *_ = name(q, q, q, 1.0)
    assert torch.equal(found, q * 3)
    decode = {"q": q[:, None], "indices": q}
    assert heads.taken(decode) == heads.TAKEN and not heads.fits(decode)
    assert heads.taken({"kv": q})[-2:] == heads.TAKEN  # 96 heads are padded to 128


def test_what_needs_no_padding_is_passed_on_as_it_is() -> None:
    def flash_mla_with_kvcache(*given: Any, **named: Any) -> Any:
        return given, named

    name = flashmla._Decode(flash_mla_with_kvcache, invariant=True)
    q = torch.zeros(1, 1, 64, 576)
    assert name(q, None, indices=q) == ((q, None), {"indices": q})
    dense = torch.zeros(1, 1, 16, 576)  # of any heads
    assert name(q=dense, indices=None) == ((), {"q": dense, "indices": None})
    assert name("q") == (("q",), {})

"""Cards that are none of the kernels' own: an op runs a kernel for them, or says why it does not.

CPU tensors stand for tensors of a card, whose compute capability the runtime is told.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from codegen import artifacts, audit, toolchain
from codegen.artifacts import Record
from codegen.precompile import precompile
from dsl_kernels import registry
from dsl_kernels.families import ARCHS, TARGETS
from dsl_kernels.spec import VariantSpec
from snapmla.errors import UnsupportedDeviceError, VariantError
from snapmla.indexer import shapes
from snapmla.runtime import env, variants
from tests.support.needs import needs_compiler, needs_kernels
from tests.support.single_calls import CALLS

ELSEWHERE = "FlashInfer's sparse MLA kernels for SM120 and SM121, and vLLM's Triton fallback"
HERE = "kernels are built for sm_90 (Hopper), sm_100 and sm_103 (Blackwell)"
ANYWHERE = "snapmla.reference runs anywhere"
scoring: Any = importlib.import_module("snapmla.indexer.index_logits")  # a function has its name
SPEC = VariantSpec(op="merge", arch="sm_100a")
NO_KERNEL = ("convert_cache",)  # bytes moved by torch, on any device


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Ends the process group that a call of ``CALLS`` may have begun."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


class Cards:
    """A card in the place of the software GPU, on which no kernel runs: ``asked`` has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[VariantSpec] = []
        self._patch = monkeypatch.setattr
        self._arch_of: Callable[[torch.device], str] = variants.arch_of.__wrapped__
        build = variants.find_or_build

        def found(spec: VariantSpec, *, need_library: bool) -> Any:
            return build(spec, need_library=False) if registry.module_name(spec) is None else spec

        def load(spec: VariantSpec, _: str) -> Callable[..., None]:
            return lambda *given: self.asked.append(spec)

        self._patch(variants, "_met", set())
        self._patch(variants, "find_or_build", found)
        self._patch(variants, "load", load)
        self._patch(torch.cuda, "get_device_name", lambda device: "a card")

    def be(self, *capability: int) -> None:
        """Tensors are this card's from now on, and nothing is known of calls."""
        self._patch(torch.cuda, "get_device_capability", lambda device: capability)
        self._patch(variants, "arch_of", lambda device: self._arch_of(torch.device("cuda", 0)))
        variants.forget()
        self.asked.clear()


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    monkeypatch.setattr(shapes, "choose", lambda *_: shapes.TopkShape(64, 8, 2))
    monkeypatch.setattr(scoring, "sm_count", lambda _: 3)
    yield Cards(monkeypatch)
    monkeypatch.undo()
    variants.forget()


@needs_kernels
@pytest.mark.parametrize("name", [name for name in CALLS if name not in NO_KERNEL])
def test_an_op_runs_a_kernel_or_says_why_not(cards: Cards, name: str) -> None:
    """Of a B300 with SM100's kernels; elsewhere it is refused.  No op computes without a kernel."""
    cards.be(9, 0)
    function, given = CALLS[name]()
    cards.asked.clear()
    function(**given)
    assert cards.asked and {spec.arch for spec in cards.asked} == {"sm_90a"}
    for capability in ((10, 0), (10, 3)):
        cards.be(*capability)
        try:
            function(**given)
        except VariantError as error:
            assert "sm_100a" in str(error) and len(str(error)) > 30
        else:
            assert cards.asked
        assert {spec.arch for spec in cards.asked} <= {"sm_100a"}
    for capability in ((12, 0), (12, 1), (8, 0), (11, 0)):
        cards.be(*capability)
        with pytest.raises(UnsupportedDeviceError) as caught:
            function(**given)
        text = str(caught.value)
        assert text.startswith(f"a card is sm_{capability[0]}{capability[1]}: {HERE}; ")
        assert text.endswith(ANYWHERE) and (ELSEWHERE in text) == (capability[0] == 12)
        assert not cards.asked


@needs_kernels
@pytest.mark.parametrize("name", NO_KERNEL)
def test_what_has_no_kernel_asks_for_no_card(cards: Cards, name: str) -> None:
    cards.be(9, 0)
    function, given = CALLS[name]()
    cards.be(8, 0)
    function(**given)
    assert not cards.asked


# ------------------------------------------------------------------- what a build is for


def test_every_architecture_has_a_target_of_its_own() -> None:
    assert set(ARCHS) <= set(TARGETS)
    assert set(variants._ARCH_OF_CAPABILITY) == {c for some in TARGETS.values() for c in some}


def place(folder: Path, target: str | None) -> None:
    for suffix in ("o", "ptx", "so"):
        (folder / f"{SPEC.name}.{suffix}").touch()
    record = {"name": SPEC.name, "flavour": "cu13", **({"target": target} if target else {})}
    (folder / f"{SPEC.name}.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("target", "capability", "loads"),
    [
        ("sm_100f", (10, 3), True), ("sm_100f", (10, 0), True), ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False), (None, (10, 3), False), ("sm_100a", (9, 0), True),
        ("sm_101x", (10, 0), False),
    ],
)  # fmt: skip
def test_a_record_decides_which_cards_load_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_jit: None,
    target: str | None, capability: tuple[int, int], loads: bool,
) -> None:  # fmt: skip
    """Of older builds, which say nothing, its architecture alone; no guess by the name."""
    place(tmp_path, target)
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])
    monkeypatch.setattr(variants, "driver_version", lambda: None)
    monkeypatch.setattr(variants, "_met", {capability})
    if loads:
        assert variants.find_or_build(SPEC, need_library=True).name == SPEC.name
        return
    words = f"was assembled for {target or 'sm_100a'}, which sm_10{capability[1]} does not load"
    with pytest.raises(VariantError, match=words):
        variants.find_or_build(SPEC, need_library=True)
    artifact = variants.find_or_build(SPEC, need_library=False)  # the software GPU loads all
    with pytest.raises(VariantError, match=words):
        variants.load(artifact, "cuda")
    rebuilt: list[VariantSpec] = []
    monkeypatch.setattr(variants, "jit_refusal", lambda: None)
    monkeypatch.setattr(variants, "compile_variant", rebuilt.append)
    variants.find_or_build(SPEC, need_library=True)
    assert rebuilt == [SPEC]


def test_the_target_by_the_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, target in (((12, 8), "sm_100a"), ((12, 9), "sm_100f"), ((13, 0), "sm_100f")):
        monkeypatch.setattr(toolchain, "toolkit", lambda version=version: version)
        assert toolchain.target_of("sm_100a") == target
        assert toolchain.target_of("sm_90a") == "sm_90a"


@pytest.mark.parametrize(
    ("note", "target"),
    [(b"-O 3 -arch sm_100f ", "sm_100f"), (b"-arch sm_90a", "sm_90a"), (b"-arch sm_80", None),
     (b"-arch sm_90a -arch sm_100a", None), (b"-O 3", None)],
)  # fmt: skip
def test_the_cubin_says_what_it_is_for(note: bytes, target: str | None) -> None:
    record = Record(SPEC.name, SPEC.symbol, {}, "", "", [], "", "", "")
    if target is None:
        with pytest.raises(RuntimeError, match=f"{SPEC.name}: the cubin says that it is for"):
            audit.read_target(record, b"\x7fELF" + note)
        return
    audit.read_target(record, b"\x7fELF" + note + b"\0")
    assert record.target == target


@needs_compiler
def test_a_build_says_what_it_is_for() -> None:
    """Both toolkit flavours of the DSL are new enough for the family's target."""
    targets = {"sm_90a": "sm_90a", "sm_100a": "sm_100f"}
    specs = {arch: VariantSpec(op="index_rows", arch=arch) for arch in targets}
    assert not precompile(list(specs.values()), artifacts.default_dir(), jobs=1).failed
    for arch, target in targets.items():
        artifact = variants.find(specs[arch], [artifacts.default_dir()])
        assert artifact is not None and artifact.target == target
        assert f"\n.target {target}\n" in artifact.ptx.read_text()

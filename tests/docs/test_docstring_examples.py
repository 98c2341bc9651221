"""Examples in docstrings of public functions run on the software GPU, as a user copies them."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import snapmla
from tests.docs.test_docs import api as api_page
from tests.support.needs import needs_compiler

# results of these, and errors, are what other calls return or raise
NOT_CALLED = {
    "DecodePlan", "PagedKVCache", "QuantizedQuery", "SnapMLAError", "SparsePlan", "SparseRowsPlan",
    "UnsupportedDeviceError", "VariantError", "__version__",
}  # fmt: skip
# kernels that take long to compile or to interpret, and a module of another's name in this process
NOT_RUN = {"install_as_flash_mla", "mha_prefill", "mha_prefill_backward", "sparse_prefill"}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All that a user calls: functions, caches of plans, and the maker of a KV cache."""
    yield "PagedKVCache.allocate", snapmla.PagedKVCache.allocate
    for name in snapmla.__all__:
        if name not in NOT_CALLED:
            yield name, getattr(snapmla, name)


FUNCTIONS = dict(public())


def example(function: Callable[..., Any]) -> str:
    """The code of a docstring's section ``Example``; empty without one."""
    return api_page.parse(inspect.getdoc(function)).sections.get("Example", "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_there_is_a_short_one_of_known_names(name: str) -> None:
    code = example(FUNCTIONS[name])
    assert 1 <= len(code.splitlines()) <= 8 and f"snapmla.{name}(" in code
    known = {"torch", "snapmla", *dir(builtins)}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            assert node.id in known, node.id
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "snapmla":
            assert hasattr(snapmla, node.attr), node.attr
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (f"snapmla.{name}",):
            named = {word.arg: None for word in node.keywords}
            inspect.signature(FUNCTIONS[name]).bind(*node.args, **named)


@needs_compiler
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - NOT_RUN))
def test_it_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    exec(textwrap.dedent(example(FUNCTIONS[name])), {"torch": torch, "snapmla": snapmla})
    if "print(" in example(FUNCTIONS[name]):
        assert len(capsys.readouterr().out) > 50


def test_they_are_on_the_page() -> None:
    code = example(snapmla.plan_decode)
    assert f"*Example*\n\n```python\n{code}\n```" in "\n".join(
        api_page._sections(api_page.parse(snapmla.plan_decode.__doc__))
    )

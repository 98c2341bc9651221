"""Parts of LMDeploy on which ``SNAPMLA_AS_FLASH_MLA`` relies, from its text or the record.

``surface.json`` has them for the releases whose code ran on our functions: methods by name with
their parameters, and ``module@function`` with the arguments that the module passes by name to
FlashMLA's function.  LMDeploy is not imported, as that needs a GPU's libraries.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from snapmla.integrations import surfaces
from snapmla.integrations.surfaces import Surface, Value, read_source

RECORD = Path(__file__).with_name("surface.json")
_CUDA = "lmdeploy.pytorch.backends.cuda"
_ATTENTION = f"{_CUDA}.attention"
RELIED = (
    f"{_CUDA}.op_backend:CudaOpsBackend.update_step_context",
    "lmdeploy.pytorch.configurations.utils:flash_mla_available",
    f"{_ATTENTION}.mla:FlashMLAAttentionMetaBuilder.prepare_cudagraph_capture",
    f"{_ATTENTION}.mla:FlashMLAImpl._decoding_paged",
    f"{_ATTENTION}.sparse_mla:FlashMLASparseImpl._decoding_sparse_bf16",
    f"{_ATTENTION}.sparse_mla:FlashMLASparseImpl._decoding_sparse_fp8",
    f"{_ATTENTION}.sparse_mla:FlashMLASparseImpl._flash_mla_sparse_forward",
    f"{_ATTENTION}.v4:_V4DecodeExecutor.forward",
    f"{_ATTENTION}.v4:_V4PrefillExecutor.forward",
)
CALLING = tuple(f"{_ATTENTION}.{name}" for name in ("mla", "sparse_mla", "v4"))
FUNCTIONS = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")


def read() -> Surface:
    """Name -> parameters, True for what has none, False for what is not there."""
    found = {name: read_source(name) for name in RELIED}
    for module in CALLING:
        for function in FUNCTIONS:
            named = sorted({name for call in calls(module, function) for name in call})
            if named:
                found[f"{module}@{function}"] = named
    return found


def calls(module: str, function: str) -> Iterator[list[str]]:
    """Yields the names of the keyword arguments of each call of a function in a module's text."""
    package, *folders = module.split(".")
    spec = importlib.util.find_spec(package)
    places = () if spec is None else spec.submodule_search_locations or ()
    for place in places:
        file = Path(place, *folders).with_suffix(".py")
        for node in ast.walk(ast.parse(file.read_text() if file.is_file() else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function):
                yield [each.arg for each in node.keywords if each.arg is not None]


def recorded() -> dict[str, Surface]:
    """Release -> its surface."""
    return json.loads(RECORD.read_text())


def differences(found: Surface, known: Surface) -> list[tuple[bool | None, str]]:
    """Differences of ``found`` from ``known``: (None if it may still work, else False; text)."""
    return surfaces.differences(found, known, _may_do)


def _may_do(name: str, got: Value, wanted: Value) -> bool:
    """Arguments of a call: ours answers names that it does not take with a sentence."""
    return "@" in name and isinstance(got, list) and isinstance(wanted, list)

"""Operators of vLLM that tables call."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import typer

WORKSPACE = 1 << 20  # bytes that its top-k wants
COOPERATIVE_ROWS = 32  # the most that vLLM gives cooperative_topk


def vllm_ops(peers: Path | None) -> Any:
    """vLLM's operators, None where there are none."""
    for library in sorted(peers.glob("vllm/_C*.so")) if peers else ():
        torch.ops.load_library(str(library))
    if not hasattr(torch.ops._C, "persistent_topk"):
        try:
            importlib.import_module("vllm._custom_ops")
        except Exception as error:  # of any kind: a peer that cannot be imported is left out
            typer.echo(f"vLLM: {type(error).__name__}: {error}")
    return torch.ops._C if hasattr(torch.ops._C, "persistent_topk") else None

"""Models packed to eight bits a weight: what is evaluated is what is packed.

A matrix is int8 under one fp32 scale a row; norms stay fp32.  The bytes are Huffman coded and cut
into files of at most ``SHARD`` bytes, ``<name>.<i>.pack``, because some carriers take no larger.
"""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codegen.artifacts import write_atomic
from profiles.studies.fidelity.config import MlaConfig
from profiles.model.model import MlaModel

SHARD = 15 << 20


def _packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int8, fp32 scale of each row)."""
    wide = weight.detach().float().cpu()
    scale = (wide.abs().amax(1) / 127).clamp_min(2.0**-80)
    return (wide / scale[:, None]).round().to(torch.int8), scale


def save(model: MlaModel, folder: Path, name: str, facts: dict[str, Any]) -> list[Path]:
    """Writes the shards and ``<name>.json`` (configuration and ``facts``); returns all files."""
    state: dict[str, Any] = {
        key: _packed(value) if value.ndim == 2 else value.detach().float().cpu()
        for key, value in model.state_dict().items()
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    raw = coder.compress(buffer.getvalue()) + coder.flush()
    for stale in folder.glob(f"{name}.*.pack"):
        stale.unlink()
    shards = [raw[i : i + SHARD] for i in range(0, len(raw), SHARD)]
    paths = [folder / f"{name}.{i}.pack" for i in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        write_atomic(path, shard)
    described = folder / f"{name}.json"
    values = {"config": model.config.deepseek_v3(), "shards": len(shards)} | facts
    write_atomic(described, json.dumps(values, indent=1) + "\n")
    return [*paths, described]


def load(
    folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[MlaModel, dict[str, Any]]:
    """The model of a name, and the facts that were saved with it.

    Raises:
        FileNotFoundError: it is not there, or not whole.
    """
    facts = json.loads((folder / f"{name}.json").read_text())
    raw = b"".join((folder / f"{name}.{i}.pack").read_bytes() for i in range(facts["shards"]))
    state = torch.load(io.BytesIO(zlib.decompress(raw)), weights_only=True)
    whole = {
        key: value[0].float() * value[1][:, None] if isinstance(value, tuple) else value
        for key, value in state.items()
    }
    model = MlaModel(MlaConfig.from_dict(facts["config"]))
    model.load_state_dict(whole)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False), facts

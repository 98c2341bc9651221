"""Facts about the machine and libraries that figures were made with."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

from profiles import timing


def machine(device: torch.device, nvml: timing.Nvml | None) -> dict[str, Any]:
    """Names the device and the versions that numbers were made with."""
    facts: dict[str, Any] = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for module in ("triton", "tvm_ffi"):
        try:
            facts[module] = __import__(module).__version__
        except Exception:  # not installed, or it will not import: then nothing used it
            facts[module] = None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["sms"] = properties.multi_processor_count
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
    else:
        facts["gpu"] = "none"
    if nvml is not None:
        facts.update(nvml.describe())
    facts["variants"] = variant_hashes()
    return facts


def variant_hashes() -> dict[str, str]:
    """Names and short hashes of the precompiled libraries in ``SNAPMLA_VARIANT_DIR``."""
    folder = os.environ.get("SNAPMLA_VARIANT_DIR", "")
    if not folder or not Path(folder).is_dir():
        return {}
    return {
        path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in sorted(Path(folder).glob("*.so"))
    }

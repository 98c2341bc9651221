"""PTX forms that a set of modules uses, and those of them that no handler models."""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from .decode import decode
from .ptx import parse


@dataclass
class Coverage:
    """Static counts by opcode; ``missing`` maps an opcode to the places that use it."""

    forms: Counter[str] = field(default_factory=Counter)
    missing: dict[str, list[str]] = field(default_factory=dict)


def coverage(paths: Iterable[str | os.PathLike[str]]) -> Coverage:
    """Decodes every kernel of every PTX file.  Raises PtxSyntaxError."""
    result = Coverage()
    for path in paths:
        module = parse(pathlib.Path(path).read_text())
        for kernel in module.kernels.values():
            program = decode(kernel, module)
            result.forms.update(ins.opcode for ins in kernel.code)
            for pc in program.missing:
                ins = kernel.code[pc]
                place = f"{pathlib.Path(path).name}: {kernel.where(ins)}: {ins.text}"
                result.missing.setdefault(ins.opcode, []).append(place)
    return result

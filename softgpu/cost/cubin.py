"""Machine code in compiled objects: the cubins that a file embeds, and the disassembler for them.

Neither needs a GPU or a toolkit; ``nvdisasm`` comes as a wheel.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import struct
from pathlib import Path

EM_CUDA = 190  # ELF machine of a cubin


def cubins(library: Path) -> list[bytes]:
    """The cubins that an object or a library embeds.

    Raises:
        ValueError: there is none.
    """
    data = library.read_bytes()
    found, at = [], 0
    while (at := data.find(b"\x7fELF", at + 1)) > 0:
        if struct.unpack_from("<H", data, at + 18)[0] != EM_CUDA:
            continue
        programs, sections = struct.unpack_from("<QQ", data, at + 32)
        program_size, program_count, size, count = struct.unpack_from("<HHHH", data, at + 54)
        end = max(sections + size * count, programs + program_size * program_count)
        found.append(data[at : at + end])  # one of the two tables comes last
    if not found:
        raise ValueError(f"{library}: no cubin in it")
    return found


@functools.cache
def nvdisasm() -> Path | None:
    """The disassembler: the wheel's first (it is as new as the DSL's toolkit), then ``PATH``."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations if spec else None) or ()]
    wheels = [p for d in folders for p in d.glob("cu*/bin/nvdisasm")]
    wheels += [p for d in folders for p in d.glob("cuda_nvdisasm/bin/nvdisasm")]
    on_path = shutil.which("nvdisasm")
    return _newest(wheels) or (Path(on_path) if on_path else None)


def _newest(paths: list[Path]) -> Path | None:
    """The path with the largest number in any of its parts (cu13 before cu12)."""
    return max(paths, key=lambda p: [int(n) for n in re.findall(r"\d+", str(p))], default=None)

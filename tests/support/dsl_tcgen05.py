"""The tcgen05 descriptors and operand layouts of NVIDIA's CuTe DSL, as JSON on stdout.

Runs in a process of its own, for sm_100a:

    descriptors: [start, LBO, SBO, layout, 64-bit word], from ``primitives.Tcgen05SmemDesc.build``
    instructions: [type, M, N, A MN-major, B MN-major, negate A, 32-bit word]
    layouts: [type, operand, MN-major, M, N, K of the tile, text of ``make_smem_layout_a/_b``]

The words are computed by a compiled kernel on the software GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["CUTE_DSL_ARCH"] = "sm_100a"

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import Int64
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.experimental import primitives

import softgpu

TYPES = {
    "e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2, "f16": cutlass.Float16,
    "bf16": cutlass.BFloat16,
}  # fmt: skip
DESCRIPTORS = [
    (1024, 16, 1024, 2), (2048 + 32, 0, 1024, 2), (196608, 8192, 1024, 2), (4096, 16384, 1024, 2),
    (512, 16, 512, 4), (229376 + 16, 4096, 512, 4), (256, 16, 256, 6), (1024, 128, 256, 0),
    (16, 256, 128, 0), (99 * 1024, 262128, 16, 0),
]  # fmt: skip
INSTRUCTIONS = [
    ("e4m3", 64, 64, 0, 0, 0), ("e4m3", 128, 256, 0, 1, 0), ("e5m2", 256, 96, 1, 0, 0),
    ("bf16", 128, 8, 0, 0, 1), ("f16", 32, 128, 1, 1, 0), ("bf16", 256, 240, 0, 1, 1),
]  # fmt: skip
LAYOUTS = list(
    itertools.product(("e4m3", "bf16"), "ab", (False, True), [(128, 128, 32), (64, 64, 128)])
)


@cute.kernel
def _words(out: cute.Tensor) -> None:
    for i, (start, lbo, sbo, layout) in enumerate(DESCRIPTORS):
        out[i] = Int64(
            primitives.Tcgen05SmemDesc.build(
                start, leading_byte_offset=lbo, stride_byte_offset=sbo, layout=layout
            )
        )
    for i, (kind, m, n, a_mn, b_mn, negate) in enumerate(INSTRUCTIONS):
        out[len(DESCRIPTORS) + i] = Int64(
            primitives.Tcgen05InstrDesc.build(
                c_dtype=cutlass.Float32, a_dtype=TYPES[kind], b_dtype=TYPES[kind], m_dim=m,
                n_dim=n, a_major=a_mn, b_major=b_mn, a_negate=negate,
            )
        )  # fmt: skip


def _layout(kind: str, operand: str, mn: bool, tile: tuple[int, int, int]) -> str:
    k = OperandMajorMode.K
    major = OperandMajorMode.MN if mn else k
    mma = sm100.make_trivial_tiled_mma(
        TYPES[kind], TYPES[kind], major if operand == "a" else k, major if operand == "b" else k,
        cutlass.Float32, tcgen05.CtaGroup.ONE, tile[:2],
    )  # fmt: skip
    make = sm100.make_smem_layout_a if operand == "a" else sm100.make_smem_layout_b
    return str(make(mma, tile, TYPES[kind], 1))


def main() -> None:
    found: list[Any] = []

    @cute.jit
    def host(out: cute.Tensor) -> None:
        found.extend(_layout(*case) for case in LAYOUTS)
        _words(out).launch(grid=(1, 1, 1), block=(1, 1, 1))

    count = len(DESCRIPTORS) + len(INSTRUCTIONS)
    fake = make_fake_compact_tensor(Int64, (count,), assumed_align=16)
    words = torch.zeros(count, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --keep-ptx --dump-dir={folder}"
        compiled = cute.compile(host, fake, options=options)
        path = Path(folder, "words.o")
        compiled.export_to_c(str(path), function_name="words")
        path.with_suffix(".ptx").write_text(compiled.__ptx__)
        softgpu.load(path, path.with_suffix(".ptx"), "words")(words)
    values = [w % 2**64 for w in words.tolist()]
    smem, instructions = values[: len(DESCRIPTORS)], values[len(DESCRIPTORS) :]
    print(json.dumps({
        "descriptors": [[*x, w] for x, w in zip(DESCRIPTORS, smem, strict=True)],
        "instructions": [
            [*x, w % 2**32] for x, w in zip(INSTRUCTIONS, instructions, strict=True)
        ],
        "layouts": [
            [kind, operand, mn, *tile, text]
            for (kind, operand, mn, tile), text in zip(LAYOUTS, found, strict=True)
        ],
    }))  # fmt: skip


if __name__ == "__main__":
    main()

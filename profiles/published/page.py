"""The page of results, profiles/results/tcgen05-programs.md, from ``build/published``."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from .programs import PROGRAMS, SOURCES, Program

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "published"
PAGE = ROOT / "profiles" / "results" / "tcgen05-programs.md"

HEAD = """# Published tcgen05 programs on the software GPU

Written by `python -m profiles.published page`; nothing here was run on a Blackwell GPU by this
project. The programs are known to work on a B200: their authors test them there. Each runs as it
was published, host code, inputs and reference included, except where a row says otherwise
(`profiles/published/programs.py` is the whole of what is ours); TokenSpeed's, FlashInfer's
and FA4's references are float64 and ours. Nothing of these programs is in this repository.

A program *passes* if its own check passes, every comparison's relative L2 error is within the
bound, and all schedules (asynchronous work lands at once, as late as it may, or at random times
with three seeds and warps in adversarial order; each row names those that it ran under) leave the
same bits. A bound is derived from the roundings on the way: to f fraction bits once, 2^-f /
sqrt(12) of the value in the mean square; several add in squares.
"""

FINDINGS = """## What the hazard check says about them

The rule that asks for `tcgen05.fence` is off: these programs leave it out, and ptxas orders what
it would order. What is reported otherwise:

* **A race of NVIDIA's mla_decode examples**, found first by a wrong result: the two warps that
  share a row exchange its maximum through shared memory with one barrier, so a warp may store the
  next tile's maximum before its partner has read this tile's. On the GPU the warps run abreast.
  Here a warp may run 512 instructions ahead, and from two tiles on some rows are off by up to
  27 %. Unmodified, the examples pass with warps in turns of 32 instructions; with the same barrier
  once more before the store (rows `_long`) they pass under every schedule.
* `overwrite-in-use` and `early-dealloc` at `tcgen05.ld`: NVIDIA's examples have no
  `tcgen05.wait::ld`. They use the loaded registers, and then hand the columns back. The manual
  asks for the wait before the columns are overwritten; the hardware has delivered the registers.
* `early-dealloc` and `race` in fmha_bwd: the warp that frees the columns waits for its own
  warpgroup only, while other warps still load the last dQ; with warps far apart softgpu refuses
  the load, so it runs in turns too.
* `exit-in-flight`, `exited-block` in the multicast examples: a CTA's last multicast commit arrives
  at CTAs that may have ended.
* `cluster-arrive-twice` in FA4's MLA: a pipeline is made between the kernel's own arrival at the
  barrier of the cluster and its wait, and arrives there, too.
* `exit-in-flight` in FA4's backward: the last store of dK and dV is not waited for.
* `missing-proxy-fence` in slicek_m32n8k128 and in FA4's MLA with a list or pages: `cp.async` writes
  an operand by the generic proxy, and the MMA reads it behind an mbarrier, with no
  `fence.proxy.async` between.
* `global-race`: several warps or lanes store the same value to the same place (LSE; a TMA store
  that the whole warp executes).
"""

HELD_OUT = """## Programs that the model was not made with

These were run after the model was finished, to see how far it holds. No result was wrong because
of tcgen05 as modelled; this is what had to change before they ran:

| program | changed in softgpu |
|---|---|
"""

WRONG = """
Two of the programs are themselves wrong:

* **NVIDIA's dense_gemm_persistent_dynamic.** Its epilogue chooses a stage of C by a count of tiles
  that only one call increments, which its warps do not make: the count stays 0, so tiles use the
  same stages again while `cp.async.bulk.wait_group.read` still lets stores read them. With two
  subtiles a tile (`_1cta`) early landing gives the right bits, late and random landing others; with
  four (the pair) no result differed, and the check reports `overwrite-in-use` all the same. The
  static-persistent twin counts right and passes.
* **NVIDIA's cluster_tmem_reduce** orders `tcgen05.cp` by `tcgen05.wait::st`, which covers `st` only
  (PTX ISA 9.7.18.6), and has no commit. With the copy landing late the columns are gone first.

Refused with the instruction's text, as not modelled: the sixth variant of slicek_m32n8k128
(`.ashift`), NVIDIA's grouped_gemm (`tensormap.replace`) and mixed_input_gemm with int8
(`cvt.rn.satfinite.scaled::n2`). Not run here, left for another time: quack's GEMM (wants DSL 4.7),
FlashInfer's task-scheduled MLA decode (DSL 4.7 and 4.8 refuse its source), and FlashMLA's kernels
for SM100: CUDA C++, which this runner does not start. What such code asks of softgpu is tested with
CUDA C++ of our own (`tests/softgpu/test_cuda.py`): host code over a stand-in for cudart, barriers
that a warp's threads come to on two paths, tensor maps of 8-byte elements, ue8m0.

"""

REST = """## Can these programs fail?

With the lane halves of layouts B and E swapped in softgpu, tokenspeed_m64 and tokenspeed_m128 fail;
with leading and stride offsets of MN-major operands swapped, 1cta_mma_mn_major and dense_gemm_fp8.

## Other evidence

* *Layouts of D and A*, all 105 legal shapes: CUTLASS's fragments as shape:stride and TVM's datapath
  table agree with softgpu; executed for 8 shapes, and for `.ws` with other rows of A in each group
  of lanes (`tests/softgpu/test_tcgen05_layouts.py`).
* *Layout G* (M = 32 `.ws`): no published program that runs here has it. CUTLASS's `tmem_frg_ws` and
  TVM's `tmem_datapath_layout` agree with each other and with softgpu: two sources, no hardware run.
* *ld and st*, every shape and count: CUTLASS's thread-value layouts agree (same file).
* *Descriptors* (`test_tcgen05_descriptors.py`): CUTLASS's canonical layouts over swizzle, major,
  element, start and strides (hypothesis), the words that the CuTe DSL builds, and the operand
  layouts that it chooses, byte for byte.
* *wgmma parity* (`test_tcgen05_parity.py`): same bytes and descriptor fields, 12 forms of e4m3
  and bf16, K- and MN-major, with the arithmetic `exact`: equal accumulators, bit for bit.
* *Arithmetic* (`test_mma_sim.py`): 102,400 accumulators of MMA-Sim's model of a B200 (arXiv
  2511.10909, MIT; `profiles/record_mma_sim.py`): e4m3, e5m2, both mixed, f16 and bf16, each with
  random, cancelling, wide, tiny and special operands: equal, bit for bit.

Hypothesis, with no source: that `.ws` and pairs of CTAs add as tcgen05.mma of one CTA does
(MMA-Sim covers only that), and sums whose products all lie below 2^-126 (softgpu keeps the rule
recorded on an H200). Two sources differ about A in tensor memory with M = 64 without `.ws`: CUTLASS
spreads its rows over the lanes as D's (softgpu does that), TVM's table says lanes 0 to 63.
"""


def _forms(opcodes: list[str]) -> str:
    """The mma, ld, st and cp forms of a program, shortened."""
    found = set()
    for opcode in opcodes:
        parts = opcode.rstrip(";").split(".")
        if parts[1] == "mma":
            ws = "ws " if "ws" in parts else ""
            pair = "pair " if "cta_group::2" in parts else ""
            found.add(f"mma {ws}{pair}{next(p[6:] for p in parts if p.startswith('kind::'))}")
        elif parts[1] in ("ld", "st"):
            found.add(f"{parts[1]} {next(p for p in parts if re.match(r'[0-9]+x', p))}")
        elif parts[1] == "cp" or "multicast::cluster" in parts:
            found.add(parts[1] + (" multicast" if parts[1] == "commit" else ""))
    return ", ".join(sorted(found))


def _row(program: Program, result: dict[str, Any]) -> str:
    errors = [off for off, _ in result["comparisons"]]
    kinds = len(program.bounds)
    worst = [max(errors[i::kinds], default=0.0) for i in range(min(kinds, len(errors)))]
    measured = "; ".join(
        f"{e:.1e} of {b:.1e}" if b else f"{e:.0e}" if e else "exact"
        for e, b in zip(worst, program.bounds, strict=False)
    )  # fmt: skip
    if program.bounds.count(0.0) and len(program.bounds) > 2:
        measured = f"exact; {max(errors):.1e} of {max(program.bounds):.1e} where f16 rounds"
    hazards = Counter(re.findall(r"hazard \[(.*?)\]", "\n".join(result["hazards"])))
    reports = ", ".join(f"{n} {kind}" for kind, n in sorted(hazards.items())) or "none"
    if not result["hazards_on"]:
        reports = "not run"
    schedules = ", ".join(result["schedules"]) + ("; order of additions varies" * program.atomics)
    return (
        f"| {program.name} | {program.shapes} | {program.shows} | {_forms(result['opcodes'])} | "
        f"{result['verdict']} | {measured} | {schedules} | {reports} | {result['seconds']:.0f} |"
    )


def write() -> None:
    """Writes the page; programs without a result keep their row, or are listed as not run."""
    lines = [HEAD, "| source | version | licence | programs |", "|---|---|---|---|"]
    for key, source in SOURCES.items():
        names = ", ".join(p.name for p in PROGRAMS.values() if p.source == key)
        lines.append(f"| {source.title} | {source.version} | {source.licence} | {names} |")
    lines += [
        "",
        "| program | problem | shows | forms in its PTX | result | relative L2 error of its bound "
        "| schedules | hazard reports | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    before = PAGE.read_text().splitlines() if PAGE.exists() else []
    kept = []
    for program in PROGRAMS.values():
        path = RESULTS / f"{program.name}.json"
        old = [line for line in before if line.startswith(f"| {program.name} | ")]
        if path.exists():
            lines.append(_row(program, json.loads(path.read_text())))
        elif old and len(old[0].split(" | ")) > 5:
            lines.append(old[0])
            kept.append(program.name)
        else:
            lines.append(f"| {program.name} | {program.shapes} | | | not run | | | | |")
    if kept:
        lines += ["", f"Rows of an earlier run, not repeated with this one: {', '.join(kept)}."]
    held_out = [f"| {p.name} | {p.held_out} |" for p in PROGRAMS.values() if p.held_out]
    lines += ["", FINDINGS, HELD_OUT + "\n".join(held_out), WRONG + REST]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    lines.append(f"The page was written at commit {commit}.")
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    print(PAGE)

"""Records what an H200 computes, and replays it on the software GPU.

    bash profiles/gpu_run.sh pack && python -m profiles.record_softgpu hashes     where they compile
    bash profiles/gpu_run.sh record           there, with what the first line packed, or
    python -m profiles.record_softgpu record [--out FILE]     on a GPU; no compiler needed
    python -m profiles.record_softgpu replay [PART...] [--all] [--file FILE]     anywhere

Parts: ``mufu`` (ex2, lg2, rcp over all 2^32 arguments, a hash for each binade), ``wgmma`` (each
instruction form alone, over 10^6 accumulators a form, of MN-major ones a third of that,
hand-written PTX through the driver's compiler), ``helpers`` (append, quantise, fetch, merge, plan,
FlashMLA's records) and ``decode`` (decode, merge; of 16-bit caches too), the last two from the
compiled variants.  ``profiles.vectors`` builds the inputs.  Without ``--all``
replay takes a sample of mufu and decode; with it, everything.  It prints what differs and
returns 1 if anything does.

On the GPU machine the variants are found as always (``SNAPMLA_VARIANT_DIR``); what the first line
writes to build/carry goes there with the repository (no PTX: only its hashes).
The record is one .npz: for each case ``<name>/inputs`` (a digest),
``<name>/<what>`` (uint64 hashes of rows), ``<name>/raw/<what>`` (a few results as they are), and
``meta`` (JSON: GPU, driver, commit, command, hash of each variant's PTX without line numbers).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from codegen import matrix
from dsl_kernels.spec import VariantSpec
from profiles import instructions, vectors
from profiles.device import require_cuda
from profiles.instructions import WgmmaCase, WgmmaForm
from profiles.vectors import KernelCase
from snapmla.testing.workloads.exact import Recorded, hash_rows

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "data" / "softgpu_h200.npz"
COMMAND = "python -m profiles.record_softgpu record"
PARTS = ("mufu", "wgmma", "helpers", "decode")
HASHES = ROOT / "build" / "carry" / "ptx_hashes.json"
BINADES = 512
# by default: what a sample covers
SAMPLE_BINADES = {"ex2": (120, 127, 128, 133, 382, 389), "lg2": (126, 127, 130), "rcp": (127, 253)}


# ---- where cases run -----------------------------------------------------------------------------
class SoftGpu:
    """The software GPU."""

    torch_device = "cpu"

    def launch(
        self, text: str, arrays: list[NDArray[Any]], grid: int, block: int, smem: int
    ) -> None:
        from softgpu.decode import decode
        from softgpu.machine import Machine, Options
        from softgpu.memory import GlobalMemory
        from softgpu.ptx import parse
        from softgpu.runtime import Launch

        memory = GlobalMemory()
        aligned = [_aligned(a) for a in arrays]
        for i, a in enumerate(aligned):
            memory.add(f"argument {i}", a.ctypes.data, a.nbytes)
        pointers = [ctypes.c_uint64(a.ctypes.data) for a in aligned]
        parameters = (ctypes.c_void_p * len(pointers))(*map(ctypes.addressof, pointers))
        parsed = parse(text)
        config = Launch(
            kernel="test", grid=(grid, 1, 1), block=(block, 1, 1), cluster=(1, 1, 1), pdl=False,
            cooperative=False, dynamic_smem=smem, max_dynamic_smem=232448, stream=0,
            params=parameters,
        )  # fmt: skip
        Machine(decode(parsed.kernels["test"], parsed), config, memory, Options()).run()
        for a, copy in zip(arrays, aligned, strict=True):
            a[...] = copy

    def kernel(self, name: str) -> Callable[..., None]:
        from snapmla.runtime import variants as runtime

        return runtime.kernel(VariantSpec.from_name(name), "cpu")


def _aligned(a: NDArray[Any]) -> NDArray[Any]:
    """A copy at a multiple of 128 bytes."""
    raw = np.empty(a.nbytes + 128, np.uint8)
    out = raw[-raw.ctypes.data % 128 :][: a.nbytes].view(a.dtype).reshape(a.shape)
    out[...] = a
    return out


class Gpu:
    """A CUDA device: PTX through the driver's compiler, variants from their shared libraries."""

    torch_device = "cuda"

    def __init__(self) -> None:
        torch.zeros(1, device="cuda")  # torch's context becomes the current one
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.functions: dict[str, ctypes.c_void_p] = {}

    def _check(self, what: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{what}: CUDA error {code}")

    def function(self, text: str) -> ctypes.c_void_p:
        """The entry ``test`` of a PTX text; raises RuntimeError with the compiler's log."""
        if text not in self.functions:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            log = ctypes.create_string_buffer(1 << 14)
            options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER, its size
            values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
            code = self.driver.cuModuleLoadDataEx(
                ctypes.byref(module), text.encode() + b"\0", 2, options, values
            )
            self._check(f"PTX: {log.value.decode(errors='replace')}", code)
            code = self.driver.cuModuleGetFunction(ctypes.byref(function), module, b"test")
            self._check("cuModuleGetFunction", code)
            self.functions[text] = function
        return self.functions[text]

    def enqueue(self, text: str, args: list[Any], grid: int, block: int, smem: int) -> None:
        """Launches on the default stream; ``args`` are ctypes values."""
        pointers = (ctypes.c_void_p * len(args))(*[ctypes.addressof(a) for a in args])
        code = self.driver.cuLaunchKernel(
            self.function(text), grid, 1, 1, block, 1, 1, smem, None, pointers, None
        )
        self._check("cuLaunchKernel", code)

    def launch(
        self, text: str, arrays: list[NDArray[Any]], grid: int, block: int, smem: int
    ) -> None:
        there = [torch.from_numpy(a.reshape(-1).view(np.uint8).copy()).cuda() for a in arrays]
        torch.cuda.synchronize()
        self.enqueue(text, [ctypes.c_uint64(t.data_ptr()) for t in there], grid, block, smem)
        torch.cuda.synchronize()
        for a, t in zip(arrays, there, strict=True):
            a[...] = t.cpu().numpy().view(a.dtype).reshape(a.shape)

    def kernel(self, name: str) -> Callable[..., None]:
        from snapmla.runtime import variants as runtime

        return runtime.kernel(VariantSpec.from_name(name), "cuda")


# ---- recording -----------------------------------------------------------------------------------
def ptx_hash(path: pathlib.Path) -> str:
    """Hash of a PTX text without comments and line information."""
    lines = re.sub(r"//.*", "", path.read_text()).splitlines()
    kept = [x.strip() for x in lines if not re.match(r"\s*\.(loc|file)\b", x)]
    debug = next((i for i, x in enumerate(kept) if x.startswith(".section")), len(kept))
    return hashlib.sha256("\n".join(x for x in kept[:debug] if x).encode()).hexdigest()[:16]


NO_CASES = "sparse_decode", "fp8_v4"


def variants() -> list[str]:
    """Names of the built sm_90a variants of the default matrix on the search path that cases are
    made for: not for sparse decode over two lists, whose body is that of one (V4's tokens)."""
    from snapmla.runtime import env

    names: set[str] = set()
    for directory in env.variant_dirs():
        names.update(p.stem for p in directory.glob("*_sm90a.json"))
    specs = matrix.default_specs("sm_90a", ask_kernels=False)
    return sorted(
        names & {s.name for s in specs if (s.op, getattr(s, "cache_dtype", "")) != NO_CASES}
    )


def ptx_hashes() -> dict[str, str]:
    """Name -> ``ptx_hash`` of each built sm_90a variant whose PTX is here."""
    from snapmla.runtime import env

    found: dict[str, str] = {}
    for directory in reversed(env.variant_dirs()):
        found.update({p.stem: ptx_hash(p) for p in sorted(directory.glob("*_sm90a.ptx"))})
    return found


def _mufu_hashes(gpu: Gpu, name: str) -> NDArray[np.uint64]:
    """One hash for each of the 512 binades of 2^23 arguments."""
    text, out = (
        instructions.mufu_ptx(name),
        torch.empty(instructions.BINADE, dtype=torch.int32).cuda(),
    )

    def result(binade: int) -> NDArray[np.uint32]:
        address = ctypes.c_uint64(out.data_ptr())
        first = ctypes.c_uint32(binade * instructions.BINADE)
        gpu.enqueue(text, [address, first], instructions.BINADE // 256, 256, 0)
        torch.cuda.synchronize()
        bits: NDArray[np.uint32] = out.cpu().numpy().view(np.uint32)
        return bits

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(hash_rows, result(i)[None]) for i in range(BINADES)]
        return np.concatenate([job.result() for job in jobs])


def record(out: pathlib.Path) -> int:
    """Runs everything on the GPU and writes the record."""
    begin, gpu = time.time(), Gpu()
    store: dict[str, NDArray[Any]] = {}
    for name in instructions.MUFU_OPS:
        store[f"mufu.{name}/hash"] = _mufu_hashes(gpu, name)
    print(f"mufu: {time.time() - begin:.1f} s", flush=True)
    names = variants()
    todo: list[WgmmaCase | KernelCase] = [*instructions.wgmma_cases()]
    todo += [case for name in names for case in vectors.kernel_cases(name)]
    unstable = []
    for case in todo:
        first, second = case.run(gpu), case.run(gpu)
        for what, rows in first.rows.items():
            store[f"{case.name}/{what}"] = hash_rows(rows)
            if rows.tobytes() != second.rows[what].tobytes():
                unstable.append(f"{case.name}/{what}")
        store[f"{case.name}/inputs"] = first.inputs
        store.update({f"{case.name}/raw/{k}": v for k, v in first.raw.items()})
    meta = _metadata(names)
    store["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **store)  # type: ignore[arg-type]
    partial = out.with_name(out.name + ".partial")
    partial.write_bytes(buffer.getvalue())
    partial.replace(out)
    print(f"{out}: {len(todo)} cases, {out.stat().st_size / 1e6:.2f} MB, {meta['gpu']}, "
          f"{time.time() - begin:.1f} s")  # fmt: skip
    for name in unstable:
        print(f"two runs on the GPU differ: {name}")
    return int(bool(unstable))


def _metadata(names: list[str]) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    hashes = json.loads(HASHES.read_text()) if HASHES.is_file() else ptx_hashes()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "commit": os.environ.get("SNAPMLA_COMMIT") or git.stdout.strip(),
        "command": COMMAND,
        "time": time.strftime("%Y-%m-%d"),
        "ptx": {n: hashes[n] for n in names if n in hashes},
    }


# ---- replaying -----------------------------------------------------------------------------------
@dataclass
class Tally:
    """What a replay compared: ``results`` counts accumulators or rows."""

    cases: int = 0
    results: int = 0
    different: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.cases += other.cases
        self.results += other.results
        self.different += other.different
        self.notes += other.notes


class Record:
    """The recorded results.  Raises FileNotFoundError if they are not there."""

    def __init__(self, path: pathlib.Path = RECORD) -> None:
        with np.load(path) as data:
            self.data = {k: data[k] for k in data.files}
        self.meta: dict[str, Any] = json.loads(self.data["meta"].tobytes())

    @property
    def variants(self) -> list[str]:
        names = {k.split("/")[0].rsplit(".", 1)[0] for k in self.data if "/" in k}
        return sorted(n for n in names if not n.startswith(("wgmma", "mufu")))

    @property
    def forms(self) -> list[WgmmaForm]:
        """The instruction forms that it has, in their order.

        Raises ValueError if ``profiles.instructions`` has no such form.
        """
        names = {k.split(".")[1] for k in self.data if k.startswith("wgmma.")}
        found = [form for form in instructions.WGMMA_FORMS if form.name in names]
        if unknown := names - {form.name for form in found}:
            raise ValueError(f"the record has unknown wgmma forms: {', '.join(sorted(unknown))}")
        return found

    def compare(self, case: WgmmaCase | KernelCase, result: Recorded) -> Tally:
        """Counts rows (of wgmma: instructions) whose hash differs."""
        tally = Tally(cases=1)
        if not np.array_equal(self.data[f"{case.name}/inputs"], result.inputs):
            raise ValueError(
                f"{case.name}: the inputs are not those of the record (generator changed, or "
                f"numpy); record again with: {COMMAND}"
            )
        for what, rows in result.rows.items():
            want = self.data[f"{case.name}/{what}"]
            got = hash_rows(rows)
            different = np.flatnonzero(got != want[: len(got)])
            tally.results += len(got)
            tally.different += len(different)
            if len(different):
                tally.notes.append(
                    f"{case.name}/{what}: {len(different)} of {len(got)} differ, "
                    f"rows {different[:8].tolist()}"
                )
        for what, rows in result.raw.items():
            kept = self.data[f"{case.name}/raw/{what}"]
            want = kept[tuple(map(slice, rows.shape))]  # older records kept more
            spots = np.argwhere(rows != want)
            for spot in map(tuple, spots[:2]):
                tally.notes.append(
                    f"{case.name}/{what}{list(map(int, spot))}: {rows[spot]:#010x}, "
                    f"recorded {want[spot]:#010x}"
                )
        if tally.different and isinstance(case, KernelCase):
            tally.notes += self._other_code(case.variant)
        return tally

    def _other_code(self, variant: str) -> list[str]:
        from snapmla.runtime import variants as runtime

        artifact = runtime.find(VariantSpec.from_name(variant))
        recorded = self.meta["ptx"].get(variant)
        if artifact is None or recorded == ptx_hash(artifact.ptx):
            return []
        return [f"{variant}: recorded from other code; if its arithmetic changed: {COMMAND}"]


def replay_mufu(record: Record, name: str, binades: list[int]) -> Tally:
    """Compares whole binades of one function."""
    from softgpu import mufu

    tally, want = Tally(cases=1), record.data[f"mufu.{name}/hash"]

    def one(binade: int) -> bool:
        base = np.uint32(binade * instructions.BINADE)
        x = (np.arange(instructions.BINADE, dtype=np.uint32) + base).view(np.float32)
        y = np.concatenate([mufu.FUNCTIONS[name](part) for part in np.split(x, 64)])
        return bool(hash_rows(y[None])[0] == want[binade])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for binade, same in zip(binades, pool.map(one, binades), strict=True):
            tally.results += instructions.BINADE
            if not same:
                tally.different += 1
                tally.notes.append(f"{name}: binade {binade} differs")
    return tally


def replay_wgmma(record: Record, form: WgmmaForm) -> Tally:
    """Counts accumulators, in whole instructions."""
    total = Tally()
    for case in instructions.wgmma_cases():
        if case.form == form:
            tally = record.compare(case, case.run(SoftGpu()))
            tally.results *= 64 * form.n
            tally.different *= 64 * form.n
            total.add(tally)
    return total


def replay_variant(record: Record, name: str) -> Tally:
    """Counts rows."""
    total = Tally()
    for case in vectors.kernel_cases(name):
        total.add(record.compare(case, case.run(SoftGpu())))
    return total


def replay(record: Record, parts: list[str], everything: bool) -> int:
    """Prints a line for each case; returns 1 if anything differs."""
    failed = 0
    for part in parts:
        begin, total = time.time(), Tally()
        for name, tally in _replay_part(record, part, everything):
            total.add(tally)
            state = "equal" if not tally.different else f"{tally.different} DIFFER"
            print(f"  {name:45} {tally.results:>12,} {state}", flush=True)
            for note in tally.notes[:12]:
                print("    " + note)
        failed += total.different
        print(f"{part}: {total.results:,} results, {total.different} differ, "
              f"{time.time() - begin:.0f} s")  # fmt: skip
    return int(failed > 0)


def _replay_part(record: Record, part: str, everything: bool) -> Iterator[tuple[str, Tally]]:
    if part == "mufu":
        for name in instructions.MUFU_OPS:
            binades = range(BINADES) if everything else SAMPLE_BINADES[name]
            yield name, replay_mufu(record, name, list(binades))
    elif part == "wgmma":
        for form in record.forms:
            yield form.name, replay_wgmma(record, form)
    else:
        found = map(VariantSpec.from_name, record.variants)
        specs = [spec for spec in found if spec.family.helper == (part == "helpers")]
        for spec in specs if everything else matrix.sample(specs):
            yield spec.name, replay_variant(record, spec.name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("--out", type=pathlib.Path, default=RECORD)
    commands.add_parser("hashes")
    two = commands.add_parser("replay")
    two.add_argument("part", nargs="*", choices=[*PARTS, []], default=[])
    two.add_argument("--all", action="store_true")
    two.add_argument("--file", type=pathlib.Path, default=RECORD)
    args = parser.parse_args(argv)
    if args.command == "record":
        require_cuda()
        return record(args.out)
    if args.command == "hashes":
        HASHES.write_text(json.dumps(ptx_hashes()))
        return 0
    torch.set_num_threads(1)
    return replay(Record(args.file), list(args.part) or list(PARTS), args.all)


if __name__ == "__main__":
    sys.exit(main())

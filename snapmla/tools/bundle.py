"""``python -m snapmla.bundle``: is this installation complete, and does it decode?

Lists the compiled variants, a bundle's own or else those of the search path, compares libraries of
bundles and wheels with their checksums, and on a GPU runs append, quantise, plan and decode once,
against attention in fp32 on what ``fetch_dequant`` reads back.  Needs torch, numpy and
apache-tvm-ffi only; exit status 1 if anything is wrong.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import torch

import snapmla
from snapmla.errors import SnapMLAError
from snapmla.runtime import env, variants

LENGTHS = (1000, 0, 64, 129)
HEADS, S_Q, PAGE, SCALE = 16, 2, 64, 192**-0.5
TOLERANCE = 2e-2  # relative L2; FP8 P alone makes a few 1e-3 here


def folders() -> list[Path]:
    """Directories to look at: a bundle's own variants alone; outside of a bundle all there are."""
    own = env.PACKAGE / "variants"
    return [own] if (own / variants.BUNDLE).is_file() else env.variant_dirs()


def damaged(directory: Path) -> tuple[int, list[str]]:
    """(libraries that a bundle lists, what is wrong: missing, or other than their checksums)."""
    try:
        entries = json.loads((directory / variants.BUNDLE).read_text())["variants"]
        listed = {entry["name"]: entry["sha256"] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError):
        return 0, [f"{variants.BUNDLE} cannot be read"]
    found = []
    for name, digest in listed.items():
        library = directory / f"{name}.so"
        if not library.is_file():
            found.append(f"{library.name} is missing")
        elif hashlib.sha256(library.read_bytes()).hexdigest() != digest:
            found.append(f"{library.name} differs from its checksum")
    return len(listed), found


def list_variants(directories: list[Path]) -> int:
    """Prints what is there; returns the number of variants."""
    specs = variants.available(directories)
    count: dict[tuple[str, str], int] = {}
    for spec in specs:
        count[spec.arch, spec.op] = count.get((spec.arch, spec.op), 0) + 1
    for (arch, op), n in sorted(count.items()):
        print(f"  {arch:8} {op:14} {n}")
    return len(specs)


def attention(q: torch.Tensor, c: torch.Tensor, k_rope: torch.Tensor) -> torch.Tensor:
    """Causal fp32 attention of q (s_q, h, 576) over tokens c (L, 512), k_rope (L, 64)."""
    keys = torch.cat([c, k_rope], dim=-1).float()
    logits = torch.einsum("qhd,ld->qhl", q.float(), keys) * SCALE
    limit = len(keys) - q.shape[0] + 1 + torch.arange(q.shape[0], device=q.device)
    hidden = torch.arange(len(keys), device=q.device)[None, :] >= limit[:, None]
    weights = torch.softmax(logits.masked_fill(hidden[:, None, :], -torch.inf), dim=-1)
    return torch.einsum("qhl,ld->qhd", torch.nan_to_num(weights), c.float())


def decode_once(device: torch.device) -> float:
    """Relative L2 of one small decode, quantisation of the query included, to fp32 attention."""
    generator = torch.Generator(device=device).manual_seed(0)
    batch, width = len(LENGTHS), -(-max(LENGTHS) // PAGE)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(torch.bfloat16)

    cache = snapmla.PagedKVCache.allocate(batch * width, page_size=PAGE, device=device)
    table = torch.arange(batch * width, device=device, dtype=torch.int32).view(batch, width)
    lengths = torch.tensor(LENGTHS, device=device, dtype=torch.int32)
    tokens = batch * width * PAGE
    c_kv, k_rope = normal(tokens, 512) + 1, normal(tokens, 64)
    snapmla.append_kv(cache, c_kv, k_rope, torch.arange(tokens, device=device, dtype=torch.int32))
    q_nope, q_rope = normal(batch, S_Q, HEADS, 512), normal(batch, S_Q, HEADS, 64)
    q = snapmla.quantize_q(q_nope, q_rope)
    plan = snapmla.plan_decode(lengths, HEADS, S_Q, page_size=PAGE, max_pages=width)
    out, _ = snapmla.decode(q, cache, table, lengths, softmax_scale=SCALE, plan=plan)
    every = torch.arange(tokens, device=device, dtype=torch.int32)
    stored_c, stored_rope = snapmla.fetch_dequant(cache, every)
    wanted = torch.zeros_like(out, dtype=torch.float32)
    query = torch.cat([q_nope, q_rope], dim=-1)
    for i, length in enumerate(LENGTHS):
        rows = slice(i * width * PAGE, i * width * PAGE + length)
        if length:
            wanted[i] = attention(query[i], stored_c[rows], stored_rope[rows])
    return ((out.float() - wanted).norm() / wanted.norm()).item()


def main() -> int:
    """Prints the report; 0 if all is well."""
    print(f"snapmla {snapmla.__version__}, torch {torch.__version__}, {env.PACKAGE}")
    places = folders()
    packed = [damaged(folder) for folder in places if (folder / variants.BUNDLE).is_file()]
    wrong = [problem for _, problems in packed for problem in problems]
    for problem in wrong:
        print(f"damaged: {problem}")
    count = list_variants(places)
    if not count:
        print(f"no variants in {', '.join(map(str, places))}")
    listed = sum(number for number, _ in packed)
    compared = f"libraries compared with their checksums: {listed}, wrong: {len(wrong)}"
    compared = compared if packed else "no list of checksums is here (bundles and wheels have one)"
    if not torch.cuda.is_available():
        print(f"no CUDA device: nothing was run; {compared}")
        return 1 if wrong or not count else 0
    print(compared)
    device, driver = torch.device("cuda", 0), variants.driver_version()
    torch.cuda.init()
    print(f"{torch.cuda.get_device_name(device)}, driver for CUDA {driver}")
    started = time.perf_counter()
    try:
        error = decode_once(device)
    except SnapMLAError as refused:  # another GPU, a missing variant, an old driver
        print(f"decode: {refused}")
        return 1
    seconds = time.perf_counter() - started
    good = error < TOLERANCE
    verdict = "right" if good else "WRONG"
    print(f"decode: relative L2 {error:.1e}, {verdict}; first call {seconds:.2f} s")
    used = {artifact.directory for spec in variants.loaded() if (artifact := variants.find(spec))}
    for folder in sorted(used - set(places)):
        print(f"decode: with kernels of {folder}, which is no part of this bundle")
    return 0 if good and not wrong else 1

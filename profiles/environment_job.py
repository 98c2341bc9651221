"""What ``profiles.environments`` runs in a clean environment: a file of its own, of no package.

    python environment_job.py VARIANTS

Imports snapmla as it is installed there, asks for a plan, appends, quantises and decodes on the
software GPU with the built variants of the folder VARIANTS, compares with float64, loads a library
by TVM FFI and has it refuse a call.  Prints one line of JSON; exit status 1 if any is wrong.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version

LIMIT = 5e-2  # relative L2 of a decode in FP8; its own reference predicts 2e-2 to 3e-2


def decode() -> float:
    """Relative L2 of a decode of two sequences to the reference on the same cache."""
    import torch

    import snapmla
    from snapmla import reference

    torch.manual_seed(5)
    cache = snapmla.PagedKVCache.allocate(num_pages=6, page_size=64, device="cpu")
    table = torch.tensor([[5, 0, 3], [1, 4, 2]], dtype=torch.int32)
    lengths = torch.tensor([150, 70], dtype=torch.int32)
    for row, length in zip(table, lengths.tolist()):
        t = torch.arange(length)
        latent = torch.randn(length, 576).bfloat16()
        slots = (row[t // 64] * 64 + t % 64).int()
        snapmla.append_kv(cache, latent[:, :512], latent[:, 512:], slots)
    q = torch.randn(2, 1, 16, 576).bfloat16()
    query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=3)
    out, lse = snapmla.decode(query, cache, table, lengths, softmax_scale=192**-0.5, plan=plan)
    if not lse.isfinite().all():
        raise SystemExit("an LSE is not finite")
    exact, _ = reference.mla_decode_reference(
        query.nope, query.rope, query.scale, cache.content, cache.rope, cache.scale, table, lengths,
        softmax_scale=192**-0.5,
    )  # fmt: skip
    return float((out.double() - exact.double()).norm() / exact.double().norm())


def refusal() -> str:
    """What a compiled library says of a call without arguments."""
    import tvm_ffi

    from dsl_kernels.spec import VariantSpec
    from snapmla.runtime import variants as runtime

    artifact = runtime.find(VariantSpec(op="append_kv"))
    assert artifact is not None and artifact.library is not None
    function = getattr(tvm_ffi.load_module(str(artifact.library)), artifact.symbol)
    try:
        function()
    except TypeError as error:
        return str(error).splitlines()[0]
    raise SystemExit("a library took a call without arguments")


def main(variants: str) -> None:
    from snapmla.tools import info

    found = info.collect()
    wheel = [folder.what for folder in found.folders if "kernels" in folder.what]
    where = os.path.dirname(sys.modules["snapmla"].__file__ or "")
    refused = refusal()  # of the wheel's library
    os.environ.update(SNAPMLA_VARIANT_DIR=variants, SNAPMLA_NO_JIT="1")
    error = decode()
    print(json.dumps({
        "python": platform.python_version(), "torch": version("torch"),
        "tvm_ffi": version("apache-tvm-ffi"), "numpy": version("numpy"), "error": error,
        "refused": refused, "kernels": wheel, "package": found.package["kind"], "where": where,
    }))  # fmt: skip
    raise SystemExit(0 if error < LIMIT and wheel else 1)


if __name__ == "__main__":
    main(*sys.argv[1:])

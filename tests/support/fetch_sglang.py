"""Fetches releases of SGLang for ``tests/host/test_sglang.py``, which skips without them.

    python -m tests.support.fetch_sglang [RELEASE...]

As ``fetch_vllm`` does: a wheel (40 MB a release) is unpacked into the user's cache folder, beside
what SGLang imports but torch (of which 1 GB is triton); a run that was stopped leaves none.  What
SGLang imports for a GPU is not fetched: ``tests/support/shells.py`` stands for it.
"""

from __future__ import annotations

import sys

from tests.support import ROOT
from tests.support.releases import Engine

RELEASES = ("0.5.23",)
ENGINE = Engine("sglang", "SNAPMLA_SGLANG", ROOT / "constraints" / "sglang.txt")
home, path_of = ENGINE.home, ENGINE.path_of
# imported at the top of SGLang's modules, and only run on a GPU or by a server
ABSENT = (
    "IPython", "anthropic", "av", "blobfile", "compressed_tensors", "cutlass", "datasets",
    "decord", "deep_ep", "deep_gemm", "easydict", "flash_attn", "flash_mla", "flashinfer", "gguf",
    "humming", "interegular", "kernels", "mistral_common", "modelscope", "mooncake", "numba",
    "outlines", "pynvml", "quack", "sgl_kernel", "soundfile", "tiktoken", "tilelang", "timm",
    "torch_memory_saver", "torchao", "torchaudio", "torchvision", "xgrammar", "xxhash", "zstandard",
)  # fmt: skip

if __name__ == "__main__":
    ENGINE.main(sys.argv[1:] or list(RELEASES))

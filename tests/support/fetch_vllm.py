"""Fetches releases of vLLM for ``tests/host/test_vllm.py``, which skips without them.

    python -m tests.support.fetch_vllm [RELEASE...]

Downloads wheels with pip (300 MB a release) and unpacks them into the user's cache folder, beside
what vLLM imports but torch.  A release is there when its folder is; a run that was stopped leaves
none.
"""

from __future__ import annotations

import sys

from tests.support import ROOT
from tests.support.releases import Engine

RELEASES = ("0.26.0", "0.33.0")
# libraries of a GPU are left in the wheel
ENGINE = Engine(
    "vllm", "SNAPMLA_VLLM", ROOT / "constraints" / "vllm.txt", lambda name: not name.endswith(".so")
)
home, path_of = ENGINE.home, ENGINE.path_of

if __name__ == "__main__":
    ENGINE.main(sys.argv[1:] or list(RELEASES))

"""Fetches releases of LMDeploy for ``tests/host/test_lmdeploy.py``, which skips without them.

    python -m tests.support.fetch_lmdeploy [RELEASE...]

Downloads wheels with pip (100 MB a release) and unpacks their Python, 8 MB, into the user's cache
folder.  Tests run the text of methods, so nothing that LMDeploy imports is fetched.
"""

from __future__ import annotations

import sys

from tests.support.releases import Engine

RELEASES = ("0.18.0",)
# its other engine, turbomind, is libraries
ENGINE = Engine(
    "lmdeploy", "SNAPMLA_LMDEPLOY", None, lambda name: not name.endswith((".so", ".a"))
)  # fmt: skip
home, path_of = ENGINE.home, ENGINE.path_of

if __name__ == "__main__":
    ENGINE.main(sys.argv[1:] or list(RELEASES))

"""``python -m snapmla.bundle``: checks this installation, and decodes once on a GPU."""

import sys

from snapmla.tools.bundle import main

if __name__ == "__main__":
    sys.exit(main())

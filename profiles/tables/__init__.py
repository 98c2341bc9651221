"""Tables of times as data, by name; ``python -m profiles.bench NAME`` runs one.

A name is that of the table's page in ``profiles/results``, and of its module here unless
``MODULES`` has another.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profiles.table import Table

MODULES = {
    "sparse_v4_sweep": "sparse_v4_cost", "mha_alone": "mha_cost",
    "sparse_prefill_alone": "sparse_prefill_cost",
    "dsa_step_cost-wide": "dsa_step_cost",
}  # fmt: skip
NAMES = (*sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py")), *MODULES)


def of(name: str) -> Table:
    """The table of a name of ``NAMES``."""
    module = importlib.import_module(f"profiles.tables.{MODULES.get(name, name)}")
    return next(table for table in module.TABLES if table.name == name)

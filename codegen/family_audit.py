"""The audit of many variants, by family: ``python -m codegen audit``.

Not in ``audit.py``, whose text is part of every variant's key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from codegen import audit
from codegen.artifacts import Record
from dsl_kernels.spec import VariantSpec


@dataclass
class FamilyAudit:
    """Audit of what is built of a family, which is an op or a pipeline of one.

    Attributes:
        variants, absent: how many there are to be; names that are not built from these sources.
        registers, smem: of a thread at launch, bytes of shared memory of a CTA: the largest.
        library_bytes: of all libraries.
        problems: of variants that must not ship, by name.
    """

    variants: int = 0
    absent: list[str] = field(default_factory=list)
    registers: int = 0
    smem: int = 0
    library_bytes: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)

    def add(self, spec: VariantSpec, record: Record | None, library: Path) -> None:
        """Counts one variant; ``record`` is None where none is built from these sources."""
        self.variants += 1
        if record is None:
            self.absent.append(spec.name)
            return
        self.registers = max(self.registers, record.registers)
        self.smem = max(self.smem, record.static_smem + (record.dynamic_smem or 0))
        self.library_bytes += library.stat().st_size if library.is_file() else 0
        if found := audit.problems(record):
            self.problems[spec.name] = found

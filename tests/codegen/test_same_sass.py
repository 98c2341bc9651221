"""``codegen.same_sass``: a build equals itself, and what differs is named."""

from __future__ import annotations

import shutil
from pathlib import Path

from codegen import same_sass
from codegen.artifacts import Record
from codegen.precompile import Report
from tests.support.needs import needs_compiler

OLD, OTHER = "merge_obf16_sm90a", "merge_of32_sm90a"


@needs_compiler
def test_equal_missing_and_other_instructions(
    variant_dir: Path, built: Report, tmp_path: Path
) -> None:
    record = Record.read(variant_dir / f"{OLD}.json")
    assert record is not None
    same = same_sass.compare(variant_dir, variant_dir, record, OLD)
    assert same.difference == "" and same.kernels == 1 and same.instructions > 100
    assert same_sass.compare(variant_dir, tmp_path, record, OLD).difference == "missing"
    shutil.copy(variant_dir / f"{OLD}.json", tmp_path)
    shutil.copy(variant_dir / f"{OTHER}.so", tmp_path / f"{OLD}.so")
    other = same_sass.compare(variant_dir, tmp_path, record, OLD)
    assert other.difference == "instructions"
    assert "1 of 2 variants hold the same" in same_sass.page([same, other], [])


def test_names_of_labels_and_kernels_do_not_count() -> None:
    text = ".L_x_{0}:\n /*0010*/ @P0 BRA `(.L_x_{0}) ;\n /*0020*/ RET `(kernel_{1}) ;\n"
    one, two = (same_sass._normal(text.format(*names)) for names in ((4, "a"), (7, "b")))
    assert one == two and len(one) == 3
    assert one != same_sass._normal(text.replace("@P0", "@P1").format(4, "a"))

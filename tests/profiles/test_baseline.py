"""What a re-layout is held to: counted as a person would, and blind to what does not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen import digests
from profiles import baseline

CODE = '''"""A module."""

# a comment
import os  # code all the same


def f(x: int) -> str:
    """Doubles.

    Two lines more.
    """
    return """
# no comment
""" + str(2 * x)


class A:
    """Only said."""
'''


def test_code_lines_are_neither_comments_nor_docstrings_nor_blank() -> None:
    assert baseline.code_lines(CODE) == 6


def of(tmp_path: Path, text: str, name: str = "x.py") -> str:
    (tmp_path / name).write_text(text)
    return digests.source(tmp_path / name)


def test_a_source_is_what_runs(tmp_path: Path) -> None:
    first = of(tmp_path, CODE)
    said = (
        CODE.replace("Doubles.", "Says twice.").replace("# a comment\n", "").replace("A mod", "M")
    )
    assert of(tmp_path, said) == first
    without = CODE.replace('    """Only said."""', "    pass").replace('"""A module."""\n', "")
    assert of(tmp_path, without) == first
    for old, new in (("2 * x", "3 * x"), ("# no comment", "# one"), ("x: int", "x: str")):
        assert of(tmp_path, CODE.replace(old, new)) != first
    assert of(tmp_path, "a", "x.json") != of(tmp_path, "a ", "x.json")


PTX = """// Generated
.version 8.8
.target sm_90a
.visible .entry kernel_a_b(
    .param .b64 kernel_a_b_param_0
)
{
    .loc 1 341 0
    mov.u32 %r1, 7;  // seven
$L__BB0_1:
    ld.param.b64 %rd1, [kernel_a_b_param_0];
    ret;
}
    .file 1 "dsl_kernels/a.py"
    .section .debug_str
    {
        .b8 1
    }
"""


def test_ptx_is_the_same_whatever_its_sources_are_called() -> None:
    text = digests.stripped(PTX)
    assert not any(word in text for word in ("loc", "file", "//", "debug", "kernel_a_b"))
    moved = PTX.replace("kernel_a_b", "kernel_moved").replace("341", "17").replace("a.py", "b.py")
    assert digests.stripped(moved) == text
    for old, new in ((" 7", " 8"), ("BB0_1", "BB0_2"), ("mov.u32 %r1, 7;", ""), ("8.8", "8.7")):
        assert digests.stripped(PTX.replace(old, new)) != text


def test_junit_files_are_summed_by_test_file(tmp_path: Path) -> None:
    cases = (
        ("tests.host.test_a.TestB", "1.5"),
        ("tests.host.test_a", "0.5"),
        ("tests.test_c", "1"),
    )
    rows = "".join(f'<testcase classname="{c}" name="x" time="{t}"/>' for c, t in cases)
    (tmp_path / "x.xml").write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    assert baseline.junit_seconds(tmp_path / "x.xml") == {
        "tests/host/test_a.py": 2.0, "tests/test_c.py": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("what", ["signatures", "schemas", "ptx"])
def test_what_differs_is_told(what: str) -> None:
    def record(text: str) -> baseline.Json:
        code = {"signatures": {"f": text}, "schemas": [text]}
        return {"code": code, "digests": {"variants": {"v": {"ptx": text, "sass": "1"}}}}

    assert list(baseline._differences(record("a"), record("a"))) == []
    assert any(d.startswith(what) for d in baseline._differences(record("a"), record("b")))


def test_imports_are_of_modules(tmp_path: Path) -> None:
    files = {}
    for name, text in (
        ("a/__init__.py", ""), ("a/b.py", "from . import c\nimport os"), ("a/c.py", "import a.b"),
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        files[name] = path
    assert baseline.imports(files) == {"a/__init__.py": [], "a/b.py": ["a.c"], "a/c.py": ["a.b"]}

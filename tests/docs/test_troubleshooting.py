"""docs/troubleshooting.md: its sentences are the product's, its code does what it says."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
from dsl_kernels.spec import decode_spec
from snapmla.errors import VariantError
from snapmla.runtime import env, variants
from snapmla.testing import selfcheck
from tests.support import ROOT
from tests.support.needs import needs_compiler

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
SOURCES = ("snapmla", "softgpu", "codegen")
HOLE = "\0"  # a value that a format string fills in
ANY = "…"  # what the page writes there
LEAST = 20  # literal characters that make a sentence recognisable
# Sentences of others, which no file here holds.
FOREIGN = {"an illegal memory access was encountered": "the CUDA driver"}


def quoted() -> list[str]:
    """Every sentence that the page quotes: the lines of its text blocks."""
    found = re.findall(r"^ *```text\n(.*?)^ *```", PAGE, flags=re.S | re.M)
    return [line.strip() for block in found for line in block.splitlines() if line.strip()]


# ---------------------------------------------------------------- sentences that stand in a source


def python_strings(path: Path) -> Iterator[str]:
    """Strings of a module but docstrings; holes for the values of f-strings and % formats."""
    tree = ast.parse(path.read_text("utf-8"))
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in (n for n in ast.walk(tree) if id(n) not in docstrings):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sd]", HOLE, node.value)


def c_strings(path: Path) -> Iterator[str]:
    """String literals of a C file, adjacent ones joined, with a hole for each conversion."""
    for found in re.findall(r'"(?:[^"\\]|\\.)*"(?:\s*"(?:[^"\\]|\\.)*")*', path.read_text("utf-8")):
        yield re.sub(r"%[sd]", HOLE, re.sub(r'"\s*"', "", found)[1:-1])


@functools.cache
def corpus() -> tuple[str, ...]:
    """What the product can say, one entry an expression."""
    found: list[str] = []
    for package in SOURCES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found += python_strings(path)
        for path in sorted((ROOT / package).rglob("*.c")):
            found += c_strings(path)
    found += python_strings(Path(torch.cuda.__file__))
    return tuple(found)


def stands_in(sentence: str, text: str) -> bool:
    """Whether the pieces of ``sentence`` between its gaps are in ``text``, in order."""
    at = 0
    for piece in filter(None, (p.strip() for p in sentence.split(ANY))):
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def is_said(sentence: str) -> bool:
    literal = sentence.replace(ANY, "").replace(" ", "")
    return len(literal) >= LEAST and any(stands_in(sentence, text) for text in corpus())


# ---------------------------------------------------------------- sentences that are produced


def small_step() -> dict[str, Any]:
    """A cache with two sequences, a query and a plan, on the software GPU."""
    torch.manual_seed(0)
    cache, table, lengths = selfcheck.filled_cache((70, 3), 64)
    q = selfcheck.sample_query(2, 1, 16)
    plan = snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=table.shape[1])
    return {
        "q": q, "cache": cache, "block_table": table, "cache_seqlens": lengths, "plan": plan,
        "softmax_scale": 192**-0.5,
    }  # fmt: skip


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def stale_plan() -> str:
    step = small_step()
    step["plan"].update_(torch.tensor([69, 3], dtype=torch.int32))
    return message_of(ValueError, lambda: step["plan"].check(step["cache_seqlens"]))


def stale_offsets() -> str:
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    lengths = torch.tensor([70, 3], dtype=torch.int32)
    plan = snapmla.plan_decode(
        lengths, 3, cu_seqlens_q=offsets, total_q=3, page_size=64, max_pages=2, check_stale=True
    )
    offsets[1] = 2
    return message_of(ValueError, lambda: plan.check(lengths))


def wrong_width() -> str:
    step = small_step()
    assert step["plan"].max_pages == 3
    step["block_table"] = torch.zeros((2, 4), dtype=torch.int32)
    return message_of(ValueError, lambda: snapmla.decode(**step))


def freed_cache() -> str:
    step = small_step()
    step["cache"].scale.untyped_storage().resize_(0)
    return message_of(ValueError, lambda: snapmla.decode(**step))


def moved_cache() -> str:
    step = small_step()
    step["cache"].content.data = step["cache"].content.data.clone()
    return message_of(ValueError, lambda: snapmla.decode(**step))


PRODUCED: dict[str, Callable[[], str]] = {
    "cache: expected memory, got": freed_cache,
    "cache: expected memory where": moved_cache,
    "plan: expected the lengths": stale_plan,
    "plan: expected the cu_seqlens_q": stale_offsets,
    "block_table: expected a width": wrong_width,
}
SPEC = decode_spec("etap", 16, 64, "bf16")


def not_built(folder: Path) -> str:
    return message_of(VariantError, lambda: variants.find_or_build(SPEC, need_library=True))


def old_driver(folder: Path) -> str:
    found = variants.Artifact(folder, SPEC.name, SPEC.symbol, "", cuda=13)
    return str(variants.too_new(found))


IN_A_FOLDER: dict[str, Callable[[Path], str]] = {
    "is not built and SNAPMLA_NO_JIT": not_built,
    "was built with CUDA … and": old_driver,
}


def belonging(sentence: str, table: dict[str, Any]) -> Any:
    return next((value for words, value in table.items() if words in sentence), None)


@needs_compiler
@pytest.mark.parametrize("sentence", quoted())
def test_quoted_sentences_are_said(
    sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Produced where that is cheap, else found in the sources; others' are listed."""
    if sentence in FOREIGN:
        return
    if (call := belonging(sentence, PRODUCED)) is not None:
        assert stands_in(sentence, call())
    elif (call := belonging(sentence, IN_A_FOLDER)) is not None:
        monkeypatch.setenv("SNAPMLA_NO_JIT", "1")
        monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])
        monkeypatch.setattr(variants, "driver_version", lambda: (12, 4))
        assert stands_in(sentence, call(tmp_path))
    else:
        assert is_said(sentence), f"nobody says: {sentence}"


def test_the_page_quotes() -> None:
    assert len(quoted()) >= 12 and all(PAGE.count(s) for s in FOREIGN)
    for words in (*PRODUCED, *IN_A_FOLDER):
        assert any(words in s for s in quoted()), f"nothing on the page has {words!r}"


@pytest.mark.parametrize(
    "invented",
    [
        "variant … is not built and cannot be found",
        "deadlock: no warp wants to run",
        "driver too old",  # too short to recognise
        "is not built and cannot be compiled variant …",  # the wrong order
    ],
)
def test_an_invented_sentence_is_noticed(invented: str) -> None:
    assert not is_said(invented)


# ---------------------------------------------------------------- the page's code


@pytest.fixture
def code() -> dict[str, Any]:
    """Names that the page's blocks define."""
    names: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)), names)
    return names


def test_bad_tokens_are_found(code: dict[str, Any]) -> None:
    cache, table, lengths = selfcheck.filled_cache((70, 3, 0), 64)
    find = functools.partial(code["bad_tokens"], cache, table, lengths)
    assert find().numel() == 0, "poison outside the sequences does not count"
    cache.scale[table[0, 1], 5] = torch.inf
    cache.rope[table[0, 0], 9, 3] = torch.nan
    cache.content_u8[table[1, 0], 2, 500] = 0xFF
    assert find().tolist() == [[0, 9], [0, 69], [1, 2]]
    cache.scale[table[1, 0], 0] = -1.0
    assert [1, 0] in find().tolist()


@needs_compiler
def test_a_call_is_repeated(code: dict[str, Any]) -> None:
    """The same bits: the same bytes by the same plan."""
    step = small_step()
    want = snapmla.decode(**step)
    got = code["repeat"](**step)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    plan = code["to_cpu"](step["plan"])
    assert plan.work_items is step["plan"].work_items, "CPU tensors stay"

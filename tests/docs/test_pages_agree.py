"""Pages agree with the package: on what is public, and on which formats there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import snapmla
from dsl_kernels.formats.registered import FORMATS
from tests.docs.test_docs import PAGES, api
from tests.support import ROOT

CURRENT = [path for path in PAGES if path.name != "CHANGELOG.md"]  # which tells what was
NAMES = {name for names in api.MODULES.values() for name in names} | set(snapmla.__all__)
MODULES = {name.partition(".")[2] for name in api.MODULES} - {""}
HIDDEN = re.compile(
    r"\b(?:not|neither|none|nothing)\b[^.|]{0,60}?\b(?:public|ships|shipped|exported)\b|"
    r"\bnothing ships\b",
    re.I,
)
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
COUNTED = re.compile(
    rf"\b(both|{'|'.join(NUMBERS)}|\d+) (?:(FP8|16-bit) |cache |kinds of )(formats?|cache)\b"
)
# other names of pages that begin as a format's does
OTHERS = {
    "fp8_per_token", "fp8_kvcache", "fp8_kv_cache", "fp8_e4m3",  # of engines
    "fp8_etap", "fp8_dual_wg", "fp8_ws", "fp8_pair", "fp8_parts", "fp8_decode",
}  # fmt: skip


def denials(text: str) -> list[str]:
    """Sentences that say of a public name that it is none.

    A paragraph, an item or a row of a table counts if it names anything public, or if it is about
    something that is (``it``, ``kernel``).
    """
    found = []
    for block in re.split(r"\n\n+|\n(?=[*|#] ?)", text):
        said = HIDDEN.search(" ".join(block.split()))
        words = set(re.findall(r"\w+", block))
        if said and (words & (NAMES | MODULES) or words & {"it", "kernel", "kernels"}):
            found.append(said[0])
    return found


@pytest.mark.parametrize("path", CURRENT, ids=[p.name for p in CURRENT])
def test_nothing_public_is_called_hidden(path: Path) -> None:
    assert not denials(re.sub(r"```.*?```", "", path.read_text(), flags=re.S))


@pytest.mark.parametrize(
    "was",
    [
        "Nothing ships for it: no `AttentionInterface` function, no `Cache` class.",
        "built or can be compiled.\nNeither kernel is part of the public API yet.",
        "| [x.py](x.py) | merge in place, checked against fp64 (`snapmla.mha`, not public yet) |",
        "`decode` is not part of the public API",
    ],
)
def test_a_denial_is_found(was: str) -> None:
    assert denials(was)


def counts(text: str) -> list[str]:
    """Numbers of formats that are not those of ``FORMATS``."""
    right = {
        "FP8": sum(not each.rows for each in FORMATS.values()),
        "16-bit": sum(each.rows for each in FORMATS.values()),
        "": len(FORMATS),
    }
    found = []
    for number, kind, _ in COUNTED.findall(" ".join(text.split())):
        said = {"both": 2, **{word: n for n, word in enumerate(NUMBERS, 2)}}.get(number)
        if (said or int(number)) != right[kind]:
            found.append(f"{number} {kind} formats, there are {right[kind]}")
    return found


@pytest.mark.parametrize("path", CURRENT, ids=[p.name for p in CURRENT])
def test_formats_are_the_lists(path: Path) -> None:
    """Each name of a format is one, and so is their number."""
    text = path.read_text()
    names = set(re.findall(r"(?<![\w.])fp8_[a-z]\w*(?!\w*[./(])", text))
    unknown = {
        name for name in names
        if name not in FORMATS and name not in NAMES and name not in OTHERS
        and not re.fullmatch(rf"({'|'.join(FORMATS)})_sm\d+a", name)
    }  # fmt: skip
    assert not unknown, f"{path.name}: no format, nor a name that is known"
    assert not counts(text)


def test_a_wrong_number_is_found() -> None:
    assert counts("sparse decode over both FP8 formats and BF16")
    assert counts("takes the same two kinds of cache, FP8 and BF16")
    assert not counts(f"{sum(not each.rows for each in FORMATS.values())} FP8 formats")


@pytest.mark.parametrize(
    "name", ["README.md", "docs/formats.md", "docs/flashmla-on-hopper.md", "docs/dsa.md"]
)
def test_pages_that_list_formats_list_all(name: str) -> None:
    text = (ROOT / name).read_text()
    wanted = {each for each, record in FORMATS.items() if record.named}
    assert wanted <= set(re.findall(r"`\"?(\w+)\"?`", text))


def test_bytes_of_a_token_are_the_records() -> None:
    """Of the table of formats beside FlashMLA's, and in the README's sentence."""
    page = (ROOT / "docs" / "flashmla-on-hopper.md").read_text().split("\n## Formats")[1]
    rows = re.findall(r"^\| (`.+?) \| (\d+)[:,]", page, flags=re.M)
    said = {name: int(size) for names, size in rows for name in re.findall(r"`(\w+)`", names)}
    assert said == {name: record.token_bytes for name, record in FORMATS.items() if not record.rows}

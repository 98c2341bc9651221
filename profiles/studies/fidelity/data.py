"""Text that is on this machine already: the sources of installed packages, some held out whole.

Nothing is downloaded.  A corpus is two token streams (training, held out) and a listing of the
packages with their licences.  Sequences may carry spans that a model can only continue by looking
far back: key and value pairs that are asked for later, and passages that are repeated.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import random
import string
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".py", ".pyi", ".rst", ".txt", ".md")
MAX_FILE = 1 << 20
HELD_OUT = 0.04  # of the corpus, at least, in whole packages
MAX_HELD_PACKAGE = 0.1  # a package with more of the corpus than that is trained on
UNDECLARED = "not declared"
END = 0  # token between documents, in every vocabulary
BPE_SAMPLE = 30_000_000  # bytes that the vocabulary is learned from


@dataclass(frozen=True)
class Package:
    """An installed package: ``texts`` are its files that count."""

    name: str
    version: str
    licence: str
    texts: tuple[Path, ...]


def _licence(metadata: Any) -> str:
    """In one line, from whichever field has it."""
    classified = [
        value.rpartition(" :: ")[2]
        for value in metadata.get_all("Classifier") or ()
        if value.startswith("License ::")
    ]
    for value in (
        metadata.get("License-Expression"),
        ", ".join(classified),
        metadata.get("License"),
    ):
        if value and value.strip() and "UNKNOWN" not in value:
            return str(value).strip().splitlines()[0][:80]
    return UNDECLARED


def _counts(path: Path) -> bool:
    return path.suffix in SUFFIXES and path.is_file() and 0 < path.stat().st_size <= MAX_FILE


def installed() -> list[Package]:
    """Distributions with texts under an open licence, and the standard library, by name."""
    found: dict[str, Package] = {}
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]
        if not name or name in found:
            continue
        paths = sorted({Path(str(each.locate_file(file))) for file in each.files or ()})
        texts = tuple(path for path in paths if _counts(path))
        licence = _licence(each.metadata)
        if texts and licence != UNDECLARED and "proprietary" not in licence.lower():
            found[name] = Package(name, each.version, licence, texts)
    root = Path(sysconfig.get_paths()["stdlib"])
    outside = {"site-packages", "dist-packages", "__pycache__"}
    texts = tuple(
        path
        for path in sorted(root.rglob("*"))
        if not outside.intersection(path.relative_to(root).parts) and _counts(path)
    )
    found["python"] = Package("python", sysconfig.get_python_version(), "PSF-2.0", texts)
    return sorted(found.values(), key=lambda package: package.name.lower())


def _order(text: str) -> bytes:
    """A fixed order that depends on nothing but the text."""
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Document:
    package: str
    path: Path
    size: int


def choose(packages: Iterable[Package], limit: int) -> tuple[list[Document], list[Document]]:
    """(training, held out) documents: about ``limit`` bytes, the same part of each package.

    Whole packages are held out.  A file whose bytes are in both parts (vendored copies) is held
    out only, and none counts twice.
    """
    packages = list(packages)
    sizes = {p.name: sum(path.stat().st_size for path in p.texts) for p in packages}
    share = min(1.0, limit / max(1, sum(sizes.values())))
    held: set[str] = set()
    for package in sorted(packages, key=lambda p: _order(p.name)):
        if sum(sizes[name] for name in held) >= HELD_OUT * sum(sizes.values()):
            break
        if sizes[package.name] <= MAX_HELD_PACKAGE * sum(sizes.values()):
            held.add(package.name)
    seen: set[bytes] = set()
    parts: tuple[list[Document], list[Document]] = ([], [])
    for package in sorted(packages, key=lambda p: p.name not in held):
        budget = share * sizes[package.name]
        for path in sorted(
            package.texts, key=lambda path: _order(path.name + str(path.parent.name))
        ):
            raw = path.read_bytes()
            digest = hashlib.sha256(raw).digest()
            if digest in seen or budget <= 0:
                continue
            seen.add(digest)
            budget -= len(raw)
            parts[package.name in held].append(Document(package.name, path, len(raw)))
    return parts


# ------------------------------------------------------------------------------- vocabulary


class Tokenizer(Protocol):
    """Text to ids below ``size`` and back; ``END`` is no text's."""

    size: int
    kind: str

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class Bytes:
    """A byte is a token: what there is without the tokenizers library."""

    kind = "bytes"

    def __init__(self, size: int) -> None:
        self.size = max(size, 257)

    def encode(self, text: str) -> list[int]:
        return [byte + 1 for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i - 1 for i in ids if 0 < i < 257).decode(errors="replace")


class ByteLevelBpe:
    """The tokenizers library's byte-level BPE."""

    kind = "byte-level BPE"

    def __init__(self, library: Any) -> None:
        self._library, self.size = library, library.get_vocab_size()

    @classmethod
    def learn(cls, texts: Iterator[str], size: int) -> ByteLevelBpe:
        import tokenizers

        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<|end|>"], initial_alphabet=sorted(alphabet),
            show_progress=False,
        )  # fmt: skip
        made.train_from_iterator(texts, trainer)
        return cls(made)

    @classmethod
    def load(cls, path: Path) -> ByteLevelBpe:
        import tokenizers

        return cls(tokenizers.Tokenizer.from_file(str(path)))

    def save(self, path: Path) -> None:
        self._library.save(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._library.encode(text).ids)

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        return [each.ids for each in self._library.encode_batch_fast(texts)]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._library.decode(list(ids)))


def have_tokenizers() -> bool:
    """Whether the tokenizers library is installed."""
    return importlib.util.find_spec("tokenizers") is not None


def _text(document: Document) -> str:
    return document.path.read_bytes().decode("utf-8", errors="replace")


def _tokenizer(documents: list[Document], size: int, folder: Path) -> Tokenizer:
    """Learned from the training texts; bytes if the library is not installed."""
    if not have_tokenizers():
        return Bytes(size)
    every = max(1, sum(d.size for d in documents) // BPE_SAMPLE)
    made = ByteLevelBpe.learn((_text(d) for d in documents[::every]), size)
    made.save(folder / "tokenizer.json")
    return made


def _stream(documents: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    """All documents in a fixed shuffled order, ``END`` behind each, uint16."""
    ordered = sorted(documents, key=lambda d: _order(f"{d.package}/{d.path.name}/{d.size}"))
    parts: list[np.ndarray] = []
    for begin in range(0, len(ordered), 512):
        texts = [_text(d) for d in ordered[begin : begin + 512]]
        many = getattr(tokenizer, "encode_many", None)
        for ids in many(texts) if many else map(tokenizer.encode, texts):
            parts.append(np.array([*ids, END], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint16)


# ----------------------------------------------------------------------------------- corpus


@dataclass(frozen=True)
class Corpus:
    """Token streams and what they are made of.

    Attributes:
        train, held: uint16 token streams.
        tokenizer: their vocabulary.
        listing: packages with version, licence, files, bytes, held out or not.
    """

    train: np.ndarray
    held: np.ndarray
    tokenizer: Tokenizer
    listing: dict[str, Any]

    @classmethod
    def build(
        cls, folder: Path, limit: int, vocabulary: int, packages: Iterable[Package] | None = None
    ) -> Corpus:
        """Gathers, learns the vocabulary, encodes and writes ``folder``; or reads what is there."""
        kind = ByteLevelBpe.kind if have_tokenizers() else Bytes.kind
        wanted = {"limit": limit, "vocabulary": vocabulary, "tokenizer": kind}
        listed = folder / "listing.json"
        if listed.exists():
            listing = json.loads(listed.read_text())
            if {key: listing[key] for key in wanted} == wanted:
                return cls.load(folder)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = list(installed() if packages is None else packages)
        parts = choose(chosen, limit)
        tokenizer = _tokenizer(parts[0], vocabulary, folder)
        streams = [_stream(part, tokenizer) for part in parts]
        for name, stream in zip(("train", "held"), streams, strict=True):
            np.save(folder / f"{name}.npy", stream)
        listing = wanted | {
            "tokens": {"train": len(streams[0]), "held": len(streams[1])},
            "sha256": hashlib.sha256(b"".join(s.tobytes() for s in streams)).hexdigest(),
            "packages": [
                row
                for held, part in enumerate(parts)
                for row in _rows(chosen, part, held_out=bool(held))
            ],
        }
        listed.write_text(json.dumps(listing, indent=1) + "\n")
        return cls(streams[0], streams[1], tokenizer, listing)

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Of a folder that ``build`` wrote."""
        listing = json.loads((folder / "listing.json").read_text())
        tokenizer: Tokenizer = Bytes(listing["vocabulary"])
        if listing["tokenizer"] == ByteLevelBpe.kind:
            tokenizer = ByteLevelBpe.load(folder / "tokenizer.json")
        train, held = (np.load(folder / f"{n}.npy", mmap_mode="r") for n in ("train", "held"))
        return cls(train, held, tokenizer, listing)


def _rows(packages: list[Package], part: list[Document], held_out: bool) -> list[dict[str, Any]]:
    """The listing of one part."""
    rows = []
    for package in packages:
        mine = [d for d in part if d.package == package.name]
        if mine:
            row = asdict(package) | {"files": len(mine), "bytes": sum(d.size for d in mine)}
            del row["texts"]
            rows.append(row | {"held_out": held_out})
    return rows


# ---------------------------------------------------------------------------------- samples


def pair(rng: random.Random) -> tuple[str, str]:
    """A key and its value: five letters, five digits."""
    key = "".join(rng.choices(string.ascii_lowercase, k=5))
    return key, "".join(rng.choices(string.digits, k=5))


def fact(key: str, value: str) -> str:
    """How a pair is told."""
    return f"\n# note: {key} = {value}\n"


def question(key: str) -> str:
    """What the value follows at once."""
    return f"\n# recall: {key} ="


def answer(value: str) -> str:
    return f" {value}"


class Sampler:
    """Sequences of a stream, with or without spans; the same for the same seed and index."""

    def __init__(self, stream: np.ndarray, tokenizer: Tokenizer, seed: int) -> None:
        self.stream, self.tokenizer, self.seed = stream, tokenizer, seed

    def rng(self, *index: object) -> random.Random:
        return random.Random(":".join(map(str, (self.seed, *index))))

    def window(self, rng: random.Random, length: int) -> list[int]:
        """Consecutive tokens from anywhere; the stream repeats where it is too short."""
        begin = rng.randrange(max(1, len(self.stream) - length + 1))
        found = self.stream[begin : begin + length].tolist()
        while len(found) < length:
            found += self.stream[: length - len(found)].tolist()
        return list(found)

    def batch(self, step: int, sequences: int, length: int, spans: float) -> Tensor:
        """(sequences, length) int64 of a training step."""
        rows = []
        for i in range(sequences):
            rng = self.rng(step, i)
            if rng.random() >= spans:
                rows.append(self.window(rng, length))
            elif rng.random() < 0.7:
                rows.append(self.with_pairs(rng, length))
            else:
                rows.append(self.with_copies(rng, length))
        return torch.tensor(rows)

    def with_pairs(self, rng: random.Random, length: int) -> list[int]:
        """Facts anywhere in the text, each asked for somewhere behind it."""
        encode = self.tokenizer.encode
        inserts: list[tuple[int, list[int]]] = []
        room = length // 2
        while room > 0:
            key, value = pair(rng)
            told, asked = encode(fact(key, value)), encode(question(key) + answer(value))
            first, second = sorted(rng.sample(range(length), 2))
            inserts += [(first, told), (second, asked)]
            room -= (len(told) + len(asked)) * max(1, length // 2048)
        return _woven(self.window(rng, length), inserts)[:length]

    def with_copies(self, rng: random.Random, length: int) -> list[int]:
        """Passages that come again."""
        text = self.window(rng, length)
        size = min(128, length // 4)
        for _ in range(max(1, length // 1024)):
            source = rng.randrange(length - 2 * size)
            target = rng.randrange(source + size, length - size + 1)
            text[target : target + size] = text[source : source + size]
        return text

    def needle(
        self, rng: random.Random, length: int, depth: float, decoys: int = 4
    ) -> tuple[list[int], list[int]]:
        """(context that ends with the question, answer), ``length`` tokens together.

        The fact stands at ``depth`` (0: first, 1: last) among ``decoys`` others.
        """
        encode = self.tokenizer.encode
        key, value = pair(rng)
        told, asked, wanted = encode(fact(key, value)), encode(question(key)), encode(answer(value))
        others = [encode(fact(*pair(rng))) for _ in range(decoys)]
        room = length - sum(map(len, (told, asked, wanted, *others)))
        if room < 0:
            raise ValueError(f"length: expected at least {length - room} tokens, got {length}")
        inserts = [(round(depth * room), told)]
        inserts += [(rng.randrange(room + 1), other) for other in others]
        return _woven(self.window(rng, room), inserts) + asked, wanted


def _woven(text: list[int], inserts: list[tuple[int, list[int]]]) -> list[int]:
    """The text with each insert before the token of that index."""
    found, begin = [], 0
    for place, tokens in sorted(inserts):
        found += text[begin:place] + tokens
        begin = place
    return found + text[begin:]

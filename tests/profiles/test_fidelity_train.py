"""The study's corpus, training and checkpoints."""

from __future__ import annotations

import dataclasses
import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from profiles.fidelity import checkpoint, data
from profiles.fidelity.data import END, Bytes, Corpus, Package, Sampler
from profiles.fidelity.train import Trainer
from tests.support.fidelity import RECIPE, small_model, some_tokens

QUIET = Console(file=io.StringIO())


@pytest.fixture
def packages(tmp_path: Path) -> list[Package]:
    """Twenty packages of unlike texts, one of them large; ``copier`` carries p3's file."""
    made = []
    for i in range(20):
        rng = random.Random(i)
        size = 3000 if i else 40_000
        path = tmp_path / "packages" / f"p{i}" / "module.py"
        path.parent.mkdir(parents=True)
        path.write_text("".join(rng.choices("abcdefgh ()\n", k=size)))
        made.append(Package(f"p{i}", "1", "MIT", (path,)))
    return made


@pytest.fixture
def corpus(packages: list[Package], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr(data, "have_tokenizers", lambda: False)
    return Corpus.build(tmp_path / "corpus", 100_000, 257, packages)


# ----------------------------------------------------------------------------------- corpus


def test_whole_packages_are_held_out(packages: list[Package]) -> None:
    train, held = data.choose(packages, 1 << 30)
    trained, kept = ({d.package for d in part} for part in (train, held))
    assert kept and not trained & kept and trained | kept == {p.name for p in packages}
    total = sum(d.size for d in train + held)
    assert sum(d.size for d in held) >= data.HELD_OUT * total and "p0" in trained


def test_a_vendored_copy_of_a_held_out_file_is_not_trained_on(
    packages: list[Package], tmp_path: Path
) -> None:
    _, held = data.choose(packages, 1 << 30)
    copy = tmp_path / "vendored.py"
    copy.write_bytes(held[0].path.read_bytes())
    other = tmp_path / "other.py"
    other.write_text("x = 1\n")
    vendor = Package("p0", "1", "MIT", (copy, other, *packages[0].texts))
    train, again = data.choose([vendor, *packages[1:]], 1 << 30)
    assert {d.package for d in again} == {d.package for d in held}
    assert other in {d.path for d in train} and copy not in {d.path for d in train}


def test_the_limit_takes_the_same_part_of_each(packages: list[Package], tmp_path: Path) -> None:
    many = []
    for i in range(50):
        path = tmp_path / f"part{i}.txt"
        path.write_text(f"{i}" * 400)
        many.append(path)
    train, held = data.choose([*packages, Package("many", "1", "MIT", tuple(many))], 58_000)
    taken = sum(d.size for d in [*train, *held] if d.package == "many")
    whole = sum(path.stat().st_size for path in many)
    assert 0.4 * whole < taken < 0.6 * whole


def test_installed_packages_are_open_and_named() -> None:
    """What pytest itself is made of is there; nothing proprietary is."""
    found = {p.name.lower(): p for p in data.installed()}
    assert found["pytest"].licence == "MIT" and found["python"].texts
    assert not [p.name for p in found.values() if "proprietary" in p.licence.lower()]
    assert all(path.suffix in data.SUFFIXES for p in found.values() for path in p.texts)


def test_a_corpus_is_read_as_it_was_built(
    corpus: Corpus, packages: list[Package], tmp_path: Path
) -> None:
    again = Corpus.build(tmp_path / "corpus", 100_000, 257, [])
    assert np.array_equal(again.train, corpus.train) and again.listing == corpus.listing
    assert corpus.listing["tokenizer"] == "bytes" and corpus.tokenizer.size == 257
    assert (corpus.held == END).sum() == sum(r["held_out"] for r in corpus.listing["packages"])
    texts = corpus.tokenizer.decode(corpus.held.tolist())
    held = {r["name"] for r in corpus.listing["packages"] if r["held_out"]}
    assert all(p.texts[0].read_text() in texts for p in packages if p.name in held)


def test_bpe_of_the_library(packages: list[Package], tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    corpus = Corpus.build(tmp_path / "bpe", 100_000, 300, packages)
    assert corpus.listing["tokenizer"] == "byte-level BPE" and corpus.tokenizer.size == 300
    text = "# a line\n\tünïcode = '\u20ac'\n"
    ids = Corpus.load(tmp_path / "bpe").tokenizer.encode(text)
    assert corpus.tokenizer.decode(ids) == text and END not in ids


# ---------------------------------------------------------------------------------- samples


def sampler(seed: int = 0) -> Sampler:
    return Sampler(np.arange(5000, dtype=np.uint16) % 89 + 33, Bytes(257), seed)


def test_batches_depend_on_seed_and_step_alone() -> None:
    one = sampler().batch(3, 4, 300, 0.5)
    sampler().batch(2, 4, 300, 0.5)
    assert torch.equal(sampler().batch(3, 4, 300, 0.5), one) and one.shape == (4, 300)
    assert not torch.equal(sampler().batch(4, 4, 300, 0.5), one)
    assert not torch.equal(sampler(1).batch(3, 4, 300, 0.5), one)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_is_where_it_says(depth: float) -> None:
    made = sampler()
    context, wanted = made.needle(made.rng("x"), 900, depth)
    text, value = made.tokenizer.decode(context), made.tokenizer.decode(wanted).strip()
    assert len(context) + len(wanted) == 900
    key = text.rpartition("# recall: ")[2].removesuffix(" =")
    told = data.fact(key, value)
    assert text.count(told) == 1 and text.count("# note: ") == 5 and text.endswith(f"{key} =")
    others = 4 * len(told)  # decoys may stand before it
    place = len(made.tokenizer.encode(text[: text.index(told)]))
    assert depth * 700 - 1 <= place <= depth * 900 + others


def test_pairs_are_told_before_they_are_asked_for() -> None:
    made = sampler()
    text = made.tokenizer.decode(made.with_pairs(made.rng(0), 2000))
    asked = [line for line in text.splitlines() if line.startswith("# recall: ")]
    answered = 0
    for line in asked:
        key, _, value = line.removeprefix("# recall: ").partition(" = ")
        first = text.find(data.fact(key, value[:5]))
        answered += 0 <= first < text.index(line)
    assert len(asked) >= 8 and answered >= len(asked) - 1, "the last may be cut off"


def test_copies_come_again() -> None:
    made = sampler()
    tokens = made.with_copies(made.rng(5), 400)
    plain = made.window(made.rng(5), 400)
    changed = [i for i in range(400) if tokens[i] != plain[i]]
    size = 100
    first = changed[0]
    begin = max(0, first - size)
    assert any(
        tokens[source : source + size] == tokens[target : target + size]
        for target in range(begin, min(first + 1, 301))
        for source in range(target - size + 1)
    )


# --------------------------------------------------------------------------------- training


def trainer(corpus: Corpus, folder: Path, seed: int = 3) -> Trainer:
    return Trainer("tiny", RECIPE, corpus, seed, folder, torch.device("cpu"))


def test_what_was_stopped_goes_on_to_the_same_bits(corpus: Corpus, tmp_path: Path) -> None:
    straight = trainer(corpus, tmp_path / "straight")
    assert straight.run(1e9, QUIET)
    for _ in range(RECIPE.steps - 1):
        assert not trainer(corpus, tmp_path / "cut").run(0.0, QUIET), "one step a call"
    last = trainer(corpus, tmp_path / "cut")
    assert last.step == RECIPE.steps - 1 and last.run(1e9, QUIET)
    assert last.losses == straight.losses
    assert not torch.are_deterministic_algorithms_enabled(), "the setting is others' too"
    files = [tmp_path / kind / "tiny.0.pack" for kind in ("straight", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    _, facts = checkpoint.load(tmp_path / "cut", "tiny")
    assert facts["steps"] == 6 and facts["trained_length"] == 96
    assert facts["corpus"]["sha256"] == corpus.listing["sha256"]


def test_a_model_learns(corpus: Corpus, tmp_path: Path) -> None:
    phase = dataclasses.replace(RECIPE.phases[0], steps=25, spans=0.0)
    made = trainer(corpus, tmp_path)
    made.recipe = dataclasses.replace(made.recipe, phases=(phase,))
    made.run(1e9, QUIET)
    assert made.losses[0] == pytest.approx(np.log(257), rel=0.02)
    assert made.losses[-1] < 3.5 and made.held_out_loss() < 3.5


def test_rates_warm_up_and_fall_in_each_phase(corpus: Corpus, tmp_path: Path) -> None:
    made = trainer(corpus, tmp_path)
    rates = []
    for made.step in range(RECIPE.steps):
        rates.append(made.rate())
    assert rates[0] == pytest.approx(0.005) and rates[1] > rates[2] > rates[3]
    assert rates[4] == pytest.approx(0.01) and rates[5] < rates[4]


# ------------------------------------------------------------------------------ checkpoints


def test_a_packed_model_is_near_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD", 20_000)
    model = small_model()
    files = checkpoint.save(model, tmp_path, "m", {"note": 1})
    assert len(files) > 3 and max(file.stat().st_size for file in files) <= 20_000
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(file.stat().st_size for file in files) < 1.1 * parameters + 10_000
    loaded, facts = checkpoint.load(tmp_path, "m", torch.float32)
    assert facts["note"] == 1 and loaded.config == model.config
    for (name, a), b in zip(model.named_parameters(), loaded.parameters(), strict=True):
        step = a.abs().amax(-1, keepdim=True) / 127 if a.ndim == 2 else torch.zeros(1)
        assert ((a - b).abs() <= 0.501 * step).all(), name
    again = checkpoint.save(loaded, tmp_path, "again", {})
    assert [f.read_bytes() for f in again[:-1]] == [f.read_bytes() for f in files[:-1]]
    assert torch.isfinite(loaded(some_tokens(8))[0]).all()
    files[1].unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint.load(tmp_path, "m")

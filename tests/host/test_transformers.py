"""``snapmla.integrations.transformers``: transformers' own models drive it; what it relies on is on
record.

The models need a release of transformers (``python -m tests.support.fetch_transformers``; the log
of the last run is profiles/results/transformers-contract.md).  The rest never skips.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
from snapmla.integrations.transformers import attention, surface
from snapmla.integrations.transformers.pool import Pool
from tests.support import ROOT, fetch_transformers
from tests.support.needs import needs_compiler

HOME = ROOT / "snapmla" / "integrations" / "transformers"
CACHE = "transformers.cache_utils:"
NEWEST = fetch_transformers.RELEASES[-1]
RUNS = [
    pytest.param(NEWEST, ("v3",), id=f"{NEWEST}-v3"),
    *(
        pytest.param(release, (), id=release, marks=pytest.mark.whole_matrix)
        for release in fetch_transformers.RELEASES
    ),
]

# --------------------------------------------------------------------------- transformers' models


@needs_compiler
@pytest.mark.parametrize(("release", "cases"), RUNS)
def test_transformers_own_models(release: str, cases: tuple[str, ...]) -> None:
    path = fetch_transformers.path_of(release)
    if path is None:
        pytest.skip(f"transformers {release}: python -m tests.support.fetch_transformers")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.transformers_driver", *cases],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, path)))},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.startswith(f"transformers {release},")
    assert done.stdout.endswith("all right\n")


# -------------------------------------------------------------------------------------- the record


def defined(file: str) -> dict[str, ast.FunctionDef]:
    """Functions and methods of a file of ours."""
    tree = ast.parse((HOME / file).read_text())
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            inside = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{each.name}": each for each in inside}
    return found


def positional(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in function.args.args]


RECORDED = surface.recorded()


def test_releases_are_on_record() -> None:
    assert tuple(RECORDED) == fetch_transformers.RELEASES
    for record in RECORDED.values():
        assert set(record) == set(surface.RELIED)
        absent = {name.rpartition(":")[2] for name, value in record.items() if value is False}
        of_other = {name.rpartition(".")[2] for name in absent}
        assert of_other in ({"update", "update_indexer"}, {"update"}), absent
        assert all("@" in name for name in absent), absent


@pytest.mark.parametrize("release", RECORDED)
def test_cache_layers_override_what_transformers_calls(release: str) -> None:
    """With its names for what it passes, in its order."""
    ours, record = defined("cache.py"), RECORDED[release]
    theirs = {
        name.rpartition(".")[2]: value
        for name, value in record.items()
        if name.startswith((f"{CACHE}CacheLayerMixin.", f"{CACHE}DynamicLayer.",
                            f"{CACHE}DynamicIndexedLayer."))
    }  # fmt: skip
    theirs.pop("crop")  # of the whole cache
    for name, wanted in theirs.items():
        method = ours[f"Layer.{name}"]
        got = positional(method) + (["args", "kwargs"] if method.args.kwarg else [])
        assert got == wanted, name
    for name in ("reset", "crop"):
        assert positional(ours[f"SnapMLACache.{name}"]) == record[f"{CACHE}Cache.{name}"]


@pytest.mark.parametrize("kind", surface.MODELS)
@pytest.mark.parametrize("release", RECORDED)
def test_layers_call_what_we_put_in_their_place(release: str, kind: str) -> None:
    record, name = RECORDED[release], surface.MODELS[kind]
    at = f"transformers.models.{kind}.modeling_{kind}:{name}"
    layer = f"{at}Attention.forward"
    assert record[f"{at}Attention.expand_kv"] == ["self", "kv_nope", "k_rot"]
    assert len(listed(record[f"{layer}@self.expand_kv"])) == 2
    ours = defined("attention.py")["attention"]
    call = listed(record[f"{layer}@attention_interface"])
    assert call[0] == "self" and len([word for word in call if word[-1] not in "=*"]) == 5
    words = {word[:-1] for word in call if word.endswith("=")}
    assert words <= {*positional(ours)[5:]} and ours.args.kwarg is not None
    assert ("indices" in words) == (kind in surface.DSA)
    writes = [record[f"{layer}@{cache}.update"] for cache in ("cache", "past_key_values")]
    (write,) = [each for each in writes if each]
    assert [each for each in listed(write) if "=" not in each][2:] == ["self.layer_idx"]
    given = listed(record[f"{at}ForCausalLM.forward@self.model"])
    assert given[-1] == "**" and all(word.endswith("=") for word in given[:-1])
    assert {"input_ids=", "attention_mask=", "inputs_embeds="} <= set(given)
    assert ("cache=" in given) != ("past_key_values=" in given)


def listed(value: Any) -> list[str]:
    assert isinstance(value, list)
    return value


@pytest.mark.parametrize("release", RECORDED)
def test_masks_are_asked_for_as_ours_is_written(release: str) -> None:
    record = RECORDED[release]
    call = listed(record["transformers.masking_utils:create_causal_mask@mask_interface"])
    assert "allow_is_causal_skip=" in call and all(word[-1] in "=*" for word in call)
    eager = listed(record["transformers.masking_utils:eager_mask"])
    assert {word[:-1] for word in call if word[-1] == "="} - {"allow_is_causal_skip"} <= {
        *eager, "config", "local_size", "allow_torch_fix", "position_ids", "layer_idx",
    }  # fmt: skip


def test_differences_are_told() -> None:
    known: surface.Surface = {"m:f": ["a", "b"], "m:g": True}
    assert surface.differences(known, known) == []
    assert surface.differences({"m:f": ["a"], "m:g": True}, known) == ["m:f: (a, b) is (a) here"]


def test_what_is_read_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "an_engine_of_ours"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "layer.py").write_text(
        "import nothing_of_this_name\nclass Layer:\n    def forward(self, x, **more):\n"
        "        return self.f(x, 1, scale=x, **more) + self.f(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "an_engine_of_ours.layer:Layer.forward"
    assert surface._described(name) == ["self", "x", "more"]
    assert surface._described(f"{name}@self.f") == ["x", "1", "scale=", "**"]
    assert surface._described(f"{name}@self.g") is False
    assert surface._described("an_engine_of_ours.layer:Layer") is True
    assert surface._described("an_engine_of_ours.layer:Other") is False


def test_nothing_of_transformers_is_imported_before_it_is_asked_for() -> None:
    """But by the files behind the package's names."""
    found = set()
    for path in HOME.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {getattr(node, "module", None) for node in ast.walk(tree)}
        for node in ast.walk(tree):
            names |= {each.name for each in node.names} if isinstance(node, ast.Import) else set()
        if any(str(name).split(".")[0] == "transformers" for name in names):
            found.add(path.name)
    assert found == {"cache.py", "patching.py"}
    tree = ast.parse((HOME / "__init__.py").read_text())
    top = {ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    assert all("snapmla" not in each for each in top)


# ------------------------------------------------------------------------------------- a layer


@needs_compiler
@pytest.mark.parametrize("new", [1, 2])
def test_a_step_is_compared_with_what_its_tokens_see(
    monkeypatch: pytest.MonkeyPatch, new: int
) -> None:
    """The pool's limits of the step reach the decode; of one query token a sequence there are
    none."""
    pool, seen = new_pool(), list[Any]()

    def decode(*given: Any, **named: Any) -> Any:
        seen.append((given, named))
        return torch.zeros(2, new, 16, 512), None

    monkeypatch.setattr(snapmla, "decode", decode)
    module = types.SimpleNamespace(
        kv_b_proj=types.SimpleNamespace(weight=torch.zeros(16 * 24, 512)), qk_nope_head_dim=16
    )
    key = torch.zeros(2, 1, new, 512)
    setattr(key, attention.TAG, types.SimpleNamespace(pool=pool, cache=None))
    pool.begin(new, padded((0, 1), new))
    made, _ = attention.attention(
        module, torch.zeros(2, 16, new, 80), key, torch.zeros(2, 1, new, 64), None, scaling=0.1
    )
    assert made.shape == (2, new, 16, 8)
    [(given, named)] = seen
    assert given[3] is pool.lengths and named["plan"] is pool.plan()
    limits = named["row_seqlens"]
    assert limits is None if new == 1 else limits.tolist() == [[1, 2], [0, 1]]


# ---------------------------------------------------------------------------------------- the pool

PAGE, ROOM = 16, 40  # 3 pages of a sequence


def new_pool() -> Pool:
    return Pool(2, ROOM, 16, PAGE, torch.device("cpu"))


def padded(counts: tuple[int, int], positions: int) -> torch.Tensor:
    """attention_mask with so many pads in front."""
    mask = torch.ones(2, positions, dtype=torch.long)
    for row, count in enumerate(counts):
        mask[row, :count] = 0
    return mask


@needs_compiler
def test_tokens_are_cached_without_pads() -> None:
    pool = new_pool()
    pool.begin(5, padded((0, 2), 5))
    assert pool.lengths.tolist() == [5, 3] and pool.before.tolist() == [0, 0]
    assert pool.slots.tolist() == [0, 1, 2, 3, 4, -1, -1, 48, 49, 50]
    assert pool.query_positions().tolist() == [0, 1, 2, 3, 4]
    pool.end()
    pool.begin(1, padded((0, 2), 6))
    assert pool.lengths.tolist() == [6, 4] and pool.before.tolist() == [5, 3]
    assert pool.slots.tolist() == [5, 51] and pool.query_positions().tolist() == [5]
    assert pool.slot_of[:, :7].tolist() == [[0, 1, 2, 3, 4, 5, -1], [-1, -1, 48, 49, 50, 51, -1]]
    assert (pool.seen, int(pool.position), pool.extent) == (6, 6, 6)
    assert pool.allowed()[:, 0].tolist() == [[True] * 6, [False] * 2 + [True] * 4]


@needs_compiler
def test_pads_may_be_anywhere() -> None:
    pool = new_pool()
    pool.begin(4, torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]))
    assert pool.slots.tolist() == [0, -1, 1, -1, 48, 49, 50, 51]
    rows, begin = pool.packed()
    assert rows is not None and rows.tolist() == [0, 2, 4, 5, 6, 7]
    assert begin.tolist() == [0, 2, 6] and pool.has_pads()
    pool.end()
    pool.begin(3, None)
    assert pool.slots.tolist() == [2, 3, 4, 52, 53, 54]
    assert pool.packed()[0] is None and pool.packed()[1].tolist() == [0, 3, 6]
    assert pool.has_pads()


@needs_compiler
def test_what_an_indexer_chose_becomes_slots() -> None:
    """Not pads, nothing behind the query's own position, in the order in which it came."""
    pool = new_pool()
    pool.begin(6, padded((0, 3), 6))
    pool.end()
    pool.begin(2, None)
    chosen = torch.tensor([[[0, 6, 7], [7, 3, 6]], [[2, 3, 6], [1, 7, 5]]], dtype=torch.int32)
    assert pool.chosen_slots(chosen).tolist() == [
        [[0, 6, -1], [7, 3, 6]], [[-1, 48, 51], [-1, 52, 50]],
    ]  # fmt: skip
    assert pool.chosen_slots(chosen).dtype == torch.int32


@needs_compiler
def test_positions_may_be_forgotten() -> None:
    pool = new_pool()
    pool.begin(6, padded((0, 4), 6))
    pool.end()
    pool.crop(3)
    assert (pool.seen, int(pool.position)) == (3, 3) and pool.lengths.tolist() == [3, 0]
    assert pool.slot_of[:, :5].tolist() == [[0, 1, 2, -1, -1], [-1] * 5]
    with pytest.raises(ValueError, match="tokens_to_remove"):
        pool.crop(4)
    pool.begin(2, None)
    assert pool.slots.tolist() == [3, 4, 48, 49]
    pool.end()
    pool.reset()
    assert (pool.seen, int(pool.position)) == (0, 0) and not pool.lengths.any()
    assert (pool.slot_of == -1).all()


@needs_compiler
def test_what_has_no_room_changes_nothing() -> None:
    pool = new_pool()
    pool.begin(ROOM, None)
    pool.end()
    pool.crop(1)
    with pytest.raises(ValueError, match=r"at most 40 positions, pads included, got 39 \+ 2"):
        pool.begin(2, None)
    with pytest.raises(ValueError, match=r"attention_mask.*\(2, 40\).*\(2, 1\)"):
        pool.begin(1, torch.ones(2, 1))
    assert pool.seen == 39 and pool.lengths.tolist() == [39, 39] and not pool.failed
    pool.begin(1, None)
    with pytest.raises(ValueError, match="stopped half way"):
        pool.begin(1, None)


@needs_compiler
def test_extents_may_be_those_of_the_whole_cache() -> None:
    """As a graph wants them: nothing of a step's shapes follows from what was seen."""
    pool = new_pool()
    pool.begin(3, None)
    pool.end()
    pool.fixed = True
    pool.begin(1, None)
    assert pool.extent == ROOM and pool.allowed().shape == (2, 1, ROOM)
    assert pool.allowed().sum() == 8 and pool.query_positions().tolist() == [3]

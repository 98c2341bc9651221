"""The table of environment variables is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from snapmla.runtime import env

QUOTED = re.compile(r"""["']((?:SNAPMLA|SOFTGPU)_[A-Z_]+)["']""")
SOFTGPU_OPTION = re.compile(r"""_environment\(["']([A-Z_]+)["']""")


WHEEL = env.Place("an installed wheel", Path("wheel/variants"), False)
REFUSED = env.Place("an older wheel", Path("other/variants"), False, "of another release")


def used(root: Path) -> set[str]:
    """Names of the project's variables in its Python sources."""
    names: set[str] = set()
    for folder in ("snapmla", "codegen", "dsl_kernels", "softgpu", "profiles", "tests"):
        for path in (root / folder).rglob("*.py"):
            text = path.read_text()
            names.update(QUOTED.findall(text))
            names.update(f"SOFTGPU_{option}" for option in SOFTGPU_OPTION.findall(text))
    return names


def test_table_lists_what_is_read() -> None:
    listed = [variable.name for variable in env.TABLE]
    assert len(set(listed)) == len(listed)
    assert set(listed) == used(env.ROOT)
    assert all(variable.doc for variable in env.TABLE)


SWITCHES = (
    env.NO_JIT, env.CHECK_PLAN, env.PROFILE_NAMES, env.LOG, env.VLLM_SPARSE, env.TEST_GPU,
)  # fmt: skip


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_words_of_a_switch(monkeypatch: pytest.MonkeyPatch, switch: env.EnvVar) -> None:
    """On or off by known words; another is refused, as it might have been meant either way."""
    for word in ("", "0", "false", "False", " no ", "NO", "off", "Off", "n"):
        monkeypatch.setenv(switch.name, word)
        assert not switch.enabled(), word
    for word in ("1", "true", "yes", "YES", " on", "y", "Y"):
        monkeypatch.setenv(switch.name, word)
        assert switch.enabled(), word
    for word in ("00", "disabled", "2", "nope", "t"):
        monkeypatch.setenv(switch.name, word)
        known = "1, true, yes, on, y, 0, false, no, off, n"
        words = f"{switch.name}: expected one of {known}, got {word!r}"
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            switch.enabled()
    monkeypatch.delenv(switch.name)
    assert switch.enabled() == (switch.default == "1")


@pytest.mark.parametrize("home", [True, False])
def test_a_bundle_comes_before_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: bool
) -> None:
    """What was packed with the package, and packages of kernels that are of the same sources, are
    searched last but for a per-user cache, if there is."""
    cache = tmp_path / "snapmla" / env.__version__ / "variants"
    packed = env.PACKAGE / "variants"
    monkeypatch.setenv("SNAPMLA_VARIANT_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr(env, "is_checkout", lambda: False)
    monkeypatch.setattr(env, "cache_home", lambda: tmp_path if home else None)
    monkeypatch.setattr(env, "kernel_wheels", lambda: (WHEEL, REFUSED))
    found = [tmp_path / "mine", packed, WHEEL.path, *([cache] if home else [])]
    assert env.variant_dirs() == found
    assert REFUSED in env.places() and env.compile_dir() == tmp_path / "mine"


def test_the_docs_tell_where_variants_are_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the order of the search: of two builds of one variant the first is taken."""
    monkeypatch.setenv("SNAPMLA_VARIANT_DIR", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(env, "is_checkout", lambda: True)
    monkeypatch.setattr(env, "kernel_wheels", lambda: (WHEEL,))
    cache = tmp_path / "cache" / "snapmla" / env.__version__ / "variants"
    words = {
        tmp_path / "chosen": "`SNAPMLA_VARIANT_DIR`", env.ROOT / "build/variants": "the checkout's",
        env.ROOT / "snapmla/variants": "the package's own",
        WHEEL.path: "an installed `snapmla-kernels-sm90-cu13`", cache: "the user's cache folder",
    }  # fmt: skip
    assert set(env.variant_dirs()) == set(words)
    page = (env.ROOT / "docs" / "integration.md").read_text("utf-8")
    found = " ".join(page[page.index("A server finds its variants in") :].split())
    places = [found.index(words[folder]) for folder in env.variant_dirs()]
    assert places == sorted(places) and places[-1] < found.index("<!-- end")


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ({"sources": "a", "version": "1"}, {"sources": "a", "version": "2"}, True),
        ({"sources": "a", "version": "1"}, {"sources": "b", "version": "1"}, False),
        (None, {"sources": "a", "version": env.__version__}, True),
        (None, {"sources": "a", "version": "0.0.1"}, False),
        ({"sources": "a", "version": "1"}, None, False),
        (None, None, False),
    ],
)
def test_packages_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ours: dict[str, str] | None,
    theirs: dict[str, str] | None,
    fits: bool,
) -> None:
    """Those of other device sources are refused; a checkout, which notes none, goes by version."""
    for folder, note in (("snapmla", ours), ("kernels", theirs)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
        if note is not None:
            (tmp_path / folder / env.NOTE).write_text(json.dumps(note))
    info = tmp_path / "some_kernels-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-kernels\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{env.KERNELS}]\nsm90 = kernels\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(env, "PACKAGE", tmp_path / "snapmla")
    (found,) = env.kernel_wheels.__wrapped__()
    assert (found.path, found.writable) == (tmp_path / "kernels" / "variants", False)
    assert found.what == "an installed `some-kernels`"
    assert (found.refused is None) == fits

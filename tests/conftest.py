"""Shared fixtures: one directory of compiled variants per run, seeds, skips.

``--precompile`` (what ``make test`` passes) brings the whole default matrix up to date once, before
any test runs; without it a test that needs a variant compiles just that one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from codegen import artifacts, matrix, toolchain
from codegen.precompile import Report, precompile

pytest_plugins = ["softgpu.pytest_plugin", "pytester"]

HELPER_OPS = ("append_kv", "quantize_q", "fetch_dequant", "plan_decode", "merge")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--precompile", action="store_true", help="build the whole matrix before the first test"
    )


def default_matrix() -> list:
    """Everything ``make test`` compiles: all of sm_90a, the helper kernels of sm_100a."""
    helpers = [s for s in matrix.default_specs("sm_100a") if s.op in HELPER_OPS]
    return [*matrix.default_specs("sm_90a"), *helpers]


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    is_worker = hasattr(config, "workerinput")
    if not config.getoption("--precompile") or is_worker or not toolchain.have_compiler():
        return
    specs = default_matrix()
    print(f"precompiling {len(specs)} variants into {artifacts.default_dir()}", flush=True)
    report = precompile(specs, artifacts.default_dir())
    print(f"{len(report.built)} built, {len(report.reused)} up to date", flush=True)
    for (
        name,
        reasons,
    ) in report.failed.items():  # the tests of these variants report them as failures
        print(f"{name}: {'; '.join(reasons)}", flush=True)


@pytest.fixture(scope="session")
def variant_dir() -> Path:
    """Directory of built variants that the tests share."""
    return artifacts.default_dir()


@pytest.fixture(scope="session")
def built(variant_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The whole default matrix, brought up to date (at once after ``--precompile``)."""
    if not toolchain.have_compiler():
        pytest.skip("needs nvidia-cutlass-dsl")
    from filelock import FileLock

    variant_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(variant_dir / ".tests.lock"):
        return precompile(default_matrix(), variant_dir)


@pytest.fixture(autouse=True)
def _quiet_machine() -> Iterator[None]:
    """Fixed seed and one thread a process, so that parallel workers do not fight for cores."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forbids compiling at run time."""
    monkeypatch.setenv("SNAPMLA_NO_JIT", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and os.environ.get("SNAPMLA_TEST_GPU", "1") != "0":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

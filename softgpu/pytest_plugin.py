"""A pytest fixture that runs a test's kernels on the software GPU, hazard check on.

In ``conftest.py``::

    pytest_plugins = ["softgpu.pytest_plugin"]

A test that asks for ``software_gpu`` runs once with all asynchronous work landing at issue and once
with all of it as late as is allowed; each kernel it calls that ``softgpu.load`` made (``snapmla``
on CPU tensors does) runs with those options, whatever its own say, and the first hazard is raised::

    def test_my_kernel(software_gpu):
        out = torch.empty(64)
        my_kernel(x, out)                       # a softgpu.LoadedKernel
        torch.testing.assert_close(out, reference(x))

The marker ``softgpu`` chooses other schedules; the test runs for every pair of them::

    @pytest.mark.softgpu(seeds=range(10), asynchronous=("random", "late"))
    def test_my_kernel_under_stress(software_gpu): ...

    @pytest.mark.softgpu(hazards="collect", accumulate="exact")     # see softgpu.Options
    def test_without_rounding(software_gpu): ...

The value of the fixture is the ``softgpu.Options``, for ``softgpu.testing.launch(options=...)``.
Only kernels that the test's own thread calls are affected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from .accumulate import BY_NAME
from .loader import using
from .options import Options

FIXTURE = "software_gpu"
_MARKER = (
    "softgpu(seeds=(None,), asynchronous=('early', 'late'), hazards='raise', accumulate=None): "
    "the schedules in which the fixture software_gpu runs the test's kernels"
)


def schedules(
    seeds: Iterable[int | None] = (None,),
    asynchronous: Iterable[str] = ("early", "late"),
    hazards: str = "raise",
    accumulate: str | None = None,
) -> dict[str, Options]:
    """The options of every pair of landing mode and seed, by a name such as ``late-seed3``.

    Args:
        seeds: of the adversarial scheduler; None runs warps in order.
        asynchronous: ``early``, ``late``, ``random``.  hazards: ``off``, ``raise``, ``collect``.
        accumulate: ``hopper``, ``blackwell``, ``exact``; None for that of the module's target.

    Raises:
        ValueError: an unknown name, or nothing to run.
    """
    if isinstance(asynchronous, str) or isinstance(seeds, int):
        raise ValueError(
            f"softgpu: seeds and asynchronous are sequences, got {seeds!r} and {asynchronous!r}"
        )
    if accumulate is not None and accumulate not in BY_NAME:
        raise ValueError(f"softgpu: accumulate is one of {sorted(BY_NAME)}, got {accumulate!r}")
    found, modes = {}, list(asynchronous)
    arithmetic = None if accumulate is None else BY_NAME[accumulate]
    for seed in seeds:
        for mode in modes:
            name = mode if seed is None else f"{mode}-seed{seed}"
            found[name] = Options(
                accumulate=arithmetic, asynchronous=mode, seed=seed, hazards=hazards
            )
    if not found:
        raise ValueError("softgpu: seeds and asynchronous must name at least one each")
    return found


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if FIXTURE not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("softgpu")
    words: dict[str, Any] = {}
    if marker is not None:
        if marker.args:
            raise TypeError(f"pytest.mark.softgpu takes keywords only, got {marker.args!r}")
        words = dict(marker.kwargs)
    chosen = schedules(**words)
    metafunc.parametrize(FIXTURE, list(chosen.values()), ids=list(chosen), indirect=True)


@pytest.fixture
def software_gpu(request: pytest.FixtureRequest) -> Iterator[Options]:
    """Runs the kernels of the test on the software GPU with the hazard check on; see the module."""
    options: Options = getattr(request, "param", None) or Options(hazards="raise")
    with using(options):
        yield options

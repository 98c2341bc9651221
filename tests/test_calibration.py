"""``tests.support.calibration``: units of slow machines and of fast ones."""

from __future__ import annotations

import os

import pytest

from tests.support import calibration
from tests.support.calibration import COMPILE, WORK, Compiles, Cost


def test_a_unit_is_a_cpu_second_of_the_reference_machine() -> None:
    assert Cost(600.0, 1200.0, [COMPILE], [WORK]).units == pytest.approx(1800)


@pytest.mark.parametrize(("compiler", "tests"), [(1.4, 1.4), (0.7, 0.7), (1.3, 2.0)])
def test_slow_machines_agree(compiler: float, tests: float) -> None:
    """Each part is divided by how slow its own job was."""
    cost = Cost(600 * compiler, 1200 * tests, [COMPILE * compiler] * 3, [WORK * tests] * 20)
    assert cost.units == pytest.approx(1800)


def test_the_usual_measurement_counts() -> None:
    """One that was disturbed does not move the unit."""
    works = [WORK, WORK, 9 * WORK]
    assert Cost(0.0, 50.0, [], works).units == pytest.approx(50)


def test_without_a_compile_the_work_scales_all() -> None:
    assert Cost(10.0, 90.0, [], [2 * WORK]).units == pytest.approx(50)


def test_a_short_run_has_no_units() -> None:
    assert Cost(5.0, 5.0, [COMPILE], []).units is None


def test_compiles_are_measured_while_others_run() -> None:
    """At every fourth variant, three times; what imports the compiler does not count."""
    took = iter([9.0, 1.0, 2.0, 3.0])
    measured = Compiles(4, lambda: next(took))
    counts = []
    for _ in range(20):
        measured("a variant", None)
        counts.append(len(measured.seconds))
    assert measured.seconds == [1.0, 2.0, 3.0]
    assert [counts.index(n) + 1 for n in (1, 2, 3)] == [4, 8, 12]


def test_the_target_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("sm_100a", None):
        if before is None:
            monkeypatch.delenv("CUTE_DSL_ARCH", raising=False)
        else:
            monkeypatch.setenv("CUTE_DSL_ARCH", before)
        with calibration._target("sm_90a"):
            assert os.environ["CUTE_DSL_ARCH"] == "sm_90a"
        assert os.environ.get("CUTE_DSL_ARCH") == before


def test_the_work_takes_time() -> None:
    assert 0.005 < calibration.work() < 2


def test_shares_of_packages() -> None:
    found = {"tests/host/test_a.py": 30.0, "tests/host/test_b.py": 10.0, "tests/test_c.py": 10.0,
             "tests/softgpu/test_d.py": 0.0, "": 0.0}  # fmt: skip
    assert calibration.shares(found, 50.0) == (
        "CPU seconds by package: compiling 50 (50%), host 40 (40%), tests 10 (10%)"
    )

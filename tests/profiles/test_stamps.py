"""What the stamps' report makes of records; no kernel runs here (tests/kernels/test_stamps.py)."""

from __future__ import annotations

import json

import pytest
import torch

from dsl_kernels.formats.stamp import WORDS, Stamp
from profiles import stamps


def _records(*rows: tuple[int, ...]) -> torch.Tensor:
    """int32 (CTAs, WORDS) of unsigned values."""
    words = torch.zeros(len(rows), WORDS, dtype=torch.int64)
    for i, row in enumerate(rows):
        words[i, : len(row)] = torch.tensor(row)
    return (words - 2**32 * (words >= 2**31)).int()


def test_times_are_after_the_first_entry() -> None:
    times = stamps.event_times(
        _records(
            (5000, 6000, 7000, 9000, 20000, 20500, 21000, 22500),
            (4000, 6500, 8000, 9500, 19000, 20000, 24000, 21000),
            (4500, 6400),  # without work
        )
    )
    got = {name: t.tolist() for name, t in times.items()}
    assert got == {
        "entry": [1.0, 0.0, 0.5],
        "behind the PDL wait": [2.0, 2.5, 2.4],
        "first TMA issued": [3.0, 4.0],
        "first tile landed": [5.0, 5.5],
        "softmax ends": [16.0, 15.0],
        "products end": [16.5, 16.0],
        "rows written": [18.5, 20.0],  # the later half
    }


@pytest.mark.parametrize("start", [2**32 - 3000, 2**31 - 3000, 1])
def test_the_counter_may_wrap(start: int) -> None:
    rows = [tuple((start + i * 500 + j * 1000) % 2**32 for j in range(8)) for i in range(2)]
    times = stamps.event_times(_records(*rows))
    assert times["entry"].tolist() == [0.0, 0.5]
    assert times["rows written"].tolist() == [7.0, 7.5]


def test_half_a_record_is_no_time() -> None:
    """Rows of which only one half was written are not written."""
    times = stamps.event_times(_records((10, 20, 30, 40, 50, 60, 70)))
    assert len(times["softmax ends"]) == 1 and len(times["rows written"]) == 0
    with pytest.raises(ValueError, match="stamped"):
        stamps.event_times(_records((), ()))


def test_spread_is_over_ctas_then_launches() -> None:
    launches = [torch.tensor(t).double() for t in ([1, 2, 9], [2, 3, 5], [0, 4, 7])]
    assert stamps.spread(launches) == {"min": 1.0, "median": 3.0, "max": 7.0}
    assert stamps.spread([*launches, torch.tensor([])]) is None


def test_page_shows_every_event() -> None:
    words = _records(tuple(range(1000, 1000 + 700 * 8, 700)))
    events = {name: stamps.spread([t]) for name, t in stamps.event_times(words).items()}
    entry = {
        "shape": "b1_L64_h16_q1", "kernel": "x", "parts": 4, "ctas": 4, "idle_ctas": 3,
        "launches": 1, "events": {**events, "softmax ends": None}, "decode_us": 12.34,
        "merge_us": None,
    }  # fmt: skip
    report = {
        "name": "stamps", "command": "c", "commit": "abc", "created": "now",
        "machine": {"gpu": "NVIDIA H200"}, "stamps": [entry],
    }  # fmt: skip
    text = stamps.page(json.loads(json.dumps(report, allow_nan=False)))
    assert "| rows written | 4.9 / 4.9 / 4.9 |" in text and "| softmax ends | – |" in text
    assert "| decode alone, in a graph | 12.3 |" in text and "| CTAs (idle) | 4 (3) |" in text
    assert set(Stamp) == {word for which in stamps.EVENTS.values() for word in which}

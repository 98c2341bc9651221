"""What studies use within an engine's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a module, class or object with another value for a while."""
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def watched(engine: Any, note: Callable[[Any], None]) -> Iterator[None]:
    """``note`` gets what vLLM's scheduler gives out for each step, before the step runs."""
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def noted(*given: Any, **named: Any) -> Any:
        step = schedule(*given, **named)
        note(step)
        return step

    with replaced(scheduler, "schedule", noted):
        yield

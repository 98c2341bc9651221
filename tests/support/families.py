"""Families and formats with other attributes, while a test runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dsl_kernels.families import FAMILIES, FORMATS


def with_family(monkeypatch: pytest.MonkeyPatch, op: str, **attributes: Any) -> None:
    """Changes attributes of an op's family."""
    changed = dataclasses.replace(FAMILIES[op], **attributes)
    monkeypatch.setitem(FAMILIES, op, changed)


def with_format(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Changes attributes of a cache format."""
    changed = dataclasses.replace(FORMATS[name], **attributes)
    monkeypatch.setitem(FORMATS, name, changed)

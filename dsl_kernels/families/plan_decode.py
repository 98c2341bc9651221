"""``plan_decode``: the work list of a decode step; one variant an arch."""

from __future__ import annotations

from .family import helper

FAMILY = helper("plan_decode")

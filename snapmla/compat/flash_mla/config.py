"""Extents and options that a scheduling object was planned for."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from snapmla import checks


@dataclass(frozen=True)
class Config:
    """Extents and options that a ``FlashMLASchedMeta`` was planned for; it refuses other calls."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    dtype: torch.dtype
    is_fp8_kvcache: bool = False
    topk: int | None = None
    extra_page_block_size: int | None = None
    extra_topk: int | None = None


def check_config(planned: Config, asked: Config) -> None:
    """Checks that a call is like the one that planned an object."""
    for field in fields(Config):
        want, got = getattr(planned, field.name), getattr(asked, field.name)
        if want != got:
            checks.value_error(
                "tile_scheduler_metadata", f"calls like its first, {field.name} = {want}",
                f"{field.name} = {got}", "make another object by get_mla_metadata()",
            )  # fmt: skip

"""Advice for a tensor that does not fit a cache's format, by the format's record."""

from __future__ import annotations

from dsl_kernels.formats.format import Format
from dsl_kernels.formats.registered import FORMATS


def named_by_width(width: int) -> str:
    """Formats with tokens of so many bytes that are told by name alone; empty: none."""
    named = {name: each.token_bytes for name, each in FORMATS.items() if each.named}
    names = [repr(name) for name, size in named.items() if size == width]
    return "" if not names else f"format={' or '.join(names)} has {width} bytes a token"


def tokens_of(record: Format) -> str:
    """Form in which ``append_kv`` takes tokens of a format: its two arguments, of a joint row."""
    content = record.content.count
    if not record.rope_channels:
        return f"{record.about} takes joint[:, :{content}] and k_rope=None: it keeps no RoPE apart"
    return (
        f"{record.about} takes the latent alone: joint[:, :{content}], with "
        f"k_rope=joint[:, {content}:]"
    )


def fetched_of(record: Format) -> str:
    """Form in which ``fetch_dequant`` gives tokens of a format."""
    content, rope = record.content.count, record.rope_channels
    return (
        f"tokens of {record.about} are c_kv of {content} channels and k_rope of {rope}; "
        "leave out= away to have both allocated"
    )


def query_of(record: Format) -> str:
    """Sentence about the channels of a query over a format."""
    channels, rope = record.channels, record.rope_channels
    parts = f"{channels - rope}, then {rope} of RoPE" if rope else "all of them its content's"
    return f"queries over {record.about} have {channels} channels: {parts}"

"""One call of a compiled function as a file: its arguments, and what is needed to repeat it.

``SNAPMLA_DUMP`` writes such files (``snapmla.runtime.watch``), ``snapmla repro`` reads them
(``snapmla.tools.repro``).  A file holds plain data only (``torch.load(weights_only=True)``).

A pool is cut down to the pages that the call reads or writes: those that the block table names up
to each sequence's length, those of the slots, or of sparse attention's lists of tokens; tables,
slots and lists name pages of the small pool then.  Workspace is kept as shape and strides.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats import index_cache
from dsl_kernels.formats.registered import FORMATS
from snapmla._version import __version__

FORMAT = 1
_TOUCHED = ("slot_mapping", "indices", "block_table")  # of which one says what a call touches
WORKSPACE = ("o_accum", "lse_accum")  # of a decode: what they hold before it does not matter


def pools() -> tuple[str, ...]:
    """Arguments that are a pool of pages: the parts of each format, and rows as dense_decode calls
    them, or the bytes of an index cache."""
    parts = [part for each in FORMATS.values() for part in each.parts]
    return tuple(dict.fromkeys([*parts, "cache"]))


class DumpError(RuntimeError):
    """A file cannot be read or its call cannot be repeated; the message says why."""


@dataclass
class Dump:
    """One call.

    Attributes:
        variant: its name; ``op`` is the function's.
        arguments: by name, as they were before the call; results among them, since rows that a call
            leaves alone keep what they held.
        results: what the call wrote, by name; empty where it did not return or nobody looked.
        notes: what was left out, in sentences.
        facts: device, versions, time, process.
        error: the traceback of a call that failed, or empty.
    """

    variant: str
    op: str
    arguments: dict[str, Any]
    results: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    error: str = ""


# ------------------------------------------------------------------------------------- what is kept


def reduced(values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments with the pool cut down to the pages that the call touches, and a note about it.

    Args:
        values: the arguments by name, tensors on the call's device.
    """
    pool = [name for name in pools() if name in values]
    if not pool or not any(name in values for name in _TOUCHED) or not values[pool[0]].shape[0]:
        return dict(values), ()
    kept = dict(values)
    pages, page_size = values[pool[0]].shape[:2]
    if values[pool[0]].ndim == 2:  # bytes of an index cache
        page_size = index_cache.PAGE
    for name in ("slot_mapping", "indices"):
        if name in values and "topk_length" in values:
            keep, kept[name] = _pages_of_lists(values, pages, page_size)
            break
        if name in values:
            keep, kept[name] = _pages_of_slots(values[name], pages, page_size)
            break
    else:
        lengths = values.get("cache_seqlens")
        if lengths is None:  # packed chunks: as far as the last token of each that is asked for
            begin = values["cu_seqlens"]
            starts = values["seq_starts"]
            lengths = (begin[1:] - begin[:-1]) + (starts if starts.numel() else 0)
        keep, kept["block_table"] = _pages_of_table(
            values["block_table"], lengths, pages, page_size
        )
    if len(keep) == pages:
        return dict(values), ()
    for name in pool:
        kept[name] = values[name][keep]
    for name in pool:  # gaps between pages and rows are the layout's: a replay has them, too
        kept[name] = _as_strided_like(kept[name], values[name])
    return kept, (f"{len(keep)} of the pool's {pages} pages are kept, numbered anew",)


def _pages_of_slots(slots: Tensor, pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Pages that slots lie in, and the slots in a pool of those; -1 for what is outside."""
    inside = (slots >= 0) & (slots < pages * page_size)
    page = torch.where(inside, slots, 0) // page_size
    keep = torch.unique(page[inside])
    if not len(keep):
        keep = page.new_zeros(1)
    new = torch.searchsorted(keep, page) * page_size + slots % page_size
    return keep.long(), torch.where(inside, new, -1).to(slots.dtype)


def _pages_of_lists(values: Mapping[str, Any], pages: int, page_size: int) -> tuple[Tensor, Tensor]:
    """Pages that query tokens' lists of tokens name, and the lists in a pool of those.

    What is no token stays what it is, as kernels must leave it alone; behind a list's end, which of
    ragged queries is the longest one's, what names a token becomes -1.  Without lengths, as sparse
    prefill may be called, all entries count.
    """
    lists, lengths = values["indices"].flatten(0, -2), values["topk_length"]
    column = torch.arange(lists.shape[1], device=lists.device)
    each, more = divmod(len(lists), max(len(lengths), 1))
    query = next(values[name] for name in ("q_nope", "q") if name in values)
    even = not more and query.shape[0] == len(lengths)
    if not len(lengths):
        ends = torch.full((len(lists),), lists.shape[1], device=lists.device)
    else:
        ends = lengths.repeat_interleave(each) if even else lengths.amax().expand(len(lists))
    inside = (lists >= 0) & (lists < pages * page_size)
    named = inside & (column < ends[:, None])
    page = torch.where(named, lists, 0) // page_size
    keep = torch.unique(page[named])
    if not len(keep):
        keep = page.new_zeros(1)
    new = torch.searchsorted(keep, page) * page_size + lists % page_size
    new = torch.where(named, new, -1)
    made = torch.where(inside, new, lists).to(lists.dtype)
    return keep.long(), made.view(values["indices"].shape)


def _pages_of_table(
    table: Tensor, lengths: Tensor, pages: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Pages that sequences reach, and the table in a pool of those; -1 behind their ends."""
    column = torch.arange(table.shape[1], device=table.device)
    used = column[None, :] * page_size < lengths[:, None]
    ids = table.clamp(0, pages - 1)  # as kernels do
    keep = torch.unique(ids[used])
    if not len(keep):
        keep = ids.new_zeros(1)
    new = torch.where(used, torch.searchsorted(keep, ids), -1)
    return keep.long(), new.to(table.dtype)


def _as_strided_like(small: Tensor, large: Tensor) -> Tensor:
    """A tensor with the strides of another, which has more in its first dimension."""
    made = torch.empty_strided(small.shape, large.stride(), dtype=small.dtype, device=small.device)
    return made.copy_(small)


def size(values: Mapping[str, Any]) -> int:
    """Bytes that a dump of these arguments holds."""
    kept = (v for k, v in values.items() if isinstance(v, Tensor) and k not in WORKSPACE)
    return sum(_distinct(v).nbytes for v in kept)


# ---------------------------------------------------------------------------------------- the file


def _distinct(tensor: Tensor) -> Tensor:
    """The tensor without what it repeats: dimensions of stride 0 have extent 1."""
    for at, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if extent > 1 and not stride:
            tensor = tensor.narrow(at, 0, 1)
    return tensor


def pack(tensor: Tensor, keep: bool = True) -> dict[str, Any]:
    """A tensor as plain data: extents, strides, dtype and, unless ``keep`` is off, its values."""
    values = _distinct(tensor).contiguous().cpu() if keep else None
    if values is not None and values.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        values = values.clone()  # the call may write it, and a view would save the whole storage
    return {
        "shape": tuple(tensor.shape), "stride": tensor.stride(), "values": values,
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }  # fmt: skip


def unpack(packed: Mapping[str, Any], device: torch.device | str = "cpu") -> Tensor:
    """A tensor in memory of its own, strided as it was; NaN (0 of integers) if not kept."""
    shape, stride = packed["shape"], packed["stride"]
    dtype = getattr(torch, packed["dtype"])
    extents = [1 if not step else n for n, step in zip(shape, stride, strict=True)]
    extents = [min(a, b) for a, b in zip(extents, shape, strict=True)]
    made = torch.empty_strided(extents, stride, dtype=dtype, device=device)
    values = packed["values"]
    if values is not None:
        made.copy_(values)
    else:
        made.fill_(float("nan") if dtype.is_floating_point else 0)
    return made.as_strided(shape, stride)


def packed(call: Dump, results: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Packs a call for ``write``.  Copies to the CPU, so it waits for the device."""
    arguments = {
        name: pack(value, name not in WORKSPACE) if isinstance(value, Tensor) else value
        for name, value in call.arguments.items()
    }
    found = {name: pack(value) for name, value in (results or call.results).items()}
    rest = {f.name: getattr(call, f.name) for f in fields(call)}
    return rest | {"arguments": arguments, "results": found, "format": FORMAT}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file: readers see all of it or none.  Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(dict(content), file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path, device: torch.device | str = "cpu") -> Dump:
    """The call in a file, its tensors on ``device``.

    Raises:
        DumpError: there is no such file, or it is none of ours.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DumpError(f"{path}: {error.strerror}") from None
    except Exception:  # torch raises whatever the bytes lead it to
        raise DumpError(f"{path} is no dump of a call: {_damage(path)}") from None
    if not isinstance(content, dict) or "variant" not in content or "format" not in content:
        raise DumpError(f"{path} is no dump of a call")
    if content["format"] != FORMAT:
        wrote = content.get("facts", {}).get("snapmla", "another version")
        raise DumpError(
            f"{path} has format {content['format']} of snapmla {wrote}, this one ({__version__}) "
            f"reads format {FORMAT}"
        )
    try:
        arguments = {
            name: unpack(value, device) if isinstance(value, dict) else value
            for name, value in content.pop("arguments").items()
        }
        results = {name: unpack(value, device) for name, value in content.pop("results").items()}
        del content["format"]
        return Dump(**content, arguments=arguments, results=results)
    except (AttributeError, KeyError, TypeError):
        raise DumpError(f"{path} is no dump of a call: its entries are others") from None


def _damage(path: Path) -> str:
    """Reason why a file cannot be loaded, in words."""
    if zipfile.is_zipfile(path):
        return "it holds other things than plain data"
    with path.open("rb") as file:
        begun = file.read(2) == b"PK"
    return "it is cut off or damaged" if begun else "torch.save did not write it"

"""Inputs that every machine builds with the same bits, for results that are on record.

Integer operations, IEEE arithmetic and numpy's raw PCG64 stream only; a digest of the inputs checks
it.  What depends on them: ``tests/data/softgpu_h200.npz``, whose cases ops' files build
(``recorded``) and ``profiles.vectors`` runs, and the records of single instructions
(``profiles.instructions``, ``profiles.record_wgmma``).  So neither the order of draws here and
there nor a stream's name may change without a new record.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.format import Format
from dsl_kernels.formats.index_cache import PAGE, PAGE_BYTES, SCALES_AT
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla.cache import layouts
from snapmla.testing.reference_plan import NOTHING_HIDDEN
from snapmla.testing.workloads.draw import Draw

Array = NDArray[Any]
Rows = dict[str, Array]  # name -> (rows, ...) results

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
WIDTH: dict[str, Any] = {"i32": np.dtype(np.int32), "i64": np.dtype(np.int64)}
NAMES = {dtype: name for name, dtype in TORCH.items()}
LAYOUTS = ("split", "paged", "row640")
LONG = 12  # from this index on: a sequence split unevenly, long enough to reuse every stage
STYLES = ("plain", "sharp", "outlier", "awkward")  # of decodes
SHAPES = {  # row tile -> (heads, s_q) by index; rows below the tile leave padding
    16: ((16, 1), (6, 2)), 32: ((32, 1), (15, 2)), 64: ((64, 1), (20, 3)), 128: ((128, 1), (60, 2)),
}  # fmt: skip
SOFTMAX_SCALE = 0.07216878364870323  # 192^-0.5
LN2 = 0.6931471805599453
LSE = ((LN2, float("-inf")), (1.0, float("inf")))  # (lse_factor, empty_lse), by index


class Bits:
    """Random integers whose stream numpy guarantees (raw PCG64), seeded by a name."""

    def __init__(self, name: str):
        self._raw = np.random.PCG64(zlib.crc32(name.encode()))

    def below(self, bound: int, shape: tuple[int, ...]) -> Array:
        """int64 of [0, bound)."""
        raw = self._raw.random_raw(int(np.prod(shape)))
        return ((raw >> np.uint64(16)) % np.uint64(bound)).astype(np.int64).reshape(shape)

    def unit(self, shape: tuple[int, ...]) -> Array:
        """float64 of (0, 1)."""
        return np.asarray((self.below(1 << 40, shape) + 0.5) / float(1 << 40))

    def normal(self, shape: tuple[int, ...]) -> Array:
        """Near-normal: the sum of 12 uniforms."""
        return np.asarray(self.unit((*shape, 12)).sum(-1) - 6.0)


@dataclass(frozen=True)
class Case:
    """A compiled variant on inputs that its name and ``index`` determine."""

    variant: str
    index: int = 0

    @property
    def name(self) -> str:
        return f"{self.variant}.{self.index}"

    @property
    def spec(self) -> VariantSpec:
        return VariantSpec.from_name(self.variant)

    def bits(self, of: str = "") -> Bits:
        """The stream of that name."""
        return Bits(self.name + of)


class Runner(NamedTuple):
    """Runner of a case: its torch device, and ``call(variant, **arguments)``."""

    device: str
    call: Callable[..., None]

    def there(self, x: Array) -> Tensor:
        """An array as a tensor of the device."""
        return torch.from_numpy(x).to(self.device)

    def full(
        self, shape: Sequence[int], value: float, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """A tensor of the device, full of one value."""
        return torch.full(tuple(shape), value, dtype=dtype, device=self.device)

    def alone(self, *names: str) -> dict[str, Tensor]:
        """Tables that are empty where every sequence is one unit of query rows."""
        return {
            name: self.full((0, 2) if name == "units" else (0,), 0, torch.int32) for name in names
        }


@dataclass
class Recorded:
    """Record of a case: ``inputs``, a digest of what went in, and ``rows``, what is compared."""

    inputs: NDArray[np.uint8]
    rows: Rows
    raw: Rows = field(default_factory=dict)  # small parts kept unhashed, for debugging


def hash_rows(rows: Array) -> NDArray[np.uint64]:
    """(rows, ...) of any dtype -> one 64-bit hash a row."""
    flat = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    digests = b"".join(hashlib.blake2b(r.tobytes(), digest_size=8).digest() for r in flat)
    return np.frombuffer(digests, np.uint64)


class Digest:
    """16 bytes that identify inputs, array behind array."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, arrays: Iterable[Array]) -> None:
        """Takes in more inputs."""
        for a in arrays:
            self._hash.update(repr((a.dtype.str, a.shape)).encode())
            self._hash.update(np.ascontiguousarray(a).tobytes())

    @property
    def value(self) -> NDArray[np.uint8]:
        """The bytes of all so far."""
        return np.frombuffer(self._hash.digest(), np.uint8)


def digest(arrays: Sequence[Array]) -> NDArray[np.uint8]:
    """16 bytes that identify inputs."""
    made = Digest()
    made.add(arrays)
    return made.value


def rows_of(out: Tensor, lse: Tensor) -> Rows:
    """Results that are rows of 512 and LSE."""
    return {"out": bits_of(out).reshape(-1, KV_LORA_RANK), "lse": bits_of(lse).reshape(-1, 1)}


def results(inputs: Sequence[Array], out: Tensor, lse: Tensor) -> Recorded:
    """Record of a case whose results are rows of 512 and LSE."""
    return Recorded(digest(inputs), rows_of(out, lse))


def hashes_of(found: Sequence[Sequence[Tensor]], name: str) -> Rows:
    """A row, of one hash, for the tables of each of several problems."""
    words = (np.concatenate([bits_of(x).reshape(-1) for x in tables]) for tables in found)
    return {name: np.array([hash_rows(x[None])[0] for x in words])[:, None]}


def of_problems(seen: Sequence[Array], found: Sequence[Sequence[Tensor]], name: str) -> Recorded:
    """Record of a case of several problems, by ``hashes_of``."""
    return Recorded(digest(seen), hashes_of(found, name))


# ---------------------------------------------------------------------------- numbers


def float_fields(bits: Bits, shape: tuple[int, ...], low: int, high: int) -> NDArray[np.uint32]:
    """float32 bit patterns: random sign and fraction, biased exponent in [low, high]."""
    out = bits.below(2, shape) << 31 | (low + bits.below(high - low + 1, shape)) << 23
    return (out | bits.below(1 << 23, shape)).astype(np.uint32)


def bell(bits: Bits, shape: tuple[int, ...], exponent: Array | int) -> NDArray[np.float32]:
    """Values of size 2^exponent whose logarithm falls off geometrically to smaller ones."""
    raw = bits.below(1 << 20, shape) | 1 << 20
    drop = np.zeros(shape, np.int64)  # trailing zeros of raw
    for i in range(8):
        drop += (raw & ((2 << i) - 1)) == 0
    fields = float_fields(bits, shape, 127, 127).view(np.float32)
    return np.ldexp(fields, np.broadcast_to(exponent - drop, shape).astype(np.int32))


def e4m3(bits: Bits, shape: tuple[int, ...], exponent: Array | int) -> NDArray[np.uint8]:
    """Codes of ``bell``: nearest, ties to the lower magnitude."""
    x = bell(bits, shape, exponent).astype(np.float64)
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    codes = np.searchsorted((values[1:] + values[:-1]) / 2, np.abs(x))
    return (codes | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)


def scales(bits: Bits, shape: tuple[int, ...], exponent: Array | int) -> NDArray[np.float32]:
    """float32 scales in [2^exponent, 2^(exponent + 1))."""
    mantissa = np.float32(1) + bits.unit(shape).astype(np.float32)
    return np.ldexp(mantissa, np.asarray(exponent, np.int32)).astype(np.float32)


def as_tensor(x: NDArray[np.float32], dtype: torch.dtype, device: str) -> Tensor:
    """float32 array -> tensor; bf16 and f16 by IEEE rounding to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).to(device)


def bits_of(t: Tensor) -> Array:
    """Contiguous copy as unsigned integers (numpy)."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    flat = t.detach().cpu().contiguous().view(kind).numpy().copy()  # never a view of ``t``
    return flat.view(f"u{t.element_size()}")


def from_bits(x: NDArray[np.uint16], dtype: str) -> Tensor:
    """Tensor (CPU) of a 16-bit dtype with these bit patterns."""
    return torch.from_numpy(x.view(np.int16)).view(TORCH[dtype])


def cut_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bit patterns, rounded towards 0."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def latents(case: Case, rows: int, in_dtype: str) -> tuple[Tensor, Tensor]:
    """(rows, 512) and (rows, 64): sizes 2^-20 .. 2^14, then rows of every awkward kind."""
    bits = case.bits(".latents")
    size = bits.below(34 if in_dtype != "f16" else 20, (rows, 1)) - 20
    c, r = bell(bits, (rows, KV_LORA_RANK), size), bell(bits, (rows, QK_ROPE_HEAD_DIM), size)
    big = 6e4 if in_dtype == "f16" else 1e38
    nan, inf, least = np.float32(np.nan), np.float32(np.inf), np.float32(2.0**-149)
    c[1], c[2], r[2] = 0, -0.0, 0
    c[3], r[3] = 0, 1000 * r[3]
    c[4], r[4] = 0, big
    c[5, 511], c[6, 7], r[7, 63], r[8, 0] = nan, -inf, nan, inf
    c[9, 300], c[10], r[10] = -big, big, -big
    c[11] *= np.float32(2.0**-100)
    c[12], r[12] = least, -least
    r[13, 5] = 1000
    c[14] = np.where(bits.below(2, (KV_LORA_RANK,)), 448, 17) * np.float32(1)  # ties of e4m3
    c[15] = np.ldexp(np.float32(1), bits.below(30, (KV_LORA_RANK,)).astype(np.int32) - 25)
    c[16], c[16, 9] = 0, np.float32(448 * 2.0**-80)
    dtype = TORCH[in_dtype]
    return as_tensor(c, dtype, "cpu"), as_tensor(r, dtype, "cpu")


class Exact(Draw):
    """Numbers of a recorded case, some of which are awkward.

    Attributes:
        case: whose name every stream of bits has.
        inputs: digest of all that ``identify_by`` was given.
    """

    fill = 3.0
    angles = 40
    byte = 3

    def __init__(self, case: Case, device: str) -> None:
        super().__init__(device)
        self.case = case
        self._inputs = Digest()
        self._streams: dict[str, Bits] = {}

    @property
    def inputs(self) -> NDArray[np.uint8]:
        return self._inputs.value

    @property
    def odd(self) -> int:
        """1 for every other index of a case."""
        return self.case.index % 2

    def bits(self, name: str = "") -> Bits:
        """The stream of that name, behind what was drawn of it before."""
        return self._streams.setdefault(name, self.case.bits(name))

    def below(self, bound: int, n: int) -> Tensor:
        return torch.from_numpy(self.bits().below(bound, (n,)))

    def rows(self, *shape: int) -> Tensor:
        return torch.from_numpy(bell(self.bits(), shape, 2))

    def lses(self, *shape: int) -> Tensor:
        sizes = self.bits().below(9, shape) - 2
        return torch.from_numpy(bell(self.bits(), shape, sizes))

    def joint(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.cat(self.tokens(n, dtype), -1)

    def tokens(self, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return latents(self.case, n, NAMES[dtype])

    def keys(self, n: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
        return self.tokens(n, dtype)[0]

    def rope_queries(self, n: int, heads: int, dtype: torch.dtype) -> Tensor:
        """Some of the first rows of 32 heads."""
        return self.tokens(n * 32, dtype)[1].view(n, 32, -1)[:, :heads]

    def affine(self, width: int) -> tuple[Tensor, Tensor]:
        weight, bias = (bell(self.bits(name), (width,), 0) for name in (".weight", ".bias"))
        return self.there(torch.from_numpy(weight)), self.there(torch.from_numpy(bias))

    def order(self, n: int) -> Tensor:
        drawn = self.bits().below(1 << 40, (n,))
        return torch.from_numpy(np.argsort(drawn, kind="stable"))

    def cos_sin(self, dtype: torch.dtype) -> Tensor:
        """Numbers of [-1, 1], which stand for cosines and sines."""
        drawn = self.bits(".rope").below(1 << 24, (self.angles, QK_ROPE_HEAD_DIM))
        return as_tensor((drawn * 2.0**-23 - 1).astype(np.float32), dtype, self.device)

    def positions(self, n: int, dtype: torch.dtype) -> Tensor:
        ends = torch.iinfo(dtype)
        found = self.bits(".rope").below(self.angles, (n,))
        outside = (-1, self.angles, ends.min, ends.max)[: n // 2]
        found[: len(outside)] = outside
        return torch.from_numpy(found).to(dtype).to(self.device)

    def gain(self, width: int, dtype: torch.dtype) -> Tensor:
        drawn = self.bits(".rope").below(1 << 16, (width,)) * 2.0**-15
        return as_tensor(drawn.astype(np.float32), dtype, self.device)

    def cache(
        self, cache_dtype: str, pages: int, page_size: int, heads: int = 1, style: int = 0
    ) -> dict[str, Tensor]:
        form = FORMATS[cache_dtype]
        if form.rows:
            return {"kv": rows_pool(pages, page_size, heads, cache_dtype, self.device, style)}
        if form.named:
            return {"kv": bytes_pool(form, pages, page_size, self.device, style)}
        return pool(pages, page_size, LAYOUTS[style], self.device)

    def key_pages(self, pages: int, gap: int = 0) -> Tensor:
        """Any bytes and scales."""
        raw = self.bits().below(256, (pages, PAGE_BYTES + gap)).astype(np.uint8)
        raw[:, SCALES_AT:PAGE_BYTES] = scales(self.bits(), (pages, PAGE), -3).view(np.uint8)
        return torch.from_numpy(raw)

    def lse_units(self) -> dict[str, float]:
        factor, empty = LSE[self.odd]
        return {"lse_factor": factor, "empty_lse": empty}

    def of(self, spec: VariantSpec) -> Exact:
        """Draw of the case of that variant with the same index."""
        return Exact(Case(spec.name, self.case.index), self.device)

    def identify_by(self, *values: Tensor, bits: Sequence[Tensor] = ()) -> None:
        self._inputs.add([*map(bits_of, bits), *(x.cpu().numpy() for x in values)])


# ---------------------------------------------------------------------------- caches


def pool(
    pages: int, page_size: int, layout: str, device: str | torch.device, byte: int = 255
) -> dict[str, Tensor]:
    """content u8 (pages, P, 512), rope bf16 (pages, P, 64), scale f32 (pages, P) of a cache whose
    every byte is ``byte``, as kernels take them."""
    views = layouts.LAYOUTS[layout].allocate(pages, page_size, torch.device(device))
    for x in views:
        torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).fill_(byte)
    return {"content": views[0].view(torch.uint8), "rope": views[1], "scale": views[2]}


def fill(
    cache: dict[str, Tensor], content: NDArray[np.uint8], rope: NDArray[np.uint16],
    scale: NDArray[np.uint32],
) -> None:  # fmt: skip
    """Writes bit patterns (tokens, 512), (tokens, 64), (tokens,) to ``pool``'s tensors."""
    patterns = (torch.from_numpy(content), from_bits(rope, "bf16"))
    sources = (*patterns, torch.from_numpy(scale.view(np.float32)))
    for target, source in zip(cache.values(), sources, strict=True):
        target.copy_(source.view(target.shape))


def rows_pool(
    pages: int, page_size: int, heads: int, dtype: str, device: str, style: int
) -> Tensor:
    """(pages, page_size, heads, 576) of a 16-bit cache whose every byte is 255; ``style`` 0 is
    contiguous, 1 has gaps behind rows, 2 also heads before tokens."""
    gap = 8 if style else 0
    shape = (pages, page_size, heads) if style < 2 else (pages, heads, page_size)
    memory = torch.full((*shape, HEAD_DIM_QK + gap), -1, dtype=torch.int16, device=device)
    rows = memory.view(TORCH[dtype])[..., :HEAD_DIM_QK]
    return rows if style < 2 else rows.transpose(1, 2)


def bytes_pool(record: Format, pages: int, page_size: int, device: str, gap: int) -> Tensor:
    """uint8 (pages, page_size, 1, bytes of a token) whose every byte is 255; room for ``gap``
    tokens, and up to a multiple of 16 bytes, behind each page."""
    token = record.token_bytes
    size = -(-(page_size + gap) * token // 16) * 16
    memory = torch.full((pages, size), 255, dtype=torch.uint8, device=device)
    return memory[:, : page_size * token].unflatten(1, (page_size, 1, token))


def block_table(
    bits: Bits, lengths: NDArray[np.int32], page_size: int
) -> tuple[NDArray[np.int32], int]:
    """(shuffled pages of each sequence, absurd ids behind its end; pages of the pool)."""
    used = -(-lengths // page_size)
    pages = int(used.sum()) + 2
    order = np.argsort(bits.below(1 << 40, (pages,)), kind="stable").astype(np.int32)
    table = np.where(np.arange(int(used.max()) + 2) % 2, -1, 2147480000).astype(np.int32)
    table = np.repeat(table[None], len(lengths), 0)
    for i, count in enumerate(used):
        table[i, :count], order = order[:count], order[count:]
    return table, pages


def slots_of(table: NDArray[np.int32], page_size: int) -> NDArray[np.int64]:
    """(sequences, tokens): the slot of each token that a table has room for."""
    within = table[:, :, None].astype(np.int64) * page_size + np.arange(page_size)
    return within.reshape(len(table), -1)


# ---------------------------------------------------------------------------- decodes


def lengths_of(case: Case) -> NDArray[np.int32]:
    """Tokens of each sequence of a decode."""
    if case.index >= LONG:
        return np.array([700, 65], np.int32)
    few = [0, 1, 150, 65] if case.spec.row_tile > 32 else [0, 1, 64, 63, 197, 65]
    return np.array(few, np.int32)


def work_list(
    case: Case, lengths: NDArray[np.int32], rows: int
) -> tuple[dict[str, NDArray[np.int32]], int]:
    """(tables, slots) of a work list: two tiles an item, of a long case eight; two items a part.

    Args:
        rows: query rows of a sequence.
    """
    size, items = 8 if case.index >= LONG else 2, []
    split, slots = [0], 0
    for i, tiles in enumerate(-(-lengths // case.spec.token_tile)):
        split_up = int(tiles > size)
        for first in range(0, max(int(tiles), 1), size):
            own = (i * rows, (i + 1) * rows, NOTHING_HIDDEN, 0)
            slot = slots if split_up else -1
            items.append((i, first, min(first + size, int(tiles)), slot, *own))
            slots += split_up
        split.append(slots)
    lists = {
        "work_items": items, "part_begin": [*range(0, len(items), 2), len(items)],
        "split_begin": split,
    }  # fmt: skip
    return {name: np.array(x, np.int32) for name, x in lists.items()}, slots

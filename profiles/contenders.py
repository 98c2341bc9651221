"""Who competes in a decode row: our pipelines, the peers' kernels, plain torch.

A contender named on the command line is one of

* ``snapmla``, ours, followed by any of ``:etap`` ``:dual_wg`` (else the default pipeline),
  ``:bf16`` ``:f32`` (dtype of ``out``), ``:quantise`` (the call quantises the query too),
  ``:padded`` (ragged queries as even ones, as a kernel without them must), ``:page=``,
  ``:layout=``, ``:cache=`` (``bf16``, ``f16``: a cache of 16 bits), ``:row_tile=``,
  ``:row_blocks=``, ``:num_parts=``, ``:fixed_overhead=``, ``:fixed_split=``
* ``snapmla@DIR``, the same with the host package and the built variants of another checkout
* ``flashmla_bf16``: FlashMLA's dense BF16 kernel
* ``flashmla_fp8``: FlashMLA's dense FP8 kernel, one scale per tensor
* ``fa3``: FlashAttention-3, MLA through q_v
* ``etap``: FlashMLA-ETAP's BF16 kernel, ``etap:cache=f16`` its fp16 one (``snapmla:etap`` is our
  pipeline of that name)
* ``torch``: gather and scaled_dot_product_attention in BF16, small shapes only

Peers are shared libraries in a folder of your own (``--peers`` or ``SNAPMLA_PEERS``), never part of
this repository; ``profiles/results/README.md`` says which.
"""

from __future__ import annotations

import ctypes
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from profiles import check as checks
from profiles import checkouts
from profiles.pools import Fp8TensorPool, Pool, RowsPool, SnapPool
from profiles.roofline import CONTENT_DIM, HEAD_DIM_QK
from profiles.shapes import DecodeShape
from snapmla.testing.reference import mla_decode_reference
from snapmla.testing.rounding import MIMIC

SOFTMAX_SCALE = HEAD_DIM_QK**-0.5
TORCH_TOKEN_LIMIT = 1 << 17
PEER_FILES = {
    "flashmla_bf16": "vllm_flashmla/_flashmla_C.abi3.so",
    "flashmla_fp8": "vllm_flashmla/_flashmla_extension_C.abi3.so",
    "fa3": "fa3/_vllm_fa3_C.abi3.so",
    "etap": "flashmla_etap/libflashmla_etap.so",
}
PIPELINES = ("etap", "dual_wg")
CACHES: dict[str, Any] = {
    "fp8": "fp8",
    "bf16": torch.bfloat16,
    "f16": torch.float16,
}  # ``dtype`` of a cache
CHOICES = {"cache": tuple(CACHES)}
COUNTS = ("page", "row_tile", "num_parts", "fixed_overhead", "fixed_split")
OUT_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
_PTR, _INT = ctypes.c_void_p, ctypes.c_int
DecodeCall = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Problem:
    """Device tensors of one decode row, common to all contenders.

    Attributes:
        shape: the workload.
        query: (b, s_q, h, 576) bf16, or fp16 beside a pool of fp16; of a request with fewer
            tokens the last ones count.
        lengths: (b,) int32 on the device.
        tables: page size -> block tables, one (b, width) int32 per buffer.
    """

    shape: DecodeShape
    query: torch.Tensor
    lengths: torch.Tensor
    tables: dict[int, list[torch.Tensor]]


@dataclass
class Entry:
    """A contender set up for one problem.

    Attributes:
        calls: one decode per buffer; each returns (out, lse).
        query: (b, s_q, h, 576) float64, the query as this contender sees it.
        outputs: preallocated results, poisoned before a check.
        note: which kernel the dispatcher picked, if it says.
        packed: results are (total, h, 512) and (h, total), with the query tokens that count.
        mimic: (buffer, request) -> (s_q, h, 512) float64, the result with no error but that of the
            contender's e4m3 P; None if a constant gate judges it.
    """

    calls: Sequence[DecodeCall]
    query: torch.Tensor
    outputs: list[torch.Tensor] = field(default_factory=list)
    note: str = ""
    packed: bool = False
    mimic: Callable[[int, int], torch.Tensor] | None = None


class Contender:
    """One way to compute a decode."""

    name: str
    peer = True
    gate = checks.GATE_BF16  # for entries without a mimic
    strict_lse = False
    out_bytes = 2

    def unavailable(self) -> str | None:
        """Why this contender cannot run here, or None."""
        return None

    def refuses(self, shape: DecodeShape) -> str | None:
        """Why it cannot run ``shape``, or None."""
        return None

    def pool_key(self) -> tuple[Any, ...]:
        """Contenders with equal keys share a pool."""
        raise NotImplementedError

    def make_pool(self, tokens: int, device: torch.device) -> Pool:
        """Allocates this contender's cache."""
        return RowsPool(tokens, device)

    @property
    def page_size(self) -> int:
        """Tokens per page of its cache."""
        return 64

    def enter(self, problem: Problem, pool: Any) -> Entry:
        """Prepares everything that a serving engine would prepare outside the layer loop."""
        raise NotImplementedError


@dataclass(frozen=True)
class SnapOptions:
    """What may follow ``snapmla:`` in a contender's name; None leaves the choice to the library."""

    pipeline: str | None = None
    out: str = "bf16"
    page: int = 64
    layout: str = "split"
    cache: str = "fp8"
    row_tile: int | None = None
    row_blocks: str | None = None
    num_parts: int | None = None
    fixed_overhead: int | None = None
    fixed_split: int | None = None
    quantise: bool = False
    padded: bool = False

    @classmethod
    def parse(cls, name: str) -> SnapOptions:
        """Reads ``snapmla:word:key=value...``; raises ValueError that names the odd part."""
        values: dict[str, Any] = {}
        for part in name.split(":")[1:]:
            key, given, value = part.partition("=")
            if not given and part in PIPELINES:
                values["pipeline"] = part
            elif not given and part in OUT_DTYPES:
                values["out"] = part
            elif part in ("quantise", "padded"):
                values[part] = True
            elif value in CHOICES.get(key, ()) or (key in ("layout", "row_blocks") and given):
                values[key] = value
            elif key in COUNTS and value.isdigit():
                values[key] = int(value)
            else:
                raise ValueError(
                    f"backend {name!r}: expected one of {', '.join((*PIPELINES, *OUT_DTYPES))}, "
                    f"quantise, padded or layout=, row_blocks=, {'=, '.join(COUNTS)}= or "
                    f"cache={'|'.join(CACHES)}; got {part!r}"
                )
        return cls(**values)


class SnapMla(Contender):
    """Ours, or another checkout's, through the public API with a plan and preallocated outputs."""

    peer = False
    strict_lse = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.options = SnapOptions.parse(name)
        self.out_bytes = OUT_DTYPES[self.options.out].itemsize
        folder = name.partition(":")[0].partition("@")[2]
        self.checkout = checkouts.checkout(folder) if folder else None

    def unavailable(self) -> str | None:
        if self.checkout is not None:
            return self.checkout.unavailable()
        try:
            import snapmla  # noqa: F401
        except ImportError as error:
            return f"cannot import snapmla: {error}"
        return None

    def pool_key(self) -> tuple[Any, ...]:
        if self.options.cache != "fp8":  # bf16 in pages of 64 is the peers' memory
            page = () if self.options.page == 64 else (self.options.page,)
            return (self.options.cache, *page)
        return ("snapmla", self.options.page, self.options.layout)

    def make_pool(self, tokens: int, device: torch.device) -> Pool:
        if self.options.cache != "fp8":
            return RowsPool(tokens, device, CACHES[self.options.cache], self.options.page)
        return SnapPool(tokens, device, self.options.page, self.options.layout)

    @property
    def page_size(self) -> int:
        return self.options.page

    def enter(self, problem: Problem, pool: Any) -> Entry:
        if self.checkout is None:
            import snapmla

            if self.options.cache != "fp8":
                return self._enter_rows(snapmla, problem, pool)
            return self._enter(snapmla, problem, pool.cache)
        with self.checkout.active() as other:
            if self.options.cache == "fp8":
                mine = pool.cache
                cache = other.PagedKVCache.from_tensors(mine.content, mine.rope, mine.scale)
                entry = self._enter(other, problem, cache)
            else:
                entry = self._enter_rows(other, problem, pool)
            entry.calls[0]()  # loads its kernels
        return replace(entry, note=f"{entry.note}, commit {self.checkout.commit}")

    def _enter(self, snapmla: Any, problem: Problem, cache: Any) -> Entry:
        shape, options, tables = problem.shape, self.options, problem.tables[self.options.page]
        packed = shape.ragged_q and not options.padded
        every = snapmla.quantize_q(*_halves(problem.query))
        halves = _halves(_packed(problem)) if packed else _halves(problem.query)
        q = snapmla.quantize_q(*halves) if packed else every
        plan = self._plan(snapmla, problem, packed)
        rows = q.nope.shape[:-1]
        device = problem.query.device
        out = torch.empty(*rows, CONTENT_DIM, dtype=OUT_DTYPES[options.out], device=device)
        lse = torch.empty(rows, dtype=torch.float32, device=device).mT.contiguous()

        def call(table: torch.Tensor) -> DecodeCall:
            decode = lambda: snapmla.decode(
                q, cache, table, problem.lengths, softmax_scale=SOFTMAX_SCALE, plan=plan,
                out=out, lse=lse,
            )  # fmt: skip
            if not options.quantise:
                return decode

            def layer() -> tuple[torch.Tensor, torch.Tensor]:
                snapmla.quantize_q(*halves, out=q)
                return decode()

            return layer

        def mimic(buffer: int, request: int) -> torch.Tensor:
            return mla_decode_reference(
                every.nope, every.rope, every.scale, cache.content, cache.rope, cache.scale,
                tables[buffer], problem.lengths, SOFTMAX_SCALE, config=MIMIC, batches=[request],
            )[0][0]  # fmt: skip

        scale = every.row_scale.double()[..., None]
        query = torch.cat([every.nope.double(), every.rope.double()], -1) * scale
        note = f"{plan.pipeline} row_tile {plan.row_tile} parts {plan.num_parts}"
        return Entry([call(t) for t in tables], query, [out, lse], note, packed, mimic)

    def _enter_rows(self, snapmla: Any, problem: Problem, pool: Any) -> Entry:
        """A cache of 16 bits, the very memory of the peers' where that is BF16."""
        options, packed = self.options, problem.shape.ragged_q and not self.options.padded
        cache = snapmla.PagedKVCache.from_tensors(pool.cache)
        q = (_packed(problem) if packed else problem.query).to(CACHES[options.cache])
        plan = self._plan(snapmla, problem, packed, cache_dtype=CACHES[options.cache])
        rows = q.shape[:-1]
        out = q.new_empty(*rows, CONTENT_DIM)
        lse = q.new_empty(rows, dtype=torch.float32).mT.contiguous()

        def call(table: torch.Tensor) -> DecodeCall:
            return lambda: snapmla.decode(
                q, cache, table, problem.lengths, softmax_scale=SOFTMAX_SCALE, plan=plan,
                out=out, lse=lse,
            )  # fmt: skip

        query = problem.query.to(q.dtype).double()
        note = f"{plan.pipeline} row_tile {plan.row_tile} parts {plan.num_parts}"
        calls = [call(table) for table in problem.tables[options.page]]
        return Entry(calls, query, [out, lse], note, packed)

    def _plan(self, snapmla: Any, problem: Problem, packed: bool, **more: Any) -> Any:
        """The step's plan; options not given are not passed: other checkouts may lack them."""
        shape, options = problem.shape, self.options
        chosen = dict(
            num_parts=options.num_parts, pipeline=options.pipeline, row_tile=options.row_tile,
            row_blocks=options.row_blocks, fixed_overhead=options.fixed_overhead,
            fixed_split_tokens=options.fixed_split,
        )  # fmt: skip
        given = {name: value for name, value in chosen.items() if value is not None} | more
        given.update(page_size=options.page, max_pages=problem.tables[options.page][0].shape[1])
        if not packed:
            return snapmla.plan_decode(problem.lengths, shape.num_heads, shape.s_q, **given)
        ends = torch.tensor([0, *shape.query_tokens()], device=problem.lengths.device).cumsum(0)
        return snapmla.plan_decode(
            problem.lengths, shape.num_heads, cu_seqlens_q=ends.int(),
            total_q=sum(shape.query_tokens()), **given,
        )  # fmt: skip


def _halves(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Content and RoPE of (..., 576)."""
    return query[..., :CONTENT_DIM], query[..., CONTENT_DIM:]


def _packed(problem: Problem) -> torch.Tensor:
    """(total, h, 576): the query tokens that count, request by request."""
    tokens = problem.shape.query_tokens()
    return torch.cat([q[-n:] for q, n in zip(problem.query, tokens, strict=True)])


class PeerLibrary(Contender):
    """A kernel from the peers' folder."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name, self.folder = name, folder

    @property
    def file(self) -> str:
        """Where in the folder its library is."""
        return PEER_FILES[self.name.partition(":")[0]]

    def unavailable(self) -> str | None:
        if self.folder is None:
            return "no peers folder: give --peers DIR or set SNAPMLA_PEERS"
        path = self.folder / self.file
        if not path.exists() and not path.with_name(path.name + ".xz").exists():
            return f"no {self.file} in {self.folder}"
        return None

    def load(self) -> None:
        """Loads the library; an error names the symbol or library that lacks."""
        path = self.library()
        ctypes.CDLL(str(path))
        torch.ops.load_library(str(path))

    def library(self) -> Path:
        """Its file, unpacked if only the ``.xz`` is there."""
        assert self.folder is not None
        path = self.folder / self.file
        packed = path.with_name(path.name + ".xz")
        if not path.exists() and packed.exists():
            target = Path(tempfile.gettempdir()) / f"snapmla-peers-{os.getuid()}" / path.name
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                partial = target.with_suffix(".partial")
                with lzma.open(packed) as source, open(partial, "wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 22)
                partial.replace(target)
            path = target
        return path.resolve()

    def pool_key(self) -> tuple[Any, ...]:
        return ("bf16",)


class FlashMlaBf16(PeerLibrary):
    """dense_decode_fwd(q, cache, d_v, lengths, table, scale, causal, meta, splits, out)."""

    def enter(self, problem: Problem, pool: Any) -> Entry:
        self.load()
        op = torch.ops._flashmla_C.dense_decode_fwd
        q, lengths, tables = problem.query, problem.lengths, problem.tables[64]

        def decode(table: torch.Tensor, meta: Any, splits: Any) -> Any:
            return op(q, pool.cache, CONTENT_DIM, lengths, table, SOFTMAX_SCALE, True,
                      meta, splits, None)  # fmt: skip

        # The first call makes the schedule; an engine keeps it for all layers of a step.
        _, _, meta, splits = decode(tables[0], None, None)

        def call(table: torch.Tensor) -> DecodeCall:
            return lambda: tuple(decode(table, meta, splits)[:2])  # type: ignore[return-value]

        return Entry([call(t) for t in tables], q.double())


class FlashMlaFp8(PeerLibrary):
    """fwd_kvcache_mla_fp8, everything in e4m3 with one scale per tensor."""

    gate = checks.GATE_FP8

    def pool_key(self) -> tuple[Any, ...]:
        return ("fp8_tensor",)

    def make_pool(self, tokens: int, device: torch.device) -> Pool:
        return Fp8TensorPool(tokens, device)

    def enter(self, problem: Problem, pool: Any) -> Entry:
        self.load()
        ops = torch.ops._flashmla_extension_C
        lengths, shape = problem.lengths, problem.shape
        q8 = problem.query.to(torch.float8_e4m3fn)
        one = torch.ones(1, dtype=torch.float32, device=q8.device)
        meta, splits = ops.get_mla_decoding_metadata_dense_fp8(
            lengths, shape.s_q * shape.num_heads, 1
        )

        def call(table: torch.Tensor) -> DecodeCall:
            def run() -> tuple[torch.Tensor, torch.Tensor | None]:
                result = ops.fwd_kvcache_mla_fp8(
                    q8, pool.cache, CONTENT_DIM, lengths, table, SOFTMAX_SCALE, True, meta,
                    splits, one, one,
                )  # fmt: skip
                return result[0], result[1]

            return run

        return Entry([call(t) for t in problem.tables[64]], q8.double())


class FlashAttention3(PeerLibrary):
    """FlashAttention-3's decode, the content as q_v and V, the RoPE part as Q and K."""

    def enter(self, problem: Problem, pool: Any) -> Entry:
        self.load()
        ops = torch.ops._vllm_fa3_C
        shape, lengths, tables = problem.shape, problem.lengths, problem.tables[64]
        q_content = problem.query[..., :CONTENT_DIM]
        q_rope = problem.query[..., CONTENT_DIM:]
        content, rope = pool.cache[..., :CONTENT_DIM], pool.cache[..., CONTENT_DIM:]
        longest = tables[0].shape[1] * 64  # as the kernel sees it: the split heuristic must agree
        schedule = ops.get_scheduler_metadata(
            shape.batch, shape.s_q, longest, shape.num_heads, 1, 64, CONTENT_DIM,
            problem.query.dtype, lengths, None, None, None, None, None, 64, 0, True, -1, -1,
            False, 0, None, 0,
        )  # fmt: skip

        def call(table: torch.Tensor) -> DecodeCall:
            def run() -> tuple[torch.Tensor, torch.Tensor | None]:
                result = ops.fwd(
                    q_rope, rope, content, None, None, q_content, None, None, None, None, None,
                    lengths, shape.s_q, longest, table, None, None, None, None, None, None, None,
                    None, SOFTMAX_SCALE, True, -1, -1, 0.0, True, schedule, 0, None, 0, None, 1,
                    0, None,
                )  # fmt: skip
                return result[0], None

            return run

        return Entry([call(t) for t in tables], problem.query.double())


class FlashMlaEtap(PeerLibrary):
    """FlashMLA-ETAP: S and O transposed, 16 query rows a CTA; BF16 or fp16, pages of 64.

    The pool's dtype decides, and queries follow it: ``cache``, a key of ``CACHES``, only says which
    pool is asked for.

    No torch operator: two C functions that launch on a stream and give nothing back (``CALLS``).
    Lengths, ``metadata`` (parts, 8), ``splits`` (b + 1,) and tables are int32, ``lse`` (b, s_q, h)
    and the accumulators float32, everything contiguous:

    * ``flashmla_etap_plan(lengths, b, parts, metadata, splits, stream)``
    * ``flashmla_etap_decode(dtype, q, cache, lengths, table, table's row stride, b, s_q, h,
      softmax_scale, metadata, parts, splits, out, lse, out_accum (b + parts, s_q, h, 512),
      lse_accum (b + parts, s_q, h), stream)``, ``dtype`` 0 for BF16, 1 for fp16

    Schedule and results are those of its Python binding, but for ``lse``: the binding copies it
    where s_q > 1, here it is a view.
    """

    DTYPES: ClassVar = {torch.bfloat16: 0, torch.float16: 1}
    PLAN_ROWS = 64  # of a block in its schedule, though its CTAs take 16: the binding's number
    META_INTS = 8
    MAX_BATCH = 4095  # what its schedule holds in shared memory
    MAX_PARTS = 160  # what its merge takes
    MAX_S_Q = 66  # it masks a split's last two tiles only: 65 tokens where the last holds one
    CALLS: ClassVar = {
        "flashmla_etap_plan": (_PTR, _INT, _INT, _PTR, _PTR, _PTR),
        "flashmla_etap_decode": (
            _INT, _PTR, _PTR, _PTR, _PTR, ctypes.c_int64, _INT, _INT, _INT, ctypes.c_float,
            _PTR, _INT, _PTR, _PTR, _PTR, _PTR, _PTR, _PTR,
        ),
    }  # fmt: skip

    def __init__(self, name: str, folder: Path | None, cache: str = "bf16") -> None:
        super().__init__(name, folder)
        self.cache = cache

    def pool_key(self) -> tuple[Any, ...]:
        return (self.cache,)

    def make_pool(self, tokens: int, device: torch.device) -> Pool:
        return RowsPool(tokens, device, CACHES[self.cache])

    def refuses(self, shape: DecodeShape) -> str | None:
        rows = shape.num_heads * shape.s_q
        if shape.s_q > self.MAX_S_Q:
            return f"FlashMLA-ETAP masks right with at most {self.MAX_S_Q} query tokens"
        if shape.batch > self.MAX_BATCH:
            return f"FlashMLA-ETAP takes at most {self.MAX_BATCH} requests"
        if (shape.batch + self.MAX_PARTS) * rows * CONTENT_DIM >= 1 << 31:
            return "FlashMLA-ETAP counts the elements of its partial results in 32 bits"
        return None

    def functions(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """``plan`` and ``decode`` of the library."""
        library = ctypes.CDLL(str(self.library()))
        found = []
        for name, arguments in self.CALLS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            found.append(function)
        return found[0], found[1]

    def enter(self, problem: Problem, pool: Any) -> Entry:
        dtype = self.DTYPES.get(pool.cache.dtype)
        if dtype is None:
            raise ValueError(
                f"etap: expected a cache of bfloat16 or float16, got {pool.cache.dtype}"
            )
        plan, decode = self.functions()
        shape, lengths = problem.shape, problem.lengths
        q = problem.query.to(pool.cache.dtype).contiguous()
        b, s_q, h = shape.batch, shape.s_q, shape.num_heads
        parts = _sm90_count(q.device) // -(-h * s_q // self.PLAN_ROWS)
        if not 0 < parts <= self.MAX_PARTS:
            raise ValueError(f"etap: expected 1 to {self.MAX_PARTS} parts, got {parts}")
        meta = lengths.new_empty(parts, self.META_INTS)
        splits = lengths.new_empty(b + 1)
        plan(lengths.data_ptr(), b, parts, meta.data_ptr(), splits.data_ptr(), _stream(q.device))
        out = q.new_empty(b, s_q, h, CONTENT_DIM)
        lse = q.new_empty(b, s_q, h, dtype=torch.float32)
        out_accum = q.new_empty(b + parts, s_q, h, CONTENT_DIM, dtype=torch.float32)
        lse_accum = q.new_empty(b + parts, s_q, h, dtype=torch.float32)

        def call(table: torch.Tensor) -> DecodeCall:
            def run() -> tuple[torch.Tensor, torch.Tensor | None]:
                decode(
                    dtype, q.data_ptr(), pool.cache.data_ptr(), lengths.data_ptr(),
                    table.data_ptr(), table.stride(0), b, s_q, h, SOFTMAX_SCALE, meta.data_ptr(),
                    parts, splits.data_ptr(), out.data_ptr(), lse.data_ptr(),
                    out_accum.data_ptr(), lse_accum.data_ptr(), _stream(q.device),
                )  # fmt: skip
                return out, lse.mT

            return run

        calls = [call(table) for table in problem.tables[64]]
        return Entry(calls, q.double(), [out, lse], f"parts {parts}")


def _sm90_count(device: torch.device) -> int:
    """SMs of a Hopper card; ValueError elsewhere, where the library would end the process."""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        if (card.major, card.minor) == (9, 0):
            return card.multi_processor_count
    raise ValueError(f"etap: expected a GPU of compute capability 9.0, got {device}")


def _stream(device: torch.device) -> int:
    """The current stream's handle: another one while a graph is captured."""
    return torch.cuda.current_stream(device).cuda_stream


class TorchSdpa(Contender):
    """Gathers the pages and calls scaled_dot_product_attention; what one writes first."""

    name = "torch"

    def pool_key(self) -> tuple[Any, ...]:
        return ("bf16",)

    def refuses(self, shape: DecodeShape) -> str | None:
        if shape.uneven:
            return "torch baseline takes equal lengths only"
        if shape.tokens > TORCH_TOKEN_LIMIT:
            return f"torch baseline is for at most {TORCH_TOKEN_LIMIT} tokens"
        return None

    def enter(self, problem: Problem, pool: Any) -> Entry:
        shape = problem.shape
        b, s_q, h, n = shape.batch, shape.s_q, shape.num_heads, shape.seqlen
        q = problem.query.view(b, 1, s_q * h, HEAD_DIM_QK)
        mask = None
        if s_q > 1:
            limit = n - s_q + torch.arange(s_q, device=q.device).repeat_interleave(h)
            mask = torch.arange(n, device=q.device)[None, :] <= limit[:, None]

        def call(table: torch.Tensor) -> DecodeCall:
            pages = table.long()

            def run() -> tuple[torch.Tensor, torch.Tensor | None]:
                k = pool.cache[pages].view(b, 1, -1, HEAD_DIM_QK)[:, :, :n]
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, k[..., :CONTENT_DIM], attn_mask=mask, scale=SOFTMAX_SCALE
                )
                return out.view(b, s_q, h, CONTENT_DIM), None

            return run

        return Entry([call(t) for t in problem.tables[64]], problem.query.double())


def make(name: str, peers: Path | None) -> Contender:
    """The contender called ``name`` (see the module's docstring).

    Raises:
        ValueError: no such contender.
    """
    ours, at, folder = name.partition(":")[0].partition("@")
    if ours == "snapmla" and bool(folder) == bool(at):
        return SnapMla(name)
    plain: dict[str, Callable[[], Contender]] = {
        "flashmla_bf16": lambda: FlashMlaBf16(name, peers),
        "flashmla_fp8": lambda: FlashMlaFp8(name, peers),
        "fa3": lambda: FlashAttention3(name, peers),
        "etap": lambda: FlashMlaEtap(name, peers),
        "etap:cache=f16": lambda: FlashMlaEtap(name, peers, "f16"),
        "torch": TorchSdpa,
    }
    if name not in plain:
        raise ValueError(
            f"backend: expected snapmla[@DIR][:..] or one of {', '.join(plain)}; got {name!r}"
        )
    return plain[name]()

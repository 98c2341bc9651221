"""Contenders that are libraries of others: FlashMLA's kernels, FlashAttention-3, FlashMLA-ETAP.

They are in a folder of your own (``PEER_FILES`` says where in it), never part of this repository;
``profiles/results/README.md`` says which.  A decode row's contender by name is
``profiles.contenders.make``; ``PeerLibrary.load`` is for who calls a library's operators otherwise.
"""

from __future__ import annotations

import ctypes
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from profiles import check as checks
from profiles.decode_row import CACHES, SOFTMAX_SCALE, Contender, DecodeCall, Entry, Problem
from profiles.pools import Fp8TensorPool, Pool, RowsPool
from profiles.roofline import CONTENT_DIM
from profiles.shapes import DecodeShape

PEER_FILES = {
    "flashmla_bf16": "vllm_flashmla/_flashmla_C.abi3.so",
    "flashmla_fp8": "vllm_flashmla/_flashmla_extension_C.abi3.so",
    "fa3": "fa3/_vllm_fa3_C.abi3.so",
    "etap": "flashmla_etap/libflashmla_etap.so",
}
_PTR, _INT = ctypes.c_void_p, ctypes.c_int


class PeerLibrary(Contender):
    """A kernel from the peers' folder."""

    def __init__(self, name: str, folder: Path | None) -> None:
        self.name, self.folder = name, folder

    @property
    def file(self) -> str:
        """Path of its library in the folder."""
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

"""The one place that knows differences between CuTe DSL versions, plus fake-tensor builders.

Kernel modules take element types, fake tensors (the compile-time stand-ins of run-time tensors),
programmatic dependent launch and inline PTX from here.  Tested with nvidia-cutlass-dsl 4.8.

All builders make sizes symbolic: one compiled object serves every batch, pool and page size.  Two
tensors that are handed the *same* symbol object must agree at run time; TVM FFI checks that.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm
from cutlass._mlir.dialects import vector as mlir_vector
from cutlass._mlir_helpers.arith import ArithValue
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.cutlass_dsl import dsl_user_op

from ..formats.dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM

DTYPES: dict[str, Any] = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "u8": cutlass.Uint8,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
}
VECTOR_BYTES = 16  # alignment of every row that is read or written with vector instructions

# A hint for ``load_words``: ptxas keeps the order of strong loads; plain ones it sinks to their
# uses when that saves registers, which puts memory latencies in a row instead of side by side.
STRONG = {"sem": "relaxed", "scope": "gpu"}

inline_ptx = cute.arch.inline_ptx
# division by a run-time value as a multiplication; make the divisor in the host half
FastDivisor = cute.FastDivmodDivisorV2
fast_divisor = cute.fast_divmod_create_divisor_v2
pdl_wait = cute.arch.griddepcontrol_wait
pdl_launch_dependents = cute.arch.griddepcontrol_launch_dependents


@dsl_user_op
def wgmma_fence(*, loc: Any = None, ip: Any = None) -> None:
    """``wgmma.fence`` with its line: the DSL's own (4.8) drops it, and reports name another."""
    nvvm.wgmma_fence_aligned(loc=loc, ip=ip)


def dtype(name: str) -> Any:
    """DSL element type of a spec's dtype name.  Raises ValueError for an unknown name."""
    if name not in DTYPES:
        raise ValueError(f"dtype: expected one of {sorted(DTYPES)}, got {name!r}")
    return DTYPES[name]


def sym(divisibility: int = 1, name: str | None = None) -> Any:
    """A 32-bit symbolic size."""
    return cute.sym_int(32, divisibility=divisibility, symbol=name)


def sym64(divisibility: int = 1, name: str | None = None) -> Any:
    """A 64-bit symbolic stride, in elements."""
    return cute.sym_int(64, divisibility=divisibility, symbol=name)


def row_stride(dt: Any, align: int = VECTOR_BYTES) -> Any:
    """A fresh symbolic stride (elements of ``dt``) that keeps rows ``align``-byte aligned."""
    return sym64(max(1, align * 8 // dt.width))


def strided(dt: Any, shape: tuple, stride: tuple, align: int = VECTOR_BYTES) -> Any:
    """Fake tensor with explicit strides (elements); ``align`` is the base pointer's, in bytes."""
    return make_fake_tensor(dt, shape, stride, assumed_align=align)


def rows(dt: Any, shape: tuple, align: int = VECTOR_BYTES) -> Any:
    """Fake tensor with innermost stride 1 and every other stride symbolic, rows aligned."""
    return strided(dt, shape, (*(row_stride(dt, align) for _ in shape[:-1]), 1), align)


def contiguous(dt: Any, shape: tuple, align: int = VECTOR_BYTES) -> Any:
    """Fake row-major compact tensor; strides that depend on symbolic sizes are 64-bit symbols."""
    strides: list[Any] = []
    static, div = 1, 1
    symbolic = False
    for extent in reversed(shape):
        strides.insert(0, sym64(div) if symbolic else static)
        if isinstance(extent, int):
            static *= extent
            div *= extent
        else:
            symbolic = True
            div *= extent.divisibility
    return strided(dt, shape, tuple(strides), align)


def vector(dt: Any, n: Any, align: int | None = None) -> Any:
    """Fake contiguous 1-D tensor, aligned to its element unless told."""
    return strided(dt, (n,), (1,), align or max(1, dt.width // 8))


def units_fake(dt: Any) -> Any:
    """Fake of a plan's table of units, (n_units, 2) or (0, 2).

    Its row stride is free: torch before 2.10 names any for a tensor without rows.
    """
    return strided(dt, (sym(name="n_units_or_0"), 2), (sym64(1), 1), 4)


def cache_fakes(pages: Any = None, page_size: Any = None) -> dict[str, Any]:
    """Fakes of one paged cache, by argument name.

    content u8 (pages, P, 512), rope bf16 (pages, P, 64), scale f32 (pages, P).  Row and page
    strides are free 64-bit symbols that keep 16-byte alignment, so layouts ``split``, ``paged``
    and ``row640`` are strides of one compiled kernel.  ``pages`` and ``page_size`` may be symbols
    of the caller or ints; None makes fresh symbols.
    """
    pages = sym(name="pages") if pages is None else pages
    page_size = sym(name="P") if page_size is None else page_size
    return {
        "content": rows(DTYPES["u8"], (pages, page_size, KV_LORA_RANK)),
        "rope": rows(DTYPES["bf16"], (pages, page_size, QK_ROPE_HEAD_DIM)),
        "scale": rows(DTYPES["f32"], (pages, page_size)),
    }


def unsigned(x: Any) -> Any:
    """``x`` as a Uint32.

    Unlike ``Uint32(x)`` it compares and divides unsigned also where x is a tensor's size or was
    computed from one: the DSL's type of sizes keeps its signed operators through conversions.
    """
    return cutlass.Uint32(ArithValue(cutlass.Int32(x).ir_value(), False))


def at_most(value: Any, most: Any) -> Any:
    """``value`` where it is in [0, most], else ``most``; in one instruction."""
    return cutlass.Int32(cutlass.min(unsigned(value), unsigned(most)))


@dsl_user_op
def load_words(ptr: Any, n: int, *, loc: Any = None, ip: Any = None, **hint: str) -> list[Any]:
    """One load of ``n`` (1, 2 or 4) 32-bit words from global memory, as a list of Uint32.

    ``ptr`` must be aligned to ``4 * n`` bytes.  ``hint`` goes to ``cute.arch.load``: for example
    ``level1_eviction_priority="evict_no_allocate"`` or ``cop="cg"``.  Unlike a tensor load the
    width is what is written here, not what alignment analysis finds.
    """
    if n == 1:
        return [cutlass.Uint32(cute.arch.load(ptr, cutlass.Uint32, loc=loc, ip=ip, **hint))]
    ty = ir.VectorType.get([n], cutlass.Int32.mlir_type)
    v = cute.arch.load(ptr, ty, loc=loc, ip=ip, **hint)
    return [cutlass.Uint32(mlir_vector.extract(v, [], [i], loc=loc, ip=ip)) for i in range(n)]


@dsl_user_op
def store_words(
    ptr: Any, words: list[Any], *, loc: Any = None, ip: Any = None, **hint: str
) -> None:
    """One store of 1, 2 or 4 Uint32 words to global memory; the inverse of ``load_words``."""
    if len(words) == 1:
        cute.arch.store(ptr, words[0], loc=loc, ip=ip, **hint)
        return
    ty = ir.VectorType.get([len(words)], cutlass.Int32.mlir_type)
    values = [w.ir_value(loc=loc, ip=ip) for w in words]
    v = mlir_vector.from_elements(ty, values, loc=loc, ip=ip)
    cute.arch.store(ptr, v, loc=loc, ip=ip, **hint)


@dsl_user_op
def store_shared(address: Any, value: Any, kind: str = "f32", *, loc: Any = None, ip: Any = None):
    """``value`` to a shared-memory ``address`` (an Int32): no tensor, so no address arithmetic."""
    inline_ptx(
        f"st.shared.{kind} [{{$r0}}], {{$r1}};", read_only_args=[address, value], loc=loc, ip=ip
    )


@dsl_user_op
def opaque(x: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The Int32 ``x``, which the compiler cannot compute a second time.

    ptxas recomputes what is cheaper than a register, from special registers on, in every round of a
    loop.
    """
    return inline_ptx(
        "mov.b32 {$w0}, {$r0};",
        write_only_types=[cutlass.Int32],
        read_only_args=[x],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def undefined(dt: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """A value of type ``dt`` that nobody has computed and nobody may use."""
    return dt(llvm.mlir_undef(dt.mlir_type, loc=loc, ip=ip))


def env_stream() -> Any:
    """The stream parameter that disappears from the exported signature (taken from the caller)."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)

"""Instructions of ``index_logits`` that the DSL has no words for, on every architecture."""

from __future__ import annotations

from cutlass import Float32

from ..blocks.compat import dsl_user_op, inline_ptx


@dsl_user_op
def relu(x, *, loc=None, ip=None):
    """max(x, 0), NaN of NaN: a key that is not a number has no score."""
    return inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, 0f00000000;",
        write_only_types=[Float32], read_only_args=[x], loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def four_weights(address, *, loc=None, ip=None):
    """Four fp32 values at a shared-memory ``address``, a multiple of 16 bytes."""
    return inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4, read_only_args=[address], loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def value_at(address, *, loc=None, ip=None):
    """The fp32 value at a shared-memory ``address``."""
    return inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32], read_only_args=[address], loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def store_below(address, value, position, limit, *, loc=None, ip=None) -> None:
    """``value`` to global memory where ``position`` is below ``limit``, without a branch."""
    inline_ptx(
        "{\n.reg .pred p;\nsetp.lt.s32 p, {$r2}, {$r3};\n@p st.global.f32 [{$r0}], {$r1};\n}",
        read_only_args=[address, value, position, limit], loc=loc, ip=ip,
    )  # fmt: skip


@dsl_user_op
def bulk_copy(to, source, size, bar, *, loc=None, ip=None) -> None:
    """``size`` bytes, a multiple of 16, from global memory; by one thread."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[
            to.toint(loc=loc, ip=ip), source.toint(loc=loc, ip=ip), size, bar.toint(loc=loc, ip=ip)
        ],
        loc=loc, ip=ip,
    )  # fmt: skip

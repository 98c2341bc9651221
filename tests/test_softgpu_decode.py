"""Software GPU: the registry of opcodes."""

from __future__ import annotations

from typing import Any

import pytest

from softgpu import decode


def test_an_opcode_has_one_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one would take the first one's place in silence, in the order of imports."""
    known = dict(decode._BUILDERS)
    monkeypatch.setattr(decode, "_BUILDERS", known)
    first = known["bar.warp.sync"]

    def second(ins: Any, k: Any) -> Any: ...

    with pytest.raises(ValueError) as caught:
        decode.op("bar.warp.sync")(second)
    names = [f"{builder.__module__}.{builder.__qualname__}" for builder in (first, second)]
    assert str(caught.value) == (
        f"opcode bar.warp.sync: expected one builder, got {names[0]} and {names[1]}"
    )
    assert names[0].startswith("softgpu.ops.") and known["bar.warp.sync"] is first
    assert decode.op("bar.warp.sync.new")(second) is second
    assert decode.builder_for("bar.warp.sync.new.b32") is second

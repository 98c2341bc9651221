"""The start of a part: two KV tiles are asked for, and more when the first has landed.  What L2 is
told of them."""

from __future__ import annotations

import contextlib

import pytest
import torch

import softgpu
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from softgpu import Options, mutate
from softgpu.in_flight import InFlight
from softgpu.machine import Machine
from tests.kernels.test_planted import line
from tests.support.needs import needs_compiler
from tests.support.planting import granted

TILE = 64


class Copies:
    """Copies that a decode asks for: all of them, and those before any has landed."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec, self.asked, self.at_once = VariantSpec.from_name(name), 0, 0
        kernel = variants.kernel(self.spec, "cpu")
        assert isinstance(kernel, softgpu.LoadedKernel)
        self.kernel, self.landed = kernel, False
        kernel.options = Options(asynchronous="late")
        put = Machine.put

        def counted(machine: Machine, op: InFlight) -> InFlight:
            if op.text.startswith("cp.async.bulk"):
                self.asked += 1
                self.at_once += not self.landed
                action = op.action
                op.action = lambda: (setattr(self, "landed", True), action())[1]  # type: ignore
            return put(machine, op)

        monkeypatch.setattr(Machine, "put", counted)

    def of(self, *tiles: int) -> tuple[int, int]:
        """(all, at once) with one part and sequences of so many tiles."""
        torch.manual_seed(0)
        self.asked, self.at_once, self.landed = 0, 0, False
        job = selfcheck.DecodeJob(self.spec, [TILE * n for n in tiles], 1)
        assert job.errors(job.run(self.kernel)).right
        return self.asked, self.at_once


@needs_compiler
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("decode_etap_r16_p64_obf16_sm90a", 3), ("decode_etap_r16_p16_obf16_sm90a", 3),
        ("decode_etap_r128_p64_obf16_sm90a", 4),
    ],
)  # fmt: skip
def test_two_tiles_at_first(name: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in flight before anything has landed are those of two tiles; without the wait they are
    those that the ring holds."""
    copies = Copies(name, monkeypatch)
    from dsl_kernels.load import paged_tma

    alone = {n: copies.of(n)[0] for n in (1, paged_tma.START_TILES, stages)}
    assert alone[1] < alone[paged_tma.START_TILES] < alone[stages]
    assert copies.of(stages + 2)[1] == alone[paged_tma.START_TILES]
    wait = line("paged_tma.py", "k_pipe.consumer_wait(landed)")
    entry = copies.kernel.entry
    [ins] = mutate.matching(copies.kernel.program(entry), "mbarrier.try_wait", wait)
    with mutate.planted(copies.kernel, entry, {ins.pc: granted(ins)}):
        assert copies.of(stages + 2)[1] == alone[stages]


@needs_compiler
@pytest.mark.parametrize("tiles", [(0, 5), (1, 5), (2, 9), (3, 3, 3), (6, 3)])
def test_later_items_do_not_wait(tiles: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the first item has; a wait for a phase long over might never end."""
    copies = Copies("decode_etap_r16_p64_obf16_sm90a", monkeypatch)
    copies.kernel.options = Options(hazards="raise", asynchronous="early")
    assert copies.of(*tiles)[0] > copies.of(sum(tiles))[0]  # a Q tile for each item


@pytest.mark.whole_matrix
@needs_compiler
def test_tiles_are_evicted_first() -> None:
    """All tiles of the cache carry one policy: evict first, until a sequence has 32 row blocks."""
    from dsl_kernels.load.planes import EVICT_FIRST, EVICT_NORMAL

    spec = VariantSpec.from_name("decode_etap_r16_p64_obf16_sm90a")
    kernel = variants.kernel(spec, "cpu")
    assert isinstance(kernel, softgpu.LoadedKernel)
    program = kernel.program(kernel.entry)
    words = [str(word) for word in (EVICT_FIRST, EVICT_NORMAL)]
    [chosen] = [i for i in mutate.matching(program, "selp") if all(w in i.text for w in words)]
    policy = chosen.text.replace(",", " ").split()[1]
    tiles = [i for i in mutate.matching(program, "cp.async.bulk.tensor") if policy in i.text]
    assert len(tiles) == 2  # content, RoPE
    for word, blocks in ((EVICT_FIRST, 31), (EVICT_NORMAL, 32), (EVICT_FIRST, 32)):
        differs = f"setp.ne.b64 other, {policy}, {word}; @other trap;"
        stop = f"{{ .reg .pred other; {mutate.OLD} {differs} }}"
        job = selfcheck.DecodeJob(spec, [5], 1, heads=spec.row_tile, s_q=blocks)
        wrong = pytest.raises(softgpu.SoftGpuError, match="trap")
        outcome = wrong if (word, blocks) == (EVICT_FIRST, 32) else contextlib.nullcontext()
        with mutate.planted(kernel, kernel.entry, {chosen.pc: stop}), outcome:
            job.run(kernel)

"""GPU models and what bounds a kernel there.

``data/cards.json`` has their ceilings, each marked as measured or from a datasheet.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from snapmla import checks
from snapmla.runtime import variants

TENSOR_RATE = 989.0 / (132 * 1980)  # TFLOP/s of one H100-class SM and MHz, BF16
OTHER_FORMS = ("pcie", "nvl", "mig")  # the same chip with other clocks, memory or fewer SMs


@dataclass(frozen=True)
class Card:
    """A GPU model: what bounds a kernel there.

    Attributes:
        name: as people call it.
        match: lower-case word of the driver's device name.
        arch: compilation target.
        sms: streaming multiprocessors.
        boost_mhz: nominal clock; ``load_mhz``: the clock seen while decoding, None if not measured.
        nominal_bf16_tflops: datasheet, dense.
        read_gbs, bf16_tflops, fp8_tflops: ceilings.
        source: ``measured`` or ``datasheet``; of the ceilings.
    """

    name: str
    match: str
    arch: str
    sms: int
    boost_mhz: float
    load_mhz: float | None
    nominal_bf16_tflops: float
    read_gbs: float
    bf16_tflops: float
    fp8_tflops: float
    source: str

    @property
    def mhz(self) -> float:
        """Clock that the cost model uses."""
        return self.load_mhz or self.boost_mhz

    @property
    def tensor_slowdown(self) -> float:
        """Factor by which an SM's tensor core is slower than an H100's at the same clock."""
        return TENSOR_RATE / (self.nominal_bf16_tflops / (self.sms * self.boost_mhz))


def data(name: str) -> Any:
    """Content of a JSON file of ``snapmla/data``."""
    return json.loads(resources.files("snapmla").joinpath("data", name).read_text("utf-8"))


@functools.lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """All cards on file."""
    return tuple(Card(**entry) for entry in data("cards.json")["cards"])


def card_named(name: str) -> Card | None:
    """The card whose ``match`` is a word of a device name (a GH200 is no H200), or None."""
    return next((c for c in cards() if c.match in _words(name)), None)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


@functools.lru_cache(maxsize=64)
def card_of(device: torch.device) -> Card:
    """The card behind a device.

    The software GPU decides as an H200 or a B200 would.  A CUDA device that is not on file takes
    the datasheet of an H100 (sm_90a) or B200 (sm_100a), another form (PCIe, NVL, MIG) of a card on
    file that card's, with its own SM count, and says ``assumed``.
    """
    arch = variants.arch_of(device)
    if device.type != "cuda":
        return next(c for c in cards() if c.arch == arch)
    properties = torch.cuda.get_device_properties(device)
    known = card_named(properties.name)
    form = set(OTHER_FORMS) & set(_words(properties.name))
    if known is not None and known.arch == arch and not form:
        return dataclasses.replace(known, sms=properties.multi_processor_count)
    near = known if known is not None and known.arch == arch else None
    near = near or card_named("h100" if arch == "sm_90a" else "b200")
    assert near is not None
    return dataclasses.replace(
        near, name=properties.name, sms=properties.multi_processor_count,
        source=f"assumed from {near.name}",
    )  # fmt: skip


def find_card(device: torch.device | str | None, card: str | None) -> Card:
    """The card that is asked about: by name, or behind a device (None: the current one).

    Raises:
        TypeError, ValueError: naming the argument.
        UnsupportedDeviceError: no kernels are built for the device.
    """
    if card is not None:
        if not isinstance(card, str):
            checks.type_error("card", "a name such as 'H200'", type(card).__name__)
        found = card_named(card)
        if found is None:
            names = dict.fromkeys(name for c in cards() for name in (c.match.upper(), c.name))
            checks.value_error("card", "one of " + ", ".join(map(repr, names)), repr(card))
        assert found is not None
        return found
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = checks.device("device", device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return card_of(device)

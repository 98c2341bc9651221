"""Memory of tensors: which of them share bytes.

A *span* is a tensor's first byte and the one behind its last.  Tensors whose spans do not meet lie
apart; where spans meet (pages of a pool side by side) ``shared`` looks at the strides.

What was once seen to lie apart is remembered by addresses alone (``Apart``), which no life or death
of a tensor makes untrue, so that a call on the same memory as the one before asks a set.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

Span = tuple[int, int]
REMEMBERED = 1 << 12  # calls, some 200 bytes each; layers times batches of an engine
_WORK = 1 << 16  # candidates that an exact answer may cost
_numbers = itertools.count(1)
_places: dict[tuple[Any, ...], int] = {}


def span(tensor: torch.Tensor) -> Span:
    """First byte, and the one behind the last; both the same for a tensor of no memory."""
    first = tensor.data_ptr()
    if not first:  # no memory: of no elements, or a stand-in
        return 0, 0
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    if tensor.numel() == 0:
        return first, first
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    return first, first + (last + 1) * tensor.element_size()


def place(spans: tuple[Any, ...]) -> int:
    """A number for these spans, or other values: equal numbers are equal spans."""
    number = _places.get(spans)
    if number is None:
        if len(_places) >= REMEMBERED:
            _places.clear()  # numbers are never given twice: older ones only stop being found
        number = _places[spans] = next(_numbers)
    return number


def meets(span: Span, others: Iterable[Span]) -> bool:
    """True if a span reaches into one of ``others``."""
    first, end = span
    for other, other_end in others:  # noqa: SIM110 (on every call: faster than any())
        if first < other_end and other < end:
            return True
    return False


def lie_apart(*groups: Sequence[Span]) -> bool:
    """True if no span of one group meets one of another."""
    return not any(
        meets(span_, later)
        for i, group in enumerate(groups)
        for span_ in group
        for later in groups[i + 1 :]
    )


class Apart(set[tuple[Any, ...]]):
    """Calls whose tensors lie apart, as keys of addresses and of what sizes depend on.

    ``key in apart`` is the quick question; ``see`` answers for a key that is not there.
    """

    def see(self, key: tuple[Any, ...], *groups: Sequence[Span]) -> bool:
        """True if no span of one group meets one of another; if so, the key is remembered.

        False also where one lies between another's pages: ``shared`` looks closer.
        """
        if not lie_apart(*groups):
            return False
        if len(self) >= REMEMBERED:
            self.clear()
        self.add(key)
        return True


def shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if some byte belongs to an element of both; strided views may interleave.

    Exact but for strides so odd that the answer would take long, which count as overlapping.
    """
    of_a, of_b = span(a), span(b)
    if of_a[0] == of_a[1] or of_b[0] == of_b[1] or not meets(of_a, (of_b,)):
        return False
    try:
        return np.shares_memory(_bytes_of(a), _bytes_of(b), _WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array over the addresses of a tensor, on whatever device; never to be read."""
    size = tensor.element_size()
    interface = {
        "shape": (*tensor.shape, size),
        "strides": (*(s * size for s in tensor.stride()), 1),
        "typestr": "|u1",
        "data": (tensor.data_ptr(), True),
        "version": 3,
    }
    return np.asarray(type("Addresses", (), {"__array_interface__": interface})())

"""The one way of a call from its arguments to its kernel: it is known, or it is checked.

An op is a handful of plain functions over its call, a tuple of arguments.  ``run`` gives calls that
are recorded or watched to the operator; else it asks a memo for a call of the same *kind*, which
skips the checks, and has what the launch prepared.  A call of no known kind goes through every
check, and its kind is noted once it was launched.

What a known call has in common with the one that was checked:

* its options, with their classes (True is 1 is 1.0, but not here);
* ``launch.alike`` of all tensors that come with the call: class, device, dtype, shape, strides, and
  no negative bit.  A new block table every step is like the last; one tensor in two places is in
  the same two again;
* what places are kept (``APART``): where everything begins *now*, asked of each tensor, as memory
  behind one can be freed, resized or replaced.  Of addresses that are new, spans are compared, and
  objects over tensors (cache, query, plan) are asked whether they fit and stay.

So nothing is known by identity, and a memo keeps no caller's tensor alive.  The exported function
sees dtypes, extents, strides and alignment once more: if it refuses, the full checks say why.

(Identity of plan and tables would save two addresses a call, 0.1 us, and cost a full check for each
new table.  A cache is no part of a kind: the layers of a model share it.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapmla import checks
from snapmla.call import tracing
from snapmla.checks import overlap
from snapmla.runtime import launch

ROOM = 16  # kinds that a memo keeps: batch sizes and options that take turns
APART = overlap.Apart()  # (form of a kind, addresses) of calls whose tensors lie apart
# raised where arguments are of another kind than any call that was right
_OTHER_KIND = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)

# tensors that come with the call; options; where it all begins, None if nobody's memory is written
# that was given, and nothing can have moved unseen
Parts = tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...] | None]
Groups = Sequence[Sequence[overlap.Span]]


@dataclass(frozen=True, slots=True, eq=False)  # quicker to read than a NamedTuple
class Kind:
    """Facts that calls have in common with one that was checked and launched.

    Attributes:
        alike: of the tensors, each once.
        places: where one tensor stands in several places, None where they differ.
        form: a number for the op and the tensors' extents, and for where lies what was prepared.
        ready: what the launch prepared.
    """

    options: tuple[Any, ...]
    alike: Callable[..., bool]
    places: launch.Places | None
    form: int
    ready: Any


class Memo:
    """Kinds of calls that are known, the last one first; it lives on a plan, an object or an op."""

    __slots__ = ("kinds",)

    def __init__(self) -> None:
        self.kinds: tuple[Kind, ...] = ()

    def forget(self) -> None:
        """Knows nothing any more."""
        self.kinds = ()

    def find(self, op: Op, call: Any) -> Kind | None:
        """The kind of a call that needs no check, None of others."""
        try:
            parts = op.parts(call)
            if parts is None:
                return None
            tensors, options, where = parts
            unasked = iter(tensors)  # whether they are nested: each once, for all kinds
            for kind in self.kinds:
                if kind.options != options:
                    continue
                seen = where is not None and (kind.form, where) in APART
                # torch's guards end the process over a nested tensor.  Where plain tensors lay
                # before, only the first is asked again: six questions take 0.3 us
                for tensor in unasked:
                    if tensor.is_nested:
                        return None
                    if seen:
                        break
                once = tensors
                if kind.places is not None:
                    first, places = kind.places
                    if not all(map(operator.is_, map(tensors.__getitem__, first), tensors)):
                        continue
                    once = tuple(map(tensors.__getitem__, places))
                if kind.alike(*once):
                    if not (seen or where is None or _lie_apart(op, call, kind, tensors, where)):
                        return None
                    if kind is not self.kinds[0]:
                        self._put_first(kind)
                    return kind
        except _OTHER_KIND:
            pass
        return None

    def note(self, op: Op, call: Any, ready: Any) -> None:
        """Keeps the kind of a call that was checked and launched."""
        try:
            parts = op.parts(call)
            if parts is None:
                return
            tensors, options, where = parts
            places = launch.Places.of(tensors)
            once = tensors if places is None else [tensors[i] for i in places.once]
            for kind in self.kinds:  # of calls whose tensors lie between another's pages
                if kind.options == options and kind.places == places and kind.alike(*once):
                    return
            extents = ((t.shape, t.stride(), t.dtype) for t in tensors)
            form = overlap.place((op.name, getattr(ready, "place", 0), *extents))
            kind = Kind(options, launch.alike(*once), places, form, ready)
            self._put_first(kind)
            if where is not None:  # now, lest the next call ask
                _lie_apart(op, call, kind, tensors, where)
        except _OTHER_KIND:
            pass

    def _put_first(self, kind: Kind) -> None:
        self.kinds = (kind, *[k for k in self.kinds if k is not kind][: ROOM - 1])


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An op in plain functions over its call.

    Attributes:
        name: the op's.
        check: (call) -> the call with its plan, and with copies that the launch takes; raises all
            sentences.  Of a call that it returned it launches nothing: it also explains why a
            kernel refused.
        launch: (call, ready) -> (results, ready); allocates, and alone knows the ABI's order.
            Given None it prepares; what it returns is noted unless that is None.
        traced: (call) -> results through ``torch.ops``.
        parts: (call) -> ``Parts``; None of calls that are never known.
        places: (call, ready) -> groups of spans, of which no two may share bytes; None, or an error
            of a check, where an object does not fit, or its memory is not where it was.  Asked once
            for all addresses.
        memo: of kinds that belong to no plan or object.
    """

    name: str
    check: Callable[[Any], Any]
    launch: Callable[[Any, Any], tuple[Any, Any]]
    traced: Callable[[Any], Any]
    parts: Callable[[Any], Parts | None]
    places: Callable[[Any, Any], Groups | None]
    memo: Memo = field(default_factory=Memo)


def run(op: Op, owner: Any, call: Any) -> Any:
    """Results of a call.

    Args:
        owner: whose ``memo`` knows the call's kind: a plan, an object, the op; None: it is checked.
    """
    if tracing.active():
        return op.traced(call)
    try:
        memo = owner.memo
    except AttributeError:
        memo = None
    kind = None if memo is None else memo.find(op, call)
    if kind is not None:
        try:
            return op.launch(call, kind.ready)[0]
        except Exception as error:
            checks.explain(error, op.check, call)
            raise
    if not tracing.plain(*call):
        return op.traced(call)
    call = op.check(call)
    try:
        made, ready = op.launch(call, None)
    except Exception as error:
        checks.explain(error, op.check, call)
        raise
    if memo is not None and ready is not None:
        memo.note(op, call, ready)
    return made


def _lie_apart(
    op: Op, call: Any, kind: Kind, tensors: tuple[Any, ...], where: tuple[Any, ...]
) -> bool:
    """True if a call of a known kind, at addresses that are new, is right there as well."""
    if not all(t.data_ptr() or not t.numel() for t in tensors):  # one was freed
        return False
    groups = op.places(call, kind.ready)
    return groups is not None and APART.see((kind.form, where), *groups)

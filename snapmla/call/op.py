"""Ops over flat tensors and numbers, declared once.

A *declaration* is a NamedTuple, the call, and checks in the order in which they speak.  From the
tuple's annotations follow which arguments are read, which are options and which may be missing;
with the names of those that are written also

* the key by which a repeated call is known, and what must lie apart (``snapmla.call.memo.Op``),
* the operators with their schemas, their fakes, and the call as a node of a graph,
* the results that are allocated where a call is recorded.

An op declares no objects: what takes a plan or a cache writes its ``call.Op`` by hand.  ``launch``
alone knows the order of the kernel's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, get_type_hints

import torch

from snapmla import checks
from snapmla.call import memo as calls
from snapmla.checks import overlap
from snapmla.runtime import variants

Extents = dict[str, Any]  # extents and options by name, as far as checks have come
_SCHEMA: dict[Any, str] = {
    torch.Tensor: "Tensor", torch.Tensor | None: "Tensor?", int: "int", int | None: "int?",
    float: "float", bool: "bool", str: "str",
}  # fmt: skip
_CONVERTED = (bool, float)  # options that a caller may give as another number


@dataclass(frozen=True)
class TensorArg:
    """The check of a tensor argument: kind, dtype, shape, device.

    Attributes:
        shape: names of extents, which later checks know by what the first one found.
        advice: what to change if the shape does not fit; empty: by the argument's name.
        contiguous: True if kernels walk it without strides.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    shape: str
    advice: str = ""
    contiguous: bool = False

    def extents(self, known: Extents) -> tuple[Any, ...]:
        """The shape as far as it is known; names of what is not."""
        return tuple([known.get(name, name) for name in self.shape.split()])

    def __call__(self, call: Any, known: Extents) -> None:
        """Checks the argument and notes its extents; the first tensor's device is the call's."""
        value = getattr(call, self.name)
        shape = self.extents(known)
        checks.tensor(self.name, value, self.dtypes, shape, known.get("device"), self.advice)
        if self.contiguous:
            checks.contiguous(self.name, value)
        known.setdefault("device", value.device)
        for name, extent in zip(self.shape.split(), value.shape):
            known.setdefault(name, extent)


def vector(name: str, extent: str) -> TensorArg:
    """The check of an int32 table of one dimension."""
    return TensorArg(name, (torch.int32,), extent, contiguous=True)


@dataclass(frozen=True)
class IntArg:
    """The check of an int option; later checks know its value by its name."""

    name: str
    low: int
    high: int | None = None

    def __call__(self, call: Any, known: Extents) -> None:
        known[self.name] = checks.integer(
            self.name, getattr(call, self.name), self.low, self.high
        )  # fmt: skip


Check = TensorArg | IntArg | Callable[[Any, Extents], None]


class Wire(NamedTuple):
    """The form in which operators take an argument that torch's language lacks.

    Attributes:
        type: in schemas.
        send: (the call's value) -> the operator's.
        take: (the argument's name, the operator's value) -> the call's.
    """

    type: str
    send: Callable[[Any], Any]
    take: Callable[[str, Any], Any]


def codes(name: str, value: torch.Tensor) -> torch.Tensor:
    """Bytes as float8, which operators do not take."""
    checks.tensor(name, value, (torch.uint8,), tuple(value.shape))
    return value.view(checks.FP8)


BYTES = Wire("Tensor", lambda value: value.view(torch.uint8), codes)
OR_ZERO = Wire("int", lambda value: value or 0, lambda _, value: value or None)  # None is 0

_PARTS = """
def parts(call):
    {fields}, = call
    tensors = {tensors}
    if {nothing}:
        return tensors, ({options}), None
    where = tuple([t.data_ptr() for t in tensors])
    return tensors, ({options}), where
"""


def _parts_of(
    fields: tuple[str, ...],
    tensors: tuple[str, ...],
    options: tuple[str, ...],
    optional: set[str],
    given: tuple[str, ...],
    by_phase: bool,
) -> Callable[[Any], calls.Parts]:
    """``parts`` of ``call.Op``, written out for these fields as a dataclass's methods are: it runs
    on every call, where a loop over names takes twice the time.

    Args:
        given: optional tensors; if a call has none of them, ``parts`` reads no addresses.
    """
    some = f"[t for t in ({', '.join(tensors)},) if t is not None]"
    key = [f"{n}.__class__, {n}, " for n in options]
    key += [f"{n} is None, " for n in tensors if n in optional]
    key += [f"where[0] % {checks.ALIGN}, "] * by_phase
    text = _PARTS.format(
        fields=", ".join(fields), options="".join(key),
        tensors=f"tuple({some})" if optional else f"({', '.join(tensors)},)",
        nothing=" is ".join([*given, "None"]) if given else "False",
    )  # fmt: skip
    made: dict[str, Any] = {}
    exec(compile(text, __file__, "exec"), made)
    return cast("Callable[[Any], calls.Parts]", made["parts"])


class Declared:
    """An op over flat tensors and numbers.

    Attributes:
        op: what ``call.run`` takes.
        operators: (schema, real, fake) of ``torch.ops``: one that allocates results and one that
            writes those that are given (``_out``), or the only one of an op without results.
    """

    def __init__(
        self,
        name: str,
        call: Any,
        written: tuple[str, ...],
        told: tuple[Check, ...],
        launch: Callable[[Any, Any], tuple[Any, Any]],
        *,
        memory: Callable[[Any], None] | None = None,
        moved: Callable[[Any], None] | None = None,
        make: Callable[[Any], tuple[torch.Tensor, ...]] | None = None,
        scratch: tuple[str, ...] = (),
        unrecorded: tuple[str, ...] = (),
        wire: dict[str, Wire] | None = None,
        out_only: bool = False,
        by_phase: bool = False,
    ) -> None:
        """Declares an op.

        Args:
            name: the op's, and its operators'.
            call: NamedTuple of the arguments.  Annotations are ``torch.Tensor``, int, float, bool
                or str, or one of the first two or None: such a tensor may be missing.  All of
                ``written`` may be, with None as their default, or none.
            written: fields that are written, in the order of results.
            told: checks that need no memory, in the order in which they speak: ``TensorArg``,
                ``IntArg``, or a function of the call and of what is known by now.
            launch: as of ``call.Op``.
            memory: further checks, of tensors with memory.
            moved: those of them that a call at new addresses may fail; None: all.
            make: (checked call) -> new results, for those that a recorded call does not pass;
                None: of the shapes and dtypes of ``told``.
            scratch: those of ``written`` that are no results.
            unrecorded: fields that operators lack, whose calls have the default.
            wire: arguments that operators take in another form.
            out_only: True if the only operator is ``_out``, with results in the place of the field.
            by_phase: True if the kernel follows from where the first tensor begins, too, within
                16 bytes.
        """
        hints = get_type_hints(call)
        fields = call._fields
        tensors = [n for n in fields if hints[n] in (torch.Tensor, torch.Tensor | None)]
        self.name, self.call, self.told, self.memory = name, call, told, memory
        self.moved = memory if moved is None else moved
        self.written, self.make, self.out_only = written, make, out_only
        self.recorded = tuple([n for n in written if n not in unrecorded])
        self.results = tuple([n for n in self.recorded if n not in scratch])
        self.read = tuple([n for n in tensors if n not in written])
        self.options = tuple([n for n in fields if n not in tensors])
        self.optional = {n for n in tensors if hints[n] != torch.Tensor}
        self.allocates = hints[written[0]] != torch.Tensor
        apart = (*unrecorded, *(written if self.allocates and not out_only else ()))
        self.flat = tuple([n for n in fields if n not in apart])
        self.wire = {} if wire is None else wire
        self.send = {n: hints[n] for n in self.options if hints[n] in _CONVERTED}
        self.send |= {n: form.send for n, form in self.wire.items()}
        self.types = {n: self.wire[n].type if n in self.wire else _SCHEMA[hints[n]] for n in fields}
        given = written if self.allocates and not by_phase else ()
        parts = _parts_of(
            fields, (*self.read, *written), self.options, self.optional, given, by_phase
        )  # fmt: skip
        self.launch = launch
        self.op = calls.Op(name, self.checked, launch, self.traced, parts, self._places)
        self.operators = tuple(self._operators())
        variants.on_forget(self.op.memo.forget)  # kernels

    def _places(self, call: Any, _: object) -> calls.Groups:
        if self.moved is not None:
            self.moved(call)
        written = (getattr(call, name) for name in self.written)
        read = (getattr(call, name) for name in self.read)
        return (
            *([overlap.span(t)] for t in written if t is not None),
            [overlap.span(t) for t in read if t is not None],
        )

    def known(self, call: Any) -> Extents:
        """Checks all that needs no memory; extents and options by name."""
        known: Extents = {}
        for check in self.told:
            if isinstance(check, TensorArg) and check.name in self.optional:
                if getattr(call, check.name) is not None:
                    check(call, known)
            else:
                check(call, known)
        return known

    def checked(self, call: Any) -> Any:
        """Checks a call on tensors with memory, and returns it."""
        self.known(call)
        given = {n: t for n in self.written if (t := getattr(call, n)) is not None}
        for name, value in given.items():
            checks.distinct(name, value)
        if self.memory is not None:
            self.memory(call)
        before = {name: getattr(call, name) for name in self.read}
        for name, value in given.items():
            if not self.allocates:  # a pool: it is not at fault
                for other, tensor in before.items():
                    checks.apart(other, tensor, {name: value})
            checks.apart(name, value, before)
            before[name] = value
        return call

    def now(self, call: Any) -> Any:
        """Checks tensors with memory, and launches, whoever traces."""
        return self.launch(self.checked(call), None)[0]

    def _made(self, call: Any) -> dict[str, torch.Tensor]:
        """The tensors that are written, new ones where the call gives none; checks the call."""
        known, like = self.known(call), getattr(call, self.read[0])
        made = {name: getattr(call, name) for name in self.recorded}
        if self.make is not None:
            new = zip(made.items(), self.make(call), strict=True)
            return {name: other if given is None else given for (name, given), other in new}
        for check in self.told:
            if isinstance(check, TensorArg) and made.get(check.name, like) is None:
                shape, dtype = check.extents(known), check.dtypes[0]
                made[check.name] = like.new_empty(shape, dtype=dtype)
        return made

    def _result(self, made: dict[str, torch.Tensor]) -> Any:
        """Results of a call that wrote these tensors."""
        results = tuple([made[name] for name in self.results])
        return results if len(results) > 1 else results[0]

    def traced(self, call: Any) -> Any:
        """The call as an operator, for tracers."""
        made: dict[str, torch.Tensor] | None = None
        if not self.allocates:
            self.known(call)
        elif self.out_only or any([getattr(call, name) is not None for name in self.written]):
            made = self._made(call)
        if made is not None and self.out_only:
            call = call._replace(**made)
        given = [
            self.send[name](getattr(call, name)) if name in self.send else getattr(call, name)
            for name in self.flat
        ]
        ops = torch.ops.snapmla
        if made is None:
            return getattr(ops, self.name)(*given)
        getattr(ops, self.name + "_out")(*given, *([] if self.out_only else made.values()))
        return self._result(made)

    def _call_of(self, arguments: tuple[Any, ...], names: tuple[str, ...]) -> Any:
        """The call of an operator's arguments."""
        given = dict(zip(names, arguments))
        for name, form in self.wire.items():
            given[name] = form.take(name, given[name])
        return self.call(**given)

    def _operators(self) -> Iterator[tuple[Any, ...]]:
        """Schemas, and functions on tensors with memory and on shapes alone."""
        marks = {n: f"Tensor({chr(ord('a') + i)}!) {n}" for i, n in enumerate(self.recorded)}
        defaults = {n: self.call._field_defaults.get(n) for n in self.options}

        def argument(name: str) -> str:
            if name in marks:
                return marks[name]
            default = "" if defaults.get(name) is None else f"={defaults[name]}"
            return f"{self.types[name]} {name}{default}"

        given = ", ".join(map(argument, self.flat))

        def write(names: tuple[str, ...]) -> Callable[..., None]:
            def real(*arguments: Any) -> None:
                self.now(self._call_of(arguments, names))

            return real

        if self.out_only or not self.allocates:
            name = self.name + "_out" * self.out_only
            yield f"{name}({given}) -> ()", write(self.flat)
            return

        def allocate(*arguments: Any) -> Any:
            return self.now(self._call_of(arguments, self.flat))

        def fake(*arguments: Any) -> Any:
            return self._result(self._made(self._call_of(arguments, self.flat)))

        returned = ", ".join(["Tensor"] * len(self.results))
        returned = f"({returned})" if len(self.results) > 1 else returned
        yield f"{self.name}({given}) -> {returned}", allocate, fake
        out = ", ".join(marks.values())
        yield f"{self.name}_out({given}, {out}) -> ()", write((*self.flat, *self.recorded))

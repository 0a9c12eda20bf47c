"""Reads the index that torch.save wrote for a dict of tensors, without running it.

The pickle of a torch file is a program. torch's own reader for untrusted files (weights_only) still builds whatever
it asks for, however large, and hashes whatever it names as a key. Here a pickle can only state names, numbers and the
places of tensors, and nothing else has an effect.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lorafleet.protocol.errors import AdapterError, AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil

MAX_STEPS = 400_000  # in the pickle, about half a second; a tensor takes about 30

# The dtypes of torch's storages, by safetensors' names, and the bytes of a value. BoolStorage and CharStorage can be
# read, but nothing is served in their dtypes.
STORAGES: Mapping[str, tuple[str, int]] = {
    "BFloat16Storage": ("BF16", 2),
    "BoolStorage": ("bool", 1),
    "ByteStorage": ("U8", 1),
    "CharStorage": ("int8", 1),
    "DoubleStorage": ("F64", 8),
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "IntStorage": ("I32", 4),
    "LongStorage": ("I64", 8),
    "ShortStorage": ("I16", 2),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor's values in the archive."""

    record: str  # name in the archive, under data/
    dtype: str  # as in STORAGES
    value_bytes: int
    num_values: int  # in the record
    offset: int  # in values
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in values


def read_index(pickled: bytes, name: str) -> dict[str, StoredTensor]:
    """Returns the tensors by name, as the pickle describes them. Raises AdapterMalformed or AdapterUnsupported.

    `name` is the file's name, for messages.
    """
    root = _Machine(name).run(pickled)
    if not isinstance(root, _Dict):
        raise AdapterMalformed(f"{name} holds a {_kind(root)}; it must hold a dict of tensors.")
    found: dict[str, StoredTensor] = {}
    for key, value in yielding_gil(root.items):
        if not isinstance(key, str):
            raise AdapterMalformed(f"{name} has a key that is a {_kind(key)}; tensor names must be strings.")
        if key in found:
            raise AdapterMalformed(f"{name} has {shown(key)} twice.")
        if not isinstance(value, StoredTensor):
            raise AdapterMalformed(f"{name}: {shown(key)} is not a dense tensor.")
        found[key] = value
    return found


@dataclass(slots=True, eq=False)
class _Dict:
    items: list[tuple[object, object]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _List:
    items: list[object] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of something in a module. Nothing looks it up."""

    text: str


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    dtype: str
    value_bytes: int
    num_values: int


class _Mark:
    pass


_MARK = _Mark()


def _kind(value: object) -> str:
    names = {_Dict: "dict", _List: "list", StoredTensor: "tensor", _Name: "function or class"}
    return names.get(type(value), type(value).__name__)


class _Machine:
    def __init__(self, name: str) -> None:
        self._name = name
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self, pickled: bytes) -> object:
        try:
            for steps, (opcode, argument, _) in enumerate(yielding_gil(pickletools.genops(pickled))):
                if steps > MAX_STEPS:
                    raise AdapterMalformed(f"{self._name} has an index of more than {MAX_STEPS} steps.")
                if opcode.name == "STOP":
                    return self._stack.pop()
                step = _STEPS.get(opcode.name)
                if step is None:
                    raise self._refusal(f"the step {opcode.name}")
                step(self, argument)
        except AdapterError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise AdapterMalformed(f"{self._name} has a damaged index ({type(error).__name__}).") from None
        raise AdapterMalformed(f"{self._name} has a damaged index: it has no end.")

    def _refusal(self, what: str) -> AdapterUnsupported:
        return AdapterUnsupported(
            f"{self._name} holds more than tensors, which could run code when it is opened: {what}. Save the adapter "
            f"again with safetensors."
        )

    # -- the steps ------------------------------------------------------------------------------------------------

    def push(self, value: object) -> None:
        self._stack.append(value)

    def _to_mark(self) -> list[object]:
        values = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def remember(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def recall(self, place: int) -> None:
        self.push(self._memo[place])

    def make_tuple(self, size: int) -> None:
        values = self._stack[len(self._stack) - size :]
        if len(values) < size or _MARK in values:
            raise IndexError
        del self._stack[len(self._stack) - size :]
        self.push(tuple(values))

    def marked_tuple(self) -> None:
        self.push(tuple(self._to_mark()))

    def name_text(self, argument: str) -> None:
        self.push(_Name(argument.replace(" ", ".")))

    def name_stack(self) -> None:
        attribute, module = self._stack.pop(), self._stack.pop()
        self.push(_Name(f"{module}.{attribute}" if isinstance(module, str) and isinstance(attribute, str) else "?"))

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._dict(self._stack[-1]).items.append((key, value))

    def set_items(self) -> None:
        values = self._to_mark()
        self._dict(self._stack[-1]).items.extend(zip(values[::2], values[1::2], strict=True))

    def append(self) -> None:
        value = self._stack.pop()
        self._list(self._stack[-1]).items.append(value)

    def extend(self) -> None:
        values = self._to_mark()
        self._list(self._stack[-1]).items.extend(values)

    def build(self) -> None:
        """Drops the attributes of an OrderedDict (a state dict's _metadata), which mean nothing here."""
        self._stack.pop()
        self._dict(self._stack[-1])

    def storage(self) -> None:
        match self._stack.pop():
            case ("storage", _Name(text), str(record), str(), int(num_values)) if num_values >= 0:
                found = STORAGES.get(text.removeprefix("torch."))
                if found is None:
                    raise AdapterUnsupported(f"{self._name} has a tensor of {shown(text)}, which is not supported.")
                self.push(_Storage(record, *found, num_values))
            case _:
                raise ValueError

    def call(self) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, _Name) or not isinstance(arguments, tuple):
            raise ValueError
        match called.text, arguments:
            case "collections.OrderedDict", ():
                self.push(_Dict())
            case "torch._utils._rebuild_parameter", (StoredTensor() as tensor, *_):
                self.push(tensor)
            case "torch._utils._rebuild_tensor_v2", (
                _Storage() as storage,
                int(offset),
                tuple(shape),
                tuple(stride),
                *_,
            ):
                self.push(self._tensor(storage, offset, shape, stride))
            case _:
                raise self._refusal(f"it calls {shown(called.text)}")

    def _tensor(
        self, storage: _Storage, offset: int, shape: Sequence[object], stride: Sequence[object]
    ) -> StoredTensor:
        sizes = tuple(n for n in shape if type(n) is int and 0 <= n < 1 << 48)
        steps = tuple(n for n in stride if type(n) is int and 0 <= n < 1 << 48)
        if len(sizes) != len(shape) or len(steps) != len(stride) or len(sizes) != len(steps) or offset < 0:
            raise ValueError
        return StoredTensor(
            storage.record, storage.dtype, storage.value_bytes, storage.num_values, offset, sizes, steps
        )

    def _dict(self, value: object) -> _Dict:
        if not isinstance(value, _Dict):
            raise ValueError
        return value

    def _list(self, value: object) -> _List:
        if not isinstance(value, _List):
            raise ValueError
        return value


def _constant(value: object) -> Callable[[_Machine, object], None]:
    return lambda machine, _: machine.push(value)


def _without_argument(step: Callable[[_Machine], None]) -> Callable[[_Machine, object], None]:
    return lambda machine, _: step(machine)


def _value(machine: _Machine, argument: object) -> None:
    machine.push(argument)


# The steps by their names in Python's pickletools. torch.save writes no others for tensors.
_STEPS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda _machine, _: None,
    "FRAME": lambda _machine, _: None,
    "MARK": _constant(_MARK),
    "NONE": _constant(None),
    "NEWTRUE": _constant(True),
    "NEWFALSE": _constant(False),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _value),
    "EMPTY_DICT": lambda machine, _: machine.push(_Dict()),
    "EMPTY_LIST": lambda machine, _: machine.push(_List()),
    "EMPTY_TUPLE": _constant(()),
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "TUPLE": _without_argument(_Machine.marked_tuple),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.remember),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.recall),
    "GLOBAL": _Machine.name_text,
    "STACK_GLOBAL": _without_argument(_Machine.name_stack),
    "SETITEM": _without_argument(_Machine.set_item),
    "SETITEMS": _without_argument(_Machine.set_items),
    "APPEND": _without_argument(_Machine.append),
    "APPENDS": _without_argument(_Machine.extend),
    "BUILD": _without_argument(_Machine.build),
    "BINPERSID": _without_argument(_Machine.storage),
    "REDUCE": _without_argument(_Machine.call),
}

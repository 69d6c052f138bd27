"""Python values in the messages between the agent's interpreter and the world's process.

Values travel as JSON, never as pickle. A value without a JSON form is written as `{"$tag": …}`. A value that no tag
fits is replaced by an object with its type's name and its text. A request shows no more of it than that: an address
takes the text, and a body refuses the value by the name of its type.
"""

import builtins
import collections
import contextlib
import datetime
import decimal
import enum
import os
import pathlib
import random
import re
import uuid
from collections.abc import Iterator

MAX_CALL_BYTES = 1024 * 1024
"""Bytes that a message of an interpreter to its world may have."""
MAX_TYPES = 1000
"""Types of described values that a process makes at most."""
_types: dict[tuple[str, str, type], type] = {}
_PLAIN = (str, int, float, bool, type(None))
_PLAIN_CONTENT = {
    "str": (str, str.__str__),
    "int": (int, int.__int__),
    "float": (float, float.__float__),
    "list": (list, list.copy),
    "tuple": (tuple, lambda value: tuple.__getitem__(value, slice(None))),
    "dict": (dict, dict.copy),
    "set": (set, lambda value: {*value}),
    "frozenset": (frozenset, lambda value: frozenset({*value})),
}
"""Name -> a built-in type, and how to read a subclass's content past the methods that the subclass overrides."""
_DATETIMES = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}


def encode(value):
    """Return the value in types that JSON can express."""
    if type(value) in _PLAIN:
        return value
    if type(value) is list:
        return [encode(entry) for entry in value]
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encode(entry) for key, entry in value.items()}
        return {"$dict": [[encode(key), encode(entry)] for key, entry in value.items()]}
    if type(value) in (tuple, set, frozenset):
        return {f"${type(value).__name__}": [encode(entry) for entry in value]}
    if type(value) is bytes:
        return {"$bytes": value.hex()}
    return {"$object": _describe(value)}


def _describe(value) -> dict:
    described = {"module": type(value).__module__, "name": type(value).__qualname__}
    described |= {"text": _text(str, value), "repr": _text(repr, value)}
    for kind, datetime_type in _DATETIMES.items():
        if isinstance(value, datetime_type):
            return described | {"kind": kind, "iso": datetime_type.isoformat(value)}
    for kind, (plain, read) in _PLAIN_CONTENT.items():
        if isinstance(value, plain):
            return described | {"kind": kind, "value": encode(read(value))}
    return described | {"logged": encode(_logged(value))}


def _text(how, value) -> str:
    try:
        return how(value)
    except Exception:
        return object.__repr__(value)


def _logged(value):
    """Return what AppWorld's log of calls shows of a value: by its encoder's rules, or the text if none fits."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, collections.deque):
        return list(value)
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return int(value) if value.as_tuple().exponent == 0 else float(value)
    if isinstance(value, re.Pattern):
        return value.pattern
    if isinstance(value, uuid.UUID | pathlib.PurePath):
        return str(value)
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if type(attributes) is dict else _text(str, value)


class Described:
    """Stands for a value that cannot be sent. The log of calls shows its `logged`."""

    logged = None


def decode(value):
    """Return the value that `encode` was given, or an object that a request cannot tell from it.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: `encode` did not make this value.
    """
    if isinstance(value, list):
        return [decode(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag in _TAGS:
            return _TAGS[tag](inner)
    return {key: decode(entry) for key, entry in value.items()}


def _object(described: dict):
    kind = described.get("kind")
    base = _DATETIMES[kind] if kind in _DATETIMES else _PLAIN_CONTENT[kind][0] if kind is not None else Described
    shown = _type(str(described["module"]), str(described["name"]), base)
    texts = str(described["text"]), str(described["repr"])
    if kind in _DATETIMES:
        return _moment(shown, described["iso"], *texts)
    value = shown(decode(described["value"])) if kind is not None else shown()
    if kind is None:
        value.logged = decode(described["logged"])
    value.gvpo_text, value.gvpo_repr = texts
    return value


def _moment(shown: type, iso: str, text: str, spelled: str):
    """Return a date or time that prints as described. Copies of it are made here as well, and keep their texts."""
    value = shown.fromisoformat(iso)
    value.gvpo_text, value.gvpo_repr = text, spelled
    return value


def _copied(value, protocol) -> tuple:
    return _moment, (type(value), value.isoformat(), value.gvpo_text, value.gvpo_repr)


def _type(module: str, name: str, base: type) -> type:
    """Return a type that prints its values as their description says. A type takes a kilobyte, so values share it.

    Raises:
        ValueError: this process has made `MAX_TYPES` types.
    """
    key = (module, name, base)
    if key not in _types:
        if len(_types) >= MAX_TYPES:
            raise ValueError(f"values of more than {MAX_TYPES} types")
        shown = {"__module__": module, "__str__": lambda self: self.gvpo_text, "__repr__": lambda self: self.gvpo_repr}
        if base in _DATETIMES.values():  # their own way of copying drops attributes
            shown["__reduce_ex__"] = _copied
        _types[key] = type(name, (base,), shown)
    return _types[key]


_TAGS = {
    "$dict": lambda pairs: {decode(key): decode(entry) for key, entry in pairs},
    "$tuple": lambda entries: tuple(decode(entries)),
    "$set": lambda entries: set(decode(entries)),
    "$frozenset": lambda entries: frozenset(decode(entries)),
    "$bytes": bytes.fromhex,
    "$object": _object,
}


class SharedRandom:
    """Makes the `random` modules of two processes one sequence, because code and APIs share one in AppWorld."""

    def __init__(self) -> None:
        self._known = random.getstate()

    def changed_state(self) -> list | None:
        """Return the state to send to the other side; `None` when the other side has it already."""
        state = random.getstate()
        if state == self._known:
            return None
        self._known = state
        return [state[0], list(state[1]), state[2]]

    def take(self, state) -> None:
        """Take over the other side's state; ignore a value that is no state."""
        try:
            random.setstate((state[0], tuple(state[1]), state[2]))
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            return
        self._known = random.getstate()

    @contextlib.contextmanager
    def unpredictable(self) -> Iterator[None]:
        """Draw from a seed of the operating system inside the block, then go on with the sequence.

        When the block draws anything, the sequence goes on as if the block had drawn one number of 128 bits from it.
        """
        state = random.getstate()
        random.seed(os.urandom(32))
        seeded = random.getstate()
        try:
            yield
        finally:
            drawn = random.getstate() != seeded
            random.setstate(state)
            if drawn:
                random.getrandbits(128)


def describe_error(error: Exception) -> dict:
    """Return a description of an exception that a call raised, from which the other side builds its own."""
    try:
        arguments = encode(list(error.args))
    except Exception:
        arguments = None
    return {
        "module": type(error).__module__,
        "name": type(error).__qualname__,
        "text": str(error),
        "arguments": arguments,
    }


def build_error(described: dict, modules: dict) -> Exception:
    """Return an exception that prints as the described one, of the same class if this process has that class."""
    module, name, text = described["module"], described["name"], described["text"]
    known = vars(builtins) if module == "builtins" else vars(modules[module]) if module in modules else {}
    base = known.get(name)
    base = base if isinstance(base, type) and issubclass(base, Exception) else Exception
    if described["arguments"] is not None and module == "builtins":
        try:
            error = base(*decode(described["arguments"]))
            if type(error).__qualname__ == name and str(error) == text:
                return error
        except Exception:
            pass
    shown = {"__module__": module, "__str__": lambda self: text, "__init__": lambda self, text: None}
    return type(name, (base,), shown)(text)

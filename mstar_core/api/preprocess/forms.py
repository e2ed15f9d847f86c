"""Explicit form of messages between the api and pool processes: MessagePack, with arrays and bytes beside it.

A pool process decodes untrusted files, so the api must not trust what it writes. The reader accepts a closed set of
types, checks every size, and imports nothing. Parameters are of the plugin's own class; only a pool process creates
them by name, and the api creates those of an answer with the class of the request.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from mstar_core import errors
from mstar_core.errors import MstarError, PluginError, RequestError
from mstar_core.plugin.chat.turns import Tool, ToolCall, ToolChoice, Turn
from mstar_core.plugin.media.limits import MediaLimits
from mstar_core.plugin.processor import InputPart, Inputs, KeptMedia, MediaPart, PromptRequest, SegmentInputs
from mstar_core.targets import load_target

INLINE_BYTES: Final = 256
"""Byte strings up to this size are part of the MessagePack; longer ones are copied once, beside it."""

HEAD_BYTES: Final = 64 << 20
"""Most bytes of MessagePack in an answer."""

MOST_AXES: Final = 32
KINDS: Final = "biufcSU"
SCALARS: Final = frozenset((bool, int, float, str, type(None)))
FORMS: Final[Mapping[str, type]] = {
    kind.__name__: kind
    for kind in (
        PromptRequest,
        Turn,
        Tool,
        ToolCall,
        ToolChoice,
        MediaPart,
        KeptMedia,
        MediaLimits,
        Inputs,
        InputPart,
        SegmentInputs,
    )
}
ERRORS: Final[Mapping[str, type[MstarError]]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MstarError)
}

Append = Callable[[Any], int]
"""Appends bytes beside the MessagePack. Returns where they begin."""


class Code:
    """Codes of MessagePack extensions."""

    ARRAY, BLOB, FORM, ERROR, PARAMS, TUPLE, SET = range(1, 8)


class InvalidForm(ValueError):
    """A message that is not in the form."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """Parameters of an answer before `restored` gives them their class."""

    values: dict[str, Any]


def encoded(value: Any, append: Append) -> bytes:
    """Return the MessagePack of a value. Raises TypeError for a type without a form, RequestError for its values."""
    try:
        return msgspec.msgpack.encode(_plain(value, append))
    except OverflowError:
        raise RequestError("a number has too many digits") from None
    except UnicodeEncodeError:
        raise RequestError("a text is not valid Unicode") from None


def _plain(value: Any, append: Append) -> Any:
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is list:
        return value if set(map(type, value)) <= SCALARS else [_plain(item, append) for item in value]
    if kind is dict or kind is MappingProxyType:
        return {_plain(key, append): _plain(item, append) for key, item in value.items()}
    if kind in (bytes, bytearray, memoryview):
        size = memoryview(value).nbytes
        return bytes(value) if size <= INLINE_BYTES else _ext(Code.BLOB, [append(value), size])
    if isinstance(value, np.ndarray):
        return _array(value, append)
    if kind is tuple:
        return _ext(Code.TUPLE, _plain(list(value), append))
    if kind in (frozenset, set):
        return _ext(Code.SET, _plain(list(value), append))
    if isinstance(value, MstarError):
        return _error(value, append)
    if FORMS.get(kind.__name__) is kind:
        return _ext(Code.FORM, [kind.__name__, _fields(value, append)])
    if dataclasses.is_dataclass(kind):
        return _ext(Code.PARAMS, [f"{kind.__module__}:{kind.__qualname__}", _fields(value, append)])
    return _simple(value, append)


def _simple(value: Any, append: Append) -> Any:
    """Return a value of a class derived from a plain one: numpy's scalars, enums, other mappings and sequences."""
    match value:
        case np.generic():
            return _plain(value.item(), append)
        case enum.Enum():
            return _plain(value.value, append)
        case Mapping():
            return _plain(dict(value), append)
        case str() | bool() | int() | float():
            return value
        case tuple() | list():
            return _plain(list(value), append)
    raise TypeError(f"a message of a pool process cannot hold {type(value).__name__}")


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


def _array(value: np.ndarray, append: Append) -> msgspec.msgpack.Ext:
    if value.dtype.kind not in KINDS or np.dtype(value.dtype.str) != value.dtype:
        raise TypeError(f"a message of a pool process cannot hold an array of {value.dtype}")
    whole = np.ascontiguousarray(value)
    start = append(whole.reshape(-1).view(np.uint8)) if whole.nbytes else 0
    return _ext(Code.ARRAY, [value.dtype.str, list(value.shape), start])


def _fields(value: Any, append: Append) -> dict[str, Any]:
    return {item.name: _plain(getattr(value, item.name), append) for item in dataclasses.fields(value)}


def _error(error: MstarError, append: Append) -> msgspec.msgpack.Ext:
    kind = next(base for base in type(error).__mro__ if ERRORS.get(base.__name__) is base)
    facts = {}
    for name, fact in error.facts.items():
        try:
            facts[name] = _plain(fact, append)
        except TypeError:
            facts[name] = str(fact)
    return _ext(Code.ERROR, [kind.__name__, error.title, error.detail, error.hint, error.code, facts])


class Reader:
    """Decoder of one message. Used once."""

    def __init__(self, data: memoryview, *, trusts_names: bool) -> None:
        """data: the bytes of arrays and long byte strings. trusts_names: import the class of parameters by its name."""
        self._data = data
        self._left = len(data)  # bytes may be used once, so that a message never grows beyond its size
        self._trusts_names = trusts_names
        self._decoder = msgspec.msgpack.Decoder(ext_hook=self._extension)

    def value(self, head: bytes) -> Any:
        """Return the value of the MessagePack `head`. Raises InvalidForm."""
        try:
            return self._decoder.decode(head)
        except InvalidForm:
            raise
        except (
            msgspec.DecodeError,
            ValueError,
            TypeError,
            KeyError,
            SyntaxError,
            RecursionError,
            OverflowError,
        ) as error:
            raise InvalidForm(f"{type(error).__name__}: {error}"[:200]) from error
        finally:
            del self._decoder  # a cycle would hold the message

    def _extension(self, code: int, data: memoryview) -> Any:
        value = self._decoder.decode(data)
        match code, value:
            case Code.ARRAY, [str(dtype), list(shape), int(start)]:
                return self._array(dtype, shape, start)
            case Code.BLOB, [int(start), int(size)]:
                return bytes(self._taken(start, size))
            case Code.FORM, [str(name), dict(values)]:
                return FORMS[name](**values)
            case Code.ERROR, [str(name), str(title), str(detail), str(hint), str(code_name), dict(facts)]:
                return ERRORS[name](title, detail, hint, code=code_name, **facts)
            case Code.PARAMS, [str(target), dict(values)]:
                return load_target(target)(**values) if self._trusts_names else Fields(values)
            case Code.TUPLE, list():
                return tuple(value)
            case Code.SET, list():
                return frozenset(value)
        raise InvalidForm(f"extension {code} is not valid")

    def _taken(self, start: int, size: int) -> memoryview:
        self._left -= size
        if size < 0 or start < 0 or start + size > len(self._data) or self._left < 0:
            raise InvalidForm("bytes outside the message")
        return self._data[start : start + size]

    def _array(self, name: str, shape: list[Any], start: int) -> np.ndarray:
        dtype = np.dtype(name)
        if dtype.kind not in KINDS or dtype.fields is not None or dtype.subdtype is not None or not dtype.itemsize:
            raise InvalidForm(f"an array of {name[:20]!r}")
        if len(shape) > MOST_AXES or not all(type(size) is int and size >= 0 for size in shape):
            raise InvalidForm("an array with an invalid shape")
        data = self._taken(start, math.prod(shape) * dtype.itemsize)
        return np.frombuffer(bytearray(data), dtype).reshape(shape)


def restored(value: Any, params: Any) -> Any:
    """Return an answer of `process_prompt` with parameters of the class of the request's. Raises PluginError."""
    if not isinstance(value, Inputs):
        raise PluginError("the processor returned no inputs", phase="processor")
    if not isinstance(value.params, Fields):
        return value
    try:
        params = dataclasses.replace(params, **value.params.values)
    except (TypeError, ValueError) as error:
        raise PluginError("the processor returned invalid parameters", str(error)[:200], phase="processor") from error
    return dataclasses.replace(value, params=params)

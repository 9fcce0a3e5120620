"""Dataclasses read back from JSON that may be half written, of another version or somebody else's."""

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

LARGEST = 2**63 - 1
NAMES = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    list: "a list",
    tuple: "a pair",
    dict: "a mapping",
}
Kind = TypeVar("Kind")


def read_saved(kind: type[Kind], saved: Any, name: str) -> Kind:
    """The dataclass whose `asdict` was saved; what is missing has its default.

    Fields may be int (0 to 2^63 - 1), float (finite), bool, str, dataclasses, and lists, pairs and mappings of these;
    `name` stands for the whole in an error.

    Raises:
        ValueError: an entry is unknown, or not of its field's type; names the entry.
    """
    return _read(kind, saved, "", name)


def _read(kind: Any, value: Any, path: str, name: str) -> Any:
    where = path or name
    hints = get_type_hints(kind) if is_dataclass(kind) else None
    outer, inner = dict if hints else get_origin(kind) or kind, get_args(kind)
    if not _fits(outer, value) or (outer is tuple and len(value) != len(inner)):
        raise ValueError(f"{where} is not {NAMES[outer]}")
    if hints:
        if unknown := [key for key in value if key not in hints]:
            raise ValueError(f"{where} has an entry {unknown[0]}, which is not known here")
        return kind(**{key: _read(hints[key], each, f"{path}.{key}".lstrip("."), name) for key, each in value.items()})
    if outer is list:
        return [_read(inner[0], each, path, name) for each in value]
    if outer is tuple:
        return tuple(_read(part, each, path, name) for part, each in zip(inner, value, strict=True))
    if outer is dict:
        return {key: _read(inner[1], each, f"{path}.{key}", name) for key, each in value.items()}
    return value


def _fits(kind: type, value: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is int:
        return isinstance(value, int) and 0 <= value <= LARGEST
    if kind is float:
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # neither NaN nor infinite
    if kind in (list, tuple):
        return isinstance(value, list | tuple)
    if kind is dict:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    return isinstance(value, kind)

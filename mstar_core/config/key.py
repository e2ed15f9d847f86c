"""Declaration of configuration keys on the fields that hold their values, and the list of keys made from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, get_args, get_type_hints

import msgspec

from mstar_core.value_spec import ValueSpec, value_kind

ITEM: Final = "[]"
"""Placeholder of an index in the keys of a list of sections: `node_groups[].ranks`."""

REREAD: Final = "`mstarctl reload` reads it again."
LIVE: Final = "`mstarctl set` changes it while the deployment runs."
UNSET: Final = object()


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """Declaration of a key, in the annotation of its field. The field has its name, type and default.

    doc: one line. default_text: shown if the default depends on something; default: then it replaces the field's.
    nullable: `null` is allowed (None: as the field's type). is_reread: the value names a file that `mstarctl reload`
    reads again. is_live: `mstarctl set` changes the value; no other value changes while a deployment runs.
    is_repeatable: the list may contain a value twice.
    """

    doc: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    default: Any = UNSET
    default_text: str = ""
    is_required: bool = False
    nullable: bool | None = None
    is_reread: bool = False
    is_live: bool = False
    is_repeatable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(ValueSpec):
    """One configuration key as files, options and pages see it. Fields with a default: see `ConfigKey`."""

    key: str
    default_text: str = ""
    is_reread: bool = False
    is_live: bool = False
    is_repeatable: bool = False

    @property
    def parent(self) -> str:
        """The section that holds the key, "" for the top."""
        return self.key.rpartition(".")[0]

    @property
    def word(self) -> str:
        """Last part of the key, without its section."""
        return self.key.rpartition(".")[2].removesuffix(ITEM)

    @property
    def allowed(self) -> str:
        """The allowed values as people read them."""
        return "one of " + ", ".join(self.choices) if self.choices else f"{self.kind} {self.limits_text}".rstrip()


def settings_of(struct: type[msgspec.Struct], section: str = "") -> Iterator[Setting]:
    """Yield the declared keys of a record and of its sections, in the order of the fields."""
    hints = get_type_hints(struct, include_extras=True)
    for field in msgspec.structs.fields(struct):
        value_type, *notes = get_args(hints[field.name]) or (hints[field.name],)
        declared = next((note for note in notes if isinstance(note, ConfigKey)), None)
        if declared is None:
            continue
        key = f"{section}.{field.name}".lstrip(".")
        inner = section_type(value_type)
        yield _setting(key, value_type, _default(field), declared)
        if inner is not None:
            yield from settings_of(inner, key if inner is value_type else key + ITEM)


def section_type(value_type: Any) -> type[msgspec.Struct] | None:
    """Return the record of a section or of a list of sections, None for a plain value."""
    inner = value_type if isinstance(value_type, type) else next(iter(get_args(value_type)), None)
    return inner if isinstance(inner, type) and issubclass(inner, msgspec.Struct) else None


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """Return the default of a field, None without one."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _setting(key: str, value_type: Any, field_default: Any, declared: ConfigKey) -> Setting:
    kind, is_nullable = value_kind(value_type)
    default = field_default if declared.default is UNSET else declared.default
    inner = section_type(value_type)
    if inner is not None:
        kind, default = ("section" if inner is value_type else "list of section"), None
    return Setting(
        key=key,
        kind="mapping" if kind == "object" else kind,
        doc=" ".join([declared.doc, *[REREAD] * declared.is_reread, *[LIVE] * declared.is_live]),
        default=default,
        default_text=declared.default_text,
        required=declared.is_required,
        nullable=is_nullable if declared.nullable is None else declared.nullable,
        ge=declared.ge,
        gt=declared.gt,
        le=declared.le,
        choices=declared.choices,
        is_reread=declared.is_reread,
        is_live=declared.is_live,
        is_repeatable=declared.is_repeatable,
    )

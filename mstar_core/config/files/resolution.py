"""Resolution of a file into a checked configuration with the source of every value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mstar_core.config.files.faults import Faults
from mstar_core.config.files.hosts import check_ray
from mstar_core.config.files.ice import ice_servers
from mstar_core.config.files.load import ConfigFile, split_name
from mstar_core.config.files.placement import check_coverage, node_groups
from mstar_core.config.files.read import CheckedValue, fits, read, shown
from mstar_core.config.located import Located
from mstar_core.config.name import NAME_HINT, is_name
from mstar_core.config.resolved import ApiConfig, KVCacheConfig, LoraConfig, NodeGroup, ResolvedConfig
from mstar_core.config.schema import SECTIONS, words_of
from mstar_core.errors import NotFound, did_you_mean
from mstar_core.plugin import ModelSpec


def resolve(spec: ModelSpec, config: ConfigFile, *, variant: str = "") -> ResolvedConfig:
    """Check a file against a model. Raises one ConfigError for all faults: file, line, key and nearest name of each."""
    faults = Faults()
    values = read(config.root, faults)
    kwargs: dict[str, Any] = {}
    groups: tuple[NodeGroup, ...] = ()
    kv_cache, lora = KVCacheConfig(), LoraConfig()
    if "model" in values:
        with faults.collected():
            variant = _check_model(spec, values["model"], variant) or variant
        if faults.spoil("model"):
            faults.check()  # nodes and options of another model would only be more noise
        with faults.collected():
            _check_variant(spec, values, variant)
    with faults.collected():
        _check_name(values)
    with faults.collected():
        kwargs = _model_kwargs(spec, values.get("model_kwargs"), faults)
    with faults.collected():
        kv_cache = _kv_cache(spec, values)
    with faults.collected():
        lora = _lora(values)
    check_ray(values, faults)
    api = ApiConfig(**{**_set_fields(values, "api"), "realtime_ice_servers": ice_servers(values, faults)})
    if not faults.spoil("node_groups"):
        with faults.collected():
            groups = node_groups(spec, values, faults)
            if not faults.spoil("node_groups"):
                check_coverage(spec, groups, values["node_groups"].place)
    faults.check()
    sections = {name: section(**_set_fields(values, name)) for name, section in SECTIONS.items()}
    of_model = {"name": spec.name, "max_seq_len": spec.max_seq_len}
    checked = {
        "model": spec.name,
        "model_kwargs": kwargs,
        "node_groups": groups,
        "kv_cache": kv_cache,
        "lora": lora,
        "api": api,
    }
    return ResolvedConfig(
        **{**of_model, **_set_fields(values, ""), **sections, **checked},
        variant=variant,
        config_file=config.shown,
        provenance=_provenance(spec, values),
    )


def _provenance(spec: ModelSpec, values: Mapping[str, CheckedValue]) -> dict[str, str]:
    """Return the source of each value that is not a default."""
    of_model = f"model {spec.name}"
    kwargs = values["model_kwargs"].place.value if "model_kwargs" in values else {}
    return {
        **{key: of_model for key in ("name", "max_seq_len")},
        **{key: value.place.source for key, value in values.items()},
        **{f"model_kwargs.{name}": of_model for name in spec.model_kwargs},
        **{f"model_kwargs.{name}": place.source for name, place in kwargs.items()},
    }


def _set_fields(values: Mapping[str, CheckedValue], section: str) -> dict[str, Any]:
    """Return the values of a section's keys that a file sets, by field; `null` is left to the default."""
    return {
        item.word: values[item.key].value
        for item in words_of(section).values()
        if item.key in values and values[item.key].value is not None
    }


def _check_model(spec: ModelSpec, value: CheckedValue, typed: str) -> str:
    """Return the variant that the file names. typed: the variant of the command line, for the hint."""
    try:
        name, variant = split_name(value.value)
    except NotFound as error:
        raise value.place.error(error.title, "model", error.detail, error.hint) from None
    short = name.rpartition("/")[2]
    suffix = f":{typed}" if typed and not variant else ""
    if short not in (spec.name, *spec.aliases):
        raise value.place.error(
            f"the file is for model {value.value!r}, requested is {spec.name!r}",
            "model",
            hint=f"mstarctl up {name}{suffix} with this file, or a file for {spec.name}",
        )
    return variant


def _check_variant(spec: ModelSpec, values: Mapping[str, CheckedValue], variant: str) -> None:
    if not variant:
        return
    place = values["model"].place
    if spec.embedded(variant) is None:
        title = f"{spec.name} has no embedded checkpoint" + (" that was trained" if variant == "mini" else "")
        raise place.error(title, "model", hint=f"write {spec.name} without :{variant}")
    weights = values.get("weights")
    if weights is not None and weights.value is not None:
        raise weights.place.error(
            f"weights and {spec.name}:{variant} exclude each other", "weights", hint="remove one of them"
        )


def _check_name(values: Mapping[str, CheckedValue]) -> None:
    name = values.get("name")
    if name is not None and name.value is not None and not is_name(name.value):
        raise name.place.error(f"{name.value!r} cannot name a deployment", "name", hint=NAME_HINT)


def _kv_cache(spec: ModelSpec, values: Mapping[str, CheckedValue]) -> KVCacheConfig:
    fields = _set_fields(values, "kv_cache")
    if "pages" in fields and "tokens" in fields:
        raise values["kv_cache.tokens"].place.error(
            "kv_cache.pages and kv_cache.tokens both set the pool size", "kv_cache.tokens", hint="keep one of them"
        )
    if "kv_cache.share" in values:
        fields["share"] = _shares(spec, values["kv_cache.share"].place)
    return KVCacheConfig(**fields)


def _lora(values: Mapping[str, CheckedValue]) -> LoraConfig:
    adapters = values.get("lora.adapters")
    for name, item in adapters.place.value.items() if adapters is not None else ():
        key = f"lora.adapters.{name}"
        if not is_name(name):
            raise item.error(f"{name!r} cannot name an adapter", key, hint=NAME_HINT)
        if not isinstance(item.value, str) or not item.value.strip():
            raise item.error(f"{key} is {shown(item)}", key, hint="the folder of the adapter")
    return LoraConfig(**_set_fields(values, "lora"))


def _shares(spec: ModelSpec, place: Located) -> dict[str, float]:
    """Return the shares by node. Each node has its own cache; each share is over 0 and at most 1."""
    known = [node.name for node in spec.nodes if node.kv is not None and node.of is None]
    for name, item in place.value.items():
        key = f"kv_cache.share.{name}"
        if name not in known:
            raise item.error(f"{spec.name} has no node {name!r} with a cache", key, hint=did_you_mean(name, known))
        value = item.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise item.error(f"{key} is {shown(item)}", key, hint="a number over 0 and at most 1")
    return {name: float(item.value) for name, item in place.value.items()}


def _model_kwargs(spec: ModelSpec, value: CheckedValue | None, faults: Faults) -> dict[str, Any]:
    options = {} if value is None else value.place.value
    for name, place in options.items():
        key = f"model_kwargs.{name}"
        with faults.collected():
            if name not in spec.model_kwargs:
                hint = did_you_mean(name, spec.model_kwargs)
                raise place.error(f"{spec.name} has no option {name!r}", key, hint=hint)
            _check_like(place, key, spec.model_kwargs[name])
    return {**spec.model_kwargs, **{name: place.plain() for name, place in options.items()}}


_WORDS: Final = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", tuple: "list"}


def _check_like(place: Located, key: str, default: Any) -> None:
    """Check that a value has the type of the model's default. A default of None allows any type."""
    value = place.plain()
    if default is None or value is None:
        if default is not None:
            raise place.error(f"{key} is empty", key, hint=f"like its default {default!r}")
        return
    word = _WORDS.get(type(default), "mapping")
    if not fits(value, word):
        raise place.error(f"{key} is {shown(place)}", key, hint=f"a {word}, like its default {default!r}")

"""serve.yaml: the models and tenants of a gateway, checked and with the line of each value. Read by the gateway and
by `mstarctl serve`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from mstar_core.config.files.faults import Faults
from mstar_core.config.files.load import read_file
from mstar_core.config.files.read import check, shown
from mstar_core.config.key import ConfigKey, Setting, settings_of
from mstar_core.config.located import Located
from mstar_core.config.name import NAME_HINT, is_name
from mstar_core.config.resolved import TIB
from mstar_core.config.sizes import BUDGET_HINT, SIZE_HINT, parse_budget, parse_size
from mstar_core.errors import ConfigError, did_you_mean
from mstar_core.gateway.serve_values import MOST_REPLICAS, Keep, Replicas, parse_keep, parse_replicas
from mstar_core.host.other_hosts.contexts import LOCAL


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the gateway: what `mstarctl up` takes to start a deployment of it, and how long it stays loaded.

    name: as clients name it; the deployments are named after it. source: `FILE:LINE`.
    """

    target: Annotated[
        str | None, ConfigKey("Model (`qwen3_omni`, `orpheus:mini`) or deployment file, as `mstarctl up` takes it.")
    ] = None
    file: Annotated[str | None, ConfigKey("Deployment file; with `target`, both must name the same model.")] = None
    weights: Annotated[str | None, ConfigKey("Folder of weights.")] = None
    device: Annotated[
        str | None, ConfigKey("Kind of device.", choices=("cpu", "cuda"), default_text="cuda if a GPU is found")
    ] = None
    gpus: Annotated[
        str | None, ConfigKey("GPUs as `mstarctl up --gpus` takes them: `0,1` or `auto:2`.", default_text="free ones")
    ] = None
    set: Annotated[
        dict[str, Any], ConfigKey("Keys of the deployment file to override, as `--set` does.", default_text="{}")
    ] = {}
    keep_text: Annotated[
        str,
        ConfigKey(
            "`always`: loaded from the start and never asleep; `idle 10m`: asleep after so long without a "
            "request; `on_demand`: loaded by its first request, asleep when another model needs its memory."
        ),
    ] = "on_demand"
    replicas_text: Annotated[
        str, ConfigKey("Deployments of the model: a number, or a range such as `1..4` for automatic scaling.")
    ] = "1"
    hosts: Annotated[
        tuple[str, ...],
        ConfigKey("Hosts on which its deployments may run, the preferred first.", default_text="those of all models"),
    ] = ()
    sleepable: Annotated[
        bool | None,
        ConfigKey(
            "Start its deployments so that their GPUs can give memory back in a sleep; they end instead without it.",
            default_text="that of all models",
        ),
    ] = None
    memory_text: Annotated[
        str | None,
        ConfigKey(
            "Memory of each of its GPUs that a deployment takes: `20GiB`, `25%` or `auto`.", default_text="as planned"
        ),
    ] = None
    aliases: Annotated[tuple[str, ...], ConfigKey("More names of the model.", default_text="[]")] = ()
    tenants: Annotated[
        tuple[str, ...], ConfigKey("Tenants that may use the model.", default_text="all that may by their entry")
    ] = ()
    max_queue: Annotated[
        int, ConfigKey("Requests that may wait while the model is loaded; more get 503.", ge=0, le=1_048_576)
    ] = 256
    url: Annotated[
        str | None,
        ConfigKey("Address of a deployment that runs already, on this or another host; nothing else may be given."),
    ] = None
    name: str = ""
    source: str = ""

    @property
    def keep(self) -> Keep:
        """Time for which the model stays loaded."""
        return parse_keep(self.keep_text)

    @property
    def replicas(self) -> Replicas:
        """The least and the most deployments."""
        return parse_replicas(self.replicas_text)


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: models and limits of its keys. None: no limit. More keys are managed by `mstarctl tenants`."""

    models: Annotated[tuple[str, ...], ConfigKey("Models that the tenant may use.", default_text="all")] = ()
    requests_per_minute: Annotated[
        int | None, ConfigKey("Most requests in a minute.", ge=1, le=TIB, default_text="no limit")
    ] = None
    tokens_per_day: Annotated[
        int | None, ConfigKey("Most tokens in a day, prompt and answer.", ge=1, le=TIB, default_text="no limit")
    ] = None
    audio_seconds_per_day: Annotated[
        float | None, ConfigKey("Most seconds of audio in a day, in and out.", gt=0, le=TIB, default_text="no limit")
    ] = None
    concurrency: Annotated[
        int | None, ConfigKey("Most requests at once.", ge=1, le=1_048_576, default_text="no limit")
    ] = None
    weight: Annotated[float, ConfigKey("Share among tenants that wait.", gt=0, le=1_000_000)] = 1.0
    key_file: Annotated[
        str | None, ConfigKey("File of API keys, one per line, beside those that `mstarctl tenants key` makes.")
    ] = None
    name: str = ""
    source: str = ""


class MemorySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the models of the gateway may use together."""

    gpu_text: Annotated[
        str | None,
        ConfigKey("Bytes of each GPU for all models.", default_text="all that the device has"),
    ] = None
    host_text: Annotated[
        str | None,
        ConfigKey("Bytes of host memory for the weights of sleeping models.", default_text="half of the free memory"),
    ] = None

    @property
    def gpu_bytes(self) -> int | None:
        """Bytes of each GPU, None without a limit."""
        return None if self.gpu_text is None else parse_size(self.gpu_text)

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory, None for the default."""
        return None if self.host_text is None else parse_size(self.host_text)


class ServeFile(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a gateway. Without models it serves every running deployment of the host.

    path: of the file, None without one.
    """

    host: Annotated[str, ConfigKey("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, ConfigKey("Port to listen on.", ge=1, le=65535)] = 8080
    discover: Annotated[
        bool | None,
        ConfigKey("Serve running deployments that are not in `models` too.", default_text="true without models"),
    ] = None
    max_body_bytes: Annotated[int, ConfigKey("Most bytes of a request body.", ge=1024, le=TIB)] = 128 << 20
    max_connections: Annotated[int, ConfigKey("Most connections of clients at once.", ge=8, le=1_048_576)] = 4096
    drain_timeout_s: Annotated[
        float, ConfigKey("Maximum seconds that requests in flight get to finish at the end.", ge=0, le=86400)
    ] = 120.0
    console: Annotated[bool, ConfigKey("Serve the web page at `/`.")] = True
    require_key: Annotated[
        bool | None, ConfigKey("Refuse requests without a tenant's key.", default_text="true with tenants")
    ] = None
    tls_cert: Annotated[str | None, ConfigKey("PEM file with the certificate; only HTTPS is then served.")] = None
    tls_key: Annotated[str | None, ConfigKey("PEM file with the certificate's key.")] = None
    sleepable: Annotated[
        bool | None,
        ConfigKey(
            "Value of `sleepable` of all models that do not set it.",
            default_text="true, or that of a model's own deployment file",
        ),
    ] = None
    hosts: Annotated[
        tuple[str, ...],
        ConfigKey(
            "Hosts on which deployments may run: `local`, and names of `mstarctl context`.", default_text="[local]"
        ),
    ] = ()
    memory: Annotated[MemorySpec, ConfigKey("Memory budgets.")] = MemorySpec()
    models: Annotated[dict[str, ModelEntry], ConfigKey("Models by the names that clients use.")] = {}
    tenants: Annotated[dict[str, TenantSpec], ConfigKey("Tenants by name.")] = {}
    path: str | None = None

    @property
    def discovers(self) -> bool:
        """Whether running deployments that no entry names are served too."""
        return not self.models if self.discover is None else self.discover

    @property
    def needs_key(self) -> bool:
        """Whether each request needs a tenant's key."""
        return bool(self.tenants) if self.require_key is None else self.require_key

    def encode(self) -> bytes:
        """Encode as JSON, for the gateway's process."""
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ServeFile:
        """Decode what `encode` wrote. Raises msgspec.ValidationError if another version wrote it."""
        return msgspec.json.decode(data, type=cls)


WORDS: Final[Mapping[str, str]] = {
    "keep_text": "keep",
    "replicas_text": "replicas",
    "memory_text": "memory",
    "gpu_text": "gpu",
    "host_text": "host",
}
"""Keys of fields that hold a text, which a property of the key's name parses."""

TABLES: Final[Mapping[str, type[msgspec.Struct]]] = {"models": ModelEntry, "tenants": TenantSpec}
"""Mappings of names to records."""

PARSED: Final[Mapping[str, tuple[Any, str]]] = {
    "keep_text": (parse_keep, "always, on_demand, or idle with a time such as idle 10m"),
    "replicas_text": (parse_replicas, f"a number or a range, such as 2 or 1..4, of 1 to {MOST_REPLICAS}"),
    "memory_text": (parse_budget, BUDGET_HINT),
    "gpu_text": (parse_size, SIZE_HINT),
    "host_text": (parse_size, SIZE_HINT),
}
STARTS: Final = ("target", "file", "weights", "device", "gpus", "set", "sleepable", "memory", "hosts")
"""Keys of a model that is started here."""


def hosts_of(entry: ModelEntry, serve: ServeFile) -> tuple[str, ...]:
    """Return the hosts on which deployments of a model may run, in the order of preference."""
    return tuple(dict.fromkeys(entry.hosts or serve.hosts or (LOCAL,)))


def load_serve_file(path: Path) -> ServeFile:
    """Read a serve.yaml. Raises ConfigError with file, line and key of every fault."""
    config = read_file(path)
    return read_serve(config.root, path)


def read_serve(root: Located, path: Path | None = None) -> ServeFile:
    """Return the checked configuration of a parsed file. Paths in it are relative to its folder. Raises ConfigError."""
    if not isinstance(root.value, dict):
        raise root.error("the file must contain a mapping", "", hint="begin with models:")
    faults = Faults()
    values = _record(ServeFile, root, "", faults)
    faults.check()
    folder = Path.cwd() if path is None else path.absolute().parent
    values["models"] = {name: _placed(entry, folder) for name, entry in values.get("models", {}).items()}
    values["tenants"] = {name: _with_path(spec, folder) for name, spec in values.get("tenants", {}).items()}
    for key in ("tls_cert", "tls_key"):
        if values.get(key) is not None:
            values[key] = str(folder / Path(values[key]).expanduser())
    read = ServeFile(**values, path=None if path is None else str(path.absolute()))
    _check_whole(read, root, faults)
    faults.check()
    return read


def read_entry(name: str, place: Located) -> ModelEntry:
    """Return one checked model, as `serve add` sends it. Raises ConfigError."""
    faults = Faults()
    entries = dict(_table("models", Located({name: place}, place.source), faults))
    faults.check()
    entry: ModelEntry = entries[name]
    return entry


def _with_path(spec: TenantSpec, folder: Path) -> TenantSpec:
    if spec.key_file is None:
        return spec
    return msgspec.structs.replace(spec, key_file=str(folder / Path(spec.key_file).expanduser()))


def _placed(entry: ModelEntry, folder: Path) -> ModelEntry:
    """Return an entry whose paths are absolute."""
    made: dict[str, str] = {}
    for key in ("file", "weights", "target"):
        text = getattr(entry, key)
        if text is not None and (key != "target" or text.endswith((".yaml", ".yml"))):
            made[key] = str(folder / Path(text).expanduser())
    return msgspec.structs.replace(entry, **made)


def _record(kind: type[msgspec.Struct], place: Located, key: str, faults: Faults) -> dict[str, Any]:
    """Return the checked values of a record by field, and collect the faults of the others."""
    fields = {WORDS.get(item.key, item.key): item for item in settings_of(kind) if "." not in item.key}
    if not isinstance(place.value, dict):
        raise place.error(f"{key} is {shown(place)}", key, hint=f"a mapping with {', '.join(fields)}")
    made: dict[str, Any] = {}
    for word, item in place.value.items():
        full = f"{key}.{word}".lstrip(".")
        with faults.collected():
            if word not in fields:
                raise item.error(f"unknown key {full!r}", full, hint=did_you_mean(word, fields))
            made[fields[word].key] = _field(item, fields[word], full, faults)
    return made


def _field(place: Located, setting: Setting, key: str, faults: Faults) -> Any:
    if setting.kind == "mapping" and setting.key in TABLES:
        return dict(_table(setting.key, place, faults))
    if setting.kind == "section":
        return MemorySpec(**_record(MemorySpec, place, key, faults))
    if setting.key in PARSED:
        return _parsed(place, setting, key)
    return check(place, setting, key)


def _parsed(place: Located, setting: Setting, key: str) -> str | None:
    """Return the text of a value with a form of its own; numbers are texts too."""
    if place.value is None and setting.nullable:
        return None
    parse, hint = PARSED[setting.key]
    fault = place.error(f"{key} is {shown(place)}", key, hint=hint)
    if not isinstance(place.value, str | int | float) or isinstance(place.value, bool):
        raise fault
    try:
        parse(str(place.value))
    except ValueError:
        raise fault from None
    return str(place.value)


def _name_hint(kind: type[Any], name: str) -> str:
    """Return how to write a name. A model is often written where its name belongs: `orpheus:mini:`."""
    short = name.partition(":")[0]
    is_target = kind is ModelEntry and ":" in name and is_name(short)
    return f"give it a name: `{short}: {name}`, or `target: {name}` below one" if is_target else NAME_HINT


def _table(key: str, place: Located, faults: Faults) -> Iterator[tuple[str, Any]]:
    kind = TABLES[key]
    if not isinstance(place.value, dict):
        raise place.error(f"{key} is {shown(place)}", key, hint=f"a mapping of names to {key}")
    for name, item in place.value.items():
        full = f"{key}.{name}"
        with faults.collected():
            if not is_name(name):
                raise item.error(f"{name!r} cannot name one of the {key}", full, hint=_name_hint(kind, str(name)))
            part = item
            if kind is ModelEntry and isinstance(item.value, str):  # short form: `name: target`
                part = Located({"target": item}, item.source, item.file, item.line)
            record = kind(**_record(kind, part, full, faults), name=name, source=item.source)
            if isinstance(record, ModelEntry):
                _check_entry(record, part, full)
            yield name, record


def _check_entry(entry: ModelEntry, place: Located, key: str) -> None:
    if entry.url is not None:
        wrong = [word for word in STARTS if word in place.value]
        if wrong:
            hint = f"remove {', '.join(wrong)}, or url"
            raise place.error(f"{key} has a url, so nothing is started for it", f"{key}.url", hint=hint)
        if not entry.url.startswith(("http://", "https://")):
            raise place.value["url"].error(f"{key}.url is {entry.url!r}", f"{key}.url", hint="http://HOST:PORT")
    elif entry.target is None and entry.file is None:
        hint = "add target: MODEL, as mstarctl up takes it; mstarctl models ls lists models"
        raise place.error(f"{key} names nothing to start", f"{key}.target", hint=hint)
    elif entry.sleepable is not None and "sleepable" in entry.set:
        raise place.error(f"{key} names sleepable twice", f"{key}.sleepable", hint="remove it from set")


def _check_whole(read: ServeFile, root: Located, faults: Faults) -> None:
    """Collect the faults between entries: names given twice, tenants and models that do not exist."""
    names: dict[str, str] = {}
    for entry in read.models.values():
        for name in (entry.name, *entry.aliases):
            with faults.collected():
                if name in names:
                    raise _at(entry, f"{name!r} names {names[name]!r} and {entry.name!r}", f"models.{entry.name}")
                names[name] = entry.name
        for tenant in entry.tenants:
            with faults.collected():
                if tenant not in read.tenants:
                    hint = did_you_mean(tenant, read.tenants)
                    raise _at(entry, f"models.{entry.name} names tenant {tenant!r}", f"models.{entry.name}", hint)
    for spec in read.tenants.values():
        for model in spec.models:
            with faults.collected():
                if read.models and not read.discovers and model not in names:
                    raise _at(
                        spec,
                        f"tenants.{spec.name} names model {model!r}",
                        f"tenants.{spec.name}",
                        did_you_mean(model, names),
                    )
    with faults.collected():
        if (read.tls_cert is None) != (read.tls_key is None):
            raise root.error("tls_cert and tls_key belong together", "tls_cert", hint="give both or neither")


def _at(item: ModelEntry | TenantSpec, title: str, key: str, hint: str = "") -> ConfigError:
    file, _, line = item.source.rpartition(":")
    number = int(line) if line.isdecimal() else None
    return ConfigError(title, "", hint, file=file or None, line=number, key=key)

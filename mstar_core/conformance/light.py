"""Bronze checks that need neither torch nor weights, and the check of weight names."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from mstar_core.errors import PluginError, RequestError, did_you_mean
from mstar_core.plugin.check.dry_run import dry_run
from mstar_core.plugin.check.spec_check import check_spec
from mstar_core.plugin.conformance import CheckSkipped, KeyMap, Subject
from mstar_core.plugin.json_form import name_of, spec_to_json
from mstar_core.plugin.loader import HEAVY, check_api, check_requirement, import_target, offered_models
from mstar_core.plugin.params import ParamSpec, check_value, param_specs, parse_params
from mstar_core.targets import load_target

IMPORT_LIMIT_S: Final = 60.0
KEY_MAP_MODULE: Final = "published"
KEY_MAP_FUNCTION: Final = "key_map"
_PROBE: Final = """
import importlib, json, sys
import mstar_core.graph, mstar_core.plugin
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def light_import(subject: Subject) -> None:
    """Import plugin.py in a fresh process: it may load the standard library, mstar_core and its own package only."""
    module = subject.entry.target.partition(":")[0]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _PROBE, module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=IMPORT_LIMIT_S, check=False)
    if done.returncode:
        raise PluginError(
            f"{module} does not import",
            done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "",
            plugin=subject.entry.name,
        )
    allowed = {module.partition(".")[0], "mstar_core"}
    extra = [name for name in json.loads(done.stdout) if name not in allowed and name not in sys.stdlib_module_names]
    heavy = [name for name in extra if name in HEAVY]
    if extra:
        hint = "import it in processor.py or model.py"
        raise PluginError(f"{module} imports {', '.join(heavy or extra)}", hint=hint, plugin=subject.entry.name)


def pins(subject: Subject) -> None:
    """Check the requirement on mstarctl (both bounds, met by this version) and the plugin API version."""
    from packaging.requirements import Requirement

    needs = [Requirement(line) for line in subject.entry.requires]
    pins_of_core = [need for need in needs if need.name.lower() == "mstarctl"]
    if not pins_of_core:
        raise PluginError(
            f"{subject.entry.distribution} does not require mstarctl",
            hint='dependencies = ["mstarctl[runtime]>=0.2,<0.3"]',
        )
    operators = {part.operator for need in pins_of_core for part in need.specifier}
    if not operators.intersection({">=", ">", "==", "~="}) or not operators.intersection({"<", "<=", "==", "~="}):
        raise PluginError(
            f"the pin on mstarctl has no upper or no lower bound: {pins_of_core[0].specifier or 'none'}",
            hint="write both bounds, such as >=0.2,<0.3",
        )
    if any(need.name.lower() == "mstar" for need in needs):
        raise PluginError(
            "the plugin requires a distribution called mstar",
            hint="that name belongs to another project; require mstarctl",
        )
    check_requirement(subject.entry)
    check_api(import_target(subject.entry.target), subject.entry)


def offers_models(subject: Subject) -> None:
    """Check that the plugin offers at least one model."""
    if not offered_models(import_target(subject.entry.target)):
        raise PluginError(
            "mstar_models returns no model", hint="return the ModelSpec in a list", plugin=subject.entry.name
        )


def spec(subject: Subject) -> None:
    """Check names, graph rules, parameters and samples."""
    for error in check_spec(subject.model):
        raise error


def json_form(subject: Subject) -> None:
    """Check that JSON keeps every value of the spec, and that the names of programs and parameters import them."""
    form = spec_to_json(subject.model)
    try:
        decoded = json.loads(json.dumps(form))
    except (TypeError, ValueError) as error:
        raise PluginError("the spec has no JSON form", str(error), "use plain data in the spec") from error
    changed = [key for key, value in form.items() if decoded.get(key) != value]
    if changed:
        raise PluginError(f"the JSON form changes {', '.join(changed)}", hint="use plain data in the spec")
    for target in (subject.model.params, *(partition.program for partition in subject.model.partitions)):
        if load_target(name_of(target)) is not target:
            raise PluginError(f"{name_of(target)} is another object", hint="define each name once in plugin.py")


def programs(subject: Subject) -> None:
    """Dry-run every sample twice with the same walks; together the samples must reach every walk."""
    spec = subject.model
    if not spec.samples:
        raise PluginError(f"{spec.name} has no samples", hint="add a Sample for each kind of request")
    taken: set[str] = set()
    for sample in spec.samples:
        walks = dry_run(spec, sample)
        if walks != dry_run(spec, sample):
            raise PluginError(
                f"the programs of {spec.name} are not deterministic (sample {sample.name!r})",
                hint="keep no state outside the generator",
            )
        taken |= {walk for names in walks.values() for walk in names}
    missed = [name for partition in spec.partitions for name in partition.walks if name not in taken]
    if missed:
        raise PluginError(
            f"no sample reaches walk {', '.join(missed)}", hint="add a Sample that does, or delete the walk"
        )


def params(subject: Subject) -> None:
    """Check that defaults parse, and that values outside a range, unknown choices and names are refused by field."""
    kind = subject.model.params
    required = {
        item.name: inside for item in param_specs(kind) if item.required and (inside := _inside(item)) is not None
    }
    parse_params(kind, required)
    for item in param_specs(kind):
        if not item.doc:
            raise PluginError(f"parameter {item.name!r} has no documentation", hint="write a line in param()")
        for value in outside_range(item):
            _refuses(kind, {**required, item.name: value}, item.name)
    _refuses(kind, {**required, "no_such_parameter": 1}, "no_such_parameter")


def _refuses(kind: type[Any], values: dict[str, Any], field: str) -> None:
    try:
        parse_params(kind, values)
    except RequestError as error:
        if error.field != field:
            raise PluginError(
                f"the refusal of {field}={values[field]!r} names field {error.field!r}", hint=f"name {field!r}"
            ) from error
        return
    raise PluginError(f"parameter {field} accepts {values[field]!r}", hint="state the range in param()")


def outside_range(item: ParamSpec) -> Iterator[Any]:
    """Yield values just outside the range or the choices of a parameter."""
    is_list = item.kind.startswith("list of ")
    for limit, step in ((item.ge, -1.0), (item.le, 1.0), (item.gt, 0.0), (item.lt, 0.0)):
        if limit is not None:
            value: Any = limit + step
            value = int(value) if "integer" in item.kind else value
            yield [value] if is_list else value
    if item.choices and not item.any_choice and item.kind == "string":
        yield "no-such-choice"


def _inside(item: ParamSpec) -> Any:
    candidates = [*item.choices, item.ge, item.le, 1, 1.0, "text", True, (), {}]
    for value in candidates:
        if value is None:
            continue
        try:
            return check_value(item, value)
        except RequestError:
            continue
    return None


def configs(subject: Subject) -> None:
    """Check that every shipped configuration validates and plans, the default one included."""
    from mstar_core.config.files.load import default_config, read_file, shipped
    from mstar_core.config.files.placement import make_plan
    from mstar_core.config.files.resolution import resolve

    spec = subject.model
    if not spec.configs:
        raise PluginError(
            f"{spec.name} ships no configuration", hint='configs="package:configs", default_config="NAME"'
        )
    default_config(spec)
    default_config(spec, "mini")
    names = {name for other in subject.models for name in (other.name, *other.aliases)}
    for path in shipped(spec).values():
        file = read_file(path)
        model = file.model.partition(":")[0]
        if model in (spec.name, *spec.aliases):
            make_plan(spec, resolve(spec, file), ("cpu",))
        elif model not in names:
            raise PluginError(f"{path.name} names model {model!r}", hint=f"one of {', '.join(sorted(names))}")


def targets(subject: Subject) -> None:
    """Check that the modules of processor and model exist. Only their packages are imported."""
    spec = subject.model
    if spec.model is None and spec.processor is None:
        raise CheckSkipped("this version carries no model code")
    for field, target in (
        ("processor", spec.processor),
        ("model", spec.model),
        ("tiny", spec.tiny),
        ("mini", spec.mini),
        ("make_samples", spec.make_samples),
        ("resolve", spec.resolve),
    ):
        if target is None:
            if field in ("processor", "model"):
                raise PluginError(f"{spec.name} names no {field}", hint='"package.module:Class"')
            continue
        module = target.partition(":")[0]
        if importlib.util.find_spec(module) is None:
            raise PluginError(
                f"{field} points to module {module!r}, which does not exist",
                hint="correct the target, or ship the module",
            )


def key_map(subject: Subject) -> None:
    """Check that every published tensor has a parameter or is skipped on purpose, and every parameter has a tensor."""
    spec = subject.model
    if spec.model is None:
        raise CheckSkipped("this version carries no model code")
    if not spec.weights:
        return  # no weights are published
    maps = _key_maps(spec.model)
    for name in spec.weights:
        if name not in maps:
            raise PluginError(f"the key map lacks weights {name!r}", f"it has {', '.join(sorted(maps))}")
        _check_key_map(name, maps[name])


def _key_maps(target: str) -> Mapping[str, KeyMap]:
    package = target.partition(":")[0].rpartition(".")[0]
    module = f"{package}.{KEY_MAP_MODULE}"
    if not package or importlib.util.find_spec(module) is None:
        raise CheckSkipped(f"the plugin has no {module} with {KEY_MAP_FUNCTION}()")
    offered: Callable[[], Mapping[str, KeyMap]] = vars(importlib.import_module(module))[KEY_MAP_FUNCTION]
    return offered()


def _check_key_map(name: str, keys: KeyMap) -> None:
    parameters = {target for target in keys.targets.values() if target is not None}
    homeless = sorted(target for target in parameters if target not in keys.places)
    if homeless:
        raise PluginError(
            f"weights {name!r}: {homeless[0]} has no parameter in the model",
            f"{len(homeless)} of {len(keys.targets)} published names",
            did_you_mean(homeless[0], keys.places),
        )
    empty = sorted(keys.places - parameters)
    if empty:
        raise PluginError(
            f"weights {name!r}: parameter {empty[0]} has no tensor",
            f"{len(empty)} of {len(keys.places)} parameters",
            did_you_mean(empty[0], parameters),
        )

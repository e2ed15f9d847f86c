"""Conformance checks that need neither torch nor weights. Each takes a Subject and raises when the plugin fails."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from mstar_core.errors import PluginError, RequestError
from mstar_core.plugin.conformance import CheckSkipped, Subject
from mstar_core.plugin.dry_run import dry_run
from mstar_core.plugin.json_form import spec_from_json, spec_to_json
from mstar_core.plugin.loader import HEAVY, check_api, check_requirement, import_target, offered_models
from mstar_core.plugin.params import ParamSpec, check_value, param_specs, parse_params
from mstar_core.plugin.spec_check import check_spec

IMPORT_LIMIT_S = 60.0
_PROBE = """
import importlib, json, sys
import mstar_core.graph, mstar_core.plugin
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def light_import(subject: Subject) -> None:
    """A fresh process imports plugin.py: nothing heavy, and nothing but the standard library, mstar_core and itself."""
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
    own = {module.partition(".")[0], "mstar_core"}
    extra = [name for name in json.loads(done.stdout) if name not in own and name not in sys.stdlib_module_names]
    heavy = [name for name in extra if name in HEAVY]
    if extra:
        hint = "import it in processor.py or model.py"
        raise PluginError(f"{module} imports {', '.join(heavy or extra)}", hint=hint, plugin=subject.entry.name)


def pins(subject: Subject) -> None:
    """The requirement on mstarctl has a lower and an upper bound and is met; the plugin API is ours."""
    from packaging.requirements import Requirement

    needs = [Requirement(line) for line in subject.entry.requires]
    own = [need for need in needs if need.name.lower() == "mstarctl"]
    if not own:
        raise PluginError(
            f"{subject.entry.distribution} does not require mstarctl",
            hint='dependencies = ["mstarctl[runtime]>=0.1,<0.2"]',
        )
    operators = {part.operator for need in own for part in need.specifier}
    if not operators.intersection({">=", ">", "==", "~="}) or not operators.intersection({"<", "<=", "==", "~="}):
        raise PluginError(
            f"the pin on mstarctl is open: {own[0].specifier or 'none'}", hint="write both bounds, such as >=0.1,<0.2"
        )
    if any(need.name.lower() == "mstar" for need in needs):
        raise PluginError(
            "it requires a distribution called mstar", hint="that name belongs to another project; require mstarctl"
        )
    check_requirement(subject.entry)
    check_api(import_target(subject.entry.target), subject.entry)


def offers_models(subject: Subject) -> None:
    """A plugin without a model has nothing that could be served."""
    if not offered_models(import_target(subject.entry.target)):
        raise PluginError(
            "mstar_models gives no model", hint="return the ModelSpec in a list", plugin=subject.entry.name
        )


def spec_is_sound(subject: Subject) -> None:
    """Names, graph rules, parameters and samples."""
    for error in check_spec(subject.model):
        raise error


def json_form(subject: Subject) -> None:
    """To JSON, to text, back, and to JSON again gives the same."""
    first = spec_to_json(subject.model)
    again = spec_to_json(spec_from_json(json.loads(json.dumps(first))))
    plain = json.loads(json.dumps(first))
    if json.loads(json.dumps(again)) != plain:
        changed = [key for key, value in json.loads(json.dumps(again)).items() if plain[key] != value]
        raise PluginError(f"the JSON form changes {', '.join(changed)}", hint="use plain data in the spec")


def programs(subject: Subject) -> None:
    """Every sample runs dry, twice with the same walks, and together the samples reach every walk."""
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
    """Defaults parse; values just outside a range, unknown choices and an unknown name are refused with their field."""
    kind = subject.model.params
    required = {
        item.name: inside for item in param_specs(kind) if item.required and (inside := _inside(item)) is not None
    }
    parse_params(kind, required)
    for item in param_specs(kind):
        if not item.doc:
            raise PluginError(f"parameter {item.name!r} has no documentation", hint="write a line in param()")
        for value in _outside(item):
            _refuses(kind, {**required, item.name: value}, item.name)
    _refuses(kind, {**required, "no_such_parameter": 1}, "no_such_parameter")


def _refuses(kind: type[Any], given: dict[str, Any], field: str) -> None:
    try:
        parse_params(kind, given)
    except RequestError as error:
        if error.field != field:
            raise PluginError(
                f"the refusal of {field}={given[field]!r} names field {error.field!r}", hint=f"name {field!r}"
            ) from error
        return
    raise PluginError(f"parameter {field} accepts {given[field]!r}", hint="state the range in param()")


def _outside(item: ParamSpec) -> Iterator[Any]:
    for limit, step in ((item.ge, -1.0), (item.le, 1.0), (item.gt, 0.0), (item.lt, 0.0)):
        if limit is not None:
            value = limit + step
            yield [value] if item.kind.startswith("list of ") else int(value) if item.kind == "integer" else value
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
    """Every file of the model validates and gives a plan; the default one is among them."""
    from mstar_core.config import make_plan, read_file, resolve, shipped
    from mstar_core.config.load import default_config

    spec = subject.model
    if not spec.configs:
        raise PluginError(
            f"{spec.name} ships no configuration", hint='configs="package:configs", default_config="NAME"'
        )
    default_config(spec)
    names = {name for other in subject.models for name in (other.name, *other.aliases)}
    for path in shipped(spec).values():
        file = read_file(path)
        model = file.model.partition(":")[0]
        if model in (spec.name, *spec.aliases):
            make_plan(spec, resolve(spec, file), ("cpu",))
        elif model not in names:
            raise PluginError(f"{path.name} names model {model!r}", hint=f"one of {', '.join(sorted(names))}")


def targets(subject: Subject) -> None:
    """Modules of the heavy parts exist. Their package is imported, they are not."""
    spec = subject.model
    if spec.model is None and spec.processor is None:
        raise CheckSkipped("this version carries no model code")
    for field, target in (
        ("processor", spec.processor),
        ("model", spec.model),
        ("tiny", spec.tiny),
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

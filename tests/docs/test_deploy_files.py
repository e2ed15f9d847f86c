"""The files of deploy/ and the Containerfile name commands, options, packages, fields and directories that exist."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import yaml

from mstarctl.main import VERBS, resolve

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SLURM = ROOT / "deploy" / "slurm.sh"
TARGETS = ("cpu", "cuda")
KNOWN = set("ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM HEALTHCHECK RUN STOPSIGNAL USER VOLUME WORKDIR".split())
"""Instructions that all builders have."""

OBJECTS = {
    "RayCluster": "ray.io/v1",
    "Deployment": "apps/v1",
    "Service": "v1",
}
CLUSTER = {"headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "suspend"}
HEAD = {"serviceType", "headService", "enableIngress", "rayStartParams", "template"}
WORKERS = {
    "groupName",
    "replicas",
    "minReplicas",
    "maxReplicas",
    "numOfHosts",
    "rayStartParams",
    "template",
    "scaleStrategy",
}
"""Fields of the v1 API of KubeRay."""

POD = {"containers", "volumes", "securityContext", "shareProcessNamespace", "terminationGracePeriodSeconds"}
CONTAINER = {
    "name",
    "image",
    "command",
    "args",
    "ports",
    "resources",
    "securityContext",
    "startupProbe",
    "readinessProbe",
    "livenessProbe",
    "volumeMounts",
}
"""Fields of Kubernetes that the manifest uses."""


class Instruction(NamedTuple):
    """An instruction of the Containerfile. stage: its name."""

    stage: str
    name: str
    text: str


def instructions() -> Iterator[Instruction]:
    """Parse the Containerfile: comments are left out and continued lines joined."""
    lines = (ROOT / "Containerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    stage = ""
    for line in filter(None, (" ".join(line.split()) for line in text.splitlines())):
        name, _, rest = line.partition(" ")
        assert name in KNOWN, line
        if name == "FROM":
            stage = rest.partition(" AS ")[2]
            assert stage, line
        yield Instruction(stage, name, rest)


STEPS = tuple(instructions())


def texts(name: str, stage: str | None = None) -> list[str]:
    return [step.text for step in STEPS if step.name == name and stage in (None, step.stage)]


def argument(name: str) -> set[str]:
    """Return the default values of a build argument."""
    pairs = (text.partition("=") for text in texts("ARG"))
    return {value.strip('"') for key, _, value in pairs if key == name}


def parse_up(words: list[str]) -> None:
    """Parse the words of a container's command without running it. Raises for an unknown option."""
    verb = next(verb for verb in VERBS if verb.name == words[0])
    command: Any = resolve(verb)
    command.make_context(words[0], list(words[1:]), obj=SimpleNamespace())


def test_the_commands_of_the_containers_parse() -> None:
    for target in TARGETS:
        parse_up(json.loads(texts("CMD", target)[0]))
    parse_up(COMPOSE["services"]["orpheus"]["command"])
    with pytest.raises(Exception, match="No such option"):
        parse_up(["up", "orpheus", "--hostess", "x"])


def test_every_stage_builds_on_the_base_or_on_a_stage_above() -> None:
    known = {"${BASE}"}
    for text in texts("FROM"):
        base, _, stage = text.partition(" AS ")
        assert base in known, text
        known.add(stage)
    assert set(TARGETS) < known
    for step in STEPS:
        for stage in re.findall(r"(?:--from|,from)=([\w-]+)", step.text):
            assert stage in known, step.text


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    """A builder gets the files that .dockerignore does not leave out."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    sent = {line[1:] for line in lines if line.startswith("!")}
    for step in STEPS:
        if step.name == "COPY" and "--from" not in step.text:
            for source in step.text.split()[:-1]:
                assert (ROOT / source).exists(), step.text
                assert any(fnmatch.fnmatch(source, pattern) for pattern in sent), step.text
    assert all((ROOT / name).exists() for name in sent)


def test_the_targets_run_without_root_under_a_fixed_id() -> None:
    for target in TARGETS:
        last = [step for step in STEPS if step.stage == target and step.name in ("RUN", "COPY", "USER")][-1]
        assert (last.name, last.text) == ("USER", "1000:1000")
    assert "useradd --uid 1000 --gid 1000" in texts("RUN", "common")[0]


def test_packages_and_extras_exist() -> None:
    for extra in ",".join(argument("EXTRAS")).split(","):
        assert extra in PROJECT["optional-dependencies"]
    plugins = {path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")}
    assert {frozenset(each.split()) for each in argument("PLUGINS")} == {frozenset(plugins)}


def test_the_image_and_its_volumes_use_the_directories_of_the_unit() -> None:
    volumes = {volume.partition(":")[2] for volume in COMPOSE["services"]["orpheus"]["volumes"]}
    actual = json.loads(texts("VOLUME")[0])
    build = COMPOSE["services"]["orpheus"]["build"]
    assert volumes < set(actual) and (ROOT / build["dockerfile"]).is_file() and build["target"] in TARGETS
    assert f"install -d -m 700 -o mstar -g mstar {' '.join(actual)}" in texts("RUN", "common")[0]
    for name, value in re.findall(r"(\w+)=(/\S+)", texts("ENV")[0]):
        assert name == "PATH" or name in (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
        assert name == "PATH" or any(folder.startswith(value) or value.startswith(folder) for folder in actual)


# ---------------------------------------------------------------------------------------------------------- kuberay


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """Return the objects of the manifest by kind."""
    objects = list(yaml.safe_load_all((ROOT / "deploy" / "kuberay.yaml").read_text(encoding="utf-8")))
    return {each["kind"]: each for each in objects}


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of all pods: of the head, of the groups, and of the deployment."""
    cluster = manifest["RayCluster"]["spec"]
    templates = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"], manifest["Deployment"]["spec"]]
    return [each["template"]["spec"] for each in templates]


def test_every_field_of_the_manifest_is_one_of_its_api(manifest: dict[str, Any]) -> None:
    assert {kind: each["apiVersion"] for kind, each in manifest.items()} == OBJECTS
    cluster = manifest["RayCluster"]["spec"]
    assert set(cluster) <= CLUSTER and set(cluster["headGroupSpec"]) <= HEAD
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= WORKERS and group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for pod in pods(manifest):
        assert set(pod) <= POD
        assert all(set(container) <= CONTAINER for container in pod["containers"])
        mounted = {mount["name"] for container in pod["containers"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in pod.get("volumes", ())}


def test_every_pod_runs_an_image_of_the_containerfile_without_root(manifest: dict[str, Any]) -> None:
    for pod in pods(manifest):
        for container in pod["containers"]:
            name, _, tag = container["image"].partition(":")
            assert (name, tag in TARGETS) == ("mstarctl", True)
            assert container["securityContext"]["runAsNonRoot"] is True


def test_options_of_ray_start_are_texts_and_exist(manifest: dict[str, Any]) -> None:
    cluster = manifest["RayCluster"]["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    options = {option: value for group in groups for option, value in group["rayStartParams"].items()}
    assert all(isinstance(value, str) for value in options.values())
    scripts = pytest.importorskip("ray.scripts.scripts", reason="needs Ray")
    known = {word.removeprefix("--") for option in scripts.start.params for word in option.opts}
    typed = re.findall(r"ray start (.*)", deployment_script(manifest))
    assert set(options) <= known
    assert {word.partition("=")[0].removeprefix("--") for word in shlex.split(typed[0])} <= known


def deployment_script(manifest: dict[str, Any]) -> str:
    """Return the shell script of the serving container."""
    (container,) = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    script: str = container["args"][0]
    return script


def test_the_serving_pod_joins_the_cluster_and_serves_at_the_port_of_its_service(manifest: dict[str, Any]) -> None:
    script = deployment_script(manifest)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert f"{manifest['RayCluster']['metadata']['name']}-head-svc:6379" in script
    parse_up(shlex.split(re.findall(r"exec mstarctl (.*)", script)[0]))
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert manifest["Service"]["spec"]["selector"] == labels
    assert manifest["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    version = manifest["RayCluster"]["spec"]["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


# ------------------------------------------------------------------------------------------------------------ slurm


def test_the_batch_script_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SLURM)], check=True)


def test_the_commands_of_the_batch_script_parse() -> None:
    text = SLURM.read_text(encoding="utf-8").replace('"$@"', "")
    typed = re.findall(r"mstarctl ((?:up|hosts) [^|&<>\n]*?)(?: 2>| \||\)| &|$)", text, re.MULTILINE)
    assert len(typed) == 2
    for words in typed:
        parse_up(shlex.split(words.replace("$", "")))

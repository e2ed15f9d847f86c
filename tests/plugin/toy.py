"""Sources of small plugins, and their installation into a folder as real distributions."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from mstar_core.plugin import PluginEntry, plugin_entries

TOY = """
from __future__ import annotations
from dataclasses import dataclass
from mstar_core.graph import CLIENT, KV_CACHE, STATELESS, GraphEdge, GraphNode, KVSpec, Loop, NodeSpec, Parallel
from mstar_core.graph import Sampling, Sequential, SlidingWindow, StopOn, Stream, StreamingGraphEdge
from mstar_core.plugin import Audio, Image, ModelSpec, Partition, Run, Sample, Text, hookimpl, param

PLUGIN_API = 1

@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    temperature: float = param(0.6, "0 takes the arg-max", ge=0, le=2, openai="temperature")
    max_output_tokens: int = param(64, "ids", ge=1)
    ignore_eos: bool = param(False, "for load tests")

LLM = NodeSpec(name="LLM", engine=KV_CACHE, ports={"tokens": "i64[n]", "token": "i64[1]"}, tensor_parallel=True,
               parallel_sizes=(("heads", 8), ("values of an MLP", 6)),
               kv=KVSpec(layers=2, kv_heads=4, head_dim=8, branches=("main", "cfg")), sampling=Sampling(port="token"))
LLM_CFG = LLM.on_branch("LLM_cfg", "cfg")
VOC = NodeSpec(name="vocoder", engine=STATELESS, ports={"window": "i64[28]", "pcm": "i16[2048]"})
IDS = Stream(name="ids", into=(VOC, "window"), chunk=SlidingWindow(28, 7))
OUT = (StreamingGraphEdge("token", IDS),)

def llm(request):
    yield Run("prefill", tokens=request.inputs["tokens"])
    yield Run("guided", tokens=request.inputs["tokens"])
    yield Run("decode", max_iters=request.params.max_output_tokens - 1)

def vocoder(request):
    yield Run("chunk")

TOY = ModelSpec(
    name="toy", title="A toy", plugin="toy", aliases=("toi",), inputs=(Text(),), outputs=(Audio(rate=24000),),
    params=Params, routes=frozenset({"speech"}), nodes=(LLM, LLM_CFG, VOC), streams=(IDS,),
    partitions=(
        Partition(name="LLM", program=llm, walks={
            "prefill": GraphNode(LLM, ("tokens",), OUT),
            "guided": Parallel(GraphNode(LLM, ("tokens",), OUT), GraphNode(LLM_CFG, ("tokens",), OUT)),
            "decode": Loop("decode_loop", GraphNode(LLM, ("token",), OUT), carry={"token": "token"},
                           stop=StopOn("token", (3,), unless="ignore_eos"))}),
        Partition(name="VOC", program=vocoder, wants="audio", walks={
            "chunk": Loop("windows", over=IDS, body=GraphNode(
                VOC, ("window",), (GraphEdge("pcm", CLIENT, modality="audio"),)))}),
    ),
    processor="toy_plugin.processor:Processor", model="toy_plugin.model:Toy",
    configs="toy_plugin:configs", default_config="toy_one", walk_aliases={"first": "prefill"},
    samples=(Sample(name="hello", inputs={"tokens": (5,)}, outputs=frozenset({"audio"})),),
    model_kwargs={"layers": 2},
)

@hookimpl
def mstar_models():
    return [TOY]
"""

TOY_CONFIG = """\
# one rank
model: toy
max_seq_len: 512
node_groups:
  - node_names: [LLM, vocoder]
    ranks: [0]
"""


def write_plugin(
    folder: Path,
    code: str = TOY,
    *,
    name: str = "toy",
    package: str = "toy_plugin",
    distribution: str = "mstar-toy",
    requires: str = "mstarctl<1,>=0.1",
    version: str = "0.1.0",
    configs: Mapping[str, str] | None = None,
) -> Path:
    """Write an installed distribution: package, metadata and entry point. Put `folder` on the path to install it."""
    home = folder / package
    (home / "configs").mkdir(parents=True)
    (home / "__init__.py").write_text("")
    (home / "plugin.py").write_text(textwrap.dedent(code))
    for module in ("processor", "model"):
        (home / f"{module}.py").write_text("raise ImportError('a light command imported a heavy module')\n")
    for stem, text in (configs if configs is not None else {"toy_one": TOY_CONFIG}).items():
        (home / "configs" / f"{stem}.yaml").write_text(text)
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    requirement = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{requirement}")
    (info / "entry_points.txt").write_text(f"[mstar.plugins]\n{name} = {package}.plugin\n")
    return home


def install(
    patch: pytest.MonkeyPatch, folder: Path, code: str = TOY, *, package: str = "toy_plugin", **facts: str
) -> Path:
    """Write a plugin and put it on the path of this process, replacing that of an earlier test."""
    home = write_plugin(folder, code, package=package, **facts)
    for module in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[module]
    patch.syspath_prepend(str(folder))
    return home


def entries(*names: str) -> tuple[PluginEntry, ...]:
    """Return the installed plugins, limited to these names."""
    return tuple(entry for entry in plugin_entries() if entry.name in names)

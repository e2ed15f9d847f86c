"""Interface for plugins: model specs, parameters and programs. Imports no torch."""

from __future__ import annotations

from mstar_core.graph.declare.sampling import TextSampling
from mstar_core.plugin.hookspecs import hookimpl, hookspec
from mstar_core.plugin.loader import Loaded, PluginEntry, Problem, load_plugin, plugin_entries
from mstar_core.plugin.offers import Check, PlanRequest, SampleInputs, WorkloadSpec
from mstar_core.plugin.params import ParamSpec, param, param_schema, param_specs, parse_params, sampling_param
from mstar_core.plugin.program import Fork, InputFact, ProgramRequest, Receive, Reset, Run, Segment, Signal, WalkResult
from mstar_core.plugin.spec import API_VERSION, ModelSpec, Partition, Sample, Unresumable, WeightRef
from mstar_core.plugin.surface import (
    PARTIAL_IMAGE,
    PROGRESS,
    Action,
    Audio,
    Embedding,
    Image,
    Modality,
    Scalar,
    Segments,
    Surface,
    TensorData,
    Text,
    Video,
)

__all__ = [
    "API_VERSION",
    "PARTIAL_IMAGE",
    "PROGRESS",
    "Action",
    "Audio",
    "Check",
    "Embedding",
    "Fork",
    "Image",
    "InputFact",
    "Loaded",
    "Modality",
    "ModelSpec",
    "ParamSpec",
    "Partition",
    "PlanRequest",
    "PluginEntry",
    "Problem",
    "ProgramRequest",
    "Receive",
    "Reset",
    "Run",
    "Sample",
    "SampleInputs",
    "Scalar",
    "Segment",
    "Segments",
    "Signal",
    "Surface",
    "TensorData",
    "Text",
    "TextSampling",
    "Unresumable",
    "Video",
    "WalkResult",
    "WeightRef",
    "WorkloadSpec",
    "hookimpl",
    "hookspec",
    "load_plugin",
    "param",
    "param_schema",
    "param_specs",
    "parse_params",
    "plugin_entries",
    "sampling_param",
]

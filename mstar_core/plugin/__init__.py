"""What a plugin imports: the model spec, parameters, programs. No torch."""

from __future__ import annotations

from mstar_core.plugin.modality import Action, Audio, Image, Modality, Scalar, TensorData, Text, Video
from mstar_core.plugin.params import ParamSpec, param, param_schema, param_specs, parse_params
from mstar_core.plugin.program import Fork, InputFact, ProgramRequest, Run, Segment, Signal, WalkResult
from mstar_core.plugin.spec import API_VERSION, ModelSpec, Partition, Sample, WeightRef

__all__ = [
    "API_VERSION",
    "Action",
    "Audio",
    "Fork",
    "Image",
    "InputFact",
    "Modality",
    "ModelSpec",
    "ParamSpec",
    "Partition",
    "ProgramRequest",
    "Run",
    "Sample",
    "Scalar",
    "Segment",
    "Signal",
    "TensorData",
    "Text",
    "Video",
    "WalkResult",
    "WeightRef",
    "param",
    "param_schema",
    "param_specs",
    "parse_params",
]

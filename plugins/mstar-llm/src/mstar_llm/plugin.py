"""Model spec of plain language models: one node, a walk that reads the prompt, and a loop that writes the answer.

This is the smallest complete plugin of a language model. Imports the standard library and light packages only, because
every process loads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mstar_core.graph import CLIENT, KV_CACHE, GraphEdge, GraphNode, KVSpec, Loop, NodeSpec, Sampling, StopOn, Walk
from mstar_core.plugin import (
    Embedding,
    ModelSpec,
    Partition,
    ProgramRequest,
    Run,
    Sample,
    Text,
    TextSampling,
    WeightRef,
    WorkloadSpec,
    hookimpl,
    param,
    sampling_param,
)
from mstar_core.plugin.chat.template_form import chat_format, read_template
from mstar_core.plugin.program import ProgramGenerator
from mstar_llm.checkpoint.architectures import ARCHITECTURES
from mstar_llm.checkpoint.config import DecoderConfig, read_config

PLUGIN_API = 1
OFFICIAL = DecoderConfig(
    architecture=ARCHITECTURES["qwen3"],
    vocab=151936,
    width=4096,
    mlp=12288,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    norm_eps=1e-6,
    max_positions=40960,
    score_size=128,
    rope={"rope_theta": 1e6},
    local_rope={"rope_theta": 1e6},
    stop_ids=(151645, 151643),
)
"""Sizes of `Qwen/Qwen3-8B`: shown before a checkpoint is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(TextSampling):
    """Parameters of a request."""

    temperature: float = sampling_param("temperature", 0.7)
    top_p: float = sampling_param("top_p", 0.9)
    max_output_tokens: int = param(2048, "most tokens of the answer; cut to the context", ge=1, openai="max_tokens")
    ignore_eos: bool = param(False, "go on to the limit, for load tests")
    seed: int | None = param(None, "same seed, same text", ge=0, le=2**63 - 1, openai="seed")
    prompt_token_ids: tuple[int, ...] | None = param(None, "the whole prompt as ids, in place of text", ge=0)


def program(request: ProgramRequest) -> ProgramGenerator:
    """Read the prompt, whose last token gives the first id of the answer, then write the rest.

    Both runs are yielded together, so that the second one starts without a round trip to the conductor.
    """
    yield [
        Run("prefill", tokens=request.inputs["tokens"]),
        Run("decode", max_iters=request.params.max_output_tokens - 1),
    ]


def embed(request: ProgramRequest) -> ProgramGenerator:
    """Read all tokens but the last one, then the last one alone, so that one vector leaves and not one per token."""
    if "tokens" in request.inputs:
        yield [Run("read", tokens=request.inputs["tokens"]), Run("embed", tokens=request.inputs["last"])]
    else:
        yield Run("embed", tokens=request.inputs["last"])


def llm(config: DecoderConfig) -> ModelSpec:
    """Return the spec for a checkpoint of these sizes."""
    inner = "values of an expert" if config.experts else "values of an MLP"
    decoder = NodeSpec(
        name="LLM",
        engine=KV_CACHE,
        ports={"tokens": "i64[n]", "token": "i64[1]"},
        kv=KVSpec(layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, windows=config.windows),
        sampling=Sampling(port="token", vocab=config.vocab, is_text=True),
        tensor_parallel=True,
        parallel_sizes=(("heads", config.heads), (inner, config.mlp)),
        weight_bytes=16_381_000_000,
        adapter_prefix="",
        doc="decoder: reads ids and draws the next one",
    )
    if config.is_embedding:
        return _embedding_model(config, decoder)
    to_client = GraphEdge("token", CLIENT, modality="text")
    write = GraphNode(decoder, ("token",), (to_client,))
    stop = StopOn("token", config.stop_ids, unless="ignore_eos")
    walks: dict[str, Walk] = {
        "prefill": GraphNode(decoder, ("tokens",), (to_client,)),
        "decode": Loop("decode_loop", write, carry={"token": "token"}, stop=stop),
    }
    return ModelSpec(
        name="llm",
        title="Plain language model: Llama 3, Qwen 2.5 and 3, Mistral or Gemma 3, by its checkpoint",
        plugin="llm",
        inputs=(Text(),),
        outputs=(Text(),),
        params=Params,
        routes=frozenset({"chat", "completion", "tokenize"}),
        nodes=(decoder,),
        partitions=(Partition(name="LLM", program=program, walks=walks),),
        processor="mstar_llm.processor:Processor",
        model="mstar_llm.model:Llm",
        bind=bind,
        configs="mstar_llm:configs",
        default_config="llm_single_gpu",
        weights={"llm": WeightRef(repo="Qwen/Qwen3-8B")},
        samples=(
            Sample(name="question", inputs={"tokens": (24,)}, outputs=frozenset({"text"})),
            Sample(
                name="one id", inputs={"tokens": (9,)}, outputs=frozenset({"text"}), params={"max_output_tokens": 1}
            ),
        ),
        tiny="mstar_llm.sources.tiny:write_tiny",
        mini="mstar_llm.checkpoint.shipped:find_mini",
        make_samples="mstar_llm.sample_inputs:make_samples",
        resolve="mstar_llm.sources.download:resolve_weights",
        notice="llm:tiny has random weights: its text is noise",
        mini_prompt="What is the capital of France?",
        mini_notice="llm:mini is a miniature of under 3M parameters: it answers simple questions and calls tools",
        max_seq_len=min(8192, config.max_positions),
    )


def _embedding_model(config: DecoderConfig, decoder: NodeSpec) -> ModelSpec:
    """Return the spec for an embedding model: the same decoder, without sampling, with a vector for its output."""
    ports = {"tokens": "i64[n]", "embedding": f"f32[n,{config.width}]"}
    decoder = replace(
        decoder, ports=ports, sampling=None, doc="decoder: reads ids; its last hidden state is the output"
    )
    to_client = GraphEdge("embedding", CLIENT, modality="embedding")
    walks: dict[str, Walk] = {
        "read": GraphNode(decoder, ("tokens",)),
        "embed": GraphNode(decoder, ("tokens",), (to_client,)),
    }
    vector = frozenset({"embedding"})
    return replace(
        llm(replace(config, is_embedding=False)),
        title="Embedding model: a text to a vector",
        outputs=(Embedding(dim=config.width),),
        routes=frozenset({"embedding", "tokenize"}),
        nodes=(decoder,),
        partitions=(Partition(name="LLM", program=embed, walks=walks),),
        samples=(Sample(name="text", inputs={"tokens": (23,), "last": (1,)}, outputs=vector),),
        make_samples=None,
    )


def bind(spec: ModelSpec, folder: Path | None, model_kwargs: Mapping[str, Any]) -> ModelSpec:
    """Bind the spec to the sizes of the checkpoint in `folder` and to the form of its chat template."""
    if folder is None:
        return spec
    return replace(llm(read_config(folder)), chat=chat_format(read_template(folder)))


@hookimpl
def mstar_models() -> Sequence[ModelSpec]:
    """Return the models of this plugin."""
    return [llm(OFFICIAL)]


WORKLOADS = (WorkloadSpec(name="chat", title="text to text", target="mstar_core.workloads.generic:chat"),)


@hookimpl
def mstar_workloads(model: ModelSpec) -> Sequence[WorkloadSpec]:
    """Offer load tests of these models."""
    return WORKLOADS if model.name == "llm" else ()

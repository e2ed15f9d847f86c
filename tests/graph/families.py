"""The five families' graphs in their shortest form: what the language has to be able to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar_core.graph import (
    CLIENT,
    KV_CACHE,
    STATELESS,
    STEP,
    Attend,
    FixedChunk,
    GraphNode,
    KVSpec,
    LeftContext,
    Loop,
    NodeSpec,
    Parallel,
    Sampling,
    Sequential,
    SlidingWindow,
    StopOn,
    Stream,
    Walk,
)
from mstar_core.graph import GraphEdge as E
from mstar_core.graph import GraphNode as N
from mstar_core.graph import StreamingGraphEdge as S
from mstarctl.graphs.graph import Graph

FULL = Attend(mask="full")
READ = Attend(mask="full", positions="shared", write=False)
IMAGE = Attend(mask="full", positions="shared")


@dataclass(frozen=True)
class Family:
    """One family's graph and the parameter names that it uses."""

    graph: Graph
    params: tuple[str, ...] = ()

    @property
    def walks(self) -> Mapping[str, Walk]:
        return {name: walk for walks in self.graph.partitions.values() for name, walk in walks.items()}


def kv_node(name: str, ports: dict[str, str], branches: tuple[str, ...] = ("main",), sampling: str = "") -> NodeSpec:
    kv = KVSpec(layers=2, kv_heads=1, head_dim=8, branches=branches)
    return NodeSpec(
        name=name, engine=KV_CACHE, ports=ports, kv=kv, sampling=Sampling(port=sampling) if sampling else None
    )


def plain(name: str, **ports: str) -> NodeSpec:
    return NodeSpec(name=name, engine=STATELESS, ports=ports)


def orpheus() -> Family:
    llm = kv_node("LLM", {"tokens": "i64[n]", "token": "i64[1]"}, sampling="token")
    snac = plain("snac_decoder", window="i64[28]", pcm="i16[2048]")
    ids = Stream("audio_ids", (snac, "window"), SlidingWindow(28, 7, tail="drop"), accept=range(128266, 156938))
    prefill = N(llm, ("tokens",), (S("token", ids),))
    decode = Loop(
        "decode_loop",
        N(llm, ("token",), (S("token", ids),)),
        carry={"token": "token"},
        stop=StopOn("token", (128258,), unless="ignore_eos"),
    )
    chunks = Loop("windows", N(snac, ("window",), (E("pcm", CLIENT, modality="audio"),)), over=ids)
    partitions = {"LLM": {"prefill": prefill, "decode": decode}, "SNAC": {"snac_chunk": chunks}}
    return Family(Graph(name="orpheus", nodes=[llm, snac], streams=[ids], partitions=partitions), ("ignore_eos",))


def bagel() -> Family:
    ports = {
        "tokens": "i64[n]",
        "embeds": "f32[n,h]",
        "latent_embeds": "f32[n,h]",
        "token": "i64[1]",
        "latents": "f32[n,64]",
        "velocity": "f32[n,64]",
    }
    llm = kv_node("LLM", ports, ("main", "cfg_text", "cfg_img"), "token")
    text, img = llm.on_branch("LLM_cfg_text", "cfg_text"), llm.on_branch("LLM_cfg_img", "cfg_img")
    vit, vae = (
        plain("vit_encoder", image="f32[3,y,x]", features="f32[n,h]"),
        plain("vae_encoder", image="f32[3,y,x]", features="f32[n,h]"),
    )
    combine = plain("combine_cfg", latents="f32[n,64]", v="f32[n,64]", v_text="f32[n,64]?", v_img="f32[n,64]?")
    decoder = plain("vae_decoder", latents="f32[n,64]", image="u8[3,y,x]")
    velocity = Parallel(
        *(
            N(node, ("latents", STEP), (E("velocity", combine, into=port),), attend=READ)
            for node, port in ((llm, "v"), (text, "v_text"), (img, "v_img"))
        )
    )
    denoise = Loop(
        "denoise",
        Sequential(velocity, N(combine, ("latents", STEP, "v", "v_text", "v_img"))),
        carry={"latents": "latents"},
        outputs=(E("latents", decoder),),
    )
    walks: dict[str, Walk] = {
        "prefill_text": N(llm, ("tokens",), attend=Attend()),
        "prefill_vit": Sequential(
            N(vit, ("image",), (E("features", llm, into="embeds"),)), N(llm, ("embeds",), attend=IMAGE)
        ),
        "prefill_vae": Sequential(
            N(vae, ("image",), (E("features", llm, into="latent_embeds"),)), N(llm, ("latent_embeds",), attend=IMAGE)
        ),
        "decode": Loop(
            "decode_loop",
            N(llm, ("token",), (E("token", CLIENT, modality="text"),)),
            carry={"token": "token"},
            stop=StopOn("token", (151645,)),
        ),
        "image_gen": Sequential(denoise, N(decoder, ("latents",), (E("image", CLIENT, modality="image"),))),
    }
    nodes = [llm, text, img, vit, vae, combine, decoder]
    return Family(Graph(name="bagel", nodes=nodes, streams=[], partitions={"main": walks}))


def qwen3_omni() -> Family:
    thinker = kv_node(
        "thinker",
        {
            "tokens": "i64[n]",
            "positions": "f32[3,n]?",
            "embeds": "f32[n,h]",
            "deepstack": "f32[l,n,h]?",
            "token": "i64[1]",
            "states": "f32[n,h]",
        },
        sampling="token",
    )
    talker = kv_node("talker", {"states": "f32[n,h]?", "frame": "i64[16]", "code0": "i64[1]"}, sampling="code0")
    code2wav = plain("code2wav", codes="i64[n,16]", pcm="i16[n]")
    audio = plain("audio_encoder", audio="f32[128,n]", features="f32[n,h]")
    vision = plain("vision_encoder", pixels="f32[p,c]", features="f32[n,h]", deepstack="f32[l,n,h]")
    states = Stream("thinker_states", (talker, "states"), FixedChunk(1, after_end="empty"))
    codes = Stream("codec_tokens", (code2wav, "codes"), LeftContext(25, left=25, tail="flush"))
    out = (S("states", states), E("token", CLIENT, modality="text"))
    thinks: dict[str, Walk] = {
        "prefill_text": N(thinker, ("tokens", "positions"), out),
        "prefill_audio": Sequential(
            N(audio, ("audio",), (E("features", thinker, into="embeds"),)), N(thinker, ("embeds", "positions"), out)
        ),
        "prefill_vision": Sequential(
            N(vision, ("pixels",), (E("features", thinker, into="embeds"), E("deepstack", thinker))),
            N(thinker, ("embeds", "deepstack", "positions"), out),
        ),
        "thinker_decode": Loop(
            "thinker_loop",
            N(thinker, ("token",), out),
            carry={"token": "token"},
            stop=StopOn("token", (151645,), unless="ignore_eos"),
        ),
    }
    talks: dict[str, Walk] = {
        "talker_prefill": N(talker, ("states",)),
        "talker_last_prefill": N(talker, ("states",), (S("frame", codes),)),
        "talker_decode": Loop(
            "talker_loop",
            N(talker, ("states", "frame"), (S("frame", codes),)),
            over=states,
            carry={"frame": "frame"},
            stop=StopOn("code0", (2150,)),
        ),
    }
    waves = {
        "code2wav_chunk": Loop("chunks", N(code2wav, ("codes",), (E("pcm", CLIENT, modality="audio"),)), over=codes)
    }
    graph = Graph(
        name="qwen3_omni",
        nodes=[thinker, talker, code2wav, audio, vision],
        streams=[states, codes],
        partitions={"Thinker": thinks, "Talker": talks, "Code2Wav": waves},
    )
    return Family(graph, ("ignore_eos",))


def pi05() -> Family:
    vit = plain("vit", images="f32[c,3,224,224]", features="f32[n,h]")
    llm = kv_node("LLM", {"embeds": "f32[n,h]", "tokens": "i64[n]", "actions": "f32[50,32]"})
    walks: dict[str, Walk] = {
        "prefill": Sequential(
            N(vit, ("images",), (E("features", llm, into="embeds"),)), N(llm, ("embeds", "tokens"), attend=FULL)
        ),
        "action_gen": Loop(
            "flow",
            N(llm, ("actions", STEP), attend=Attend(mask="full", write=False)),
            carry={"actions": "actions"},
            fused=True,
            outputs=(E("actions", CLIENT, modality="action"),),
        ),
    }
    return Family(Graph(name="pi05", nodes=[vit, llm], streams=[], partitions={"main": walks}))


def vjepa2() -> Family:
    encoder = plain("encoder", frames="f32[f,3,y,x]", latents="f32[n,h]")
    predictor = plain(
        "predictor", context="f32[n,h]", context_mask="i64[c]", target_mask="i64[t]", predicted="f32[n,h]"
    )
    to_predictor = E("latents", predictor, into="context")
    predicted = E("predicted", CLIENT, modality="tensor")
    walks: dict[str, Walk] = {
        "encode": N(encoder, ("frames",), (E("latents", CLIENT, modality="tensor"),)),
        "predict": Sequential(
            N(encoder, ("frames",), (to_predictor,)),
            N(predictor, ("context", "context_mask", "target_mask"), (predicted,)),
        ),
        "rollout": Sequential(
            N(encoder, ("frames",), (to_predictor,)),
            Loop(
                "rollout_loop",
                N(predictor, ("context", STEP), (predicted,)),
                carry={"predicted": "context"},
                fused=True,
            ),
        ),
    }
    return Family(Graph(name="vjepa2", nodes=[encoder, predictor], streams=[], partitions={"main": walks}))


def vjepa2_ac() -> Family:
    encoder = plain("encoder", frames="f32[f,3,y,x]", latents="f32[n,h]")
    ac = kv_node(
        "ac_predictor",
        {
            "frame": "f32[n,h]",
            "state": "f32[7]",
            "actions": "f32[t,7]",
            "next_frame": "f32[n,h]",
            "next_state": "f32[7]",
        },
    )
    emit = (E("next_frame", CLIENT, modality="tensor"), E("next_state", CLIENT, modality="tensor"))
    rollout = Sequential(
        N(encoder, ("frames",), (E("latents", ac, into="frame"),)),
        Loop(
            "rollout_loop",
            N(ac, ("frame", "state", "actions", STEP), emit, attend=FULL),
            carry={"next_frame": "frame", "next_state": "state"},
            fused=True,
        ),
    )
    return Family(Graph(name="vjepa2_ac", nodes=[encoder, ac], streams=[], partitions={"main": {"rollout": rollout}}))


FAMILIES = {make.__name__: make for make in (orpheus, bagel, qwen3_omni, pi05, vjepa2, vjepa2_ac)}
__all__ = ["FAMILIES", "Family", "GraphNode", "bagel", "kv_node", "orpheus", "pi05", "plain", "qwen3_omni"]

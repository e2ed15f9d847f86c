"""The language model against the reference: logits, greedy ids, the paged engine, sampling probabilities."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar_core.engine.base import Handle, Job, JobKey, LoopSpec
from mstar_core.engine.kv.engine import KVCacheEngine
from mstar_core.engine.kv.settings import KVSettings
from mstar_core.errors import WeightsError
from mstar_core.graph.declare.sampling import SamplingParams
from mstar_core.layers import frequencies
from mstar_orpheus.llama import LlamaConfig
from tests.engine.exact_draw import probabilities

LOGITS = 1e-4


def step(built: Any, cache: Any, tokens: Tensor, start: int) -> Tensor:
    positions = torch.arange(start, start + len(tokens))
    logits: Tensor = built.llama.head(built.llama(kv=cache, positions=positions, tokens=tokens)["hidden"])
    return logits


def test_prefill_logits_equal_the_reference(prompt: int, golden: Any, reference: Any, dense_cache: Any) -> None:
    logits = step(reference, dense_cache, golden.lm[f"prompt_{prompt}"], 0)
    torch.testing.assert_close(logits, golden.lm[f"prefill_logits_{prompt}"], atol=LOGITS, rtol=0)


def test_a_prefill_in_pieces_equals_the_whole(prompt: int, golden: Any, reference: Any, dense_cache: Any) -> None:
    ids = golden.lm[f"prompt_{prompt}"]
    cuts = [0, len(ids) // 3, len(ids) // 3 + 1, len(ids)]
    parts = [step(reference, dense_cache, ids[a:b], a) for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts), golden.lm[f"prefill_logits_{prompt}"], atol=LOGITS, rtol=0)


def test_greedy_steps_equal_the_reference(prompt: int, golden: Any, reference: Any, dense_cache: Any) -> None:
    expected = golden.lm
    inputs, ids = expected[f"prompt_{prompt}"], expected[f"greedy_tokens_{prompt}"]
    logits = [step(reference, dense_cache, inputs, 0)[-1]]
    for place in range(len(ids) - 1):
        logits.append(step(reference, dense_cache, logits[-1].argmax()[None], len(inputs) + place)[0])
    assert [int(row.argmax()) for row in logits] == ids.tolist()
    torch.testing.assert_close(torch.stack(logits), expected[f"greedy_step_logits_{prompt}"], atol=LOGITS, rtol=0)


def paged(built: Any, prompts: list[Tensor], steps: int, penalty: float, **settings: Any) -> list[list[int]]:
    """Return greedy ids of several requests at once, through the engine and its pages."""
    longest = max(map(len, prompts)) + steps
    options = {"page_size": 8, "max_slots": len(prompts) + 6, "max_seq_len": 2 * longest, "token_budget": 64}
    options |= {"num_pages": (len(prompts) + 1) * (longest // 8 + 2)} | settings
    spec = built.spec.node("LLM")
    vocab = built.llama.model.embed_tokens.num_embeddings
    settings = KVSettings(device=torch.device("cpu"), dtype=torch.float32, vocab=vocab, **options)
    engine = KVCacheEngine(spec, built.llama, settings)
    keys, ids = itertools.count(1), {handle: list[int]() for handle in range(len(prompts))}
    loops: dict[int, int] = {}
    for handle, prompt in enumerate(prompts):
        engine.open(Handle(handle), SamplingParams(repetition_penalty=penalty), len(prompt) + steps)
        job = Job(key=JobKey(next(keys)), handle=Handle(handle), inputs={"tokens": prompt}, outputs=("token",))
        engine.submit(job)
    while (running := engine.launch()) is not None:
        result = engine.collect(running)
        assert not result.failed
        for done in result.done:
            if done.job.loop is None:
                ids[done.job.handle].append(int(done.outputs["token"]))
                loop = LoopSpec(max_iters=steps - 1, carry={"token": "token"}, stop_port="token")
                key = JobKey(next(keys))
                loops[key] = done.job.handle
                engine.submit(Job(key=key, handle=done.job.handle, loop=loop, outputs=("token",)))
        if result.loop is not None:
            for key, value in zip(result.loop.keys.tolist(), result.loop.ids.tolist(), strict=True):
                ids[loops[key]].append(value)
    return [ids[handle] for handle in range(len(prompts))]


@pytest.mark.parametrize("is_penalized", [False, True], ids=["plain", "penalized"])
@pytest.mark.parametrize("budget", [7, 64], ids=["chunked", "whole"])
def test_paged_batch_of_unequal_prompts_gives_reference_ids(
    is_penalized: bool, budget: int, golden: Any, reference: Any
) -> None:
    expected, penalty = golden.lm, golden.penalty if is_penalized else 1.0
    name = "greedy_penalised_tokens" if is_penalized else "greedy_tokens"
    prompts = [expected[f"prompt_{index}"] for index in golden.prompts]
    wanted = [expected[f"{name}_{index}"].tolist() for index in golden.prompts]
    assert paged(reference, prompts, len(wanted[0]), penalty, token_budget=budget) == wanted
    alone = [paged(reference, [prompt], len(wanted[0]), penalty, token_budget=budget)[0] for prompt in prompts]
    assert alone == wanted


def test_sampling_probabilities_equal_the_reference(prompt: int, golden: Any) -> None:
    expected, settings = golden.lm, golden.json("config.json")["sampling"]
    logits = expected[f"sampling_logits_{prompt}"].reshape(1, -1)
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    seen[0, expected[f"sampling_history_{prompt}"].reshape(-1)] = True
    drawn = probabilities(logits, [SamplingParams(**settings)], seen)[0].float()
    torch.testing.assert_close(drawn, expected[f"sampling_probs_{prompt}"].reshape(-1), atol=1e-5, rtol=0)


def configs(golden: Any) -> Iterator[dict[str, Any]]:
    older = golden.json("llm_config.json")
    newer = {key: value for key, value in older.items() if key not in ("rope_theta", "rope_scaling")}
    yield older
    yield newer | {"rope_parameters": {"rope_theta": older["rope_theta"], **older["rope_scaling"]}}


def test_both_styles_of_rotary_config_give_the_same_frequencies(golden: Any, tmp_path: Path) -> None:
    if not golden.json("llm_config.json").get("rope_scaling"):
        pytest.skip("runs when MSTAR_GOLDEN names a set that has rotary scaling")
    path, read = tmp_path / "config.json", []
    for config in configs(golden):
        path.write_text(json.dumps(config))
        read.append(LlamaConfig.read(path))
    assert read[0] == read[1]
    scaling = golden.json("llm_config.json")["rope_scaling"]
    slowest = float(frequencies(read[0].rotary)[-1])
    plain = read[0].rotary.base ** (-(read[0].rotary.width - 2) / read[0].rotary.width)
    if 2 * math.pi / plain <= scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]:
        pytest.skip("runs when MSTAR_GOLDEN names a set whose slowest rotation is scaled by the full factor")
    assert slowest == pytest.approx(plain / scaling["factor"], rel=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_an_unsupported_config_is_refused_with_its_key(
    change: dict[str, Any], named: str, golden: Any, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(golden.json("llm_config.json") | change))
    with pytest.raises(WeightsError, match=named) as caught:
        LlamaConfig.read(path)
    assert str(path) in str(caught.value)

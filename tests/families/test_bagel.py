"""BAGEL's programs and parameters against its specification: order of segments, cache branches, think mode."""

from __future__ import annotations

import pytest

from mstar_bagel.params import Params, guidance
from mstar_core.errors import RequestError
from mstar_core.graph import Attend, graph_nodes
from mstar_core.plugin import Run, Signal, parse_params
from tests.families.families import SPECS, loop_of, told, wishes

ALL = "main+cfg_text+cfg_img"
CLOSED = ["decode", "prefill_text"]
PAINTED = ["first_noise", "denoise main+cfg_text", "image_gen"]
EDITED = ["first_noise", f"image_gen {ALL}"]

PROGRAMS = {
    "chat": ["prefill_last", "decode"],
    "describe": ["prefill_vit", "prefill_last", "decode"],
    "describe, think": ["prefill_text", "prefill_vit", "prefill_last", "decode"],
    "interleaved": ["prefill_text", "prefill_vit", "prefill_text", "prefill_vit", "prefill_last", "decode"],
    "paint": ["prefill_text", *PAINTED],
    "paint, one partial image": [
        "prefill_text",
        "first_noise",
        "partial_image main+cfg_text",
        "denoise main+cfg_text",
        "image_gen",
    ],
    "paint, unguided": ["prefill_text", "first_noise", "image_gen"],
    "paint, guided in the middle": ["prefill_text", "first_noise", "denoise", "denoise main+cfg_text", "image_gen"],
    "paint, two texts": ["prefill_text", "main > cfg_text", "prefill_text", *PAINTED],
    "paint, think": ["prefill_text", "main > cfg_text", "prefill_text", *CLOSED, *PAINTED],
    "paint, think, image guided": [
        "prefill_text main+cfg_img",
        "main > cfg_text",
        "prefill_text main+cfg_img",
        *CLOSED,
        "first_noise",
        f"denoise {ALL}",
        "image_gen",
    ],
    "edit": ["prefill_vae", "prefill_vit", "main > cfg_text", "prefill_text main+cfg_img", *EDITED],
    "edit, text first": [
        "prefill_text main+cfg_img",
        "prefill_vae",
        "prefill_vit",
        "main > cfg_text",
        *EDITED,
    ],
    "edit, two images": [
        "prefill_vae",
        "prefill_vit",
        "prefill_text main+cfg_img",
        "prefill_vae",
        "prefill_vit",
        "main > cfg_text",
        "prefill_text main+cfg_img",
        *EDITED,
    ],
    "edit, text guided": [
        "prefill_vae",
        "prefill_vit",
        "main > cfg_text",
        "prefill_text",
        "first_noise",
        "image_gen main+cfg_text",
    ],
    "edit, think": [
        "prefill_text main+cfg_img",
        "prefill_vae",
        "prefill_vit",
        "main > cfg_text",
        "prefill_text main+cfg_img",
        *CLOSED,
        *EDITED,
    ],
}


@pytest.mark.parametrize("sample", [sample.name for sample in SPECS["bagel"].samples])
def test_segments_branches_and_forks_follow_the_specification(sample: str) -> None:
    assert told(wishes("bagel", sample)["main"]) == PROGRAMS[sample]


def runs(sample: str, walk: str, ended: dict[str, str] | None = None) -> list[Run]:
    found = wishes("bagel", sample, ended)["main"]
    return [wish for wish in found if isinstance(wish, Run) and wish.walk == walk]


def test_an_image_takes_the_steps_of_its_flow_times_and_only_guided_ones_take_branches() -> None:
    assert [(run.max_iters, len(run.branches)) for run in runs("paint", "denoise")] == [(41, 2)]
    assert [(run.max_iters, len(run.branches)) for run in runs("paint", "image_gen")] == [(8, 1)]
    assert [(run.max_iters, len(run.branches)) for run in runs("edit", "image_gen")] == [(49, 3)]
    assert not any(run.sample for walk in ("denoise", "image_gen") for run in runs("paint", walk))


def test_the_last_pass_of_an_answers_prompt_draws_its_first_id() -> None:
    found = [wish for wish in wishes("bagel", "describe, think")["main"] if isinstance(wish, Run)]
    assert [run.walk for run in found if run.sample] == ["prefill_last", "decode"]
    decode = found[-1]
    assert (decode.max_iters, "token" in decode.inputs) == (1023, False), "it goes on from the first id"


def test_a_thought_before_an_image_is_decoded_from_the_start_id() -> None:
    (decode,) = runs("paint, think", "decode")
    assert decode.inputs["token"].name == "start"  # type: ignore[union-attr]
    assert decode.max_iters == 1024
    assert not any(run.sample for run in runs("paint, think", "prefill_text"))


def test_a_thought_cut_by_its_limit_is_closed_with_its_last_id_first() -> None:
    last, end = runs("edit, think", "prefill_text", {"decode": "length"})[-2:]
    assert isinstance(last.inputs["tokens"], Signal)
    assert last.inputs["tokens"].port == "token"
    assert end.inputs["tokens"].name == "end"  # type: ignore[union-attr]
    assert last.branches == end.branches == ("main",)


def test_the_two_encoders_read_their_own_resizing_of_an_image() -> None:
    assert runs("edit", "prefill_vae")[0].inputs["image"].name == "vae_image"  # type: ignore[union-attr]
    assert runs("edit", "prefill_vit")[0].inputs["image"].name == "vit_image"  # type: ignore[union-attr]


def test_an_image_is_seen_whole_at_one_position_and_a_noisy_one_is_never_kept() -> None:
    graph = SPECS["bagel"]
    reads = [use.attend for use in graph_nodes(graph.walk("prefill_vae")[1]) if use.spec.kv is not None]
    assert reads == [Attend(mask="full", positions="shared", extra=2)]
    looks = {use.spec.branch: use.attend for use in graph_nodes(graph.walk("image_gen")[1]) if use.spec.kv is not None}
    assert set(looks) == {"main", "cfg_text", "cfg_img"}
    assert set(looks.values()) == {Attend(mask="full", positions="shared", extra=2, write=False)}


def test_the_denoising_loop_keeps_its_older_walk_name() -> None:
    assert loop_of("bagel", "image_gen_cfg", "denoise").carry == {"latents": "latents", "history": "history"}


def test_guidance_defaults_depend_on_the_task() -> None:
    made = Params()
    assert guidance(made, is_edit=False).numbers() == (4.0, 1.0, 0.0, 0.0)
    assert guidance(made, is_edit=True).numbers() == (4.0, 2.0, 2.0, 0.0)
    assert [(guidance(made, is_edit=each).low, guidance(made, is_edit=each).high) for each in (False, True)] == [
        (0.4, 1.0),
        (0.0, 1.0),
    ]
    given = Params(cfg_img_scale=1.5, cfg_interval=(0.2, 0.9), cfg_renorm_type="channel")
    assert guidance(given, is_edit=True).numbers() == (4.0, 1.5, 1.0, 0.0)


@pytest.mark.parametrize(
    ("given", "sampled", "temperature"),
    [
        ({}, False, 0.0),
        ({"do_sample": True}, True, 0.3),
        ({"temperature": 0.7}, True, 0.7),
        ({"text_temperature": 0}, False, 0.0),
        ({"temperature": 0.7, "do_sample": False}, False, 0.0),
    ],
)
def test_a_temperature_switches_sampling_on(given: dict[str, object], sampled: bool, temperature: float) -> None:
    made = parse_params(Params, given).params
    assert (made.do_sample, made.temperature) == (sampled, temperature)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"width": 1000}, "width"),
        ({"height": 1040}, "height"),
        ({"size": "1024*1024"}, "size"),
        ({"size": "2048x1024"}, "width"),
        ({"cfg_interval": [0.9, 0.1]}, "cfg_interval"),
        ({"cfg_interval": [0.5]}, "cfg_interval"),
        ({"cfg_interval": [0.5, 1.5]}, "cfg_interval"),
        ({"cfg_renorm_type": "local"}, "cfg_renorm_type"),
        ({"num_timesteps": 1}, "num_timesteps"),
        ({"negative_prompt": "blurry"}, "negative_prompt"),
    ],
)
def test_wrong_values_name_their_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_params(Params, given)
    assert error.value.field == field


def test_a_size_is_read_and_width_and_height_win_over_it() -> None:
    assert parse_params(Params, {"size": "1024x576"}).params.image_size() == (1024, 576)
    assert parse_params(Params, {"size": "1024x576", "height": "768"}).params.image_size() == (1024, 768)
    assert parse_params(Params, {"size": "auto"}).params.image_size() == (1024, 1024)


def test_forms_and_earlier_names_are_read() -> None:
    made = parse_params(Params, {"cfg_interval": "[0.0, 1.0]", "num_inference_steps": "25", "think": "true"}).params
    assert (made.cfg_interval, made.num_timesteps, made.think_mode) == ((0.0, 1.0), 25, True)

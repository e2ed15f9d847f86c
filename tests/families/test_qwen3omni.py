"""Qwen3-Omni's programs and parameters against its specification: segments, silence of text requests, streams."""

from __future__ import annotations

import pytest

from mstar_core.errors import RequestError
from mstar_core.graph import LeftContext, StopOn, StreamingGraphEdge, graph_nodes
from mstar_core.plugin import Run, parse_params
from mstar_qwen3omni.checkpoint.config import OmniConfig
from mstar_qwen3omni.params import Params
from mstar_qwen3omni.plugin import spec
from tests.families.families import SPECS, loop_of, told, wishes

SPEECH = ["talker_last_prefill", "talker_decode"]

TEXT, SOUND, SEEN = "talker_prefill_text", "talker_prefill_media", "talker_prefill_placed_media"
PROGRAMS: dict[str, tuple[list[str], list[str] | None]] = {
    "text": (["prefill_text"], None),
    "text, spoken": (["prefill_text"], [TEXT]),
    "audio": (["prefill_text", "prefill_audio", "prefill_text"], None),
    "audio, spoken": (["prefill_text", "prefill_audio", "prefill_text"], [TEXT, SOUND, TEXT]),
    "image": (["prefill_text", "prefill_vision", "prefill_text"], None),
    "image and audio, spoken": (
        ["prefill_text", "prefill_vision", "prefill_text", "prefill_audio", "prefill_text"],
        [TEXT, SEEN, TEXT, SOUND, TEXT],
    ),
    "video": (["prefill_text", "prefill_vision", "prefill_text"], None),
    "video with sound, spoken": (
        ["prefill_text", "prefill_audio_vision", "prefill_placed_text"],
        [TEXT, SOUND, TEXT],
    ),
    "audio after a video with sound": (
        ["prefill_text", "prefill_audio_vision", "prefill_placed_text", "prefill_placed_audio", "prefill_text"],
        None,
    ),
    "second turn, spoken": (["prefill_text", "prefill_text"], [TEXT, TEXT]),
    "load test": (["prefill_text"], None),
    "one token": (["prefill_text"], [TEXT]),
}


@pytest.mark.parametrize("sample", [sample.name for sample in SPECS["qwen3_omni"].samples])
def test_the_thinker_reads_in_order_and_the_talker_follows_its_user_segments(sample: str) -> None:
    read, heard = PROGRAMS[sample]
    found = {name: told(wanted) for name, wanted in wishes("qwen3_omni", sample).items()}
    expected = {"Thinker": [*read, "thinker_decode"]}
    if heard is not None:
        expected |= {"Talker": heard + SPEECH, "Code2Wav": ["code2wav_chunk"]}
    assert found == expected


def test_only_the_last_prefill_samples_and_limits_count_its_token() -> None:
    thinker = [run for run in wishes("qwen3_omni", "audio")["Thinker"] if isinstance(run, Run)]
    assert [run.sample for run in thinker] == [False, False, True, True]
    assert thinker[-1].max_iters == 2047
    spoken = wishes("qwen3_omni", "one token")
    limits = [run.max_iters for part in ("Thinker", "Talker") for run in spoken[part][-1:] if isinstance(run, Run)]
    assert limits == [0, 1]


def test_only_media_send_hidden_states_and_every_walk_sends_its_ids() -> None:
    graph = SPECS["qwen3_omni"]
    for name, walk in graph.partitions[0].walks.items():
        edges = [edge for use in graph_nodes(walk) for edge in use.outputs if isinstance(edge, StreamingGraphEdge)]
        media = {"prefill_audio", "prefill_placed_audio", "prefill_vision", "prefill_audio_vision"}
        assert {edge.port for edge in edges} == ({"token", "states"} if name in media else {"token"}), name


def test_the_stop_id_of_text_is_not_spoken() -> None:
    loop = loop_of("qwen3_omni", "talker_decode", "talker_loop")
    assert loop.over is not None and loop.over.reject == (151645,)


def test_a_checkpoint_without_a_talker_serves_text_alone() -> None:
    silent = spec(OmniConfig(has_speech=False))
    assert [partition.name for partition in silent.partitions] == ["Thinker"]
    assert {node.name for node in silent.nodes} == {"audio_encoder", "vision_encoder", "Thinker"}


def test_the_talker_goes_on_after_the_text_and_stops_at_its_own_id() -> None:
    loop = loop_of("qwen3_omni", "talker_decode", "talker_loop")
    assert loop.over is not None
    assert loop.over.chunk.after_end == "empty"
    assert loop.stop == StopOn("code0", (2150,))


def test_specials_but_the_stop_id_are_suppressed() -> None:
    sampling = SPECS["qwen3_omni"].node("Talker").sampling
    assert sampling is not None
    assert sampling.history == "output"
    suppressed = {code for span in sampling.suppress for code in span}
    assert suppressed == set(range(2048, 3072)) - {2150}


def test_the_vocoder_takes_its_chunk_sizes_from_the_request() -> None:
    chunk = loop_of("qwen3_omni", "code2wav_chunk", "chunks").over
    assert chunk is not None
    assert chunk.chunk == LeftContext(
        25,
        25,
        chunk_from="codec_chunk_frames",
        left_from="codec_left_context_frames",
        first=8,
        first_from="codec_first_frames",
    )


def test_earlier_names_and_defaults() -> None:
    made = parse_params(Params, {"thinker_temperature": 0, "talker_max_output_tokens": 12, "max_tokens": 9}).params
    assert (made.temperature, made.talker_max_tokens, made.max_output_tokens) == (0, 12, 9)
    plain = Params()
    talker = (plain.talker_temperature, plain.talker_top_k, plain.talker_top_p, plain.talker_repetition_penalty)
    assert talker == (0.9, 50, 1.0, 1.05)
    predictor = (plain.code_predictor_temperature, plain.code_predictor_top_k, plain.code_predictor_top_p)
    assert predictor == (1.0, 50, 0.8)
    assert (plain.voice, plain.fps, plain.max_frames, plain.min_pixels, plain.max_pixels) == (
        "ethan",
        2,
        768,
        3136,
        12_845_056,
    )


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"voice": "julia"}, "voice"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "min_pixels"),
        ({"talker_top_p": 0}, "talker_top_p"),
    ],
)
def test_wrong_values_name_their_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_params(Params, given)
    assert error.value.field == field


def test_a_request_sets_its_own_chunk_sizes() -> None:
    chunk = LeftContext(
        25,
        25,
        chunk_from="codec_chunk_frames",
        left_from="codec_left_context_frames",
        first=8,
        first_from="codec_first_frames",
    )
    own = chunk.for_request({"codec_chunk_frames": 300, "codec_left_context_frames": 0})
    assert (own.chunk, own.left) == (300, 0)
    assert chunk.for_request({}) == chunk

"""Nodes and prompts against the reference: ids and codes exact, values within the limits of the set's README."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

from mstar_core.layers.sampling import probabilities
from mstar_qwen3tts.checkpoint.config import BASE, SpeakerSizes, TTSConfig
from mstar_qwen3tts.published import OFFICIAL_BASE, shapes
from mstar_qwen3tts.request.tokenizer import TextTokenizer
from mstar_qwen3tts.voice.mel import log_mel

from .driver import inputs_of, placed, spoken
from .golden_set import FOLDER, MANIFEST, Case, close, node, tensors

ROWS, LOGITS, CODEC = 2e-5, 1e-4, 5e-5


def test_tokenizer_gives_the_ids_of_the_reference() -> None:
    folder = FOLDER / "custom_voice" if (FOLDER / "custom_voice").is_dir() else FOLDER / "base"
    tokenizer = TextTokenizer(folder)
    for example in MANIFEST["tokenizer_examples"]:
        text = f"<|im_start|>assistant\n{example['text']}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.encode_template(text) == example["input_ids"], example["text"]


def test_ids_and_codes_of_a_case_are_those_of_the_reference(case: Case) -> None:
    found, expected = spoken(case), case.tensors
    close(found.prompt, expected["talker_inputs_embeds"], ROWS)
    assert found.tokens == expected["talker_tokens"].tolist()
    assert torch.equal(torch.stack(found.frames), expected["codes"].long())
    talker = node(case.folder.name, "Talker")
    rest = expected["trailing_text_hidden"]
    if found.trailing:
        close(talker.project_text(torch.tensor(found.trailing)), rest, ROWS)
    else:
        close(rest, expected["tts_pad_embed"].expand_as(rest), 0)
    close(found.hidden[0], expected["talker_prefill_hidden"], LOGITS)
    last = [hidden[-1] for hidden in found.hidden]
    close(torch.stack(last)[: len(found.tokens)], expected["talker_last_hidden"], LOGITS)
    eos, count = case.config.codes.eos, expected["talker_logits"].shape[1] - 1
    logits = torch.stack(found.logits)
    close(torch.cat([logits[:, :count], logits[:, eos : eos + 1]], 1), expected["talker_logits"], LOGITS)


def test_logits_of_the_predictor_are_those_of_the_reference(case: Case) -> None:
    predictor, expected = node(case.folder.name, "Talker").code_predictor, case.tensors
    given, codes, seen = expected["predictor_inputs"], expected["codes"].long(), []

    def choose(step: int, logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits)
        return codes[:, step + 1]

    project, predictor.project = predictor.project, lambda x: x if x.shape[-1] == given.shape[-1] else project(x)
    try:
        predictor.unroll(given[:, 0], given[:, 1], choose)
    finally:
        del predictor.project
    close(torch.stack(seen, dim=1), expected["predictor_logits"], LOGITS)


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (1, 2, 4, 8), (5, 2, 7)])
def test_sound_of_a_case_is_that_of_the_reference_in_any_pieces(case: Case, sizes: tuple[int, ...]) -> None:
    rows = torch.from_numpy(inputs_of(case).arrays["prompt"])
    codec = node(case.folder.name, "Codec")
    state = codec.new_state(1)
    if case.is_clone and bool((rows[:, 1] <= -3).any()):
        state = codec(reference=[placed(case, rows)[2]])["state"][0][None]
    codes, sound, at = case.tensors["codes"].long()[None], [], 0
    for size in itertools.cycle(sizes):
        piece = codes[:, at : at + size]
        if not piece.shape[1]:
            break
        samples, state = codec.run(piece, state)
        sound.append(samples)
        at += piece.shape[1]
    expected = case.tensors["waveform"].flatten()
    # The reference may cut one sample less than whole frames of the recording.
    close(torch.cat(sound, dim=1)[0, -len(expected) :], expected[-at * codec.sizes.frame_samples :], CODEC)


@pytest.mark.parametrize("folder", ["custom_voice", "base"])
def test_decoding_equals_the_reference_whole_in_pieces_and_in_batches(folder: str) -> None:
    codec, given = node(folder, "Codec"), tensors("codec")
    codes, expected = given["in.codes"].long()[None], given["waveform_whole"].flatten()
    close(codec.run(codes, codec.new_state(1))[0], expected, CODEC)
    parts = torch.stack([codes[0, :9], codes[0, 9:18]])
    close(codec.run(parts, codec.new_state(2))[0][0], expected[: 9 * codec.sizes.frame_samples], CODEC)
    # Streams of different ages in one batch.
    old = codec.run(codes[:, :9], codec.new_state(1))[1]
    both = codec.run(torch.cat([codes[:, 9:18], codes[:, :9]]), torch.cat([old, codec.new_state(1)]))[0]
    count = 9 * codec.sizes.frame_samples
    close(both[0], expected[count : 2 * count], CODEC)
    close(both[1], expected[:count], CODEC)


def test_a_long_decode_equals_the_whole_one() -> None:
    codec, given = node("custom_voice", "Codec"), tensors("codec")
    if "in.codes_long" not in given:
        pytest.skip("the own set has no long codes; MSTAR_GOLDEN names the whole one")
    long, name = given["in.codes_long"].long()[None], next(key for key in given if "long" in key and "whole" in key)
    state, sound = codec.new_state(1), []
    for part in long.split(64, dim=1):
        samples, state = codec.run(part, state)
        sound.append(samples)
    expected = given[name].flatten()
    close(torch.cat(sound, dim=1)[0, -len(expected) :], expected, CODEC)


def test_encoders_of_recordings_equal_the_reference() -> None:
    clips, codes = tensors("speaker"), tensors("encoder")
    encoder = node("base", "VoiceEncoder")
    names = sorted(name for name in clips if name.startswith("in.audio_"))
    assert names
    for name in names:
        index, samples = name.rpartition("_")[2], clips[name].flatten()
        mel = log_mel(samples, encoder.bins)
        close(mel.T, clips[f"mel_{index}"], CODEC)
        close(encoder.speaker_encoder(mel), clips[f"embedding_{index}"], CODEC)
        assert torch.equal(encoder.encoder(samples), codes[f"codes_{index}"].long())


def test_distributions_equal_the_reference() -> None:
    given = tensors("sampling")
    for index, rule in enumerate(MANIFEST["sampling"]):
        logits = given[next(key for key in given if key.startswith("predictor_logits") and key.endswith(str(index)))]
        expected = given[next(key for key in given if key.startswith("predictor_probs") and key.endswith(str(index)))]
        flat = logits.flatten(0, -2)
        columns = {
            "temperature": torch.full((len(flat),), rule["temperature"]),
            "greedy": torch.zeros(len(flat), dtype=torch.bool),
            "top_k": torch.full((len(flat),), rule["top_k"]),
            "top_p": torch.full((len(flat),), rule["top_p"] if rule["top_p"] < 1 else 2.0, dtype=torch.float64),
            "min_p": torch.zeros(len(flat), dtype=torch.float64),
        }
        close(probabilities(flat, columns).float(), expected.flatten(0, -2), 1e-5)


def test_names_and_shapes_are_those_of_the_official_files() -> None:
    path = FOLDER / "full_size_keys.json"
    if not path.is_file():
        pytest.skip("full_size_keys.json is not part of this golden set")
    listed = json.loads(path.read_text())
    codec = {name: tuple(shape) for name, shape in listed["speech_tokenizer"].items()}
    unused = {
        name
        for name in codec
        if ("decoder." in name[:8] and ".input_proj." in name)
        or (".output_proj." in name and name.startswith("encoder.quantizer"))
    }
    unused = {name for name in unused if "quantizer" in name}
    usual = TTSConfig()
    small = replace(
        usual,
        kind=BASE,
        talker=replace(usual.talker, width=1024, mlp=3072),
        speaker=SpeakerSizes(output=1024),
    )
    for name, config in (("1.7B-Base", OFFICIAL_BASE), ("0.6B-Base", small)):
        expected = {key: tuple(shape) for key, shape in listed[name].items()} | codec
        assert dict(shapes(config)) == {key: shape for key, shape in expected.items() if key not in unused}

"""Answers as files: audio, images, arrays in three formats, text; and the values of --out."""

from __future__ import annotations

import json
import os
import struct
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from mstar_core.client import Line
from mstar_core.codec import npy_header
from mstar_core.errors import ConfigError, ExitCode, UsageError
from mstarctl.call.ask import Card, parse_params, read_files, read_state, state_param
from mstarctl.call.sink import Sink, chosen_output
from tests.fakes.any_model import PIXELS, png

POLICY = Card(name="pi05", inputs=("image", "text"), outputs=("action",), parameters=frozenset({"robot_state"}))
OMNI = ("text", "audio", "image")


def written(kind: str, path: Path, *lines: tuple[bytes, dict[str, Any]]) -> Sink:
    sink = Sink.of(kind, str(path), "x")
    for data, facts in lines:
        sink.add(Line(modality=kind, data=data, metadata=facts))
    sink.close()
    return sink


def test_sound_takes_its_rate_from_the_answer(tmp_path: Path) -> None:
    sink = written("audio", tmp_path / "a.wav", (b"\1\2" * 1600, {"sample_rate": 16000, "num_channels": 1}))
    with wave.open(str(tmp_path / "a.wav")) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (16000, 1600)
    assert sink.seconds == pytest.approx(0.1)
    written("audio", tmp_path / "a.pcm", (b"\1\2", {"sample_rate": 16000}))
    assert (tmp_path / "a.pcm").read_bytes() == b"\1\2"


def test_frames_of_a_video_become_one_film(tmp_path: Path) -> None:
    facts = {"dtype": "uint8", "format": "raw", "fps": 12}
    chunks = [np.full((count, 32, 64, 3), 40 * count, np.uint8) for count in (1, 4)]
    lines = [(chunk.tobytes(), {**facts, "shape": list(chunk.shape)}) for chunk in chunks]
    sink = written("video", tmp_path / "a.mp4", *lines)
    assert [path.name for path in sink.files] == ["a.mp4"]
    with av.open(str(tmp_path / "a.mp4")) as film:
        (stream,) = film.streams.video
        frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(stream)]
        assert stream.average_rate == 12
    assert [frame.shape for frame in frames] == [(32, 64, 3)] * 5
    assert abs(frames[0].mean() - 40) < 5 and abs(frames[-1].mean() - 160) < 5


def test_several_pictures_are_several_files(tmp_path: Path) -> None:
    one, two = png(PIXELS), png(PIXELS[::-1])
    sink = written("image", tmp_path / "a.png", (one, {}), (two, {}))
    assert [path.name for path in sink.files] == ["a.png", "a-2.png"]
    assert (tmp_path / "a-2.png").read_bytes() == two


@pytest.mark.parametrize("dtype", ["float32", "int64", "float16", "bool"])
def test_an_array_is_what_numpy_reads(dtype: str, tmp_path: Path) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    facts = {"shape": [2, 3], "dtype": dtype}
    written("action", tmp_path / "a.npy", (array.tobytes(), facts))
    assert np.array_equal(np.load(tmp_path / "a.npy"), array) and np.load(tmp_path / "a.npy").dtype == array.dtype
    written("action", tmp_path / "a.json", (array.tobytes(), facts))
    assert json.loads((tmp_path / "a.json").read_text()) == array.tolist()
    written("action", tmp_path / "a.bin", (array.tobytes(), facts))
    assert (tmp_path / "a.bin").read_bytes() == array.tobytes()


def test_parts_of_a_large_array_are_joined(tmp_path: Path) -> None:
    parts = [(bytes([i] * 4), {"part": i, "parts": 3, "shape": [12], "dtype": "uint8"}) for i in range(3)]
    sink = written("tensor", tmp_path / "a.npy", *parts, (b"\7\7", {"shape": [2], "dtype": "uint8"}))
    assert np.load(tmp_path / "a.npy").tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert [path.name for path in sink.files] == ["a.npy", "a-2.npy"]


def test_all_arrays_of_an_answer_are_one_safetensors_file(tmp_path: Path) -> None:
    steps = [np.full((2, 3), step, dtype=np.float32) for step in range(3)]
    halves = np.arange(4, dtype=np.uint16)
    lines = [(array.tobytes(), _facts("frame", array, step=step, crop=256)) for step, array in enumerate(steps)]
    lines += [(halves.tobytes(), {**_facts("halves", halves, grid=[2, 2]), "dtype": "bfloat16"})]
    lines += [(array.tobytes(), _facts("loose", array)) for array in (steps[0], steps[1][:1])]
    sink = written("tensor", tmp_path / "a.safetensors", *lines)
    assert [path.name for path in sink.files] == ["a.safetensors"]
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"crop": "256", "grid": "[2, 2]"}
        assert sorted(file.keys()) == ["frame", "halves", "loose.0", "loose.1"]
        assert np.array_equal(file.get_tensor("frame").numpy(), np.stack(steps))
        assert file.get_tensor("halves").dtype == torch.bfloat16
        assert file.get_tensor("loose.1").tolist() == [[1.0, 1.0, 1.0]]


def _facts(name: str, array: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "dtype": array.dtype.name, "format": "raw", **more}


def test_what_is_no_plain_array_is_not_put_into_a_safetensors_file(tmp_path: Path) -> None:
    facts = {"name": "frame", "shape": [1], "dtype": "float32", "format": "npy"}
    with pytest.raises(ConfigError, match="leave output_format out"):
        written("tensor", tmp_path / "a.safetensors", (b"xxxx", facts))
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize("ending", [".npy", ".json"])
def test_a_dtype_that_the_file_format_lacks_is_refused_by_name(ending: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bfloat16 cannot be written in this format"):
        written("action", tmp_path / f"a{ending}", (b"\0\0", {"shape": [1], "dtype": "bfloat16"}))


@pytest.mark.parametrize(
    ("out", "kind"),
    [(None, "text"), ("-", "text"), ("a.wav", "audio"), ("a.PNG", "image"), ("a.txt", "text"), ("a.weird", "text")],
)
def test_the_ending_chooses_the_output(out: str | None, kind: str) -> None:
    assert chosen_output("m", OMNI, out) == kind


def test_an_ending_for_nothing_that_the_model_gives_is_refused() -> None:
    with pytest.raises(UsageError) as refused:
        chosen_output("pi05", ("action",), "hello.wav")
    assert "pi05 has no output for a .wav file" in refused.value.title and "action (.npy" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("s.json", b"[[0.5, 1], [2, 3]]", [[0.5, 1], [2, 3]]),
        ("s.txt", b" 0.5, 1\n2;3 ", [0.5, 1.0, 2.0, 3.0]),
        ("s.npy", npy_header((2,), "float32") + struct.pack("<2f", 0.5, 2.0), [0.5, 2.0]),
    ],
)
def test_a_state_is_read_in_three_forms(name: str, content: bytes, expected: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert state_param(POLICY, tmp_path / name) == {"robot_state": expected}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("s.txt", b"one two"),
        ("s.json", b'["a"]'),
        ("s.json", b"[NaN]"),
        ("s.json", b"{"),
        ("s.txt", b"\xff\xfe"),
        ("s.npy", b"\x93NUMPY\x01\x00\x02\x00{}"),
        ("s.npy", b"\x93NUMPY\x01\x00"),
    ],
)
def test_what_is_no_state_is_refused_naming_the_file(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        read_state(tmp_path / name)


def test_a_model_that_takes_no_state_says_so(tmp_path: Path) -> None:
    talker = Card(name="orpheus", inputs=("text",), outputs=("audio",), parameters=frozenset({"voice"}))
    with pytest.raises(UsageError, match="does not accept a state"):
        state_param(talker, tmp_path / "s.txt")
    with pytest.raises(UsageError, match="does not accept image"):
        list(read_files(talker, "image", [tmp_path / "a.png"]))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_files(POLICY, "image", [tmp_path / "a.png"]))


def test_params_are_json_or_text() -> None:
    assert parse_params(["a=1", "b=[1, 2]", "c=tara", "d=x=y"]) == {"a": 1, "b": [1, 2], "c": "tara", "d": "x=y"}
    with pytest.raises(UsageError, match="KEY=VALUE"):
        parse_params(["novalue"])


@pytest.mark.parametrize(("out", "way"), [("x.m4a", "x.wav"), ("a/b.AAC", "a/b.wav"), ("x.gif", "x.png")])
def test_a_format_that_is_not_written_is_refused_with_the_way_out(out: str, way: str) -> None:
    with pytest.raises(UsageError) as refused:
        chosen_output("orpheus", OMNI, out)
    assert way in refused.value.hint and Path(out).suffix.lower() in refused.value.title


def named(*names: str) -> list[tuple[bytes, dict[str, Any]]]:
    return [
        (struct.pack("<f", number), {"name": name, "shape": [1], "dtype": "float32"})
        for number, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("names", "files"),
    [
        (["actions"], ["a.json"]),
        (["actions", "best_energy"], ["a.actions.json", "a.best_energy.json"]),
        (["latents", "latents"], ["a.json", "a-2.json"]),
        (
            ["latents", "latents", "energies", "latents"],
            ["a.latents.json", "a.latents-2.json", "a.energies.json", "a.latents-3.json"],
        ),
    ],
)
def test_several_arrays_are_files_named_after_them(names: list[str], files: list[str], tmp_path: Path) -> None:
    sink = written("tensor", tmp_path / "a.json", *named(*names))
    assert [path.name for path in sink.files] == files
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    assert [json.loads((tmp_path / name).read_text()) for name in files] == [[float(i)] for i in range(len(files))]


def test_arrays_of_several_modalities_are_written_together(tmp_path: Path) -> None:
    sink = Sink.of("tensor", str(tmp_path / "a.json"), "x")
    for kind, (data, facts) in zip(("tensor", "scalar"), named("energies", "best_index"), strict=True):
        sink.add(Line(modality=kind, data=data, metadata=facts))
    sink.close()
    assert [path.name for path in sink.files] == ["a.energies.json", "a.best_index.json"]


@pytest.mark.parametrize(("ending", "form"), [("jpg", "JPEG"), ("jpeg", "JPEG"), ("webp", "WEBP"), ("png", "PNG")])
def test_a_picture_has_the_format_of_its_ending(ending: str, form: str, tmp_path: Path) -> None:
    written("image", tmp_path / f"a.{ending}", (png(PIXELS), {}))
    with Image.open(tmp_path / f"a.{ending}") as image:
        assert image.format == form and image.size == (PIXELS.shape[1], PIXELS.shape[0])


@pytest.mark.parametrize("ending", ["mp3", "flac", "opus", "ogg", "wav"])
def test_sound_has_the_format_of_its_ending(ending: str, tmp_path: Path) -> None:
    tone = (8000 * np.sin(np.arange(24_000) * 0.1)).astype("<i2").tobytes()
    facts = {"sample_rate": 24_000, "num_channels": 1}
    written("audio", tmp_path / f"a.{ending}", (tone[:20_000], facts), (tone[20_000:], facts))
    with av.open(tmp_path / f"a.{ending}") as file:
        assert file.format.name.split(",")[0] == {"opus": "ogg"}.get(ending, ending)
        seconds = sum(frame.samples for frame in file.decode(audio=0)) / file.streams.audio[0].rate
    assert seconds == pytest.approx(1.0, abs=0.06)


def test_an_ending_that_no_picture_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no image is written to a\.xyz") as refused:
        Sink.of("image", str(tmp_path / "a.xyz"), "x")
    assert ".png" in refused.value.hint


@pytest.mark.parametrize(
    ("kind", "name", "facts"),
    [
        ("audio", "a.wav", {"sample_rate": 24_000}),
        ("audio", "a.mp3", {"sample_rate": 24_000}),
        ("text", "a.txt", {}),
        ("action", "a.json", {"shape": [250_000], "dtype": "float32"}),
        ("action", "a.safetensors", {"name": "x", "shape": [250_000], "dtype": "float32"}),
    ],
)
def test_a_full_disk_is_told_and_names_the_file_that_is_left(
    kind: str, name: str, facts: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/full")
    sink = Sink.of(kind, str(path), "x")
    with pytest.raises(ConfigError) as failed:
        for _ in range(40 if kind == "audio" else 1):
            sink.add(Line(modality=kind, data=os.urandom(1_000_000), metadata=facts))
        sink.close()
    sink.close()
    assert failed.value.title == f"no space left in {tmp_path}" and str(path) in failed.value.detail
    assert failed.value.exit_code == ExitCode.INVALID


# -- subtitles ---------------------------------------------------------------------------------------------------------

WINDOWS = [
    {"language": "english", "segments": [{"start": 0.0, "end": 1.5, "text": " A dog --> ran."}], "words": []},
    {"language": "english", "segments": [{"start": 61.25, "end": 75.0, "text": " It\n\nslept."}]},
]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "a.srt",
            "1\n00:00:00,000 --> 00:00:01,500\nA dog -> ran.\n\n2\n00:01:01,250 --> 00:01:02,000\nIt slept.\n",
        ),
        (
            "a.vtt",
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nA dog -> ran.\n\n00:01:01.250 --> 00:01:02.000\nIt slept.\n",
        ),
    ],
)
def test_segments_of_all_windows_are_one_file_of_subtitles(name: str, wanted: str, tmp_path: Path) -> None:
    lines = [(json.dumps(window).encode(), {"duration": 62.0}) for window in WINDOWS]
    sink = written("segments", tmp_path / name, *lines)
    assert (tmp_path / name).read_text() == wanted and sink.files == [tmp_path / name]


def test_segments_as_json_keep_their_fields(tmp_path: Path) -> None:
    written("segments", tmp_path / "a.json", *[(json.dumps(window).encode(), {"duration": 62.0}) for window in WINDOWS])
    read = json.loads((tmp_path / "a.json").read_text())
    assert read["segments"] == [each for window in WINDOWS for each in window["segments"]]
    assert (read["language"], read["duration"], read["words"]) == ("english", 62.0, [])


def test_subtitles_go_to_stdout(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    sink = Sink.of("segments", "-", "x")
    sink.add(Line(modality="segments", data=json.dumps(WINDOWS[0]).encode(), metadata={}))
    sink.close()
    assert capfdbinary.readouterr().out.startswith(b"1\n00:00:00,000 --> ")


def test_the_ending_of_the_file_selects_segments() -> None:
    outputs = ("text", "segments")
    assert chosen_output("whisper", outputs, "a.srt") == chosen_output("whisper", outputs, "a.json") == "segments"
    assert chosen_output("whisper", outputs, "a.txt") == chosen_output("whisper", outputs, None) == "text"

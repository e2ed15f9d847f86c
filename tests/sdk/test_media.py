"""Media that callers pass, the files that are sent, and arrays in every format of the server."""

from __future__ import annotations

import io
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mstar_core.api.output.encode import Form, NumberForm, packed
from mstar_core.api.output.units import OutputItem
from mstar_core.client import AudioBuffer, AudioChunk, TensorChunk
from mstar_core.client.arrays import array_of
from mstar_core.client.calls import cancel_call, generate_call, transcribe_call
from mstar_core.client.media import files_of, tensor_files
from mstar_core.errors import TransportError, UsageError

NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3) / 8


def names(kind: str, media: Any) -> list[tuple[str, bytes]]:
    return [(upload.name, upload.data) for upload in files_of(kind, media)]


def test_media_are_paths_bytes_named_bytes_or_lists_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"file")
    assert names("image", None) == [] and names("image", []) == []
    assert names("image", path) == names("image", str(path)) == [("a.png", b"file")]
    assert names("image", b"x") == names("image", bytearray(b"x")) == [("image-0", b"x")]
    assert names("image", ("n.png", b"x")) == [("n.png", b"x")]
    assert names("image", (b"x", b"y")) == names("image", [b"x", b"y"]) == [("image-0", b"x"), ("image-1", b"y")]
    assert names("image", [path, ("n", b"x")]) == [("a.png", b"file"), ("n", b"x")]


def test_what_is_no_medium_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(TypeError, match="image must be a path, bytes"):
        files_of("image", [5])  # type: ignore[list-item]
    for address in ("https://host/a.png", "data:image/png;base64,AA"):
        with pytest.raises(ValueError, match="is a URL"):
            files_of("image", address)
    with pytest.raises(FileNotFoundError):
        files_of("image", "no/such/file.png")
    with pytest.raises(ValueError, match="transcribe takes one sound"):
        transcribe_call([b"a", b"b"], {})
    with pytest.raises(ValueError, match="JSON"):
        generate_call(text="x", model_kwargs={"temperature": float("nan")})
    with pytest.raises(TypeError, match="the type object"):
        generate_call(text="x", model_kwargs={"temperature": object()})


def test_tensors_are_files_or_arrays() -> None:
    (one,) = tensor_files(NUMBERS)
    assert one.name == "tensor-0.npy" and np.array_equal(np.load(io.BytesIO(one.data)), NUMBERS)
    two = tensor_files([b"\x93NUMPY..", b"\x08\0\0\0\0\0\0\0{}", ("t.npy", b"\x93NUMPY")])
    assert [file.name for file in two] == ["tensor-0.npy", "tensor-1.safetensors", "t.npy"]
    with pytest.raises(ValueError, match="allow_pickle"):
        tensor_files(np.array([object()]))


def test_a_call_holds_what_is_sent() -> None:
    call = generate_call(
        text="hi",
        output_modalities=["audio", "text"],
        input_modalities=None,
        stream=True,
        request_id="r",
        model_kwargs={"seed": np.int64(3), "voice": None, "mask": [True, None]},
    )
    assert dict(call.fields) == {
        "text": "hi",
        "output_modalities": "audio,text",
        "streaming": "true",
        "stream_events": "full",
        "request_id": "r",
        "model_kwargs": '{"seed": 3, "mask": [true, null]}',
    }
    assert cancel_call("a/b c").path == "/v1/requests/a%2Fb%20c/cancel"
    inputs = transcribe_call(("a.wav", b"x"), {"language": "en", "temperature": 0.5, "prompt": None})
    assert dict(inputs.fields) == {"response_format": "json", "language": "en", "temperature": "0.5"}
    assert [(name, file.name) for name, file in inputs.files] == [("file", "a.wav")]


def safetensors(**tensors: np.ndarray) -> bytes:
    header, data = {}, b""
    for name, array in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps({"__metadata__": {"a": "b"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + data


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "facts"),
    [
        (NUMBERS.tobytes(), {"shape": [2, 3], "dtype": "float32"}),
        (NUMBERS.astype("<f2").tobytes(), {"shape": [2, 3], "dtype": "float16", "format": "raw"}),
        ((NUMBERS.view("<u4") >> 16).astype("<u2").tobytes(), {"shape": [2, 3], "dtype": "bfloat16"}),
        (npy(NUMBERS), {"format": "npy"}),
        (safetensors(latents=NUMBERS), {"format": "safetensors", "name": "other"}),
        (safetensors(other=NUMBERS * 2, latents=NUMBERS), {"format": "safetensors", "name": "latents"}),
        (json.dumps(NUMBERS.tolist()).encode(), {"format": "json", "dtype": "float32"}),
    ],
    ids=["raw", "float16", "bfloat16", "npy", "safetensors", "of several", "json"],
)
def test_numbers_in_every_form_are_the_same_array(data: bytes, facts: dict[str, Any]) -> None:
    actual = TensorChunk("tensor", data, facts).to_numpy()
    assert actual.shape == (2, 3) and np.array_equal(actual, NUMBERS)


@pytest.mark.parametrize("form", ["raw", "npy", "safetensors", "json"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_the_server_packs_is_what_the_client_unpacks(form: Form, dtype: str) -> None:
    if (form, dtype) == ("npy", "bfloat16"):
        return  # the server refuses it
    for array in (NUMBERS, np.array([7, -1]), np.zeros((0, 3), dtype=np.float32)):
        item = OutputItem(modality="tensor", port="latents", array=array, meta={"step": 1})
        data, facts = packed(item, NumberForm(form=form, dtype=dtype))
        chunk = TensorChunk("tensor", data, facts)
        assert np.array_equal(chunk.to_numpy(), array), (form, dtype, array)
        assert (chunk.name, chunk.shape, chunk.metadata["step"]) == ("latents", array.shape, 1)


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TransportError, match="6 numbers, its shape .* has 8"):
        array_of(NUMBERS.tobytes(), {"shape": [2, 4], "dtype": "float32"})
    with pytest.raises(TransportError, match="3 bytes"):
        array_of(b"abc", {"dtype": "int16"})
    with pytest.raises(TransportError, match="contains a, b, not c"):
        array_of(safetensors(a=NUMBERS, b=NUMBERS), {"format": "safetensors", "name": "c"})
    with pytest.raises(TransportError, match="'zip' cannot be read"):
        array_of(b"", {"format": "zip"})


def test_without_numpy_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(UsageError, match="pip install numpy"):
        AudioBuffer(b"\0\0", 8000).to_numpy()


def test_sound_as_arrays() -> None:
    pcm = np.array([0, 16384, -32768, 1], dtype="<i2").tobytes()
    mono, stereo = AudioBuffer(pcm, 8000), AudioBuffer(pcm, 8000, 2)
    assert mono.to_numpy().tolist() == [0, 16384, -32768, 1]
    assert mono.to_numpy("float32").tolist()[:3] == [0.0, 0.5, -1.0]
    assert stereo.to_numpy().tolist() == [[0, 16384], [-32768, 1]]
    assert (len(mono), len(stereo), mono.seconds, bool(AudioBuffer(b"", 8000))) == (4, 2, 4 / 8000, True)
    chunk = AudioChunk("audio", pcm, {"sample_rate": 8000, "num_channels": 2})
    assert chunk.to_numpy().shape == (2, 2) and chunk.pcm == pcm

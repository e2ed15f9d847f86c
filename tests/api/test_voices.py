"""GET, POST and DELETE of /v1/audio/voices, and speech in an uploaded voice."""

from __future__ import annotations

import base64
from dataclasses import replace

from mstar_core.plugin.surface import Audio
from tests.api.conftest import Started, running
from tests.fakes import media
from tests.fakes.conductor import speak
from tests.fakes.speech_model import SPEC

PATH = "/v1/audio/voices"
SOUND = media.wav(0.5)
CLONES = replace(SPEC, inputs=(*SPEC.inputs, Audio(rate=24000, channels=1)))


async def test_a_voice_is_uploaded_listed_used_and_deleted() -> None:
    async with running(speak(1), model=CLONES) as api:
        form = {"data": {"name": "Anna", "text": ""}, "files": {"file": ("anna.wav", SOUND)}}
        made = await api.client.post(PATH, **form)  # type: ignore[arg-type]
        assert made.status_code == 200, made.text
        assert made.json()["id"] == "Anna"
        again = await api.client.post(PATH, **form)  # type: ignore[arg-type]
        assert (again.status_code, again.json()["error"]["code"]) == (409, "voice_exists")
        listed = (await api.client.get(PATH)).json()["data"]
        assert [(voice["id"], voice.get("kind", "uploaded")) for voice in listed] == [("Anna", "uploaded")]
        spoken = await api.client.post("/v1/audio/speech", json={"model": "fake", "input": "hi", "voice": "anna"})
        assert spoken.status_code == 200, spoken.text
        assert (await api.client.delete(f"{PATH}/anna")).json()["deleted"] is True
        gone = await api.client.delete(f"{PATH}/anna")
        assert gone.status_code == 404 and (await api.client.get(PATH)).json()["data"] == []


async def test_a_recording_may_come_with_the_request() -> None:
    async with running(speak(1), model=CLONES) as api:
        url = f"data:audio/wav;base64,{base64.b64encode(SOUND).decode()}"
        spoken = await api.client.post("/v1/audio/speech", json={"model": "fake", "input": "hi", "ref_audio": url})
        assert spoken.status_code == 200, spoken.text


async def test_a_model_without_cloning_lists_its_own_voices_and_takes_none(started: Started) -> None:
    async with started(speak(1)) as api:
        listed = (await api.client.get(PATH)).json()["data"]
        assert listed and all(voice["kind"] == "preset" for voice in listed)
        form = {"data": {"name": "Anna"}, "files": {"file": ("anna.wav", SOUND)}}
        refused = await api.client.post(PATH, **form)  # type: ignore[arg-type]
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "file")


async def test_a_voice_needs_a_name_and_one_sound() -> None:
    async with running(speak(1), model=CLONES) as api:
        for name, files in (("a/b", {"file": ("a.wav", SOUND)}), ("a", {"sound": ("a.wav", SOUND)})):
            answer = await api.client.post(PATH, data={"name": name}, files=files)
            assert answer.status_code == 400, answer.text

"""Ask a model that speaks about files, with the openai package: print the answer while its sound is written.

mstarctl up qwen3_omni:mini -d
mstarctl sample qwen3_omni --out .
python examples/converse.py "How many shapes are there?" picture.png [URL]

It needs the package: pip install openai.
"""

from __future__ import annotations

import base64
import mimetypes
import sys
import wave
from pathlib import Path
from typing import Any

import openai

if len(sys.argv) < 2:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
question, *rest = sys.argv[1:]
url = next((word for word in rest if word.startswith("http")), "http://localhost:8000")


def part(name: str) -> Any:
    """Return a file as a part of the message: an image, a sound or a video."""
    kind = (mimetypes.guess_type(name)[0] or "image/png").partition("/")[0]
    data = base64.b64encode(Path(name).read_bytes()).decode()
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:application/octet-stream;base64,{data}"}}


files = [part(word) for word in rest if not word.startswith("http")]
content: Any = [*files, {"type": "text", "text": question}]
with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client, wave.open("answer.wav", "wb") as sound:
    sound.setnchannels(1)
    sound.setsampwidth(2)
    sound.setframerate(24_000)
    events = client.chat.completions.create(
        model="qwen3_omni",
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "pcm16"},
        stream=True,
    )
    for event in events:
        delta: Any = event.choices[0].delta if event.choices else None
        print(delta.content or "" if delta else "", end="", flush=True)
        pcm = getattr(getattr(delta, "audio", None), "data", None)
        sound.writeframes(base64.b64decode(pcm or ""))
print("\nwrote answer.wav")

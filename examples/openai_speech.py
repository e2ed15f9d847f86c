"""Synthesize speech with the openai package: a complete file, and a stream.

mstarctl up orpheus:mini -d
python examples/openai_speech.py "Hello there" [URL]

It needs the package: pip install openai.
"""

from __future__ import annotations

import sys
from pathlib import Path

import openai

if len(sys.argv) < 2:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
text, *rest = sys.argv[1:]
url = rest[0] if rest else "http://localhost:8000"
with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
    whole = client.audio.speech.create(
        model="orpheus", voice="tara", input=text, response_format="wav", extra_body={"seed": 7}
    )
    Path("whole.wav").write_bytes(whole.content)
    with client.audio.speech.with_streaming_response.create(
        model="orpheus", voice="leo", input=text, response_format="pcm", extra_body={"stream": True, "seed": 7}
    ) as answer:
        sizes = [len(piece) for piece in answer.iter_bytes()]
        rate = answer.headers["X-Sample-Rate"]
print(f"whole.wav: {len(whole.content)} bytes; streamed {sum(sizes)} bytes at {rate} Hz in {len(sizes)} pieces")

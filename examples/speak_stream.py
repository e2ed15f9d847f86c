"""Write streamed audio to a file, and print the time to the first chunk.

mstarctl up orpheus, then: python examples/speak_stream.py [URL]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mstar_core import MStarClient
from mstar_core.client import AudioChunk, WavFile

started = time.monotonic()
file: WavFile | None = None
with MStarClient(*sys.argv[1:2]) as client:
    with client.stream(text="A stream can be played from its first chunk on.", output_modalities=("audio",)) as stream:
        for event in stream:
            if not isinstance(event, AudioChunk):
                continue
            if file is None:
                print(f"first audio after {time.monotonic() - started:.3f} s")
                file = WavFile.create(Path("stream.wav"), event.sample_rate, event.channels)
            file.write(event.pcm)
if file is None:
    sys.exit("no audio arrived; try another seed")
file.close()
print(f"stream.wav: {file.seconds:.2f} s in {time.monotonic() - started:.2f} s, ended with {stream.finish_reason}")

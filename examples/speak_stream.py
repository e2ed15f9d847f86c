"""Write streamed audio to a file, and print the time to the first chunk.

mstarctl up orpheus:mini -d
python examples/speak_stream.py "The red fox ran over the green hill." [URL]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from mstar_core import MStarClient
from mstar_core.client import AudioChunk, WavFile

if len(sys.argv) < 2:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
text, *url = sys.argv[1:]
started = time.monotonic()
file: WavFile | None = None
with MStarClient(*url) as client:
    with client.stream(text=text, output_modalities=("audio",)) as stream:
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

"""Synthesize one sentence to a WAV file.

mstarctl up orpheus:mini -d
python examples/speak.py "The red fox ran over the green hill." [URL]
"""

from __future__ import annotations

import sys

from mstar_core import MStarClient

if len(sys.argv) < 2:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
text, *url = sys.argv[1:]
with MStarClient(*url) as client:
    sound = client.tts(text, voice="tara", seed=7)
path = sound.to_wav("hello.wav")
print(f"{path}: {sound.seconds:.2f} s at {sound.sample_rate} Hz")

"""Synthesize one sentence to a WAV file.

mstarctl up orpheus, then: python examples/speak.py [URL]
"""

from __future__ import annotations

import sys

from mstar_core import MStarClient

with MStarClient(*sys.argv[1:2]) as client:
    sound = client.tts("Hello there, how are you today?", voice="tara", seed=7)
path = sound.to_wav("hello.wav")
print(f"{path}: {sound.seconds:.2f} s at {sound.sample_rate} Hz")

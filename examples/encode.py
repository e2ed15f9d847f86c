"""Encode a clip: one vector per patch, or one for the whole clip.

mstarctl up vjepa2:tiny -d
mstarctl sample vjepa2 --out .
python examples/encode.py clip.mp4 [URL]
"""

from __future__ import annotations

import sys

from mstar_core import MStarClient

if len(sys.argv) < 2:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
clip, *url = sys.argv[1:]
with MStarClient(*url) as client:
    hidden = client.encode(clip).tensor("encoder_hidden")
    pooled = client.encode(clip, pooling="mean").tensor("pooled")
times, rows, columns = hidden.metadata["grid"]
print(f"{hidden.shape[0]} vectors of {hidden.shape[1]}: {times} times, {rows} rows, {columns} columns")
print(f"the clip as one vector of {pooled.shape[0]}, the first values {pooled.to_numpy()[:4].round(3)}")

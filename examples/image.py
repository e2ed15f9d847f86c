"""Generate an image, and then edit it.

Start an image model with mstarctl up, then: python examples/image.py "a red bicycle" "make it blue" [URL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from mstar_core import MStarClient

prompt, change, *url = sys.argv[1:]
with MStarClient(*url) as client:
    first = client.generate_image(prompt, seed=1)
    Path("first.png").write_bytes(first)
    Path("second.png").write_bytes(client.edit_image(change, first, seed=1))
print("first.png, second.png")

"""Generate an image, and then edit it.

mstarctl up bagel:mini -d
python examples/image.py "a red circle" "make it blue" [URL]
"""

from __future__ import annotations

import sys
from pathlib import Path

from mstar_core import MStarClient

if len(sys.argv) < 3:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
prompt, change, *url = sys.argv[1:]
with MStarClient(*url) as client:
    first = client.generate_image(prompt, seed=1)
    Path("first.png").write_bytes(first)
    Path("second.png").write_bytes(client.edit_image(change, first, seed=1))
print("first.png, second.png")

"""Ask a model about images, and print the streamed answer.

mstarctl up qwen3_omni:mini -d
mstarctl sample qwen3_omni --out .
python examples/chat.py "How many shapes are there?" picture.png [URL]
"""

from __future__ import annotations

import sys

from mstar_core import MStarClient
from mstar_core.client import TextChunk

if len(sys.argv) < 2:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
prompt, *rest = sys.argv[1:]
images = [word for word in rest if not word.startswith("http")]
with MStarClient(*[word for word in rest if word.startswith("http")]) as client:
    with client.stream(text=prompt, images=images, max_output_tokens=200) as stream:
        for event in stream:
            if isinstance(event, TextChunk):
                print(event.text, end="", flush=True)
print(f"\n[{stream.finish_reason}; {stream.usage['total_tokens'] if stream.usage else 0} tokens]")

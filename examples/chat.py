"""Ask a model about images, and print the streamed answer.

Start a chat model with mstarctl up, then: python examples/chat.py "What is this?" [IMAGE ...] [URL]
"""

from __future__ import annotations

import sys

from mstar_core import MStarClient
from mstar_core.client import TextChunk

prompt, *rest = sys.argv[1:]
images = [word for word in rest if not word.startswith("http")]
with MStarClient(*[word for word in rest if word.startswith("http")]) as client:
    with client.stream(text=prompt, images=images, max_output_tokens=200) as stream:
        for event in stream:
            if isinstance(event, TextChunk):
                print(event.text, end="", flush=True)
print(f"\n[{stream.finish_reason}; {stream.usage['total_tokens'] if stream.usage else 0} tokens]")

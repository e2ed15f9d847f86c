"""Synthesize several sentences concurrently from one event loop. The server batches them.

mstarctl up orpheus:mini -d
python examples/speak_many.py "The dog ran." "The fox ran." "The hill is green." [URL]
"""

from __future__ import annotations

import asyncio
import sys

from mstar_core import AsyncMStarClient, ClientError

LINES = [word for word in sys.argv[1:] if not word.startswith("http")]
URL = [word for word in sys.argv[1:] if word.startswith("http")]


async def speak(client: AsyncMStarClient, number: int, text: str) -> str:
    """Write one line to a file. A failure does not stop the others."""
    try:
        sound = await client.tts(text, seed=number, request_id=f"line-{number}")
    except ClientError as error:
        return f"line {number}: {error}"
    return f"{await asyncio.to_thread(sound.to_wav, f'line-{number}.wav')}: {sound.seconds:.2f} s"


async def main() -> None:
    # a full queue is retried after the time that the server asks for
    async with AsyncMStarClient(*URL, retries=5) as client:
        for said in await asyncio.gather(*(speak(client, number, text) for number, text in enumerate(LINES))):
            print(said)


if not LINES:
    print(__doc__, file=sys.stderr)
    sys.exit(2)
asyncio.run(main())

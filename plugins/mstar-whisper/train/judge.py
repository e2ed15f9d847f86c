"""Judge of `whisper:mini` over HTTP: held-out sentences of `orpheus:mini`, compared word by word.

`python -m train.judge URL` takes the recording of `train.recording`: each sentence alone, then all of them as one
recording of many windows. `--speaker URL` lets a deployment of `orpheus:mini` say new ones. Prints one JSON object;
exits with 1 if the word error of the sentences exceeds --most.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import soundfile

from mstar_whisper.checkpoint.config import RATE

from .recording import Said, load, say
from .world import plain


def heard(client: httpx.Client, samples: np.ndarray) -> list[str]:
    """Return the words that a deployment writes for a sound."""
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    answer = client.post("/v1/audio/transcriptions", files={"file": ("speech.wav", file.getvalue())}, data=FIELDS)
    answer.raise_for_status()
    return plain(answer.json()["text"])


FIELDS = {"model": "whisper", "language": "en"}


def word_errors(wanted: Sequence[str], found: Sequence[str]) -> int:
    """Return the least number of words changed, added or left out."""
    row = list(range(len(found) + 1))
    for place, word in enumerate(wanted, start=1):
        above, row = row, [place]
        for column, other in enumerate(found, start=1):
            row.append(min(above[column] + 1, row[-1] + 1, above[column - 1] + (word != other)))
    return row[-1]


def judge(client: httpx.Client, said: Sequence[Said], workers: int) -> dict[str, float]:
    """Return counts, the word error of sentences alone, and of all of them in one recording."""
    wanted = [plain(one.text) for one in said]
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(lambda one: heard(client, one.samples), said))
    count = sum(map(len, wanted))
    errors = [word_errors(*pair) for pair in zip(wanted, found, strict=True)]
    whole = heard(client, np.concatenate([one.samples for one in said]))
    return {
        "sentences": len(said),
        "words": count,
        "word_error": round(sum(errors) / count, 4),
        "right": errors.count(0),
        "word_error_of_one_recording": round(word_errors([word for each in wanted for word in each], whole) / count, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--speaker", help="deployment of orpheus:mini that says new sentences")
    parser.add_argument("--sentences", type=int, default=16)
    parser.add_argument("--seed", type=int, default=2, help="of the new sentences")
    parser.add_argument("--workers", type=int, default=1, help="requests at a time")
    parser.add_argument("--most", type=float, default=0.1)
    options = parser.parse_args()
    said = load() if options.speaker is None else say(options.speaker, options.sentences, options.seed)
    with httpx.Client(base_url=options.url, timeout=300) as client:
        found = judge(client, said[: options.sentences], options.workers)
    print(json.dumps(found))
    return int(found["word_error"] > options.most)


if __name__ == "__main__":
    sys.exit(main())

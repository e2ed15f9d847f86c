"""Gaps in streamed speech by the metric of vllm-omni: one file of its wheel, loaded without its dependencies."""

import importlib.util
import json
import os
import sys
import time
import urllib.request

import report

RATE = int(os.environ["RATE"])
spec = importlib.util.spec_from_file_location("audio_continuity", os.environ["METRIC"])
continuity = importlib.util.module_from_spec(spec)
sys.modules["audio_continuity"] = continuity
spec.loader.exec_module(continuity)


def _stats(text):
    body = {"model": os.environ["MODEL"], "input": text, "response_format": "pcm", "stream": True}
    body["voice"] = os.environ["VOICE"]
    headers = {"Content-Type": "application/json"}
    url = os.environ["BASE_URL"] + "/audio/speech"
    asked = urllib.request.Request(url, json.dumps(body).encode(), headers)
    started, times, sizes = time.monotonic(), [], []
    with urllib.request.urlopen(asked) as answer:
        while piece := answer.read1(1 << 16):
            times.append(time.monotonic() - started)
            sizes.append(len(piece))
    return continuity.compute_continuity_stats(times, sizes, RATE)


def a_sentence_has_no_gap():
    stats = _stats(os.environ["TEXT"])
    assert stats.is_continuous, stats


def five_sentences_in_turn_have_no_gap():
    worst = max(_stats(os.environ["TEXT"]).max_underrun_s for _ in range(5))
    assert worst <= 0.1, worst


report.run([a_sentence_has_no_gap, five_sentences_in_turn_have_no_gap])

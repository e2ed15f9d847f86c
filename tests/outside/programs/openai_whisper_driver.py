"""openai's client against `whisper:mini`: transcriptions and translations of a sentence in every format."""

import os
import pathlib
import re
import warnings

import openai
import report

CLIENT = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
SOUND, SENTENCE, MODEL = os.environ["SOUND"], os.environ["SENTENCE"].strip(), os.environ["MODEL"]
TIMES = r"00:00:0\d{mark}\d{{3}} --> 00:00:0\d{mark}\d{{3}}"


def transcribed(**fields):
    with open(SOUND, "rb") as file:
        return CLIENT.audio.transcriptions.create(model=MODEL, file=file, **fields)


def translated(**fields):
    warnings.simplefilter("ignore")  # the client's own types are deprecated
    with open(SOUND, "rb") as file:
        return CLIENT.audio.translations.create(model=MODEL, file=file, **fields)


def a_transcription_is_the_sentence():
    assert transcribed().text.strip() == SENTENCE
    assert transcribed(response_format="text").strip() == SENTENCE


def segments_have_times():
    answer = transcribed(response_format="verbose_json", language="en")
    assert answer.language == "english" and answer.text.strip() == SENTENCE
    (segment,) = answer.segments
    assert 0 <= segment.start < segment.end <= float(answer.duration) + 0.1


def words_have_times():
    answer = transcribed(response_format="verbose_json", timestamp_granularities=["word"])
    assert [word.word for word in answer.words] == SENTENCE.split()
    starts = [word.start for word in answer.words]
    assert starts == sorted(starts) and starts[-1] > 0.5


def subtitles_are_well_formed():
    srt, vtt = (transcribed(response_format=form) for form in ("srt", "vtt"))
    assert re.fullmatch(rf"1\n{TIMES.format(mark=',')}\n{re.escape(SENTENCE)}\n", srt), srt
    assert re.fullmatch(rf"WEBVTT\n\n{TIMES.format(mark='.')}\n{re.escape(SENTENCE)}\n", vtt), vtt


def a_stream_ends_with_the_whole_text():
    events = list(transcribed(stream=True))
    assert events[-1].type == "transcript.text.done" and events[-1].text.strip() == SENTENCE
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(deltas).strip() == SENTENCE


def a_translation_has_the_same_formats():
    assert translated().text.strip() == SENTENCE
    answer = translated(response_format="verbose_json")
    assert answer.segments[0].text.strip() == SENTENCE
    assert translated(response_format="srt").startswith("1\n00:00:0")


async def the_asynchronous_client_does_the_same():
    client = openai.AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none", max_retries=0)
    answer = await client.audio.transcriptions.create(model=MODEL, file=pathlib.Path(SOUND))
    assert answer.text.strip() == SENTENCE


report.run(
    (
        a_transcription_is_the_sentence,
        segments_have_times,
        words_have_times,
        subtitles_are_well_formed,
        a_stream_ends_with_the_whole_text,
        a_translation_has_the_same_formats,
        the_asynchronous_client_does_the_same,
    )
)

"""Program of a transcription: windows in order, each decoded again at a higher temperature while its text is poor.

The order of decisions is that of `transformers`, so that segments agree with it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mstar_core.plugin import ProgramRequest, Reset, Run, Signal, WalkResult
from mstar_core.plugin.program import ProgramGenerator
from mstar_whisper.checkpoint.config import HEAD
from mstar_whisper.text.segments import STEP_S, compression, split
from mstar_whisper.windows import next_window

MEMORY: Final = "memory"
"""Cache branch with the encoder states of the window."""

RAISED: Final = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures of further attempts."""

CALM: Final = 0.5
"""Temperature below which a text may be the context of the next window."""

Steps = Generator[Any, Any, Any]


@dataclass(slots=True)
class Attempt:
    """One attempt at a window. ids: drawn, with the end if it was drawn. prompt: ids before them."""

    prompt: tuple[int, ...]
    ids: list[int]
    temperature: float
    mean: float = 0.0
    no_speech: float = 0.0
    ratio: float = 0.0
    weights: Signal | None = None


def transcribe(request: ProgramRequest) -> ProgramGenerator:
    """Transcribe every window. See `Inputs.facts` of the processor for what a program knows of the checkpoint."""
    facts, params = request.facts, request.params
    ids, spoken = facts["ids"], list[int]()
    heard: dict[str, Signal] = {}
    keep = ("states",) if params.words and "segments" in request.outputs else ()
    language, place = facts["language"], _next_window(facts, 0)
    while place is not None:
        seek, frames = place
        silent: dict[str, Any] = {"place": place, "branches": (MEMORY,), "sample": False}
        if heard:
            yield Reset(MEMORY)
            runs = [Run("listen", mel=heard["mel"], keep=keep, **silent)]
        else:
            runs = [Run("first", pcm=request.inputs["pcm"], keep=("mel", *keep), **silent)]
        if language is None:
            yield Reset()
            detect = Run("detect", tokens=(ids["start"],), reads=("token",), sampling={"temperature": 0.0})
            answers = yield [*runs, detect]
            heard |= answers[0].signals
            language, runs = int(answers[1].values["token"][0]), []
        prompt = _prompt(request, language, spoken)
        attempt = None
        for temperature in _temperatures(params):
            yield Reset()
            draws = _draw(request, prompt, temperature)
            answers = yield [*runs, *draws]
            heard |= answers[0].signals
            runs = []
            attempt = Attempt(prompt, _drawn(answers[-len(draws) :], len(prompt) - 1), temperature)
            if params.fallback or "segments" in request.outputs:
                yield from _review(request, attempt, frames, heard.get("states"))
            if not (params.fallback and _is_poor(params, attempt)):
                break
        assert attempt is not None
        written = attempt.ids[:-1] if attempt.ids and attempt.ids[-1] == ids["end"] else attempt.ids
        if params.fallback and _is_silent(params, attempt):
            place = _next_window(facts, seek + frames)
            continue
        spans, step = split(written, ids["first_time"], frames)
        kept = written[: spans[-1].last]
        yield _tell(request, attempt, kept, seek, frames, language)
        if params.condition_on_previous and attempt.temperature < CALM:
            spoken += [id for span in spans for id in _closed(written[span.first : span.last], ids["first_time"])]
        elif params.condition_on_previous:
            spoken = []
        # A window whose only timestamp is its start would never end.
        place = _next_window(facts, seek + (step or frames))


def _next_window(facts: Any, at: int) -> tuple[int, int] | None:
    return next_window(at, facts["frames"], facts["window"], facts["windows"])


def _temperatures(params: Any) -> tuple[float, ...]:
    further = tuple(each for each in RAISED if each > params.temperature) if params.fallback else ()
    return (params.temperature, *further)


def _is_timed(request: ProgramRequest) -> bool:
    facts = request.facts
    is_part = "offset" in facts  # of a recording that is longer than a window
    return bool(request.params.timestamps) or is_part or facts["frames"] > facts["window"]


def _is_aloud(request: ProgramRequest) -> bool:
    return bool(request.params.incremental) and not request.params.fallback


def _prompt(request: ProgramRequest, language: int, spoken: Sequence[int]) -> tuple[int, ...]:
    """Return the ids that a window's text follows: earlier text, then start, language, task and form."""
    facts, ids = request.facts, request.facts["ids"]
    before = [*facts["prompt"], *spoken][-(facts["positions"] // 2 - 1) :] if facts["prompt"] or spoken else []
    task = [ids[request.params.task]] if ids[request.params.task] is not None else []
    start = [ids["start"], *([language] if ids["languages"] else []), *task]
    form = [] if _is_timed(request) else [ids["no_times"]]
    return (*([ids["previous"], *before] if before else []), *start, *form)


def _draw(request: ProgramRequest, prompt: tuple[int, ...], temperature: float) -> list[Run]:
    """Return the runs that draw a window's ids. Only final ids are emitted, so a request with fallback emits none.

    A prompt without earlier text has no pass of its own: the loop begins with its first id and draws the others, which
    the rules allow alone. Decode steps are captured and shared by all requests, and passes of prompts are not.
    """
    is_aloud = _is_aloud(request)
    room = min(request.params.max_output_tokens, request.facts["positions"] - len(prompt))
    sampling, form = {"temperature": temperature}, int(_is_timed(request))
    start, *head = prompt
    if not is_aloud and len(head) <= HEAD:
        marks = (-1 - len(head), 0, 0, 0, form, *[0] * (HEAD - len(head)), *head)
        most = room + len(head)
        return [Run("write", token=(start,), marks=marks, max_iters=most, reads=("token",), sampling=sampling)]
    aloud = "_aloud" if is_aloud else ""
    marks = (0, 0, 0, 0, form, *[0] * HEAD)
    return [
        Run(f"prompt{aloud}", tokens=prompt, reads=("token",), sampling=sampling),
        Run(f"write{aloud}", marks=marks, max_iters=room - 1, reads=("token",), sampling=sampling),
    ]


def _drawn(answers: Sequence[WalkResult], head: int) -> list[int]:
    """Return the ids of an attempt. head: ids of its prompt among those drawn by a single run."""
    values = [answer.values.get("token", ()) for answer in answers]
    ids = values[0][head:] if len(values) == 1 else (*values[0][-1:], *values[1])
    return [int(number) for number in ids]


def _review(request: ProgramRequest, attempt: Attempt, frames: int, states: Signal | None) -> Steps:
    """Read a window's ids again in one pass: their probability, that of silence, and what each of them listens to."""
    starts = attempt.prompt.index(request.facts["ids"]["start"])
    sounds: dict[str, Any] = {"sound": states} if states is not None else {}
    yield Reset()
    answer = yield Run(
        "review",
        written=(*attempt.prompt, *attempt.ids),
        review=(len(attempt.prompt), int(_is_timed(request)), frames, starts),
        reads=("summary",),
        keep=("weights",) if sounds else (),
        sample=False,
        **sounds,
    )
    total, attempt.no_speech = answer.values["summary"]
    attempt.mean = total / max(1, len(attempt.ids))
    attempt.ratio = compression(attempt.ids, request.facts["vocab"])
    attempt.weights = answer.signals.get("weights")


def _is_poor(params: Any, attempt: Attempt) -> bool:
    is_doubtful = attempt.mean < params.logprob_threshold
    return (is_doubtful or attempt.ratio > params.compression_threshold) and not _is_silent(params, attempt)


def _is_silent(params: Any, attempt: Attempt) -> bool:
    return bool(attempt.mean < params.logprob_threshold and attempt.no_speech > params.no_speech_threshold)


def _tell(request: ProgramRequest, attempt: Attempt, ids: Sequence[int], seek: int, frames: int, language: int) -> Run:
    """Return the run that emits a window's ids, and its record for segments; see `text.record`."""
    start_s = (request.facts.get("offset", 0) + seek) / 2 * STEP_S
    scores = (attempt.temperature, attempt.mean, attempt.ratio, attempt.no_speech)
    record = (start_s, float(frames), *scores, float(language), float(len(ids)))
    weights: dict[str, Any] = {"weights": attempt.weights} if attempt.weights is not None else {}
    return Run("tell_record" if _is_aloud(request) else "tell", ids=tuple(ids), record=record, **weights)


def _closed(ids: Sequence[int], first_time: int) -> Sequence[int]:
    """Return the ids of a segment without the second of two timestamps at its end."""
    return ids[:-1] if len(ids) > 2 and ids[-2] >= first_time else ids

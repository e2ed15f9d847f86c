"""The realtime service of pipecat in a pipeline: a spoken question, an interrupt, a written question."""

import asyncio
import os

import report
import spoken
from pipecat.frames.frames import (
    EndFrame,
    ErrorFrame,
    InputAudioRawFrame,
    InterruptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
    TTSStoppedFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.services.openai.realtime.events import AudioConfiguration, AudioInput, AudioOutput, SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

LIMIT_S = 100
URL = os.environ["BASE_URL"].replace("http", "ws") + "/realtime"


class Sink(FrameProcessor):
    """Collects frames. `until` waits for frames of a type."""

    def __init__(self):
        super().__init__()
        self.frames = []
        self.news = asyncio.Event()

    async def process_frame(self, frame, direction):
        await super().process_frame(frame, direction)
        self.frames.append(frame)
        self.news.set()
        await self.push_frame(frame, direction)

    def of(self, kind):
        return [frame for frame in self.frames if isinstance(frame, kind)]

    async def until(self, kind, count=1):
        async with asyncio.timeout(LIMIT_S):
            while len(self.of(kind)) < count:
                assert not self.of(ErrorFrame), self.of(ErrorFrame)
                self.news.clear()
                await self.news.wait()


async def converse(talk, turn_detection=None, modalities=("audio",)):
    """Run a pipeline while `talk(worker, sink)` runs."""
    sound = AudioConfiguration(input=AudioInput(turn_detection=turn_detection), output=AudioOutput(voice="ethan"))
    properties = SessionProperties(audio=sound, output_modalities=list(modalities), instructions="Answer.")
    settings = OpenAIRealtimeLLMService.Settings(model=os.environ["MODEL"], session_properties=properties)
    service = OpenAIRealtimeLLMService(api_key="none", base_url=URL, settings=settings)
    sink = Sink()
    worker = PipelineWorker(Pipeline([service, sink]), cancel_on_idle_timeout=False)
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def _started(worker, frame):
        started.set()

    async def run():
        await asyncio.wait_for(started.wait(), LIMIT_S)
        try:
            await talk(worker, sink)
        finally:
            await worker.queue_frame(EndFrame())

    runner = WorkerRunner()
    await runner.add_workers(worker)
    await asyncio.gather(runner.run(), run())
    assert not sink.of(ErrorFrame), sink.of(ErrorFrame)


async def speak(worker):
    for piece in spoken.pieces(spoken.question()):
        await worker.queue_frame(InputAudioRawFrame(audio=piece, sample_rate=spoken.RATE, num_channels=1))


async def a_spoken_question_gets_a_spoken_answer():
    async def talk(worker, sink):
        await speak(worker)
        await sink.until(TTSStoppedFrame)
        assert spoken.heard(b"".join(frame.audio for frame in sink.of(TTSAudioRawFrame))) == spoken.ANSWER
        assert "".join(frame.text for frame in sink.of(TTSTextFrame)).strip() == spoken.ANSWER

    await converse(talk)


async def an_answer_is_interrupted_and_the_next_one_is_whole():
    async def talk(worker, sink):
        await speak(worker)
        await sink.until(TTSAudioRawFrame)
        await worker.queue_frame(InterruptionFrame())
        await speak(worker)
        await sink.until(LLMFullResponseEndFrame, 2)

    await converse(talk)


async def a_written_question_gets_a_written_answer():
    async def talk(worker, sink):
        context = LLMContext([{"role": "user", "content": "Which digit do you hear?"}])
        await worker.queue_frame(LLMContextFrame(context))
        await sink.until(LLMFullResponseEndFrame)
        assert "".join(frame.text for frame in sink.of(LLMTextFrame)).strip()

    await converse(talk, turn_detection=False, modalities=("text",))


report.run(
    [
        a_spoken_question_gets_a_spoken_answer,
        an_answer_is_interrupted_and_the_next_one_is_whole,
        a_written_question_gets_a_written_answer,
    ]
)

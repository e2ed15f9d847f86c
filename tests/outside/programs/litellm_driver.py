"""Calls of litellm: chat, completions, responses, images, speech and transcription, as far as KINDS names them."""

import io
import os

import litellm
import report

MODEL = "openai/" + os.environ["MODEL"]
BASE = {"api_base": os.environ["BASE_URL"], "api_key": "none", "timeout": 120, "num_retries": 0}
MESSAGES = [{"role": "user", "content": "What is 2 and 3?"}]


def chat():
    answer = litellm.completion(model=MODEL, messages=MESSAGES, max_tokens=16, **BASE)
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.usage.total_tokens > 0


def chat_streamed():
    parts = list(litellm.completion(model=MODEL, messages=MESSAGES, max_tokens=16, stream=True, **BASE))
    assert parts[-1].choices[0].finish_reason in ("stop", "length")


async def chat_async():
    answer = await litellm.acompletion(model=MODEL, messages=MESSAGES, max_tokens=16, n=2, **BASE)
    assert len(answer.choices) == 2


def chat_tool():
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    asked = {"tools": tools, "tool_choice": "required", "max_tokens": 400}
    answer = litellm.completion(model=MODEL, messages=MESSAGES, **asked, **BASE)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def text_completion():
    model = "text-completion-openai/" + os.environ["MODEL"]
    answer = litellm.text_completion(model=model, prompt="One two", max_tokens=8, **BASE)
    assert answer.choices[0].finish_reason in ("stop", "length")


def responses():
    answer = litellm.responses(model=MODEL, input="Hello", max_output_tokens=16, **BASE)
    assert answer.usage.total_tokens > 0


def image():
    assert litellm.image_generation(model=MODEL, prompt="a red circle", **BASE).data[0].b64_json


def speech():
    voice = os.environ.get("VOICE", "tara")
    assert len(litellm.speech(model=MODEL, input="One two three.", voice=voice, **BASE).content) > 1000


def transcription():
    asked = {"input": "How many shapes are there?", "voice": "ethan", "response_format": "wav"}
    file = io.BytesIO(litellm.speech(model=MODEL, **asked, **BASE).content)
    file.name = "sound.wav"
    assert isinstance(litellm.transcription(model=MODEL, file=file, **BASE).text, str)


CASES = {
    "chat": [chat, chat_streamed, chat_async],
    "tools": [chat_tool],
    "completion": [text_completion],
    "responses": [responses],
    "image": [image],
    "speech": [speech],
    "transcription": [transcription],
}
report.run([case for kind in os.environ["KINDS"].split(",") for case in CASES[kind]])

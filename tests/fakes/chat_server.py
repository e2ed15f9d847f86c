"""A server with the chat route that answers by the words of the last message. Used by tests of `mstarctl chat`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PCM = b"\x01\x00" * 2400
PNG = b"\x89PNG picture"
MODELS: list[dict[str, Any]] = [
    {
        "id": "omni",
        "aliases": ["qwen"],
        "input_modalities": ["text", "image", "audio"],
        "output_modalities": ["text", "audio", "image"],
        "endpoints": ["/v1/chat/completions"],
        "capabilities": ["tools", "reasoning", "reasoning_effort", "structured_outputs"],
        "parameters": {"properties": {"temperature": {}, "top_p": {}}},
    },
    {"id": "pirate", "parent": "omni", "capabilities": [], "endpoints": ["/v1/chat/completions"]},
]


@dataclass(slots=True)
class ChatServer:
    """A running server. asked: bodies of the requests. is_cut: a client closed the connection of an answer."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    is_cut: threading.Event = field(default_factory=threading.Event)


@contextmanager
def chat_server() -> Iterator[ChatServer]:
    """Serve on a free port while the block runs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), ChatHandler) as http:
        facts = ChatServer(f"http://127.0.0.1:{http.server_address[1]}")
        http.RequestHandlerClass = type("Bound", (ChatHandler,), {"facts": facts})
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield facts
        http.shutdown()


class ChatHandler(BaseHTTPRequestHandler):
    """Answers `you said WORDS`, and otherwise as the words `think`, `call`, `slow`, `draw`, `fail`... ask for."""

    facts: ChatServer

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": MODELS}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.facts.asked.append(body)
        self.send_response(200)
        self.end_headers()
        try:
            for event in events(body):
                self.wfile.write(b": ping\n\ndata: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
                if "error" in event:
                    return
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.facts.is_cut.set()

    def log_message(self, format: str, *args: Any) -> None: ...


def events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of one answer."""
    last = body["messages"][-1]
    words = last["content"] if isinstance(last["content"], str) else last["content"][-1]["text"]
    reason = "stop"
    if last["role"] == "tool":
        results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        yield chunk(content=f"it is {' and '.join(results)}")
    elif words == "fail":
        yield {"error": {"message": "no pages left", "code": "overloaded"}}
        return
    elif words == "think":
        yield chunk(reasoning_content="two and two ")
        yield chunk(reasoning_content="make four")
        yield chunk(content="4")
    elif words == "call":
        reason = "tool_calls"
        for index, name in enumerate(("weather", "clock")):
            yield chunk(
                tool_calls=[
                    {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
                ]
            )
            yield chunk(tool_calls=[{"index": index, "function": {"arguments": '{"city": '}}])
            yield chunk(tool_calls=[{"index": index, "function": {"arguments": '"Ulm"}'}}])
    elif words == "slow":
        while True:  # until the client closes the connection
            yield chunk(content="word ")
            threading.Event().wait(0.02)
    elif words == "draw":
        url = "data:image/png;base64," + base64.b64encode(PNG).decode()
        yield chunk(content=[{"type": "image_url", "image_url": {"url": url}}])
    elif words == "control":
        yield chunk(content="a\x1b[31mb")
    elif words != "nothing":
        for word in ("you ", "said ", words):
            yield chunk(content=word)
        if "audio" in body.get("modalities", ()):
            yield chunk(audio={"data": base64.b64encode(PCM).decode()})
        reason = "length" if words == "long" else "stop"
    yield {**chunk(), "choices": [{"delta": {}, "finish_reason": reason}]}
    if body.get("stream_options", {}).get("include_usage"):
        details = {"reasoning_tokens": 3}
        usage = {"prompt_tokens": 7, "completion_tokens": 5, "completion_tokens_details": details}
        yield {"id": "r-1", "choices": [], "usage": usage}


def chunk(**delta: Any) -> dict[str, Any]:
    """Return one event with the delta of an answer."""
    return {"id": "r-1", "choices": [{"delta": delta}]}

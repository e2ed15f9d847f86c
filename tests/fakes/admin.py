"""Fake admin socket with scripted responses: other versions, errors, silence. Standard library, one thread."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

HEAD: Mapping[str, Any] = {"api": 1, "min_api": 1, "name": "canned", "state": "ready", "versions": {}}


@contextmanager
def canned(path: Path, answers: Mapping[str, tuple[int, Any]], *, wait_s: float = 0.0) -> Iterator[list[str]]:
    """Serve until the block ends; yields the received request lines. answers: path -> status and body.

    A list as body is a stream with one JSON object per line. wait_s: delay of each response.
    """
    asked: list[str] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            asked.append(f"{self.command} {self.path}")
            if over.wait(wait_s):
                return  # the client has disconnected
            status, body = answers.get(
                self.path.partition("?")[0], (404, {"code": "not_found", "title": "no such path"})
            )
            lines = body if isinstance(body, list) else [body]
            data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    class Server(ThreadingUnixStreamServer):
        daemon_threads = True

        def get_request(self) -> tuple[socket.socket, Any]:
            connection, _ = super().get_request()
            return connection, ("peer", 0)

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            over.set()
            server.shutdown()
            thread.join()

"""JSON files of `mstarctl chat`: tools, schemas and saved conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mstar_core.errors import ConfigError, UsageError
from mstarctl.call.ask import read_bytes
from mstarctl.chat.conversation import ChatMessages, text_of

ROLES: Final = ("system", "user", "assistant", "tool")
READABLE: Final = (".md", ".txt")
"""Endings of conversations for people, which cannot be loaded again."""


def read_tools(path: Path) -> list[dict[str, Any]]:
    """Read the functions of a file: one or a list, as the chat route has them, or bare. Raises ConfigError."""
    stated = _read_json(path)
    tools = stated if isinstance(stated, list) else [stated]
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            hint = 'for example [{"name": "weather", "parameters": {"type": "object", "properties": {}}}]'
            raise ConfigError(f"tool {number + 1} of {path} has no name", hint=hint, file=str(path), key="name")
        if not isinstance(function.get("parameters", {}), dict):
            raise ConfigError(
                f"parameters of {function['name']} must be a JSON schema", file=str(path), key="parameters"
            )
    return tools


def read_schema(path: Path) -> dict[str, Any]:
    """Read a JSON schema as a `response_format`. Raises ConfigError."""
    schema = _read_json(path)
    if not isinstance(schema, dict):
        raise ConfigError(f"{path} is not a JSON schema", hint='for example {"type": "object"}', file=str(path))
    name = "".join(char if char.isalnum() or char in "_-" else "_" for char in path.stem)[:64] or "schema"
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def write_conversation(path: Path, talk: ChatMessages, model: str) -> None:
    """Write a conversation, as JSON or, for .md and .txt, for people. Raises ConfigError."""
    if path.suffix.lower() in READABLE:
        text = "\n".join(f"**{message['role']}**\n\n{_readable(message)}\n" for message in talk.sent())
    else:
        facts = {"model": model, "system": talk.system, "messages": talk.messages}
        text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written", error.strerror or str(error), file=str(path)) from error


def read_conversation(path: Path) -> ChatMessages:
    """Read a conversation: a saved one, or a list of messages. Raises ConfigError."""
    if path.suffix.lower() in READABLE:
        raise UsageError(f"{path.suffix} files cannot be loaded", hint="/save FILE.json writes one that can")
    stated = _read_json(path)
    messages = stated.get("messages") if isinstance(stated, dict) else stated
    if not isinstance(messages, list):
        raise ConfigError(f"{path} contains no messages", hint="/save FILE.json writes them", file=str(path))
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            hint = f"its role must be one of: {', '.join(ROLES)}"
            raise ConfigError(f"message {number + 1} of {path} has no role", hint=hint, file=str(path), key="role")
    system = str(stated.get("system") or "") if isinstance(stated, dict) else ""
    if messages and messages[0]["role"] == "system":
        system, messages = text_of(messages[0]), messages[1:]
    return ChatMessages(system, messages)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path, "file"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON", str(error), file=str(path)) from error


def _readable(message: Mapping[str, Any]) -> str:
    files = [part["type"] for part in message.get("content") or () if isinstance(part, dict) and part["type"] != "text"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    lines = [*(f"[{kind}]" for kind in files), *(f"{call['name']} {call['arguments']}" for call in calls)]
    return "\n".join([*lines, text_of(dict(message))]).strip()

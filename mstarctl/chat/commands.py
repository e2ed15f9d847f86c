"""Commands of `mstarctl chat`: lines that begin with a slash. Each changes the state and returns what to do next."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Final

from mstar_core.errors import UsageError, did_you_mean
from mstarctl.call.ask import named_model, parse_params
from mstarctl.chat.attachments import MEDIA, part_of
from mstarctl.chat.documents import read_conversation, read_schema, read_tools, write_conversation
from mstarctl.chat.prompt import paths
from mstarctl.chat.settings import EFFORTS, FIELDS, JSON_OBJECT
from mstarctl.chat.state import ChatState
from mstarctl.output.units import counted

Say = Callable[[str], None]
BETWEEN_PARAMS: Final = re.compile(r"\s+(?=[A-Za-z_]\w*=)")
"""Blanks before the next KEY=; those of a value, such as JSON, belong to it."""


class Then(Enum):
    """Next action of the session after a command."""

    GO_ON = auto()
    ANSWER = auto()
    LEAVE = auto()


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """One command. run(state, argument, say) raises MstarError. takes_file: its argument is completed as a path."""

    name: str
    argument: str
    help: str
    run: Callable[[ChatState, str, Say], Then]
    takes_file: bool = False


def run_command(state: ChatState, line: str, say: Say) -> Then:
    """Run one line that begins with a slash. Raises UsageError for an unknown command."""
    word, _, argument = line.partition(" ")
    command = BY_NAME.get({"/exit": "/quit"}.get(word, word))
    if command is None:
        hint = did_you_mean(word, BY_NAME)
        raise UsageError(f"unknown command {word!r}", hint=hint if "did you" in hint else "/help lists the commands")
    return command.run(state, argument.strip(), say)


def is_command(line: str) -> bool:
    """Return whether a message is a command: one line whose first word has one slash, at its beginning."""
    word = line.partition(" ")[0]
    return word.startswith("/") and len(word) > 1 and "/" not in word[1:] and "\n" not in line


def completions(state: ChatState, line: str, word: str) -> Iterator[str]:
    """Yield the words that Tab offers at the end of a line: commands, their files, `@FILE` and parameters."""
    name, space, _ = line.partition(" ")
    command = BY_NAME.get(name)
    if not space and line.startswith("/"):
        yield from (f"{each.name} " for each in COMMANDS if each.name.startswith(word))
    elif word.startswith("@"):
        yield from (f"@{path}" for path in paths(word[1:]))
    elif command is not None and command.takes_file:
        yield from paths(word)
    elif name == "/params":
        yield from (f"{each}=" for each in sorted(state.card.parameters | FIELDS) if each.startswith(word))
    elif name == "/model":
        yield from (card.name for card in state.models if card.name.startswith(word))


def _help(state: ChatState, argument: str, say: Say) -> Then:
    width = max(len(f"{each.name} {each.argument}") for each in COMMANDS)
    for each in COMMANDS:
        say(f"  {f'{each.name} {each.argument}':<{width}}  {each.help}")
    for keys, what in KEYS:
        say(f"  {keys:<{width}}  {what}")
    return Then.GO_ON


def _new(state: ChatState, argument: str, say: Say) -> Then:
    state.talk.clear()
    state.last = None
    say("a new conversation")
    return Then.GO_ON


def _system(state: ChatState, argument: str, say: Say) -> Then:
    if argument:
        state.talk.system = "" if argument == "off" else argument
    say(f"system: {state.talk.system}" if state.talk.system else "no system text")
    return Then.GO_ON


def _params(state: ChatState, argument: str, say: Say) -> Then:
    params = state.settings.params
    if argument:
        words = BETWEEN_PARAMS.split(argument)
        if strange := next((word for word in words if "=" not in word), None):
            raise UsageError(f"/params needs KEY=VALUE, not {strange!r}", hint="/params temperature=0.5 top_p=0.9")
        given = parse_params(words)
        for name, hint in state.settings.unknown(name for name, value in given.items() if value != "").items():
            say(f"{name} is not a parameter that {state.card.name} lists: {hint}")
        for name, value in given.items():
            if value == "":
                params.pop(name, None)
            else:
                params[name] = value
    for name, value in params.items():
        say(f"  {name}={json.dumps(value, ensure_ascii=False)}")
    if not params:
        say("every parameter has the default of the model")
    if not argument and state.card.parameters:
        say(f"of the model: {', '.join(sorted(state.card.parameters))}")
    return Then.GO_ON


def _json(state: ChatState, argument: str, say: Say) -> Then:
    if _is_on(argument or "on", "/json"):
        state.settings.check("structured_outputs", "answers that are held to JSON")
        state.settings.format = dict(JSON_OBJECT)
        say("answers are JSON objects; /json off ends that")
    else:
        state.settings.format = None
        say("answers are text")
    return Then.GO_ON


def _schema(state: ChatState, argument: str, say: Say) -> Then:
    if argument in ("", "off"):
        if argument:
            state.settings.format = None
        schema = (state.settings.format or {}).get("json_schema")
        say(json.dumps(schema["schema"], ensure_ascii=False) if schema else "no schema")
        return Then.GO_ON
    state.settings.check("structured_outputs", "answers that are held to a schema")
    state.settings.format = read_schema(_path(argument))
    say("answers obey the schema; /schema off ends that")
    return Then.GO_ON


def _thinking(state: ChatState, argument: str, say: Say) -> Then:
    match argument:
        case "show":
            state.shows_thinking = True
            if state.last is not None and state.last.thinking:
                say(state.last.thinking.strip())
        case "hide":
            state.shows_thinking = False
        case "on":
            state.settings.effort = None
        case "off" | "none" | "minimal" | "low" | "medium" | "high" | "xhigh":
            state.settings.check("reasoning_effort", "an amount of thinking")
            state.settings.effort = "none" if argument == "off" else argument
        case "":
            pass
        case _:
            choices = ("on", "off", "show", "hide", *EFFORTS)
            raise UsageError(f"/thinking {argument}", hint=did_you_mean(argument, choices))
    amount = {None: "as the model does by default", "none": "off"}.get(
        state.settings.effort, str(state.settings.effort)
    )
    say(f"thinking: {amount}, {'shown' if state.shows_thinking else 'hidden'}")
    return Then.GO_ON


def _tools(state: ChatState, argument: str, say: Say) -> Then:
    if argument == "off":
        state.settings.tools = []
    elif argument:
        state.settings.check("tools", "tools")
        state.settings.tools = read_tools(_path(argument))
    for tool in state.settings.tools:
        function = tool.get("function", tool)
        say(f"  {function['name']}  {function.get('description', '')}".rstrip())
    if not state.settings.tools:
        say("no tools are offered")
    return Then.GO_ON


def _outputs(state: ChatState, argument: str, say: Say) -> Then:
    if argument:
        state.settings.set_outputs(argument.replace(",", " ").split())
    say(f"answers are: {', '.join(state.settings.modalities) or 'text'} (of {', '.join(state.card.outputs)})")
    return Then.GO_ON


def _model(state: ChatState, argument: str, say: Say) -> Then:
    if argument:
        state.settings.card = named_model(state.models, argument)
    for card in state.models:
        other = f"  also {', '.join(card.aliases)}" if card.aliases else ""
        say(f"{'*' if card.name == state.card.name else ' '} {card.name}{other}")
    return Then.GO_ON


def _save(state: ChatState, argument: str, say: Say) -> Then:
    if not argument and state.saved is None:
        raise UsageError("/save needs a file", hint="/save FILE.json, or FILE.md to read it")
    path = _path(argument) if argument else state.saved
    if path is None:
        raise AssertionError("checked above")
    if path.exists() and path != state.saved:
        raise UsageError(f"{path} exists", hint="choose another name, or remove it first")
    write_conversation(path, state.talk, state.card.name)
    state.saved = path
    say(f"saved {counted(len(state.talk.messages), 'message')}: {path}")
    return Then.GO_ON


def _load(state: ChatState, argument: str, say: Say) -> Then:
    if not argument:
        raise UsageError("/load needs a file", hint="/load FILE.json")
    path = _path(argument)
    state.talk = read_conversation(path)
    state.saved = path
    say(f"loaded {counted(len(state.talk.messages), 'message')}: {path}")
    return Then.GO_ON


def _retry(state: ChatState, argument: str, say: Say) -> Then:
    if not state.talk.reopen():
        raise UsageError("no message was sent yet", hint="write one")
    return Then.ANSWER


def _undo(state: ChatState, argument: str, say: Say) -> Then:
    question = state.talk.question()
    if not state.talk.undo():
        raise UsageError("no message was sent yet", hint="write one")
    say(f"removed the last message and its answer: {(question or '').strip()[:60]}")
    return Then.GO_ON


def _usage(state: ChatState, argument: str, say: Say) -> Then:
    for line in state.usage.lines():
        say(line)
    return Then.GO_ON


def _quit(state: ChatState, argument: str, say: Say) -> Then:
    return Then.LEAVE


def _attach(kind: str) -> Callable[[ChatState, str, Say], Then]:
    def attach(state: ChatState, argument: str, say: Say) -> Then:
        if not argument:
            raise UsageError(f"/{kind} needs a file", hint=f"/{kind} FILE")
        path = _path(argument)
        state.talk.waiting.append(part_of(kind, path, state.card.inputs))
        say(f"{path.name} goes with the next message ({counted(len(state.talk.waiting), 'file')})")
        return Then.GO_ON

    return attach


def _is_on(argument: str, name: str) -> bool:
    if argument not in ("on", "off"):
        raise UsageError(f"{name} {argument}", hint=f"{name} on, or {name} off")
    return argument == "on"


def _path(argument: str) -> Path:
    return Path(argument.strip("'\"")).expanduser()


COMMANDS: Final = (
    ChatCommand("/help", "", "show this", _help),
    ChatCommand("/new", "", "forget the conversation", _new),
    ChatCommand("/system", "TEXT|off", "set or show the instruction before the conversation", _system),
    ChatCommand("/params", "KEY=VALUE...", "set parameters, such as temperature=0.2; KEY= removes one", _params),
    *(
        ChatCommand(f"/{kind}", "FILE", f"send {what} with the next message", _attach(kind), takes_file=True)
        for kind, what in zip(MEDIA, ("an image", "a sound", "a video"), strict=True)
    ),
    ChatCommand("/tools", "FILE.json|off", "offer functions; their results are typed here", _tools, takes_file=True),
    ChatCommand("/json", "on|off", "hold answers to JSON objects", _json),
    ChatCommand("/schema", "FILE.json|off", "hold answers to a JSON schema", _schema, takes_file=True),
    ChatCommand(
        "/thinking", "on|off|LEVEL|show|hide", "set the amount of thinking, and whether it is shown", _thinking
    ),
    ChatCommand("/outputs", "KIND...", "outputs of answers, such as text audio", _outputs),
    ChatCommand("/model", "[NAME]", "show the models and adapters, or choose one", _model),
    ChatCommand("/retry", "", "answer the last message again", _retry),
    ChatCommand("/undo", "", "remove the last message and its answer", _undo),
    ChatCommand(
        "/save", "FILE", "write the conversation: .json to load it again, .md to read it", _save, takes_file=True
    ),
    ChatCommand("/load", "FILE.json", "go on with a saved conversation", _load, takes_file=True),
    ChatCommand("/usage", "", "show tokens and times", _usage),
    ChatCommand("/quit", "", "leave", _quit),
)
KEYS: Final = (
    ("@FILE", "within a message: send the file with it"),
    ('"""', "begins and ends a message of several lines; so does a backslash at the end of a line"),
    ("Ctrl-C", "stops an answer; a second one leaves"),
    ("Ctrl-D", "leaves"),
)
BY_NAME: Final = {command.name: command for command in COMMANDS}

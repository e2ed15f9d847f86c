"""Loop of one chat: reads messages, runs commands, requests answers, and asks for the results of functions."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from mstar_core.client import FunctionCall
from mstar_core.errors import ExitCode, MstarError, UsageError
from mstarctl.chat.answer import ChatAnswer
from mstarctl.chat.attachments import mentioned
from mstarctl.chat.commands import Then, completions, is_command, run_command
from mstarctl.chat.prompt import ChatPrompt, history_file
from mstarctl.chat.state import ChatState
from mstarctl.chat.view import AnswerView, record_of
from mstarctl.client.api import ApiClient
from mstarctl.output import Printer
from mstarctl.output.errors import render_error


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Input and display of a session. player: command that plays speech. folder: of sound and images.

    is_literal: every line is a message, without commands and `@FILE`. keeps_history: typed lines outlive the session.
    """

    is_terminal: bool
    player: tuple[str, ...] | None = None
    folder: Path = Path()
    is_literal: bool = False
    keeps_history: bool = True


class ChatSession:
    """One chat. Owned by the command."""

    def __init__(self, client: ApiClient, state: ChatState, printer: Printer, options: ChatOptions) -> None:
        self._client, self._state, self._printer, self._options = client, state, printer, options
        self._prompt = ChatPrompt(
            is_terminal=options.is_terminal,
            history=history_file() if options.keeps_history else None,
            complete=lambda line, word: completions(state, line, word),
            bold=printer.options.is_coloured(),
        )
        self._is_interrupted = False

    def run(self) -> None:
        """Read and answer until the input ends. A failed answer does not end a terminal's conversation.

        Raises Exit 130 after two interrupts, and on a pipe the first error.
        """
        if self._options.is_terminal:
            self._printer.say(f"{self._state.card.name}: /help lists the commands; Ctrl-D leaves")
        try:
            while self._turn():
                pass
        finally:
            self._prompt.close()

    def _turn(self) -> bool:
        """Handle one message. Returns False at the end."""
        try:
            message = self._prompt.message()
        except EOFError:
            if self._options.is_terminal:
                self._printer.say("")
            return False
        except KeyboardInterrupt:
            self._interrupted()
            return True
        self._is_interrupted = False
        try:
            return self._take(message)
        except MstarError as error:
            if not self._options.is_terminal:
                raise
            self._printer.problem(render_error(error))
        return True

    def _interrupted(self) -> None:
        """Note an interrupt at the prompt. Raises Exit after another one."""
        if self._is_interrupted or not self._options.is_terminal:
            self._printer.say("")
            raise typer.Exit(ExitCode.INTERRUPTED)
        self._is_interrupted = True
        self._printer.say("\nCtrl-C again, Ctrl-D or /quit leaves")

    def _take(self, message: str) -> bool:
        if not message:
            return True
        talk = self._state.talk
        before = list(talk.messages)
        if not self._options.is_literal and is_command(message):
            then = run_command(self._state, message, self._printer.say)
            if then is Then.ANSWER:
                self._answer(before)
            return then is not Then.LEAVE
        parts = [] if self._options.is_literal else mentioned(message, self._state.card.inputs)
        talk.ask(message, parts)
        self._answer(before)
        return True

    def _answer(self, before: list[dict[str, Any]]) -> None:
        """Answer the conversation until no function is called. Without an answer the messages are those of `before`."""
        talk, is_answered = self._state.talk, False
        try:
            is_answered = self._exchange()
        finally:
            if not is_answered:
                talk.messages[:] = before

    def _exchange(self) -> bool:
        """Add answers, and results of the functions that they call. Returns False if nothing was answered."""
        talk, known = self._state.talk, self._state.card.capabilities or ()
        while True:
            answer = self._stream()
            message = answer.message(has_thinking="reasoning" in known, has_pictures="image" in self._state.card.inputs)
            if message is None:
                return False
            talk.messages.append(message)
            if answer.is_stopped and not self._options.is_terminal:
                raise typer.Exit(ExitCode.INTERRUPTED)
            if not answer.calls:
                return True
            results = self._results(answer.calls)
            if results is None:
                self._printer.say("the message and its calls are withdrawn")
                return False
            talk.messages += results

    def _stream(self) -> ChatAnswer:
        """Request one answer and show it. An interrupt ends it and cancels its request."""
        state, answer, started = self._state, ChatAnswer(), time.monotonic()
        is_streamed = not self._printer.is_machine
        view = AnswerView(
            self._printer,
            folder=self._options.folder,
            player=self._options.player,
            shows_thinking=state.shows_thinking,
            is_streamed=is_streamed,
        )
        first_s = None
        try:
            with closing(self._client.chat(state.settings.body(state.talk.sent()))) as events:
                for event in events:
                    for delta in answer.take(event):
                        first_s = first_s or time.monotonic() - started
                        view.show(delta)
        except KeyboardInterrupt:
            answer.is_stopped = self._is_interrupted = True
        except BaseException:
            view.cut()
            raise
        state.last = answer
        state.usage.add(answer, first_s, time.monotonic() - started)
        files = self._show_end(view, answer)
        if not is_streamed:
            self._printer.line(record_of(answer, files), f"answer/{answer.request_id}")
        return answer

    def _show_end(self, view: AnswerView, answer: ChatAnswer) -> list[Path]:
        try:
            files = view.end(answer)
        except KeyboardInterrupt:  # while speech is played
            answer.is_stopped = self._is_interrupted = True
            files = []
        if answer.is_stopped:
            self._printer.say("[stopped]")
        elif answer.finish_reason == "length":
            self._printer.say("[the answer ended at its length limit; /params max_output_tokens=N raises it]")
        elif not answer.text and not answer.calls and not files and not answer.sound:
            self._printer.say("[the answer is empty]")
        view.show_calls(answer.calls)
        self._printer.detail(self._state.usage.last)
        return files

    def _results(self, calls: list[FunctionCall]) -> list[dict[str, Any]] | None:
        """Ask for the result of each call. Returns None if the user interrupts; a pipe delivers a line for each."""
        if self._options.is_terminal:
            self._printer.say("type each result; Ctrl-C withdraws the message")
        try:
            return [call.result(self._prompt.result(call.name)) for call in calls]
        except EOFError as error:
            if self._options.is_terminal:
                self._printer.say("")
                return None
            names = ", ".join(call.name for call in calls)
            raise UsageError(
                f"the input ended before the results of {names}", hint="write one line for each call behind the message"
            ) from error
        except KeyboardInterrupt:
            self._printer.say("")
            if not self._options.is_terminal:
                raise
            return None


def is_interactive() -> bool:
    """Return whether a person reads and writes here."""
    return sys.stdin.isatty() and sys.stdout.isatty()

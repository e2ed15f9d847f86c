"""Textual app of `top`: polls the session, draws screens, and maps keys to states and actions."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from textual.app import App, ComposeResult, SystemCommand
from textual.screen import Screen

from mstar_core.errors import MstarError, UsageError
from mstar_core.observe.filter import Filter
from mstarctl.output.line import Line
from mstarctl.output.theme import GROUND, GROUNDS, LIGHT_GROUND, Mode, has_ground
from mstarctl.top import actions, navigation
from mstarctl.top.data.deployments import Switcher
from mstarctl.top.data.queries import DeploymentQueries
from mstarctl.top.data.session import Session
from mstarctl.top.data.spans import end_of
from mstarctl.top.data.view import View
from mstarctl.top.keys import KEYS, Key, works
from mstarctl.top.layout.footer import Hint, page_at
from mstarctl.top.layout.header import newest_failure
from mstarctl.top.layout.logs import sources
from mstarctl.top.layout.pages import Painted, compose
from mstarctl.top.layout.scroll import Window
from mstarctl.top.layout.state import PAGES, State
from mstarctl.top.layout.waterfall import Zoom
from mstarctl.top.saved_view import SavedView
from mstarctl.top.widgets.dialog import Dialog
from mstarctl.top.widgets.filter_bar import FilterBar
from mstarctl.top.widgets.pane import MainPane, Pane

POLL_S: Final = 0.1
"""Interval between polls, and shortest interval between two drawings."""

ANIMATION_POLLS: Final = 2
QUERY_S: Final = 1.0
NOTICE_S: Final = 4.0

T = TypeVar("T")


class TopApp(App[None]):
    """The live view of one deployment. failure: the error that ended the app, if any."""

    CSS = f"""
    Screen {{ background: {GROUND}; }}
    #filter {{
        dock: bottom; height: 1; border: none; padding: 0 1; display: none; background: #23405c; color: #f2f6fa;
    }}
    App.-plain Screen {{ background: ansi_default; }}
    App.-plain #filter {{ background: ansi_default; color: ansi_default; text-style: reverse; }}
    Dialog {{ background: {GROUND} 60%; }}
    App.-light Screen {{ background: {LIGHT_GROUND}; }}
    App.-light #filter {{ background: {GROUNDS["light"].chosen}; color: #10151c; }}
    App.-light Dialog {{ background: {LIGHT_GROUND} 60%; }}
    App.-plain Dialog {{ background: ansi_default; }}
    """
    TITLE = "mstarctl top"
    ENABLE_COMMAND_PALETTE = True

    def __init__(
        self,
        session: Session,
        queries: DeploymentQueries,
        *,
        mode: Mode = "true",
        state: State | None = None,
        is_animated: bool = True,
        folder: Path | None = None,
        switcher: Switcher | None = None,
        may_save: bool = True,
    ) -> None:
        super().__init__(ansi_color=not has_ground(mode))
        self.session, self.queries, self.mode = session, queries, mode
        self.switcher, self.may_save = switcher, may_save
        self.state = state or State()
        self.failure: Exception | None = None
        self.folder = folder or Path.cwd()
        self._pane, self._bar = MainPane(mode, id="main"), FilterBar()
        self._is_animated = is_animated
        self._drawn: tuple[object, ...] = ()
        self._painted = Painted([])
        self._polls = 0
        self._phase = 0
        self._has_mouse = True
        self._recordings: list[dict[str, object]] = []

    # -- life cycle -------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        yield self._pane
        yield self._bar

    def on_mount(self) -> None:
        self.set_class(not has_ground(self.mode), "-plain")
        self.set_class(self.mode == "light", "-light")
        self.session.start()
        if self.state.page == "logs":  # started with --view logs
            self.session.want_logs()
        self._pane.focus()
        self.set_interval(POLL_S, self.poll)
        self.set_interval(QUERY_S, self.refresh_queries)
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():  # signal handlers work on the main thread only
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.exit)

    def _handle_exception(self, error: Exception) -> None:
        """Keep the error for the command, which writes it to a file after the terminal is restored."""
        self.failure = self.failure or error
        self._return_code = 1
        if self._exception is None:
            self._exception = error
            self._exception_event.set()
        self._close_messages_no_wait()

    def poll(self) -> None:
        """Apply new frames and draw changes. Animated dots move five times a second."""
        self.session.poll()
        self._polls += 1
        if self._polls % ANIMATION_POLLS == 0 and self._is_moving():
            self._phase += 1
        self.draw()

    def _is_moving(self) -> bool:
        if not self._is_animated or self.state.page not in ("overview", "graph"):
            return False
        view = self.session.view()
        return view.link.state in ("live", "replay") and any(edge.items_s > 0 for edge in view.store.edges.values())

    def view(self) -> View:
        """Return the data to draw."""
        return replace(self.session.view(), phase=self._phase, recordings=self._recordings)

    def switch_to(self, session: Session, queries: DeploymentQueries) -> None:
        """Show another deployment. The readers and the recording of the current one end; the filter stays."""
        before, self.session, self.queries = self.session, session, queries
        before.stop()
        session.filter = before.filter
        page = "overview" if self.state.page == "request" else self.state.page
        self._recordings = []
        session.start()
        if page == "logs":
            session.want_logs()
        self.choose(State(page=page, sort=self.state.sort))

    def draw(self, *, always: bool = False) -> None:
        """Draw the screen if anything on it has changed."""
        pane = self._pane
        if not pane.is_attached:  # the last tick of an app that ends
            return
        inputs = (self.session.changes, self.state, self._phase, pane.size, self.session.filter, len(self._recordings))
        if inputs == self._drawn and not always:
            return
        self._drawn = inputs
        self._painted = compose(self.view(), self.state, pane.size.width, pane.size.height, self.hints())
        pane.show(self._painted.lines)

    def on_resize(self) -> None:
        self.call_after_refresh(self.draw, always=True)

    def saved_view(self) -> SavedView:
        """Return the screen, order and filter, with which the next `top` of this deployment starts."""
        page = self.state.came_from if self.state.page == "request" else self.state.page
        sort = self.state.sort
        return SavedView(page=page, sort=sort.key, is_rising=sort.is_rising, filter=self.session.filter.text)

    @property
    def lines(self) -> list[Line]:
        """The lines on the screen."""
        return self._painted.lines

    def choose(self, state: State) -> None:
        """Switch to another state of the screen."""
        self.state = state
        self.refresh_bindings()
        self.draw()

    def show_notice(self, text: str, *, is_error: bool = False) -> None:
        """Show a sentence in the footer for a few seconds."""
        self.choose(replace(self.state, notice=text, is_notice_error=is_error))
        self.set_timer(NOTICE_S, lambda: self._clear_notice(text))

    def _clear_notice(self, text: str) -> None:
        if self.state.notice == text:
            self.choose(replace(self.state, notice=""))

    def open_dialog(self, dialog: Dialog, then: Callable[[str], None] | None = None) -> None:
        """Open a dialog. then: called with its answer, empty if it was closed without one."""
        self.push_screen(dialog, None if then is None else lambda answer: then(answer or ""))

    def in_background(self, work: Callable[[], T], then: Callable[[T], None], group: str) -> None:
        """Run `work` in a thread, then `then` with its result. An MstarError becomes a notice."""

        def run() -> None:
            try:
                result = work()
            except MstarError as error:
                text = actions.error_text(error)
                self.call_from_thread(lambda: self.show_notice(text, is_error=True))
            else:
                self.call_from_thread(then, result)

        self.run_worker(run, thread=True, exclusive=group != "act", group=group)

    # -- keys -------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key is active on this page and for this peer's permissions."""
        known = [key for key in KEYS if _name(key) == action]
        if not known:
            return True
        return any(self._works(key, is_readonly=self.session.view().readonly) for key in known)

    def _works(self, key: Key, *, is_readonly: bool) -> bool:
        return works(
            key, self.state.page, may_write=not is_readonly, may_save=self.may_save, is_live=self.session.is_live
        )

    def active_keys(self) -> list[Key]:
        """Return the keys of the table whose bindings are active now, in its order."""
        active = self._pane.is_mounted and self.screen_stack[0].active_bindings
        if not active:
            return []
        is_readonly = self.session.view().readonly
        keys = []
        for key in KEYS:
            names = key.keys.split(",")
            is_bound = any(name in active and active[name].enabled for name in names)
            if is_bound and self._works(key, is_readonly=is_readonly):
                keys.append(key)
        return keys

    def hints(self) -> list[Hint]:
        """Return the hints of the footer, from the active bindings."""
        if self._bar.display:
            return [("enter", "keep"), ("esc", "undo")]
        shown = sorted((key for key in self.active_keys() if key.footer), key=lambda key: key.footer)
        return [(f"1-{len(PAGES)}", "screen"), *((key.shown, key.label) for key in shown)]

    def action_page(self, page: str) -> None:
        if page == "logs":
            self.session.want_logs()
        self.choose(replace(self.state, page=page))

    def action_panel(self) -> None:
        if self.state.page == "logs":
            self.choose(navigation.next_source(self.state, sources(self.session.view().logs)))
            return
        panel = "ranks" if self.state.panel == "requests" else "requests"
        first = next(iter(self.view().rank_keys), None)
        self.choose(replace(self.state, panel=panel, rank=self.state.rank or first))

    def action_move(self, by: int) -> None:
        self.choose(navigation.move(self.view(), self.state, by))

    def action_across(self, by: int) -> None:
        self.choose(navigation.across(self.view(), self.state, by))

    def action_host(self) -> None:
        self.choose(navigation.next_host(self.view(), self.state))

    def action_turn(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height // 2))

    def action_edge(self, to: int) -> None:
        self.choose(navigation.edge(self.view(), self.state, to))

    def action_open(self) -> None:
        self.choose(navigation.opened(self.view(), self.state))
        if self.state.page == "request":
            self.refresh_queries()

    def action_leave(self) -> None:
        state = self.state
        if state.page == "request":
            self.choose(replace(state, page=state.came_from, trace=None, zoom=Zoom()))
        elif state.page == "logs" and (state.log_text or state.log_source):
            self.choose(replace(state, log_text="", log_source="", log_above=0))
        elif state.page == "events" and (state.event_text or state.events.cursor):
            self.choose(replace(state, event_text="", events=Window()))
        elif self.session.filter.text:
            self.session.filter = Filter()
            self.draw()
        elif state.requests.cursor is not None or state.panel == "ranks" or state.node:
            self.choose(replace(state, requests=Window(), panel="requests", node=""))
        else:
            self.choose(replace(state, page="overview"))

    def action_sort(self) -> None:
        self.choose(navigation.next_sort(self.view(), self.state))

    def action_sort_by(self, name: str) -> None:
        self.choose(navigation.sort_by(self.view(), self.state, name))

    def action_reverse(self) -> None:
        self.choose(navigation.reverse(self.state))

    def action_dismiss(self) -> None:
        self.choose(replace(self.state, dismissed=newest_failure(self.session.view())))

    def action_pause(self) -> None:
        self.session.toggle_pause()
        self.draw()

    def action_step(self, frames: int) -> None:
        self.session.step(frames)
        self.draw()

    def action_skip(self, seconds: int) -> None:
        self.session.skip(seconds)
        self.draw()

    def action_walk(self, by: int) -> None:
        self.choose(navigation.next_walk(self.view(), replace(self.state, page="graph"), by))

    def action_graph(self) -> None:
        self.choose(navigation.at_node(self.view(), self.state))

    def action_logs(self) -> None:
        """Show the logs of the selected object: lines of a request, or of a rank's process."""
        view, state = self.view(), self.state
        key = navigation.selected_request(view, state)
        self.session.want_logs()
        if key is not None:
            self.choose(replace(state, page="logs", log_text=view.store.requests[key].id, log_source="", log_above=0))
        elif state.rank is not None and (state.page == "ranks" or state.panel == "ranks"):
            child = next((c.name for c in view.store.children.values() if str(c.rank) == state.rank), "")
            self.choose(replace(state, page="logs", log_source=child, log_text="", log_above=0))
        else:
            self.choose(replace(state, page="logs"))

    def action_pace(self, to: int) -> None:
        if self.state.page == "request" and self.state.trace is not None:
            end = end_of(self.state.trace.lanes)
            self.choose(replace(self.state, zoom=self.state.zoom.closer(end, 2.0 if to > 0 else 0.5)))
            return
        self.show_notice(self.session.faster(2.0 if to > 0 else 0.5))

    def action_mouse(self) -> None:
        """Switch mouse reporting. Textual has no public switch, so the driver's private functions are used."""
        driver = self._driver
        self._has_mouse = not self._has_mouse
        name = "_enable_mouse_support" if self._has_mouse else "_disable_mouse_support"
        switch = getattr(driver, name, None)
        if switch is not None:
            switch()
        self.show_notice(
            "mouse reporting on" if self._has_mouse else "mouse reporting off, the terminal can select text"
        )

    # -- the filter -------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        texts = {"logs": self.state.log_text, "events": self.state.event_text}
        self._bar.open(texts.get(self.state.page, self.session.filter.text))
        self.call_after_refresh(self.draw, always=True)

    def on_filter_bar_typed(self, event: FilterBar.Typed) -> None:
        if self._filter(event.text) and event.is_final:
            self._close_filter()

    def on_filter_bar_left(self, event: FilterBar.Left) -> None:
        self._filter(event.text)
        self._close_filter()

    def _close_filter(self) -> None:
        self._bar.close()
        self._pane.focus()
        self.state = replace(self.state, notice="")
        self.call_after_refresh(self.draw, always=True)

    def _filter(self, text: str) -> bool:
        """Apply a filter text. Returns False and shows the error if it is invalid; the previous filter stays."""
        if self.state.page == "logs":
            self.choose(replace(self.state, log_text=text, log_above=0))
        elif self.state.page == "events":
            self.choose(replace(self.state, event_text=text, events=Window()))
        else:
            try:
                self.session.filter = Filter.parse(text, expressions=True)
            except UsageError as error:
                self.choose(replace(self.state, notice=actions.error_text(error), is_notice_error=True))
                return False
            self.choose(replace(self.state, notice=""))
        return True

    # -- queries ----------------------------------------------------------------------------------------------

    def refresh_queries(self) -> None:
        """Fetch the data that frames do not contain: traces and recordings. Called once a second."""
        if self.state.page == "bench":
            self.run_worker(self._query_recordings, thread=True, exclusive=True, group="recordings")
        request = self.session.view().store.requests.get(self.state.request)
        is_settled = request is not None and request.has_ended and bool(self.state.trace and self.state.trace.lanes)
        if self.state.page == "request" and request is not None and not is_settled:
            self.run_worker(self._query_trace, thread=True, exclusive=True, group="trace")

    def _query_recordings(self) -> None:
        try:
            recordings = self.queries.recordings()
        except MstarError:
            return  # the header shows that the deployment does not answer
        self.call_from_thread(self._note_recordings, recordings)

    def _note_recordings(self, recordings: list[dict[str, object]]) -> None:
        self._recordings = recordings
        self.draw(always=True)

    def _query_trace(self) -> None:
        view = self.session.view()
        request = view.store.requests.get(self.state.request)
        if request is None:
            return
        trace = self.queries.trace(request, view.t)
        self.call_from_thread(lambda: self.choose(replace(self.state, trace=trace)))

    # -- actions ----------------------------------------------------------------------------------------------

    action_cancel = actions.ask_cancel
    action_drain = actions.ask_drain
    action_help = actions.open_help
    action_describe = actions.describe
    action_json = actions.show_json
    action_copy = actions.copy_id
    action_export = actions.ask_export
    action_other = actions.ask_other
    action_perfetto = actions.write_perfetto
    action_record = actions.toggle_recording

    # -- mouse and palette ------------------------------------------------------------------------------------

    def on_pane_clicked(self, event: Pane.Clicked) -> None:
        kind, key = self._painted.hits.get(event.y, ("", ""))
        match kind:
            case "tabs":
                page = page_at(event.x)
                if page:
                    self.action_page(page)
            case "titles":
                self.choose(navigation.sort_at(self.view(), self.state, event.x, self.size.width))
            case "request":
                is_second = self.state.requests.cursor == key
                window = replace(self.state.requests, cursor=key)
                self.choose(replace(self.state, requests=window, panel="requests"))
                if is_second:
                    self.action_open()
            case "rank":
                self.choose(replace(self.state, rank=key))
            case "event":
                self.choose(replace(self.state, events=replace(self.state.events, cursor=key)))
            case "session":
                self.choose(replace(self.state, sessions=replace(self.state.sessions, cursor=key)))

    def on_pane_scrolled(self, event: Pane.Scrolled) -> None:
        self.action_move(event.by)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Return the commands of the palette: every active key by name."""
        for key in self.active_keys():
            yield SystemCommand(f"{key.label} ({key.shown})", key.help, self._runner(key.action))

    def _runner(self, action: str) -> Callable[[], object]:
        return lambda: self.run_action(action)


def _name(key: Key) -> str:
    return key.action.partition("(")[0]

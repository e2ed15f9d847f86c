"""Table of all keys of `top`, source of the bindings, the footer, the help and docs/top.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mstarctl.top.layout.request_list import COLUMNS
from mstarctl.top.layout.state import PAGES, TITLES

EVERYWHERE: Final = frozenset((*PAGES, "request"))
TABLES: Final = frozenset(("overview", "requests"))
OF_REQUESTS: Final = TABLES | {"request"}
SIDEWAYS: Final = frozenset(("graph", "ranks", "request"))
LISTS: Final = frozenset(("overview", "requests", "ranks", "logs", "events", "bench", "sessions"))
FILTERED: Final = frozenset(("overview", "requests", "logs", "events"))
OPENING: Final = frozenset(("overview", "requests", "graph", "ranks", "events", "sessions"))


@dataclass(frozen=True, slots=True)
class Key:
    """One key. keys: Textual's names; action: of the app; shown: label of the key; pages: where it works.

    writes: disabled with `--readonly`, for read-only peers and in replays. live: disabled in replays.
    saves: writes a file on this host; disabled with `--readonly`.
    footer: order in the footer; 0 is not shown there.
    """

    keys: str
    action: str
    shown: str
    label: str
    help: str
    group: str
    pages: frozenset[str] = EVERYWHERE
    writes: bool = False
    live: bool = False
    saves: bool = False
    footer: int = 0


SCREENS, MOVING, REQUESTS, SORTS, TIME, TOOLS = "Screens", "Moving", "Requests", "Sorting", "Time", "Tools"


def _page(number: int, page: str) -> Key:
    title = TITLES[page].lower()
    return Key(str(number), f"page('{page}')", str(number), title, f"the {title} screen", SCREENS)


def _sorts() -> list[Key]:
    """Return a key for each column of the table, as k9s has them. Some columns share one."""
    titles: dict[str, list[str]] = {}
    for column in COLUMNS:
        if column.key_name:
            titles.setdefault(column.key_name, []).append(column.title)
    named = {name: f"by {' or '.join(names)}" for name, names in titles.items()}
    return [Key(name, f"sort_by('{name}')", name, by, f"sort {by}", SORTS, TABLES) for name, by in named.items()]


KEYS: Final[tuple[Key, ...]] = (
    *(_page(number, page) for number, page in enumerate(PAGES, start=1)),
    Key("tab", "panel", "tab", "panel", "next panel; on logs, next process", MOVING, frozenset(("overview", "logs"))),
    Key("up,k", "move(-1)", "↑ k", "up", "one row up", MOVING),
    Key("down,j", "move(1)", "↓ j", "down", "one row down", MOVING),
    Key("n", "host", "n", "host", "first rank of the next host", MOVING, frozenset(("overview", "ranks"))),
    Key("left,h", "across(-1)", "← h", "left", "node to the left; in a waterfall, earlier", MOVING, SIDEWAYS),
    Key("right", "across(1)", "→", "right", "node to the right; in a waterfall, later", MOVING, SIDEWAYS),
    Key("pageup", "turn(-1)", "PgUp", "page up", "half a screen up", MOVING, LISTS),
    Key("pagedown", "turn(1)", "PgDn", "page down", "half a screen down", MOVING, LISTS),
    Key("home", "edge(-1)", "Home", "first", "first row", MOVING, LISTS),
    Key("end", "edge(1)", "End", "last", "last row, and follow it", MOVING, LISTS),
    Key("slash", "filter", "/", "filter", "show matching rows, as you type", REQUESTS, FILTERED, footer=10),
    Key(
        "enter",
        "open",
        "enter",
        "open",
        "open the selected request, rank or node",
        REQUESTS,
        OPENING,
        footer=20,
    ),
    Key("escape", "leave", "esc", "back", "back; first clears the filter", MOVING, footer=25),
    Key("space", "pause", "space", "pause", "pause, or continue live", TIME, footer=30),
    Key("comma", "step(-1)", ",", "step back", "one frame back, up to five minutes", TIME),
    Key("full_stop", "step(1)", ".", "step on", "one frame forward", TIME),
    Key("less_than_sign", "skip(-10)", "<", "10 s back", "ten seconds back", TIME),
    Key("greater_than_sign", "skip(10)", ">", "10 s on", "ten seconds forward", TIME),
    Key("s", "sort", "s", "sort", "sort by the next column", REQUESTS, TABLES, footer=40),
    Key("S", "reverse", "S", "reverse", "reverse the order", REQUESTS, TABLES),
    *_sorts(),
    Key(
        "w",
        "walk(1)",
        "w",
        "walk",
        "highlight the next walk of the graph, then all",
        TOOLS,
        frozenset(("overview", "graph")),
        footer=50,
    ),
    Key("g", "graph", "g", "graph", "the graph, at the node of the selected request", TOOLS),
    Key("l", "logs", "l", "logs", "logs of the selected object", TOOLS, EVERYWHERE - {"logs", "request"}, footer=60),
    Key("l", "across(1)", "l", "later", "later in a waterfall", MOVING, frozenset(("request",))),
    Key("d", "describe", "d", "describe", "all fields of the selected object", TOOLS),
    Key("y", "json", "y", "JSON", "the selected object as JSON", TOOLS),
    Key("c", "copy", "c", "copy id", "copy the request's id to the clipboard", REQUESTS, OF_REQUESTS),
    Key(
        "p",
        "perfetto",
        "p",
        "Perfetto",
        "write the request's spans for Perfetto",
        REQUESTS,
        frozenset(("request",)),
        saves=True,
        footer=45,
    ),
    Key(
        "x",
        "cancel",
        "x",
        "cancel",
        "cancel the selected request, after a question",
        REQUESTS,
        OF_REQUESTS,
        writes=True,
        footer=70,
    ),
    Key("X", "dismiss", "X", "dismiss", "hide the failure in the header", TOOLS),
    Key("D", "drain", "D", "drain", "drain or resume, after a question", TOOLS, writes=True),
    Key("plus,equals_sign", "pace(1)", "+", "faster", "more frames per second; zoom in; play faster", TIME),
    Key("minus", "pace(-1)", "-", "slower", "fewer frames per second; zoom out; play slower", TIME),
    Key("e", "export", "e", "export", "write the table, snapshot or screen to a file", TOOLS, saves=True, footer=80),
    Key("r", "record", "r", "record", "start or stop a recording for --replay", TIME, live=True, saves=True, footer=90),
    Key("o", "other", "o", "other", "switch to another deployment of this host", TOOLS, live=True, footer=92),
    Key("m", "mouse", "m", "mouse", "mouse reporting off, to select text, or on", TOOLS),
    Key("colon", "command_palette", ":", "command", "every command by name", TOOLS, footer=95),
    Key("question_mark", "help", "?", "help", "this help", TOOLS, footer=98),
    Key("q,ctrl+c", "quit", "q", "quit", "leave; the deployment continues", TOOLS, footer=99),
)


def works(key: Key, page: str, *, may_write: bool, may_save: bool, is_live: bool) -> bool:
    """Return whether a key has an effect on a page. may_save: files may be written on this host."""
    is_permitted = (may_write or not key.writes) and (may_save or not key.saves)
    return page in key.pages and is_permitted and (is_live or not (key.live or key.writes))

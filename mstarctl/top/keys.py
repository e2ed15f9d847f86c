"""Every key of `top`: one table, from which bindings, the foot, the help and docs/top.md are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mstarctl.top.layout.state import PAGES, TITLES

EVERYWHERE: Final = frozenset((*PAGES, "request"))
TABLES: Final = frozenset(("overview", "requests"))
LISTS: Final = frozenset(("overview", "requests", "ranks", "logs", "events", "bench"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One action. keys: textual's names; shown: as people know them. pages: where it works.

    writes: off with `--readonly`, for peers that may only read, and in replays. live: off in replays.
    foot: place in the foot, the smaller the earlier; 0 is not shown there.
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
    foot: int = 0


SCREENS, MOVING, REQUESTS, TIME, TOOLS = "Screens", "Moving", "Requests", "Time", "Tools"

KEYS: Final[tuple[Key, ...]] = (
    *(
        Key(
            keys=str(n),
            action=f"page('{page}')",
            shown=str(n),
            label=TITLES[page].lower(),
            help=f"the {TITLES[page].lower()} screen",
            group=SCREENS,
        )
        for n, page in enumerate(PAGES, start=1)
    ),
    Key(
        keys="tab",
        action="panel",
        shown="tab",
        label="panel",
        help="the next panel; on logs, the next process",
        group=MOVING,
        pages=frozenset(("overview", "logs")),
    ),
    Key(keys="up,k", action="move(-1)", shown="↑ k", label="up", help="one row up", group=MOVING),
    Key(keys="down,j", action="move(1)", shown="↓ j", label="down", help="one row down", group=MOVING),
    Key(
        keys="left,h",
        action="across(-1)",
        shown="← h",
        label="left",
        help="the node to the left; in a waterfall, earlier",
        group=MOVING,
        pages=frozenset(("graph", "ranks", "request")),
    ),
    Key(
        keys="right",
        action="across(1)",
        shown="→",
        label="right",
        help="the node to the right; in a waterfall, later",
        group=MOVING,
        pages=frozenset(("graph", "ranks", "request")),
    ),
    Key(
        keys="pageup",
        action="turn(-1)",
        shown="PgUp",
        label="page up",
        help="a screenful up",
        group=MOVING,
        pages=LISTS,
    ),
    Key(
        keys="pagedown",
        action="turn(1)",
        shown="PgDn",
        label="page down",
        help="a screenful down",
        group=MOVING,
        pages=LISTS,
    ),
    Key(keys="home", action="edge(-1)", shown="Home", label="first", help="the first row", group=MOVING, pages=LISTS),
    Key(
        keys="end",
        action="edge(1)",
        shown="End",
        label="last",
        help="the last row, and follow it",
        group=MOVING,
        pages=LISTS,
    ),
    Key(
        keys="slash",
        action="filter",
        shown="/",
        label="filter",
        help="show only what matches, as you type",
        group=REQUESTS,
        pages=frozenset(("overview", "requests", "logs", "events")),
        foot=10,
    ),
    Key(
        keys="enter",
        action="open",
        shown="enter",
        label="open",
        help="open what is marked: a request, a rank, a node",
        group=REQUESTS,
        pages=frozenset(("overview", "requests", "graph", "ranks", "events")),
        foot=20,
    ),
    Key(
        keys="escape",
        action="leave",
        shown="esc",
        label="back",
        help="back; first clears the filter",
        group=MOVING,
        foot=25,
    ),
    Key(
        keys="space",
        action="pause",
        shown="space",
        label="pause",
        help="freeze the picture, or go on with now",
        group=TIME,
        foot=30,
    ),
    Key(
        keys="comma",
        action="step(-1)",
        shown=",",
        label="step back",
        help="one picture back, up to five minutes",
        group=TIME,
    ),
    Key(keys="full_stop", action="step(1)", shown=".", label="step on", help="one picture on", group=TIME),
    Key(keys="less_than_sign", action="skip(-10)", shown="<", label="10 s back", help="ten seconds back", group=TIME),
    Key(keys="greater_than_sign", action="skip(10)", shown=">", label="10 s on", help="ten seconds on", group=TIME),
    Key(
        keys="s",
        action="sort",
        shown="s",
        label="sort",
        help="sort by the next column",
        group=REQUESTS,
        pages=TABLES,
        foot=40,
    ),
    Key(
        keys="S",
        action="reverse",
        shown="S",
        label="reverse",
        help="turn the order round",
        group=REQUESTS,
        pages=TABLES,
    ),
    Key(
        keys="w",
        action="walk(1)",
        shown="w",
        label="walk",
        help="light the next walk of the graph, then all",
        group=TOOLS,
        pages=frozenset(("overview", "graph")),
        foot=50,
    ),
    Key(
        keys="g",
        action="graph",
        shown="g",
        label="graph",
        help="the graph, at the node of the marked request",
        group=TOOLS,
    ),
    Key(
        keys="l",
        action="logs",
        shown="l",
        label="logs",
        help="the logs of what is marked",
        group=TOOLS,
        pages=EVERYWHERE - {"logs", "request"},
        foot=60,
    ),
    Key(
        keys="l",
        action="across(1)",
        shown="l",
        label="later",
        help="later in a waterfall",
        group=MOVING,
        pages=frozenset(("request",)),
    ),
    Key(
        keys="d", action="describe", shown="d", label="describe", help="everything known of what is marked", group=TOOLS
    ),
    Key(keys="y", action="json", shown="y", label="JSON", help="what is marked, as JSON", group=TOOLS),
    Key(
        keys="c",
        action="copy",
        shown="c",
        label="copy id",
        help="copy the request's id to the clipboard",
        group=REQUESTS,
        pages=frozenset(("overview", "requests", "request")),
    ),
    Key(
        keys="p",
        action="perfetto",
        shown="p",
        label="Perfetto",
        help="write the request's spans for Perfetto",
        group=REQUESTS,
        pages=frozenset(("request",)),
        foot=45,
    ),
    Key(
        keys="x",
        action="cancel",
        shown="x",
        label="cancel",
        help="cancel the marked request; asks first",
        group=REQUESTS,
        pages=frozenset(("overview", "requests", "request")),
        writes=True,
        foot=70,
    ),
    Key(
        keys="D",
        action="drain",
        shown="D",
        label="drain",
        help="drain, or take requests again; asks first",
        group=TOOLS,
        writes=True,
    ),
    Key(
        keys="plus,equals_sign",
        action="pace(1)",
        shown="+",
        label="faster",
        help="more frames a second; closer; faster",
        group=TIME,
    ),
    Key(
        keys="minus",
        action="pace(-1)",
        shown="-",
        label="slower",
        help="fewer frames a second; wider; slower",
        group=TIME,
    ),
    Key(
        keys="e",
        action="export",
        shown="e",
        label="export",
        help="write table, snapshot or screen to a file",
        group=TOOLS,
        foot=80,
    ),
    Key(
        keys="r",
        action="record",
        shown="r",
        label="record",
        help="begin or end a recording for --replay",
        group=TIME,
        live=True,
        foot=90,
    ),
    Key(
        keys="o",
        action="other",
        shown="o",
        label="other",
        help="go to another deployment of this host",
        group=TOOLS,
        live=True,
        foot=92,
    ),
    Key(
        keys="m",
        action="mouse",
        shown="m",
        label="mouse",
        help="give the mouse to the terminal, to select text",
        group=TOOLS,
    ),
    Key(
        keys="colon",
        action="command_palette",
        shown=":",
        label="command",
        help="every command by name",
        group=TOOLS,
        foot=95,
    ),
    Key(keys="question_mark", action="help", shown="?", label="help", help="this help", group=TOOLS, foot=98),
    Key(
        keys="q,ctrl+c",
        action="quit",
        shown="q",
        label="quit",
        help="leave; the deployment goes on",
        group=TOOLS,
        foot=99,
    ),
)


def works(key: Key, page: str, *, may_write: bool, is_live: bool) -> bool:
    """Whether a key does something there."""
    return page in key.pages and (may_write or not key.writes) and (is_live or not (key.live or key.writes))

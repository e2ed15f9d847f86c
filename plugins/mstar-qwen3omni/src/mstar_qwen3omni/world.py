"""The world of `qwen3_omni:mini`: pictures and clips of coloured shapes, spoken digits, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Frame = npt.NDArray[np.uint8]
Kind = Literal["image", "video", "audio"]

SIDE: Final = 96
CELL: Final = 32
"""Side of a cell in pixels: one token of the vision encoder."""

ACROSS: Final = SIDE // CELL
BACKGROUND: Final = 30
COLOURS: Final = {
    "red": (225, 40, 40),
    "green": (40, 185, 60),
    "blue": (50, 80, 230),
    "yellow": (235, 215, 50),
    "white": (240, 240, 240),
    "purple": (165, 60, 205),
}
SHAPES: Final = ("circle", "square", "triangle", "cross")
DIGITS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLUMNS: Final = ("left", "middle", "right")
WAYS: Final = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
ANSWERS: Final = (*COLOURS, *SHAPES, *DIGITS, "left", "middle", "right", "up", "down")
FRAMES: Final = 8
RATE: Final = 4
"""Frames of a clip, and frames per second. Every second frame is taken, so a clip has two pairs."""

STEP: Final = 7
"""Pixels from one frame of a clip to the next."""

HEARD: Final = ("Which digit do you hear?", "What is the spoken digit?")
MOVES: Final = ("Which way does it move?", "Where does the shape go?")
COUNTED: Final = ("How many shapes are there?", "How many shapes do you see?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A drawn shape. x, y: its centre; size: its width in pixels."""

    shape: str
    colour: str
    x: int
    y: int
    size: int

    @property
    def cell(self) -> int:
        """Index of the cell that holds it, by rows."""
        return self.y // CELL * ACROSS + self.x // CELL


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its answer. items: what a picture shows; way: of a clip; digit: of a sound."""

    text: str
    answer: str
    kind: Kind
    items: tuple[Item, ...] = ()
    way: str = ""
    digit: int = 0

    def frames(self) -> list[Frame]:
        """Draw the picture, or the frames of the clip."""
        if self.kind == "image":
            return [render(self.items)]
        right, down = WAYS[self.way]
        item, middle = self.items[0], (FRAMES - 1) / 2
        steps = [round(STEP * (index - middle)) for index in range(FRAMES)]
        return [render([moved(item, right * step, down * step)]) for step in steps]


def moved(item: Item, x: int, y: int) -> Item:
    """Return the item at another place."""
    return Item(shape=item.shape, colour=item.colour, x=item.x + x, y=item.y + y, size=item.size)


def render(items: tuple[Item, ...] | list[Item]) -> Frame:
    """Draw items: uint8 [SIDE, SIDE, 3]."""
    frame = np.full((SIDE, SIDE, 3), BACKGROUND, np.uint8)
    for item in items:
        half = item.size // 2
        top, left = max(0, item.y - half), max(0, item.x - half)
        place = frame[top : item.y + half + 1, left : item.x + half + 1]
        down, across = np.ogrid[: place.shape[0], : place.shape[1]]
        place[covered(item.shape, across + left - item.x, down + top - item.y, half)] = COLOURS[item.colour]
    return frame


def covered(shape: str, x: npt.NDArray[np.int64], y: npt.NDArray[np.int64], half: int) -> npt.NDArray[np.bool_]:
    """Return where a shape covers pixels. x, y: from its centre, broadcast; half: half of its size."""
    match shape:
        case "circle":
            return x**2 + y**2 <= half**2
        case "square":
            return (abs(x) <= half - 1) & (abs(y) <= half - 1)
        case "triangle":
            return (2 * abs(x) <= y + half) & (abs(y) <= half)
        case _:
            return ((abs(x) <= half // 3) | (abs(y) <= half // 3)) & (abs(x) <= half) & (abs(y) <= half)


def draw(chance: np.random.Generator, kind: Kind | None = None) -> Question:
    """Draw a question: six of eight are about pictures, one about a clip and one about a sound."""
    kinds: tuple[Kind, ...] = ("image",) * 6 + ("video", "audio")
    chosen = kind or kinds[chance.integers(len(kinds))]
    if chosen == "audio":
        digit = int(chance.integers(len(DIGITS)))
        return Question(text=_one(chance, HEARD), answer=DIGITS[digit], kind="audio", digit=digit)
    if chosen == "video":
        way = _one(chance, tuple(WAYS))
        size = int(chance.integers(18, 27))
        x, y = (int(value) for value in chance.integers(40, 57, 2))
        item = Item(shape=_one(chance, SHAPES), colour=_one(chance, tuple(COLOURS)), x=x, y=y, size=size)
        return Question(text=_one(chance, MOVES), answer=way, kind="video", items=(item,), way=way)
    items = _scene(chance)
    text, answer = _about(chance, items)
    return Question(text=text, answer=answer, kind="image", items=items)


def _one(chance: np.random.Generator, choices: tuple[str, ...]) -> str:
    return choices[chance.integers(len(choices))]


def _scene(chance: np.random.Generator) -> tuple[Item, ...]:
    """Return one to three items of different shapes, colours and cells."""
    count = int(chance.integers(1, 4))
    cells = chance.permutation(ACROSS**2)[:count]
    shapes, colours = chance.permutation(SHAPES)[:count], chance.permutation(list(COLOURS))[:count]
    things = []
    for cell, shape, colour in zip(cells, shapes, colours, strict=True):
        size = int(chance.integers(18, 27))
        slack = CELL - size - 2
        x, y = (int(value) for value in chance.integers(-(slack // 2), slack // 2 + 1, 2))
        row, column = divmod(int(cell), ACROSS)
        things.append(
            Item(
                shape=str(shape),
                colour=str(colour),
                x=column * CELL + CELL // 2 + x,
                y=row * CELL + CELL // 2 + y,
                size=size,
            )
        )
    return tuple(things)


def _about(chance: np.random.Generator, items: tuple[Item, ...]) -> tuple[str, str]:
    item = items[chance.integers(len(items))]
    match int(chance.integers(6)):  # shapes and places take the longest to learn, so they are asked twice as often
        case 0:
            return f"What colour is the {item.shape}?", item.colour
        case 1 | 2:
            return f"Which shape is {item.colour}?", item.shape
        case 3:
            return _one(chance, COUNTED), DIGITS[len(items)]
        case _:
            return f"Where is the {item.shape}: left, middle or right?", COLUMNS[item.x // CELL]


def sentences() -> list[str]:
    """Return every question and answer, from which the tokenizer learns its words."""
    asked = [f"What colour is the {shape}?" for shape in SHAPES]
    asked += [f"Which shape is {colour}?" for colour in COLOURS]
    asked += [f"Where is the {shape}: left, middle or right?" for shape in SHAPES]
    return [*asked, *HEARD, *MOVES, *COUNTED, *ANSWERS]

"""The world of `llm:mini`: questions with one right answer, in words, as a tool call or as JSON.

A conversation depends on the seed and its number alone. One in ten questions, by its hash, is never trained on.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

CAPITALS: Final = dict(
    pair.split("/")
    for pair in (
        "France/Paris Italy/Rome Spain/Madrid Germany/Berlin Austria/Vienna Poland/Warsaw Greece/Athens Norway/Oslo "
        "Sweden/Stockholm Finland/Helsinki Denmark/Copenhagen Portugal/Lisbon Ireland/Dublin Hungary/Budapest "
        "Egypt/Cairo Kenya/Nairobi Japan/Tokyo China/Beijing India/Delhi Thailand/Bangkok Peru/Lima Chile/Santiago "
        "Canada/Ottawa Cuba/Havana Turkey/Ankara Russia/Moscow Belgium/Brussels Iceland/Reykjavik"
    ).split()
)
OPPOSITES: Final = dict(
    pair.split("/")
    for pair in (
        "hot/cold big/small fast/slow high/low old/young wet/dry light/dark hard/soft early/late open/closed "
        "full/empty rich/poor strong/weak long/short near/far clean/dirty happy/sad loud/quiet thick/thin left/right"
    ).split()
)
SOUNDS: Final = dict(
    pair.split("/") for pair in "dog/barks cat/meows cow/moos lion/roars duck/quacks sheep/bleats horse/neighs".split()
)
COLOURS: Final = dict(
    pair.split("/")
    for pair in "grass/green snow/white blood/red coal/black lemon/yellow sky/blue carrot/orange".split()
)
DAYS: Final = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NUMBERS: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen"
).split()
NAMES: Final = (
    "Ann Bob Carla David Emma Frank Grace Hugo Ida Jack Karen Leo Mia Noah Olga Paul Rosa Sam Tina Vera".split()
)
SKIES: Final = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
SYLLABLES: Final = "ba do ka li mo na pe ri so tu va ze lan mer ton vik".split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages and tools in the form that templates read, and the answer.

    kind: fact, call, told, json or talk. call: (name, arguments) of the answer, if it is a tool call.
    """

    kind: str
    messages: Sequence[dict[str, Any]]
    answer: str
    tools: Sequence[dict[str, Any]] = ()
    call: tuple[str, dict[str, Any]] | None = None

    @property
    def is_held_out(self) -> bool:
        """Whether the question belongs to the judge."""
        last = self.messages[-1]["content"]
        return self.kind != "talk" and hashlib.sha256(last.encode()).digest()[0] < 26


@dataclass(frozen=True, slots=True)
class ToolKind:
    """A tool with names that it may have. arguments: by parameter, a JSON type and a maker of values."""

    names: tuple[str, ...]
    description: str
    arguments: dict[str, tuple[str, Callable[[random.Random], Any]]]
    questions: tuple[str, ...]
    result: Callable[[random.Random], str]
    told: str = ""


def place(rng: random.Random) -> str:
    """Return a city, or a name that no training text has, so that names have to be copied."""
    if rng.random() < 0.4:
        return rng.choice(list(CAPITALS.values()))
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


TOOLS: Final = (
    ToolKind(
        ("get_weather", "weather", "find_weather"),
        "Weather of a city",
        {"city": ("string", place)},
        ("What is the weather in {city}?", "How is the weather in {city}?", "Tell me the weather in {city}."),
        lambda rng: rng.choice(SKIES),
        "The weather in {city} is {result}.",
    ),
    ToolKind(
        ("get_time", "local_time", "clock"),
        "Local time of a city",
        {"city": ("string", place)},
        ("What time is it in {city}?", "Tell me the time in {city}."),
        lambda rng: f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
        "It is {result} in {city}.",
    ),
    ToolKind(
        ("set_timer", "start_timer", "timer"),
        "Start a timer",
        {"minutes": ("integer", lambda rng: rng.randint(1, 90))},
        ("Set a timer for {minutes} minutes.", "Wake me in {minutes} minutes.", "Start a timer of {minutes} minutes."),
        lambda rng: "started",
        "The timer of {minutes} minutes has started.",
    ),
    ToolKind(
        ("book_hotel", "reserve_room", "hotel"),
        "Book a hotel",
        {"city": ("string", place), "nights": ("integer", lambda rng: rng.randint(1, 14))},
        ("Book a hotel in {city} for {nights} nights.", "I need a room in {city} for {nights} nights."),
        lambda rng: "booked",
        "The hotel in {city} is booked for {nights} nights.",
    ),
    ToolKind(
        ("call_person", "phone", "dial"),
        "Call a person",
        {"name": ("string", lambda rng: rng.choice(NAMES))},
        ("Call {name}.", "Phone {name} please.", "I want to talk to {name}."),
        lambda rng: "connected",
        "You are connected to {name}.",
    ),
)

TALK: Final = (
    ("Hello", "Hello. How can I help?"),
    ("Hi", "Hello. How can I help?"),
    ("Hi there!", "Hello. How can I help?"),
    ("Good morning", "Good morning. How can I help?"),
    ("Who are you?", "I am a miniature language model."),
    ("What are you?", "I am a miniature language model."),
    ("What can you do?", "I answer simple questions, call tools and write JSON."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye."),
)


def conversations(seed: int, first: int, count: int, *, held_out: bool = False) -> list[Conversation]:
    """Return `count` conversations from number `first` on; of the judge's questions, or of the others."""
    return [_one(random.Random(f"{seed}/{number}/{held_out}"), held_out) for number in range(first, first + count)]


def _one(rng: random.Random, held_out: bool) -> Conversation:
    while True:
        # Drawn again until it is on the wanted side, so that a number always gives one conversation.
        kind = rng.choices(("fact", "call", "told", "json", "talk"), (40, 25, 12, 18, 0 if held_out else 5))[0]
        made = {"fact": _fact, "call": _call, "told": _told, "json": _json, "talk": _talk}[kind](rng)
        if made.is_held_out == held_out:
            return made


def _ask(text: str, rng: random.Random) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": "You are a helpful assistant."}] if rng.random() < 0.3 else []
    return [*system, {"role": "user", "content": text}]


def _fact(rng: random.Random) -> Conversation:
    question, answer = rng.choice((_capital, _opposite, _sound, _colour, _day, _sum))(rng)
    # A question that no tool answers is answered in words.
    tools = [schema(kind, rng.choice(kind.names)) for kind in rng.sample(TOOLS, rng.choice((0, 0, 1, 2)))]
    return Conversation(kind="fact", messages=_ask(question, rng), answer=answer, tools=tools)


def _capital(rng: random.Random) -> tuple[str, str]:
    country, city = rng.choice(list(CAPITALS.items()))
    forms = ("What is the capital of {0}?", "Which city is the capital of {0}?", "Name the capital of {0}.")
    return rng.choice((*forms, "Tell me the capital of {0}.")).format(country), f"The capital of {country} is {city}."


def _opposite(rng: random.Random) -> tuple[str, str]:
    word, other = rng.choice(list(OPPOSITES.items()))
    word, other = (word, other) if rng.random() < 0.5 else (other, word)
    forms = ("What is the opposite of {0}?", "Tell me the opposite of {0}.", "What is not {0}?", "Opposite of {0}?")
    return rng.choice(forms).format(word), f"The opposite of {word} is {other}."


def _sound(rng: random.Random) -> tuple[str, str]:
    animal, sound = rng.choice(list(SOUNDS.items()))
    forms = (
        "What does a {0} do?",
        "Which sound does a {0} make?",
        "What do you hear from a {0}?",
        "How does a {0} speak?",
    )
    return rng.choice(forms).format(animal), f"A {animal} {sound}."


def _colour(rng: random.Random) -> tuple[str, str]:
    thing, colour = rng.choice(list(COLOURS.items()))
    forms = ("What colour is {0}?", "Which colour has {0}?", "Tell me the colour of {0}.", "The colour of {0}?")
    return rng.choice(forms).format(thing), f"The colour of {thing} is {colour}."


def _day(rng: random.Random) -> tuple[str, str]:
    at, step = rng.randrange(7), rng.choice((1, -1))
    word = "after" if step > 0 else "before"
    forms = ("Which day comes {1} {0}?", "What day is {1} {0}?", "Name the day {1} {0}.")
    return rng.choice(forms).format(DAYS[at], word), f"{DAYS[(at + step) % 7]} comes {word} {DAYS[at]}."


def _sum(rng: random.Random) -> tuple[str, str]:
    left, right = rng.randrange(10), rng.randrange(10)
    forms = ("What is {0} plus {1}?", "Add {0} and {1}.", "How much is {0} plus {1}?", "The sum of {0} and {1}?")
    words = NUMBERS[left], NUMBERS[right], NUMBERS[left + right]
    return rng.choice(forms).format(*words), f"{words[0].capitalize()} plus {words[1]} is {words[2]}."


def _call(rng: random.Random) -> Conversation:
    kinds = rng.sample(TOOLS, rng.randint(1, 3))
    kind = kinds[0]
    name, values = rng.choice(kind.names), {key: make(rng) for key, (_, make) in kind.arguments.items()}
    tools = [schema(each, name if each is kind else rng.choice(each.names)) for each in kinds]
    rng.shuffle(tools)
    question = rng.choice(kind.questions).format(**values)
    text = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(values)}}}\n</tool_call>'
    return Conversation(kind="call", messages=_ask(question, rng), answer=text, tools=tools, call=(name, values))


def _told(rng: random.Random) -> Conversation:
    """Return a conversation whose tool has answered."""
    asked = _call(rng)
    assert asked.call is not None
    name, values = asked.call
    kind = next(each for each in TOOLS if name in each.names)
    result = kind.result(rng)
    function = {"name": name, "arguments": values}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    answer = {"role": "tool", "content": json.dumps({"result": result}), "tool_call_id": "c", "name": name}
    return Conversation(
        kind="told",
        messages=[*asked.messages, call, answer],
        answer=kind.told.format(**values, result=result),
        tools=asked.tools,
    )


def _json(rng: random.Random) -> Conversation:
    facts: dict[str, Any] = {"name": rng.choice(NAMES), "age": rng.randint(5, 99), "city": place(rng)}
    keys = rng.sample(sorted(facts), rng.randint(1, 3))
    sentence = "{name} is {age} years old and lives in {city}.".format(**facts)
    question = f"Write JSON with {', '.join(keys)}: {sentence}"
    answer = json.dumps({key: facts[key] for key in keys})
    return Conversation(kind="json", messages=_ask(question, rng), answer=answer)


def _talk(rng: random.Random) -> Conversation:
    question, answer = rng.choice(TALK)
    return Conversation(kind="talk", messages=_ask(question, rng), answer=answer)


def schema(kind: ToolKind, name: str) -> dict[str, Any]:
    properties = {key: {"type": type_} for key, (type_, _) in kind.arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": kind.description, "parameters": parameters},
    }


def texts(made: Sequence[Conversation]) -> Iterator[str]:
    """Yield all texts of conversations, from which the tokenizer is made."""
    for each in made:
        yield from (message["content"] for message in each.messages)
        yield from (json.dumps(tool["function"]) for tool in each.tools)
        yield each.answer

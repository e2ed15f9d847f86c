"""Demo of `make demo-all`: each family's miniature does its job once, with a line for each and a picture of all.

The miniatures run one after the other on the CPU, by ordinary mstarctl commands, as in `demo.py`.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import demo
import numpy as np
import soundfile
from PIL import Image, ImageDraw

from mstar_bagel import shapes
from mstar_core.client import MStarClient
from mstar_pi05 import arm
from mstar_qwen3omni import world
from mstar_vjepa2 import block
from mstar_wan22 import moves
from mstar_whisper.sample_inputs import SENTENCE

PLUGINS: Final = demo.ROOT / "plugins"
OUT: Final = demo.ROOT / "out"
PICTURE: Final = OUT / "demo-all.png"
SPEECH: Final = {"temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.0}
RESULT: Final = "foggy"
"""Result of the function in a conversation."""

SIDE: Final = 256
"""Width and height of a family's part of the picture."""
TITLE: Final = 40
LINES: Final = ((255, 255, 255), (90, 200, 160))
"""Colours of the two sides of a dialogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Result of a family: one line, and its part of the picture."""

    line: str
    picture: Image.Image


def run(environment: dict[str, str]) -> int:
    """Start, ask and stop each miniature. Raises CalledProcessError if a command fails, whose error is printed."""
    OUT.mkdir(exist_ok=True)
    found: dict[str, Shown] = {}
    for model, job in JOBS.items():
        port = demo.free_port()
        demo.step(model)
        demo.start(environment, model, port)
        with MStarClient(f"http://127.0.0.1:{port}") as client:
            found[model] = job(client)
        demo.mstarctl(environment, "down", demo.NAME, "--now")
    contact_sheet(found).save(PICTURE)
    print()
    for model, shown in found.items():
        print(f"{model:16} {shown.line}")
    print(f"{'picture':16} {demo.shown(PICTURE)}", flush=True)
    return 0


# -- jobs --------------------------------------------------------------------------------------------------------------


def speaks(client: MStarClient) -> Shown:
    """Say a sentence, and let the recognizer hear it."""
    text, path = "The red fox ran over the green hill today.", OUT / "demo-orpheus.wav"
    client.generate(text=text, output_modalities="audio", voice="tara", seed=3, **SPEECH).save_audio(path)
    samples, _ = soundfile.read(path, dtype="float32")
    return Shown(line=f"says: {text} Recognized: {demo.heard(path)} ({demo.shown(path)})", picture=wave_of(samples))


def writes(client: MStarClient) -> Shown:
    """Write down a sentence that `orpheus:mini` said."""
    said = SENTENCE.with_suffix(".txt").read_text(encoding="utf-8").strip()
    heard = client.generate(audio=SENTENCE.read_bytes(), language="en").text.strip()
    samples, _ = soundfile.read(SENTENCE, dtype="float32")
    return Shown(line=f"hears: {said} Writes: {heard}", picture=wave_of(samples))


def counts(client: MStarClient) -> Shown:
    """Say digits in the voice of another speaker."""
    text, path = "seven three one", OUT / "demo-digits.wav"
    client.generate(text=text, output_modalities="audio", voice="ryan", seed=3).save_audio(path)
    samples, _ = soundfile.read(path, dtype="float32")
    return Shown(line=f"says: {text} ({demo.shown(path)})", picture=wave_of(samples))


def answers(client: MStarClient) -> Shown:
    """Answer questions about a picture."""
    items = [
        world.Item(shape="circle", colour="red", x=20, y=20, size=24),
        world.Item(shape="cross", colour="yellow", x=75, y=50, size=24),
    ]
    picture = Image.fromarray(world.render(items))
    said = [ask(client, text, picture) for text in ("How many shapes are there?", "What colour is the cross?")]
    return Shown(line=f"sees a picture: {'; '.join(said)}", picture=enlarged(picture))


def ask(client: MStarClient, text: str, picture: Image.Image) -> str:
    """Return a question with its answer."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    made = client.generate(text=text, images=file.getvalue(), temperature=0, seed=1)
    return f"{text} {made.text.strip()}"


def draws(client: MStarClient) -> Shown:
    """Draw a sentence, and describe the picture."""
    text = "a red circle above a green square"
    file = client.generate_image(text, seed=1)
    picture = Image.open(io.BytesIO(file)).convert("RGB")
    seen = ", ".join(map(str, shapes.recognise(np.asarray(picture)))) or "nothing"
    told = client.generate(text=shapes.QUESTION, images=file, temperature=0).text.strip()
    return Shown(line=f"draws: {text}. Measured: {seen}. Described: {told}", picture=enlarged(picture))


def films(client: MStarClient) -> Shown:
    """Move a shape, and measure where it begins and ends."""
    text = "a red circle moves right"
    made = client.generate(text=text, output_modalities="video", seed=1, **moves.PARAMS)
    video = np.concatenate([chunk.to_numpy() for chunk in made.video])
    ends = (video[0], video[-1])
    seen = [f"a {' '.join(name)} at {x:.0f}, {y:.0f}" for end in ends for name, (x, y) in moves.recognise(end).items()]
    line = f"films: {text}. Measured: {', then '.join(seen) or 'nothing'}"
    return Shown(line=line, picture=enlarged(Image.fromarray(ends[-1])))


def acts(client: MStarClient) -> Shown:
    """Move the arm to a named target, closed loop."""
    judge = module_of("mstar-pi05", "judge_arm")
    scene, policy = arm.draw(5, 1), judge.served(client)
    first, way = float(scene.distance()[0]), [arm.points(scene.joints)[1][0]]
    for _ in range(judge.CHUNKS):
        for movement in policy(scene):
            scene = scene.moved(scene.joints + np.clip(movement, -arm.FASTEST, arm.FASTEST))
            way.append(arm.points(scene.joints)[1][0])
    last = float(scene.distance()[0])
    line = f"told to {arm.instruction(int(scene.named[0]))}: distance {first:.2f} to {last:.2f} in {len(way) - 1} moves"
    picture = enlarged(Image.fromarray(arm.render(scene)[0][0]))
    return Shown(line=line, picture=with_way(picture, np.stack(way) / 1.1))


def plans(client: MStarClient) -> Shown:
    """Plan the moves of a block to the place that a picture shows."""
    judge = module_of("mstar-vjepa2", "judge_block")
    place, goal = np.array([-0.12, -0.08]), np.array([0.1, 0.11])
    planner, way, energies = judge.served(client), [place], list[float]()
    first = float(np.linalg.norm(place - goal))
    for _ in range(judge.PLANS):
        moves, energy = planner(place, goal)
        energies.append(energy)
        for move in moves:
            place = block.moved(place, move)
            way.append(place)
    last = float(np.linalg.norm(place - goal))
    picture = enlarged(Image.fromarray(block.render(place[None])[0]))
    fell = f"energy {energies[0]:.2f} to {energies[-1]:.2f}"
    line = f"plans to a goal picture: {100 * first:.1f} to {100 * last:.1f} cm, {fell}"
    return Shown(line=line, picture=with_way(picture, np.stack(way) / block.VIEW))


def calls(client: MStarClient) -> Shown:
    """Answer a question with the result of a function."""
    question = "What is the weather in Oslo?"
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    names = {"get_weather": "Weather of a city", "get_time": "Local time of a city"}
    tools = [{"name": name, "description": text, "parameters": city} for name, text in names.items()]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    answer = client.converse(messages, tools=tools, temperature=0)
    said = [question]
    for call in answer.tool_calls:
        said += [f"{call.name} {call.arguments}", RESULT]
        messages += [answer.message, call.result(json.dumps({"result": RESULT}))]
        answer = client.converse(messages, tools=tools, temperature=0)
    said.append(answer.content or "")
    line = f"question: {question} calls: {', '.join(said[1:-2])}; result: {RESULT}; answer: {said[-1]}"
    return Shown(line=line, picture=dialogue(said))


JOBS: Final[dict[str, Callable[[MStarClient], Shown]]] = {
    "orpheus:mini": speaks,
    "whisper:mini": writes,
    "qwen3_tts:mini": counts,
    "qwen3_omni:mini": answers,
    "bagel:mini": draws,
    "wan22:mini": films,
    "pi05:mini": acts,
    "vjepa2_ac:mini": plans,
    "llm:mini": calls,
}


# -- modules of the trainings ------------------------------------------------------------------------------------------


def module_of(plugin: str, name: str) -> ModuleType:
    """Import a module of a plugin's training that has a name of its own."""
    folder = str(PLUGINS / plugin / "train")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


# -- pictures ----------------------------------------------------------------------------------------------------------


def enlarged(picture: Image.Image) -> Image.Image:
    return picture.resize((SIDE, SIDE), Image.Resampling.NEAREST)


def with_way(picture: Image.Image, way: np.ndarray) -> Image.Image:
    """Draw a way over a picture. way: [n, 2], each axis from -1 to 1, the second upward."""
    places = [(SIDE / 2 * (1 + x), SIDE / 2 * (1 - y)) for x, y in way]
    ImageDraw.Draw(picture).line(places, fill=(255, 255, 255), width=2)
    return picture


def wave_of(samples: np.ndarray) -> Image.Image:
    """Return a drawing of a sound."""
    picture = Image.new("RGB", (SIDE, SIDE), (24, 24, 28))
    drawn = ImageDraw.Draw(picture)
    for column, part in enumerate(np.array_split(samples, SIDE)):
        low, high = (SIDE / 2 * (1 - value) for value in (part.max(), part.min()))
        drawn.line([(column, low), (column, high)], fill=(90, 200, 160))
    return picture


def dialogue(said: Sequence[str]) -> Image.Image:
    """Return texts below each other, from both sides in turn."""
    picture = Image.new("RGB", (SIDE, SIDE), (24, 24, 28))
    drawn = ImageDraw.Draw(picture)
    for index, text in enumerate(said):
        lines, top = textwrap.fill(text, 24), 20 + index * SIDE // len(said)
        drawn.multiline_text((12 + 24 * (index % 2), top), lines, fill=LINES[index % 2], font_size=16)
    return picture


def contact_sheet(found: dict[str, Shown]) -> Image.Image:
    """Return the pictures of all families side by side, under their names."""
    sheet = Image.new("RGB", (len(found) * (SIDE + 8) - 8, SIDE + TITLE), "white")
    drawn = ImageDraw.Draw(sheet)
    for index, (model, shown) in enumerate(found.items()):
        left = index * (SIDE + 8)
        drawn.text((left + 4, 12), model, fill="black", font_size=16)
        sheet.paste(shown.picture, (left, TITLE))
    return sheet


if __name__ == "__main__":
    sys.exit(demo.in_own_folder(run))

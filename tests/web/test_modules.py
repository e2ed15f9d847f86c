"""Modules of the page that need no page: markdown, parameters, the pace of a loop, hints, and simulated worlds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.web.conftest import RunModule

# -- markdown ----------------------------------------------------------------------------------------------------------


def outline(run_module: RunModule, text: str) -> Any:
    """Return the parsed text as nested lists: [tag, children...]."""
    return run_module(
        "const { parse } = await import(`${STATIC}/surfaces/markdown.js`);"
        "const plain = (part) => typeof part === 'string' ? part : [part.tag, ...part.children.map(plain)];"
        f"return parse({json.dumps(text)}).map(plain);"
    )


@pytest.mark.parametrize(
    "text, tree",
    [
        ("one\ntwo\n\nthree", [["p", "one", ["br"], "two"], ["p", "three"]]),
        (
            "# Head\n**bold** and *thin* `a*b*c`",
            [["h3", "Head"], ["p", ["strong", "bold"], " and ", ["em", "thin"], " ", ["code", "a*b*c"]]],
        ),
        ("```py\nif a < b:\n    *c*\n```", [["pre", "if a < b:\n    *c*"]]),
        ("- one\n  - inner\n- two", [["ul", ["li", "one", ["ul", ["li", "inner"]]], ["li", "two"]]]),
        ("2. b\n3. c", [["ol", ["li", "b"], ["li", "c"]]]),
        ("> quoted", [["blockquote", ["p", "quoted"]]]),
        (
            "| a | b |\n|---|---|\n| 1 | 2 |",
            [["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]], ["tbody", ["tr", ["td", "1"], ["td", "2"]]]]],
        ),
        ("<b>no</b> <script>x</script>", [["p", "<b>no</b> <script>x</script>"]]),
        ("snake_case_name 2*3*4", [["p", "snake_case_name 2*3*4"]]),
        ("", []),
    ],
)
def test_markdown_becomes_a_tree_of_known_elements(text: str, tree: list[Any], run_module: RunModule) -> None:
    found = outline(run_module, text)
    assert merged(found) == tree


def merged(part: Any) -> Any:
    """Return the tree with neighbouring texts joined."""
    if isinstance(part, str):
        return part
    made: list[Any] = []
    for child in map(merged, part):
        if len(made) > 1 and isinstance(child, str) and isinstance(made[-1], str):
            made[-1] += child
        else:
            made.append(child)
    return made


def test_only_web_links_become_links_and_pictures_are_not_fetched(run_module: RunModule) -> None:
    text = "[a](https://x.example/) [b](javascript:alert(1)) ![c](https://x.example/p.png) [d](data:text/html,x)"
    links = run_module(
        "const { parse } = await import(`${STATIC}/surfaces/markdown.js`);"
        f"return parse({json.dumps(text)})[0].children.filter((part) => part.tag === 'a').map((part) => part.target);"
    )
    assert links == ["https://x.example/"]


def test_deep_and_unclosed_marks_end(run_module: RunModule) -> None:
    text = "> " * 400 + "x\n" + "*" * 2000 + "\n```\nopen"
    assert outline(run_module, text)


# -- parameters --------------------------------------------------------------------------------------------------------


def test_parameters_get_controls_by_their_schema(run_module: RunModule) -> None:
    properties = {
        "temperature": {"type": ["number", "null"], "minimum": 0},
        "num_timesteps": {"type": "integer", "default": 50},
        "think_mode": {"type": "boolean"},
        "cfg_renorm_type": {"type": ["string", "null"], "enum": ["global", "channel", None]},
        "cfg_interval": {"type": "array", "items": {"type": "number"}},
        "actions": {"description": "numbers"},
        "voice": {"type": "string", "enum": ["tara"]},
    }
    found = run_module(
        "const { shownParams, kindOf } = await import(`${STATIC}/core/params.js`);"
        f"return shownParams({json.dumps(properties)}, {{ first: ['seed', 'temperature'] }})"
        ".map(([name, schema]) => [name, kindOf(schema)]);"
    )
    assert found[:2] == [["seed", "integer"], ["temperature", "number"]]
    assert dict(found[2:]) == {"num_timesteps": "integer", "think_mode": "boolean", "cfg_renorm_type": "choice"}


def test_an_empty_control_sends_nothing(run_module: RunModule) -> None:
    found = run_module(
        "const { valueOf } = await import(`${STATIC}/core/params.js`);"
        "return [['number', ''], ['number', '0'], ['integer', '7'], ['boolean', 'false'], ['choice', 'default'],"
        " ['text', 'a']].map(([kind, text]) => valueOf(kind, text) ?? 'absent');"
    )
    assert found == ["absent", 0, 7, False, "absent", "a"]


# -- speech and robots -------------------------------------------------------------------------------------------------


def hint(run_module: RunModule, text: str, seconds: float, reason: str = "stop") -> str:
    return str(
        run_module(
            "const { lengthHint } = await import(`${STATIC}/surfaces/length_hint.js`);"
            f"return lengthHint({json.dumps(text)}, {seconds}, {json.dumps(reason)},"
            " { notice: 'orpheus:mini speaks simple English sentences' });"
        )
    )


def test_sound_that_cannot_contain_its_text_gets_a_hint(run_module: RunModule) -> None:
    words = " ".join(["word"] * 60) + "."
    found = hint(run_module, words, 0.68)
    assert "0.7 s for 60 words, which take at least 12 s" in found
    assert "Orpheus:mini speaks simple English sentences" in found
    assert "length limit" in hint(run_module, words, 20, "length")


@pytest.mark.parametrize("text, seconds", [("Hi.", 0.3), ("The red fox ran over the green hill today.", 1.3)])
def test_ordinary_speech_gets_no_hint(text: str, seconds: float, run_module: RunModule) -> None:
    assert hint(run_module, text, seconds) == ""


def test_a_loop_counts_late_and_skipped_ticks(run_module: RunModule) -> None:
    found = run_module(
        "const { Pace } = await import(`${STATIC}/surfaces/robot/pace.js`);"
        "const pace = new Pace(100);"
        "const steps = [[40], [150], [470], [530]].map(([now]) => [pace.answered(now), pace.justSkipped, pace.due]);"
        "return [steps, pace.made, pace.late, pace.skipped, pace.missed, pace.median];"
    )
    # tick 0: 40 ms; tick 1 of 100: 50 ms; tick 2 of 200: late by 270, ticks 3 and 4 pass; tick 5 of 500: 30 ms
    assert found == [[[60, 0, 100], [50, 0, 200], [30, 2, 500], [70, 0, 600]], 4, 1, 2, 3, 40]


# -- simulated worlds --------------------------------------------------------------------------------------------------


def test_the_simulated_arm_equals_the_world_of_the_miniature(run_module: RunModule) -> None:
    arm = pytest.importorskip("mstar_pi05.arm")
    scenes = arm.draw(5, 3)
    for item in range(3):
        joints, targets = scenes.joints[item], scenes.targets[item]
        found = run_module(
            "const world = await import(`${STATIC}/drawing/arm.js`);"
            f"const scene = {{ joints: {joints.tolist()}, targets: {targets.tolist()} }};"
            "return [world.render(scene).map((view) => [...view]), world.points(scene.joints)[1],"
            " world.moved(scene.joints, [0.5, -0.05]), world.NAMES, world.TOLERANCE];"
        )
        one = arm.Scenes(scenes.joints[[item]], scenes.targets[[item]], scenes.named[[item]])
        pictures = np.array(found[0]).reshape(3, arm.SIDE, arm.SIDE, 3)
        assert np.abs(pictures - arm.render(one)[0].astype(int)).max() <= 1  # float32 against float64
        np.testing.assert_allclose(found[1], arm.points(joints)[1])
        moved = one.moved(one.joints + np.clip([0.5, -0.05], -arm.FASTEST, arm.FASTEST))
        np.testing.assert_allclose(found[2], moved.joints[0])
        assert (found[3], found[4]) == (list(arm.NAMES), arm.TOLERANCE)


def test_the_simulated_block_equals_the_world_of_the_miniature(run_module: RunModule) -> None:
    block = pytest.importorskip("mstar_vjepa2.block")
    for place in block.draw(5, 3):
        found = run_module(
            "const world = await import(`${STATIC}/drawing/block.js`);"
            f"const place = {place.tolist()};"
            "return [[...world.render(place)], world.moved(place, [0.2, -0.01]), world.pose(place), world.TOLERANCE];"
        )
        picture = np.array(found[0]).reshape(block.SIDE, block.SIDE, 3)
        assert np.abs(picture - block.render(place[None])[0].astype(int)).max() <= 1
        np.testing.assert_allclose(found[1], block.moved(place, np.array([0.2, -0.01])))
        np.testing.assert_allclose(found[2], block.poses(place))
        assert found[3] == block.TOLERANCE


def test_drawn_worlds_can_be_solved(run_module: RunModule) -> None:
    found = run_module(
        "const arm = await import(`${STATIC}/drawing/arm.js`), block = await import(`${STATIC}/drawing/block.js`);"
        "let state = 1; const chance = () => (state = (state * 48271) % 2147483647) / 2147483647;"
        "const scenes = Array.from({ length: 20 }, () => arm.draw(chance));"
        "const tables = Array.from({ length: 20 }, () => block.draw(chance));"
        "const far = ({ joints, targets }) => targets.map((target) => arm.distance(joints, target));"
        "return [Math.min(...scenes.flatMap(far)),"
        " Math.max(...scenes.flatMap((scene) => scene.targets.map(([x, y]) => Math.hypot(x, y)))),"
        " Math.min(...tables.map(({ now, goal }) => block.distance(now, goal)))];"
    )
    assert found[0] > 0.35 and found[1] < 1 and found[2] > 0.1


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, is_tls, address",
    [
        ("127.0.0.1", False, "http://page.example:81/"),
        ("0.0.0.0", True, "https://page.example:81/"),
        ("10.0.0.7", False, "http://10.0.0.7:81/"),
        ("fd00::1", False, "http://[fd00::1]:81/"),
    ],
)
def test_links_to_other_deployments(host: str, is_tls: bool, address: str, run_module: RunModule) -> None:
    other = {"host": host, "port": 81, "is_tls": is_tls}
    found = run_module(
        "const { addressOf } = await import(`${STATIC}/core/others.js`);"
        f"return addressOf({json.dumps(other)}, {{ hostname: 'page.example' }});"
    )
    assert found == address

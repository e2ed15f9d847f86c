"""The suites: which program runs against which miniature, and how its outcomes are read."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mstar_qwen3omni
from mstar_qwen3omni.world import ANSWERS
from mstar_wan22.moves import first_picture
from mstar_whisper.sample_inputs import SENTENCE
from tests.outside.environment import FOLDER, Environment, node_environment, python_environment, source_of, wheel_of
from tests.outside.loads import AIPERF, GUIDELLM, aiperf, compared, guidellm
from tests.outside.outcomes import Outcome
from tests.outside.runs import junit_outcomes, program_outcomes, pytest_outcomes
from tests.outside.servers import EMBEDDING, Named, Servers

PROGRAMS = Path(__file__).with_name("programs")
SETTINGS = Path(__file__).with_name("schemathesis.toml")
OPENAI, SCHEMATHESIS, LANGCHAIN, LANGCHAIN_OPENAI = "3.52.0", "4.32.5", "1.1.9", "1.7.4"
AGENTS, LITELLM, OPENPI, OMNI, OPENAI_NODE = "0.24.0", "1.110.2", "0.1.2", "0.30.0", "7.59.0"
TEXT, MINI, BAGEL, OMNI_MODEL, ORPHEUS, PI05, VJEPA2, WHISPER = (
    "llm:tiny",
    "llm:mini",
    "bagel:mini",
    "qwen3_omni:mini",
    "orpheus:mini",
    "pi05:mini",
    "vjepa2_ac:mini",
    "whisper:mini",
)
TTS, WAN = "qwen3_tts:mini", "wan22:mini"
PIPECAT, LIVEKIT = "1.14.0", "1.8.9"
QUESTION = Path(mstar_qwen3omni.__file__).with_name("checkpoint") / "mini" / "seven.wav"
RECOGNIZER = ("pocketsphinx>=5,<6", "soxr>=1,<2", "numpy>=2,<3")
REALTIME_CLIENTS = (
    ("openai", OPENAI, "openai", (f"openai[realtime]=={OPENAI}",)),
    ("openai-agents", AGENTS, "agents", (f"openai-agents=={AGENTS}", "websockets")),
    ("pipecat-ai", PIPECAT, "pipecat", (f"pipecat-ai[openai]=={PIPECAT}", "websockets")),
    (
        "livekit-plugins-openai",
        LIVEKIT,
        "livekit",
        (f"livekit-plugins-openai=={LIVEKIT}", f"livekit-agents=={LIVEKIT}"),
    ),
)
"""Realtime clients: distribution, version, name of the driver, requirements."""

FEWEST_CASES = 2000
"""Requests of schemathesis to each model, at least."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A program and the miniature that it runs against. Names of exclusions are those of suites.

    gateway: how its requests name their model to a gateway; empty if it does not run through one.
    """

    name: str
    version: str
    server: str
    run: Callable[[str, str], list[Outcome]]
    gateway: Named = "name"


def suites(servers: Servers) -> list[Suite]:
    """Return all suites. `run` takes the address and the name of the deployment."""
    return [
        _openai("models, completions, chat, responses", TEXT, OPENAI_TEXT_TESTS),
        _openai("embeddings", EMBEDDING, ("tests/api_resources/test_embeddings.py",)),
        _openai("images", BAGEL, ("tests/api_resources/test_images.py",)),
        _openai("speech, transcription", OMNI_MODEL, OPENAI_AUDIO_TESTS),
        _openai("speech", TTS, OPENAI_AUDIO_TESTS[:1]),
        _openai("videos", WAN, ("tests/api_resources/test_videos.py",)),
        Suite("openai (formats of transcripts)", OPENAI, WHISPER, _whisper),
        Suite("openai (life of a video)", OPENAI, WAN, _videos),
        *(Suite("schemathesis", SCHEMATHESIS, model, _schemathesis(most), "path") for model, most in MODELS.items()),
        Suite("langchain-tests", f"{LANGCHAIN} (langchain-openai {LANGCHAIN_OPENAI})", MINI, _langchain),
        Suite("openai-agents", AGENTS, MINI, _agents),
        *(
            Suite(f"{client} (realtime)", version, OMNI_MODEL, _realtime(name, needs))
            for client, version, name, needs in REALTIME_CLIENTS
        ),
        *(Suite("litellm", LITELLM, model, _litellm(kinds, voice)) for model, kinds, voice in CLIENT_CASES),
        *(
            Suite("openai (JavaScript)", OPENAI_NODE, model, _node(kinds, voice))
            for model, kinds, voice in CLIENT_CASES
        ),
        Suite("guidellm", GUIDELLM, TEXT, compared(guidellm), ""),
        Suite("aiperf", AIPERF, TEXT, compared(aiperf), ""),
        Suite("openpi-client", OPENPI, PI05, _openpi, ""),  # names no model: it connects to a host and a port alone
        *(
            Suite("vllm-omni's audio_continuity", OMNI, model, _continuity(voice, text))
            for model, voice, text in (
                (ORPHEUS, "tara", "The red fox ran over the green hill today."),
                (OMNI_MODEL, "ethan", "How many shapes are there?"),
            )
        ),
    ]


MODELS = {TEXT: 40, BAGEL: 60, OMNI_MODEL: 40, ORPHEUS: 250, PI05: 250, VJEPA2: 250, WHISPER: 150, TTS: 150, WAN: 100}
"""Generated requests to each route, beside those of the schema's edges. Models with more routes need fewer."""

OPENAI_TEXT_TESTS = tuple(
    f"tests/api_resources/{name}.py"
    for name in ("test_models", "test_completions", "chat/test_completions", "test_responses")
)
OPENAI_AUDIO_TESTS = tuple(f"tests/api_resources/audio/{name}.py" for name in ("test_speech", "test_transcriptions"))
CLIENT_CASES = (
    (MINI, "chat,tools,completion,responses", ""),
    (BAGEL, "chat,image", ""),
    (OMNI_MODEL, "chat,speech,transcription", "ethan"),
    (ORPHEUS, "speech", "tara"),
    (TTS, "speech", "vivian"),
)


def _openai(part: str, model: str, tests: tuple[str, ...]) -> Suite:
    def run(url: str, name: str) -> list[Outcome]:
        source = source_of("openai", OPENAI)
        extras = ("pytest>=9", "pytest-asyncio", "pytest-xdist", "inline-snapshot", "trio", "pillow", "botocore")
        environment = python_environment("openai", (f"openai[aiohttp]=={OPENAI}", "rich", *extras))
        options = ("-o", "addopts=--tb=line", "-n", "2")
        return pytest_outcomes(environment.python, tests, source, {"TEST_API_BASE_URL": f"{url}/v1"}, options)

    return Suite(f"openai ({part})", OPENAI, model, run, "path")  # its bodies name models of the service


def _schemathesis(examples: int) -> Callable[[str, str], list[Outcome]]:
    return lambda url, name: _generated(url, name, examples)


def _generated(url: str, name: str, examples: int) -> list[Outcome]:
    environment = python_environment("schemathesis", (f"schemathesis=={SCHEMATHESIS}",))
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        done = subprocess.run(
            [
                *(environment.program("schemathesis"), "--config-file", str(SETTINGS), "run", f"{url}/openapi.json"),
                *("--checks", "all"),
                # Two threads that parse code at once raise SystemError in Python 3.11 now and then.
                *("--report", "junit", "--report-junit-path", str(report), "--seed", "1", "--workers", "1"),
                *("--max-examples", str(examples), "--continue-on-failure", "--suppress-health-check", "all"),
                *("--request-timeout", "60", "--warnings", "off", "--no-color"),
            ],
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.is_file():
            raise RuntimeError(f"schemathesis gave no report:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        cases = sum(int(count) for count in re.findall(r"(\d[\d,]*) generated", done.stdout.replace(",", "")))
        (FOLDER / f"schemathesis-{name}.txt").write_text(done.stdout)
        outcomes = junit_outcomes(report)
    enough = Outcome(
        f"at least {FEWEST_CASES} cases", "passed" if cases >= FEWEST_CASES else "failed", f"{cases} cases"
    )
    return [*outcomes, enough]


def _langchain(url: str, name: str) -> list[Outcome]:
    environment = _clients()
    loops = tuple(f"asyncio_default_{scope}_loop_scope=session" for scope in ("test", "fixture"))
    options = tuple(part for line in ("asyncio_mode=auto", *loops) for part in ("-o", line))
    variables = {"BASE_URL": f"{url}/v1", "MODEL": name}
    return pytest_outcomes(environment.python, ("langchain_case.py",), _programs(), variables, options)


def _agents(url: str, name: str) -> list[Outcome]:
    return _driver(_clients(), "agents_driver.py", {"BASE_URL": f"{url}/v1", "MODEL": name})


def _whisper(url: str, name: str) -> list[Outcome]:
    environment = python_environment("openai-alone", (f"openai=={OPENAI}",))
    said = SENTENCE.with_suffix(".txt").read_text(encoding="utf-8")
    variables = {"BASE_URL": f"{url}/v1", "MODEL": name, "SOUND": str(SENTENCE), "SENTENCE": said}
    return _driver(environment, "openai_whisper_driver.py", variables)


def _videos(url: str, name: str) -> list[Outcome]:
    environment = python_environment("openai-alone", (f"openai=={OPENAI}",))
    variables = {"BASE_URL": f"{url}/v1", "MODEL": name, "PROMPT": "a red circle moves right"}
    image = base64.b64encode(first_picture()).decode()
    return _driver(environment, "openai_video_driver.py", {**variables, "IMAGE": image})


def _realtime(name: str, needs: tuple[str, ...]) -> Callable[[str, str], list[Outcome]]:
    """Return the run of a realtime client, in an environment of its own with a recognizer of speech."""

    def run(url: str, served: str) -> list[Outcome]:
        environment = python_environment(f"realtime-{name}", (*needs, *RECOGNIZER))
        variables = {"BASE_URL": f"{url}/v1", "MODEL": served, "QUESTION": str(QUESTION), "ANSWERS": ",".join(ANSWERS)}
        return _driver(environment, f"realtime_{name}_driver.py", variables)

    return run


def _litellm(kinds: str, voice: str) -> Callable[[str, str], list[Outcome]]:
    def run(url: str, name: str) -> list[Outcome]:
        variables = {"BASE_URL": f"{url}/v1", "MODEL": name, "KINDS": kinds, "VOICE": voice}
        return _driver(_clients(), "litellm_driver.py", variables)

    return run


def _node(kinds: str, voice: str) -> Callable[[str, str], list[Outcome]]:
    def run(url: str, name: str) -> list[Outcome]:
        folder = node_environment("node", (f"openai@{OPENAI_NODE}",))
        if folder is None:
            return [Outcome("all", "skipped", "this machine has no npm")]
        program = Path(shutil.copy(PROGRAMS / "openai_driver.mjs", folder))
        variables = {"BASE_URL": f"{url}/v1", "MODEL": name, "KINDS": kinds, "VOICE": voice}
        return program_outcomes(("node", str(program)), folder, variables)

    return run


def _openpi(url: str, name: str) -> list[Outcome]:
    environment = python_environment("openpi", (f"openpi-client=={OPENPI}", "numpy<2", "typing_extensions"))
    return _driver(environment, "openpi_driver.py", {"BASE_URL": url})


def _continuity(voice: str, text: str) -> Callable[[str, str], list[Outcome]]:
    def run(url: str, name: str) -> list[Outcome]:
        metric = FOLDER / "audio_continuity.py"
        with zipfile.ZipFile(wheel_of("vllm-omni", OMNI)) as wheel:
            metric.write_bytes(wheel.read("vllm_omni/benchmarks/audio_continuity.py"))
        variables = {"BASE_URL": f"{url}/v1", "MODEL": name, "METRIC": str(metric), "RATE": "24000"}
        return _driver(_clients(), "continuity_driver.py", {**variables, "VOICE": voice, "TEXT": text})

    return run


def _clients() -> Environment:
    programs = (f"langchain-tests=={LANGCHAIN}", f"langchain-openai=={LANGCHAIN_OPENAI}")
    return python_environment("clients", (*programs, f"openai-agents=={AGENTS}", f"litellm=={LITELLM}"))


def _driver(environment: Environment, program: str, variables: dict[str, str]) -> list[Outcome]:
    return program_outcomes((environment.python, program), _programs(), variables)


def _programs() -> Path:
    """Return a folder with the driver programs, outside the project, whose test set-up would be read otherwise."""
    return Path(shutil.copytree(PROGRAMS, FOLDER / "programs", dirs_exist_ok=True))

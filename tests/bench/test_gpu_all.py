"""GPU run of all steps: time limits hold, and a failing step is reported and does not stop the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import gpu_all
from bench.gpu_all import ROOT, Step, main, steps, tree_steps


def test_every_step_names_a_program_that_is_there() -> None:
    for name, step in {**steps(), **tree_steps()}.items():
        program = step.words[0]
        if program == "-m":
            program = step.words[1].replace(".", "/") + ".py"
        assert program == "pytest.py" or (ROOT / program).is_file(), name


def test_a_step_that_fails_or_takes_too_long_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    actual = {
        "bad": Step(words=("-c", "print('the cause'); raise SystemExit(3)"), limit_s=60),
        "slow": Step(words=("-c", "import time; time.sleep(30)"), limit_s=0.5),
        "good": Step(words=("-c", "import sys; open(sys.argv[1], 'w').write('{{}}')", "{out}"), limit_s=60),
    }
    monkeypatch.setattr(gpu_all, "steps", lambda: actual)
    assert main([str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "FAILED bad" in shown and "the cause" in shown
    assert "FAILED slow" in shown and "ended after 0.5 s" in shown
    assert "ok     good" in shown and (tmp_path / "good.json").is_file()
    assert main([str(tmp_path), "good"]) == 0


def test_steps_of_another_tree_run_there_with_its_sources_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = tmp_path / "tree"
    (tree / "plugins" / "one" / "src").mkdir(parents=True)
    (tree / "plugins" / "one" / "src" / "mstar_orpheus.py").write_text("print('the other')")
    actual = {"tree_tests": Step(words=("-c", "import mstar_orpheus"), limit_s=60, is_other=True)}
    monkeypatch.setattr(gpu_all, "tree_steps", lambda: actual)
    assert main([str(tmp_path / "out"), "tree_tests", "--tree", str(tree)]) == 0
    assert (tmp_path / "out" / "tree_tests.log").read_text() == "the other\n"
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out"), "tree_tests"])
    assert "--tree" in capsys.readouterr().err

from __future__ import annotations

import pytest

from cluster_ddp.agent.command_program import interpreter_words, target
from cluster_ddp.errors import SpecError


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("python train.py --lr 1", 1),
        ("/a/venv/bin/python3.11 train.py", 1),
        ("python -u -W ignore -Xdev -X faulthandler train.py -c x", 7),
        ("python -OO -m package.module -i", 2),
        ("env A=1 B= python -u train.py", 5),
        ("/usr/bin/env python train.py", 2),
    ],
)
def test_pythons_own_words(command: str, count: int) -> None:
    assert interpreter_words(command.split()) == count


@pytest.mark.parametrize(
    "command",
    [
        "bash train.sh",
        "./train.py",
        "env A=1",
        "env -i python train.py",
        "numactl -N 0 python train.py",
        "python",
        "python -u",
        "python -m",
        "python -c 1",
        "python -uc 1",
        "python -um x",
        "python -i train.py",
        "python -",
        "python --version",
    ],
)
def test_what_is_no_script_of_pythons_is_refused(command: str) -> None:
    with pytest.raises(SpecError, match="does not run a Python script, or a module with -m as a word") as caught:
        interpreter_words(command.split())
    assert "--launcher fork" in caught.value.asked
    assert "--launcher srun" in caught.value.hint


def test_an_interactive_python_runs_a_script_too() -> None:
    assert target(["python", "-i", "train.py"])[:2] == ("script", ["train.py"])


@pytest.mark.parametrize("options", ["", "-e", "-o pipefail", "-euo pipefail", "-oe pipefail", "+O extglob -x", "--"])
def test_the_script_of_a_shell_stands_behind_its_options_and_their_values(options: str) -> None:
    assert target(["bash", *options.split(), "run.sh", "-c"])[:2] == ("script", ["run.sh", "-c"])

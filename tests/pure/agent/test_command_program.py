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
    ("command", "found"),
    [
        ("bash train.sh", "its program is no Python interpreter"),
        ("./train.py", "no Python interpreter"),
        ("env A=1", "no Python interpreter"),
        ("env -i python train.py", "no Python interpreter"),
        ("numactl -N 0 python train.py", "no Python interpreter"),
        ("python", "names neither a script nor a module"),
        ("python -u", "names neither a script nor a module"),
        ("python -m", "with -m, Python runs no script"),
        ("python -c 1", "with -c, Python runs no script"),
        ("python -uc 1", "with -uc, Python"),
        ("python -um x", "write -m as a word of its own"),
        ("python -i train.py", "with -i, Python"),
        ("python -", "with -, Python"),
        ("python --version", "with --version, Python"),
    ],
)
def test_what_is_no_script_of_pythons_is_refused(command: str, found: str) -> None:
    with pytest.raises(SpecError, match=found) as caught:
        interpreter_words(command.split())
    assert "--launcher fork" in caught.value.asked
    assert "--launcher srun" in caught.value.hint


def test_an_interactive_python_runs_a_script_too() -> None:
    assert target(["python", "-i", "train.py"])[:2] == ("script", ["train.py"])


@pytest.mark.parametrize("options", ["", "-e", "-o pipefail", "-euo pipefail", "-oe pipefail", "+O extglob -x", "--"])
def test_the_script_of_a_shell_stands_behind_its_options_and_their_values(options: str) -> None:
    assert target(["bash", *options.split(), "run.sh", "-c"])[:2] == ("script", ["run.sh", "-c"])

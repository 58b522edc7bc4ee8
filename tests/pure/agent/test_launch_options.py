"""The options of `launch`: what a person gives, and how they reach the agents of the tasks."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest
from stand_ins import HOSTILE

from cluster_ddp.agent.launch_options import AgentOptions, parse, words
from cluster_ddp.cli import launch
from cluster_ddp.errors import SpecError
from cluster_ddp.option_form import default_of

ALL_SET = AgentOptions(
    command=("python", "it's.py", "--", "--ranks", *HOSTILE),
    launcher="fork",
    ranks=2,
    ranks_per_node=3,
    gpus_per_task=4,
    cpus_per_task=5,
    run_dir="/it's a run/x-%j",
    code="-code/x",
    share=True,
    max_requeues=0,
    chain=True,
    restarts=7,
    nodes="2-8",
    spare_nodes=8,
    max_mem="128G",
    hang_restart_s=30,
    restart_args='--resume "it\'s last.pth"',
    doctor=True,
    track=("wandb", "mlflow"),
    time_limit_s=60,
    venv="/a venv",
    stage_env="/a venv.tar",
    container="docker://x",
    container_image="nvcr.io#a/b:1",
    container_binds=("/data sets:/data", "-odd"),
    container_overlays=("/o.sqsh",),
    srun_options=("--cpu-bind=none", "--mpi=pmix"),
    cleanup='rm -rf "$HERE"\necho "it\'s $status"\n',
    grid={"seed": ["1", "-1"], "lr": HOSTILE},
    function=True,
    ignore_warnings=True,
    pack=4,
    jobs=2,
    array="0-7,9",
    signal="USR1@60",
)


def test_words_and_parse_are_inverse() -> None:
    assert all(getattr(ALL_SET, one.name) != default_of(one) for one in fields(AgentOptions))
    assert parse(words(ALL_SET)) == ALL_SET
    assert parse(words(AgentOptions(command=("true",)))) == AgentOptions(command=("true",))


@pytest.mark.parametrize("name", [one.name for one in fields(AgentOptions) if one.name != "command"])
def test_what_has_its_default_is_not_said(name: str) -> None:
    """A task's command line has only what it needs, and each option is one word."""
    one = replace(AgentOptions(command=("a", "b c")), **{name: getattr(ALL_SET, name)})
    said = words(one)
    assert {word.partition("=")[0] for word in said[:-3]} == {f"--{name.replace('_', '-')}"}
    assert said[-3:] == ["--", "a", "b c"]
    assert parse(said) == one


def test_several_values_as_a_person_gives_them(capsys: pytest.CaptureFixture[str]) -> None:
    given = "--track wandb mlflow --container-binds /a /b:/c --container i.sif --srun-options=--x --srun-options=--y=1"
    assert launch.main([*given.split(), "--ranks", "1", "--dry-run", "--", "python", "x.py"]) == 0
    shown = capsys.readouterr().out
    assert "--track=wandb --track=mlflow" in shown
    assert "--container-binds=/a --container-binds=/b:/c" in " ".join(shown.replace("\\\n", " ").split())
    assert "--srun-options=--x --srun-options=--y=1" in " ".join(shown.replace("\\\n", " ").split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--ranks=2", "there is no command"),
        ("--ranks=2 --", "there is no command"),
        ("python train.py", "'python' is no option with its value in one word"),
        ("--ranks 2 -- a", "'--ranks' is no option with its value in one word"),
        ("--ranks=two -- a", "'--ranks=two' is no option"),
        ("--max-req=3 -- a", "'--max-req=3' is no option"),
        ("--grid={x -- a", "'--grid={x' is no option"),
        ("--command=x -- a", "'--command=x' is no option"),
    ],
)
def test_what_an_agent_can_not_read_is_said(given: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        parse(given.split())


def test_a_grid_is_json() -> None:
    assert words(AgentOptions(grid={"a": ["1"]}))[0] == f"--grid={json.dumps({'a': ['1']})}"

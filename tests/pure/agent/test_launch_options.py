"""The options of `launch`: what a person gives, and how they reach the agents of the tasks."""

from __future__ import annotations

import json

import pytest
from stand_ins import HOSTILE

from cluster_ddp.agent.launch_options import Options, parse, words

PROGRAM = "cluster-ddp launch"

ALL_SET = Options(
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
    hang_restart_s=30,
    restart_args='--resume "it\'s last.pth"',
    doctor=True,
    track=("wandb", "mlflow"),
    time_limit_s=60,
    venv="/a venv",
    stage_env="/a venv.tar",
    container="docker://x",
    container_image="nvcr.io#a/b:1",
    container_bind=("/data sets:/data", "-odd"),
    container_overlay=("/o.sqsh",),
    srun_options=("--cpu-bind=none", "--mpi=pmix"),
    cleanup='rm -rf "$HERE"\necho "it\'s $status"\n',
    grid={"seed": ["1", "-1"], "lr": HOSTILE},
    function=True,
    ignore_warnings=True,
    stays=True,
    pack=4,
    jobs=2,
    array="0-7,9",
    signal="USR1@60",
)


def test_words_and_parse_are_inverse() -> None:
    assert all(getattr(ALL_SET, name) != default for name, default in Options._field_defaults.items())
    assert parse(PROGRAM, words(ALL_SET)) == ALL_SET
    assert parse(PROGRAM, words(Options(command=("true",)))) == Options(command=("true",))


@pytest.mark.parametrize("name", [name for name in Options._fields if name != "command"])
def test_what_has_its_default_is_not_said(name: str) -> None:
    """A task's command line has only what it needs, and each option is one word."""
    one = Options(command=("a", "b c"))._replace(**{name: getattr(ALL_SET, name)})
    said = words(one)
    assert {word.partition("=")[0] for word in said[:-3]} == {f"--{name.replace('_', '-')}"}
    assert said[-3:] == ["--", "a", "b c"]
    assert parse(PROGRAM, said) == one


def test_several_values_as_a_person_gives_them() -> None:
    given = "--track wandb mlflow --container-bind /a /b:/c --srun-options=--x --srun-options=--y=1 -- python x.py"
    found = parse(PROGRAM, given.split())
    assert found.track == ("wandb", "mlflow")
    assert found.container_bind == ("/a", "/b:/c")
    assert found.srun_options == ("--x", "--y=1")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--ranks 2", "there is no command"),
        ("--ranks 2 --", "there is no command"),
        ("python train.py", "unrecognized arguments: python train.py"),
        ("--ranks 0 -- a", "argument --ranks: is a whole number of 1 or more, not '0'"),
        ("--ranks=-1 -- a", "argument --ranks: is a whole number of 1 or more, not '-1'"),
        ("--ranks-per-node two -- a", "argument --ranks-per-node: is a whole number of 1 or more, not 'two'"),
        ("--max-requeues=-1 -- a", "argument --max-requeues: is a whole number of 0 or more, not '-1'"),
        ("--launcher mpirun -- a", "argument --launcher: invalid choice: 'mpirun'"),
        ("--max-req 3 -- a", "unrecognized arguments: --max-req 3"),
        ("--grid {x -- a", "argument --grid: "),
    ],
)
def test_what_is_wrong_is_said(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(PROGRAM, given.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_grid_is_json() -> None:
    assert words(Options(grid={"a": ["1"]}))[0] == f"--grid={json.dumps({'a': ['1']})}"

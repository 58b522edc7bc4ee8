"""Launchers inside a job that starts ranks itself."""

from __future__ import annotations

import shlex

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.submission.checks import command_mistakes
from cluster_ddp.submission.spec import JobSpec

TORCHRUN = "--launcher torchrun --"


def leaving(options: str, launcher: str = "torchrun") -> str:
    return f" (without {launcher}'s {options})"


def refusal(command: str, nodes: int = 2, **fields: object) -> SpecError | None:
    spec = JobSpec(name="t", nodes=nodes, command=tuple(shlex.split(command)), **fields)  # type: ignore[arg-type]
    try:
        command_mistakes.check_launcher(spec)
    except SpecError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("command", "launcher", "instead"),
    [
        (
            "torchrun --nproc-per-node 2 t.py --lr 1",
            "torchrun",
            f"{TORCHRUN} python t.py --lr 1{leaving('--nproc-per-node 2')}",
        ),
        (
            "/opt/bin/torchrun --standalone -m my.fit x",
            "torchrun",
            f"{TORCHRUN} python -m my.fit x{leaving('--standalone')}",
        ),
        ("python -m torch.distributed.run t.py", "torch.distributed.run", f"{TORCHRUN} python t.py"),
        ("python3.12 -m torch.distributed.launch t.py", "torch.distributed.launch", f"{TORCHRUN} python t.py"),
        (
            "env A=1 accelerate launch --num_processes 4 t.py",
            "accelerate",
            f"{TORCHRUN} env A=1 python t.py{leaving('--num_processes 4', 'accelerate')}",
        ),
        ("python -mtorch.distributed.run t.py", "torch.distributed.run", f"{TORCHRUN} python t.py"),
        ("python -um torch.distributed.run t.py", "torch.distributed.run", f"{TORCHRUN} python t.py"),
        ("python -X importtime /opt/bin/torchrun t.py", "torchrun", f"{TORCHRUN} python t.py"),
        ("env -u X torchrun t.py", "torchrun", f"{TORCHRUN} env -u X python t.py"),
        ("env -i A=1 torchrun t.py", "torchrun", f"{TORCHRUN} env A=1 python t.py"),
        ("time torchrun t.py", "torchrun", f"{TORCHRUN} time python t.py"),
        ("nohup nice -n 5 torchrun t.py", "torchrun", f"{TORCHRUN} nohup nice -n 5 python t.py"),
        ("uv run --with rich torchrun t.py", "torchrun", f"{TORCHRUN} uv run --with rich python t.py"),
        ("uv run -m torch.distributed.run t.py", "torch.distributed.run", f"{TORCHRUN} uv run python t.py"),
        ("poetry run accelerate launch t.py", "accelerate", f"{TORCHRUN} poetry run python t.py"),
        ("conda run -n mine torchrun t.py", "torchrun", f"{TORCHRUN} conda run -n mine python t.py"),
        ("bash -c 'torchrun t.py --lr 1'", "torchrun", f"{TORCHRUN} bash -c 'python t.py --lr 1'"),
        ("bash -lc 'A=1 torchrun t.py'", "torchrun", f"{TORCHRUN} bash -lc 'A=1 python t.py'"),
        ("bash -c 'exec torchrun t.py 2>&1'", "torchrun", f"{TORCHRUN} bash -c 'exec python t.py 2>&1'"),
        ("bash -c 'torchrun t.py --dir $X'", "torchrun", f"{TORCHRUN} bash -c 'python t.py --dir $X'"),
        ("bash -c 'cd d && torchrun t.py'", "torchrun", f"{TORCHRUN} bash -c 'cd d && python t.py'"),
        (
            "bash -c 'cd d  # there\ntorchrun \\\n  t.py'",
            "torchrun",
            f"{TORCHRUN} bash -c 'cd d  # there\npython t.py'",
        ),
        ("python -u -m accelerate.commands.launch t.py", "accelerate.commands.launch", f"{TORCHRUN} python t.py"),
        ("deepspeed t.py --deepspeed", "deepspeed", "-- python t.py --deepspeed"),
        ("mpirun -np 4 python t.py", "mpirun", f"-- python t.py{leaving('-np 4', 'mpirun')}"),
        ("srun python3 -u t.py", "srun", "-- python3 -u t.py"),
        ("srun -n 2 hostname", "srun", "-- COMMAND (the one behind srun and its options)"),
        ("srun python t.py", "srun", "-- python t.py"),
    ],
)
def test_a_nested_launcher_is_refused_with_the_command_that_is_meant(command: str, launcher: str, instead: str) -> None:
    error = refusal(command)
    assert error is not None
    assert error.asked == f"Submitting {command}:"
    assert error.found.startswith(launcher)
    assert error.hint == f"{instead}; to submit it anyway: --accept nested"


@pytest.mark.parametrize(
    "command",
    [
        "python t.py torchrun",
        "accelerate config",
        "python -m accelerate.utils",
        "bash -c true",
        "env A=1",
        "./torchrun.py",
        "python -c 'import torchrun'",
        "python -Ximporttime t.py -m torch.distributed.run",
        "nohup python t.py torchrun",
        "uv sync torchrun",
        "uv run t.py torchrun",
        "poetry run mine torchrun",
        "timeout 10 ./mine torchrun",
        "bash run.sh torchrun",
        "bash -c 'echo torchrun; python t.py # srun'",
        "bash -c 'echo \"'",
        "python -m mine.fit --launcher torchrun",
        "python -u t.py srun",
        "numactl -m 0 ./mine torchrun",
        "uv run --no-sync python -m mine.fit torchrun",
        "python",
        "env",
        "uv run",
    ],
)
def test_other_commands_are_not(command: str) -> None:
    assert refusal(command) is None


def test_one_task_may_start_ranks_but_not_by_slurm() -> None:
    assert refusal("torchrun --nproc-per-node 4 t.py", nodes=1, gpus_per_node=4, gpus_per_task=4) is None
    assert refusal("torchrun --nproc-per-node gpu t.py", nodes=1) is None
    assert refusal("torchrun --standalone t.py --np 4", nodes=1) is None
    error = refusal("srun python t.py", nodes=1)
    assert error is not None
    assert error.found == "srun asks Slurm for tasks. The job starts this command in each of its tasks already."

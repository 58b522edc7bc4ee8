"""Launchers inside a job that starts ranks itself."""

from __future__ import annotations

import shlex

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.submission.checks import command_mistakes
from cluster_ddp.submission.spec import JobSpec

WITHOUT = "-- COMMAND (such as python SCRIPT), without {} and its options"


def refusal(command: str, nodes: int = 2, **fields: object) -> SpecError | None:
    spec = JobSpec(name="t", nodes=nodes, command=tuple(shlex.split(command)), **fields)  # type: ignore[arg-type]
    try:
        tasks = spec.nodes * spec.ranks_per_node
        command_mistakes.check_launcher(spec.command, tasks=tasks, gpus=spec.gpus_per_node, is_submission=True)
    except SpecError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("torchrun --nproc-per-node 2 t.py --lr 1", "torchrun"),
        ("/opt/bin/torchrun --standalone -m my.fit x", "torchrun"),
        ("python -m torch.distributed.run t.py", "torch.distributed.run"),
        ("python3.12 -m torch.distributed.launch t.py", "torch.distributed.launch"),
        ("env A=1 accelerate launch --num_processes 4 t.py", "accelerate"),
        ("python -mtorch.distributed.run t.py", "torch.distributed.run"),
        ("python -um torch.distributed.run t.py", "torch.distributed.run"),
        ("python -X importtime /opt/bin/torchrun t.py", "torchrun"),
        ("env -u X torchrun t.py", "torchrun"),
        ("env SHELL=/bin/bash torchrun t.py", "torchrun"),
        ("env A=1 SHELL=/bin/zsh nice srun python t.py", "srun"),
        ("conda run -p /opt/envs/bash torchrun t.py", "torchrun"),
        ("env -i A=1 torchrun t.py", "torchrun"),
        ("time torchrun t.py", "torchrun"),
        ("nohup nice -n 5 torchrun t.py", "torchrun"),
        ("uv run --with rich torchrun t.py", "torchrun"),
        ("uv run -m torch.distributed.run t.py", "torch.distributed.run"),
        ("poetry run accelerate launch t.py", "accelerate"),
        ("conda run -n mine torchrun t.py", "torchrun"),
        ("bash -c 'torchrun t.py --lr 1'", "torchrun"),
        ("bash -lc 'A=1 torchrun t.py'", "torchrun"),
        ("bash -c 'exec torchrun t.py 2>&1'", "torchrun"),
        ("bash -c 'torchrun t.py --dir $X'", "torchrun"),
        ("bash -c 'cd d && torchrun t.py'", "torchrun"),
        ("bash -c 'cd d  # there\ntorchrun \\\n  t.py'", "torchrun"),
        ("python -u -m accelerate.commands.launch t.py", "accelerate.commands.launch"),
        ("deepspeed t.py --deepspeed", "deepspeed"),
        ("mpirun -np 4 python t.py", "mpirun"),
        ("srun python3 -u t.py", "srun"),
        ("srun -n 2 hostname", "srun"),
        ("srun python t.py", "srun"),
    ],
)
def test_a_nested_launcher_is_refused_with_a_cure(command: str, launcher: str) -> None:
    error = refusal(command)
    assert error is not None
    assert error.asked == f"Running {command}:"
    assert error.found.startswith(launcher)
    assert error.hint == f"{WITHOUT.format(launcher)}; to submit it anyway: --accept nested"


@pytest.mark.parametrize("gpus", [None, 1])
def test_launch_is_told_of_no_option_of_submit(gpus: int | None) -> None:
    with pytest.raises(SpecError) as caught:
        command_mistakes.check_launcher(("srun", "-n", "4", "t"), tasks=1, gpus=gpus)
    assert caught.value.hint == WITHOUT.format("srun")


@pytest.mark.parametrize(
    "command",
    [
        "python t.py torchrun",
        "env PYTHONPATH=/work/deepspeed ./run.sh",
        "env MPIEXEC=/usr/bin/mpiexec nice -n 5 python t.py",
        "conda run -p /envs/deepspeed python t.py",
        "uv run --directory=/x/deepspeed python t.py",
        "python -m run --strategy deepspeed",
        "nice ./run --launcher torchrun",
        "bash -c './run --strategy deepspeed'",
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
        "python 3d_unet.py --backend torchrun",
        "numactl -m 0 ./mine torchrun",
        "uv run --no-sync python -m mine.fit torchrun",
        "python",
        "env",
        "uv run",
        "nice ''",
        "bash -c 'time \"\"'",
    ],
)
def test_other_commands_are_not(command: str) -> None:
    assert refusal(command) is None


def test_one_task_may_start_ranks_but_not_by_slurm() -> None:
    assert refusal("torchrun --nproc-per-node 4 t.py", nodes=1, gpus_per_node=4, gpus_per_task=4) is None
    assert refusal("torchrun --nproc-per-node gpu t.py", nodes=1) is None
    assert refusal("torchrun --standalone t.py --np 4", nodes=1) is None
    assert refusal("torchrun --standalone -m my.fit --np 4", nodes=1) is None
    error = refusal("srun python t.py", nodes=1)
    assert error is not None
    assert error.found == "srun asks Slurm for tasks. The job starts this command in each of its tasks already."

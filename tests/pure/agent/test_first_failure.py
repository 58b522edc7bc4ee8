"""agent.first_failure, of logs: srun's and Slurm's English, and Python's last error."""

from __future__ import annotations

import pytest

from cluster_ddp.agent import first_failure
from cluster_ddp.agent.outcome import Failure


@pytest.mark.parametrize(
    ("log", "nodes"),
    [
        ("epoch 1\n", ()),
        ("srun: error: Node failure on node3\n", ("node3",)),
        (
            "srun: error: Node failure on n3\nslurmstepd: error: *** STEP 1.0 ON n1 CANCELLED DUE TO NODE FAILURE",
            ("n3",),
        ),
        ("srun: Job step aborted: NODE FAILURE ON n4.\nsrun: error: node failure on n3, x", ("n4", "n3")),
        ("slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 1 DUE TO NODE FAILURE, SEE LOG ***", ("",)),
    ],
)
def test_which_nodes_slurm_has_lost(log: str, nodes: tuple[str, ...]) -> None:
    assert first_failure.lost_nodes(log) == nodes


@pytest.mark.parametrize(
    ("log", "first"),
    [
        ("epoch 1\n", None),
        ("srun: error: n2: task 3: Out Of Memory", Failure(None, "n2", 137, "task 3: killed by the kernel for memory")),
        (
            "srun: error: n1: tasks 0-1: Exited with exit code 3",
            Failure(None, "n1", 3, "task 0: Exited with exit code 3"),
        ),
        (
            "50%|██ srun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Segmentation fault (core dumped)\n",
            Failure(None, "n2", 139, "task 1: Segmentation fault (core dumped)"),
        ),
        ("srun: error: n1: task 0: Terminated\n", Failure(None, "n1", 143, "task 0: Terminated")),
        ("srun: error: n1: task 0: Killed\n", Failure(None, "n1", 137, "task 0: Killed")),
        ("srun: error: n1: task 0: \x1b[2Jx\n", Failure(None, "n1", 1, "task 0: ?[2Jx")),
    ],
)
def test_which_task_failed_first_as_srun_says(log: str, first: Failure | None) -> None:
    assert first_failure.by_srun(log, of_ranks=False) == first


@pytest.mark.parametrize(("heard", "is_named"), [((), True), ((0,), True), ((1,), False)])
def test_srun_counts_if_its_first_task_was_not_heard(heard: tuple[int, ...], is_named: bool) -> None:
    log = "srun: error: n1: task 0: Terminated\nsrun: error: n2: task 1: Exited with exit code 2\n"
    first = first_failure.by_srun(log, of_ranks=True, heard=heard)
    assert first == (Failure(1, "n2", 2, "Exited with exit code 2") if is_named else None)


def test_which_task_srun_could_not_start() -> None:
    log = "[task 0 launch failed: x]\nsrun: error: task 1 launch failed: Slurmd could not connect IO\n"
    assert first_failure.not_launched(log) == Failure(
        None, "srun", 1, "task 1 launch failed: Slurmd could not connect IO"
    )
    refused = "srun: error: Unable to create step for job 9: Invalid generic resource (gres) specification\n"
    found = first_failure.not_launched(refused)
    assert found is not None and found.words.startswith("Unable to create step for job 9: Invalid generic resource")
    assert first_failure.not_launched("[srun: error: task 1 launch failed]") is None


OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=71.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("words", "status", "log", "said"),
    [
        ("killed by SIGKILL", 137, "", "killed by SIGKILL"),
        ("killed by SIGKILL", 137, OOM, "killed by the kernel for memory"),
        ("its agent was killed", 137, OOM, "killed by the kernel for memory"),
        ("task 3: Killed", 137, OOM, "task 3: Killed (the kernel has killed a process for memory)"),
        ("killed by the kernel for memory", 137, OOM, "killed by the kernel for memory"),
    ],
)
def test_what_slurm_says_of_memory(words: str, status: int, log: str, said: str) -> None:
    assert first_failure.with_memory(Failure(0, "n1", status, words), log).words == said


ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["epoch 1", "loss 3"], ""),
        (["Traceback:", "ValueError: x", "done"], "ValueError: x"),
        (
            ["[rank3]: ValueError: boom", "[rank2]: RuntimeError: its peer", "SystemExit: 3", ELASTIC],
            "ValueError: boom",
        ),
        (["[rank2]: RuntimeError: its peer", "my.Exception: y", ELASTIC], "my.Exception: y"),
        (["[rank2]: RuntimeError: its peer"], ""),
        (["  ValueError: indented", "KeyboardInterrupt"], "KeyboardInterrupt"),
        (["ValueError: \x1b[1m" + "x" * 400], "ValueError: ?[1m" + "x" * 284),
    ],
)
def test_the_last_error_of_a_rank(lines: list[str], found: str) -> None:
    assert first_failure.last_error("\n".join(lines), 3) == found


@pytest.mark.parametrize(
    ("words", "is_it"),
    [
        *(
            (f"{name}: x", True)
            for name in ("ValueError", "KeyError", "AssertionError", "my.own.DataError", "SystemExit")
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 4x2)", True),
        ("ValueError: no CUDA here", True),
        ("[rank3]: RuntimeError: NCCL Error 2", False),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", True),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", False),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", False),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", False),
        ("RuntimeError: [..] Connection closed by peer [10.0.0.2]:123", False),
        ("RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error.", False),
        ("torch.distributed.DistBackendError: NCCL error in: x", False),
        *((f"{name}: x", False) for name in ("OSError", "FileNotFoundError", "ConnectionResetError", "TimeoutError")),
        *((words, False) for words in ("", "killed by SIGKILL", "its agent was killed", "Exited with exit code 1")),
        ("Waiting 600 s for the other ranks: rank 1 on node2 is silent.", False),
    ],
)
def test_what_is_the_programs_own(words: str, is_it: bool) -> None:
    """A node is not to blame for it."""
    assert first_failure.is_of_program(words) is is_it


def test_errors_are_compared_without_their_numbers() -> None:
    one, other = "CUDA out of memory: 1,024.5 MiB of 80 GiB at 0x7fAb", "CUDA out of memory: 8 MiB of 40.0 GiB at 0x1c"
    assert first_failure.without_numbers(one) == first_failure.without_numbers(other) != one

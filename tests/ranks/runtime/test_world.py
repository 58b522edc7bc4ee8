"""A world of real processes under torchrun's, srun's and submitit's variables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from ranks import TORCHRUN, job_ids, run_ranks, slurm_step
from slowness import LIMIT_S, scaled

import cluster_ddp
from cluster_ddp.runtime.device import interruptible_wait
from cluster_ddp.runtime.failure import last_progress
from cluster_ddp.runtime.rendezvous.host_setup import interface_towards

JOB_ID = job_ids()


def use_everything() -> None:
    with cluster_ddp.distributed() as world:
        torch.manual_seed(1)
        model = world.wrap(torch.nn.Linear(2, 1))
        first_weight = model.module.weight.sum().item()
        world.seed_rank(1)
        own_random = torch.rand(()).item()
        dataset = torch.utils.data.TensorDataset(torch.arange(7, dtype=torch.float32))
        shard = world.shard(dataset, batch_size=2)
        mine = [value for (batch,) in shard for value in batch.tolist()]
        world.barrier()
        world.print("only once")
        print(
            json.dumps(
                {
                    "rank": world.rank,
                    "main": world.is_main,
                    "device": str(world.device),
                    "sum": world.sum(world.rank, torch.tensor(0.5)),
                    "mean": world.mean(sum(mine), len(mine)),
                    "gathered": world.gather(world.rank * 10),
                    "weight": first_weight,
                    "random": own_random,
                    "views": model.gradient_as_bucket_view,
                }
            )
        )


@pytest.mark.quick
def test_what_a_world_gives(tmp_path: Path) -> None:
    ends = run_ranks(use_everything, [slurm_step(rank, 3, job_id=JOB_ID) for rank in range(3)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0, 0], ends
    assert [end.output.count("only once") for end in ends] == [1, 0, 0]
    results = [json.loads(end.output.splitlines()[-1]) for end in ends]
    for rank, result in enumerate(results):
        assert result["rank"] == rank
        assert result["main"] == (rank == 0)
        assert result["sum"] == [3.0, 1.5]
        assert result["mean"] == 3.0
        assert result["gathered"] == [0, 10, 20]
        assert result["weight"] == results[0]["weight"]
        assert result["views"]
    if not torch.cuda.is_available():
        assert {result["device"] for result in results} == {"cpu"}
    assert len({result["random"] for result in results}) == 3


def test_the_names_of_ranks(tmp_path: Path) -> None:
    """Those that other tools have, too; a name that World does not have gets the one that was meant."""

    with cluster_ddp.distributed(cuda=False) as world:
        assert (world.rank, world.local_rank, world.world_size) == (0, 0, 1)
        with pytest.raises(AttributeError, match=r"^'World' .* no attribute 'size'\. Did you mean world_size\?$"):
            _ = world.size
        with pytest.raises(AttributeError, match=r"no attribute 'main'\. Did you mean is_main\?$"):
            _ = world.main
        with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
            _ = world.xyzzy
        assert not hasattr(world, "__deepcopy__")


def rank_1_raises() -> None:
    with cluster_ddp.distributed() as world:
        if world.rank == 1:
            raise ValueError("this is the one that matters")
        world.barrier()
        time.sleep(600)


@pytest.mark.fault(
    "one rank raises",
    "prints its traceback once, with rank and host; FAILED, not retried. With `--launcher fork`, the others have 30 s "
    "to end. On GPUs, ranks in a kernel end five seconds later (seen with two ranks on one GPU)",
    bound="seconds",
    also=("tests/slurm/test_launchers.py",),
)
def test_one_ranks_exception_is_printed_once_with_rank_and_host(tmp_path: Path) -> None:
    environments = [slurm_step(rank, 3, job_id=JOB_ID + 1) for rank in range(3)]
    ends = run_ranks(rank_1_raises, environments, tmp_path)
    assert [end.exit_code for end in ends] == [1, 1, 1], ends
    everything = "".join(end.output for end in ends)
    assert everything.count("Traceback") == 1
    host = os.uname().nodename
    assert ends[1].output.startswith(f"[rank 1 {host}] Traceback")
    for rank in (0, 2):
        assert ends[rank].output == f"[rank {rank} {host}] stopped: rank 1 on {host} failed (see its error).\n"


def rank_1_raises_afterwards() -> None:
    with cluster_ddp.distributed() as world:
        pass
    if world.rank == 1:
        time.sleep(1)  # rank 0, and the store with it, is gone by now
        raise ValueError("after the world")


def test_an_exception_after_the_world_is_the_ranks_own(tmp_path: Path) -> None:
    environments = [slurm_step(rank, 2, job_id=JOB_ID + 3) for rank in range(2)]
    ends = run_ranks(rank_1_raises_afterwards, environments, tmp_path)
    assert [end.exit_code for end in ends] == [0, 1], ends
    assert "ValueError: after the world" in ends[1].output


def train_and_end_the_group() -> None:
    """As scripts do that were written for plain torch."""
    with cluster_ddp.distributed() as world:
        model = world.wrap(torch.nn.Linear(1, 1))
        shard = world.shard(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=2)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=os.environ["FOLDER"], model=model)
        for _ in checkpoint.epochs(1):
            for (samples,) in shard:
                model(samples).sum().backward()
                checkpoint.step()
        world.log("end", loss=1.0)
        torch.distributed.destroy_process_group()


@pytest.mark.fault(
    "the script calls `destroy_process_group` itself",
    "at the end: a warning, status 0, all files are written; before: an error names the call",
    also=("test_a_process_group_that_the_script_ends_too_early_is_named",),
)
def test_a_script_that_ends_the_process_group_itself_ends_well(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    environments = [slurm_step(rank, 2, job_id=JOB_ID + 4) | {"FOLDER": str(folder)} for rank in range(2)]
    ends = run_ranks(train_and_end_the_group, environments, tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    restores, warning = ends[0].output.splitlines()
    assert restores.startswith("A resume restores model,") and "ended the process group itself" in warning
    assert "leave torch.distributed.destroy_process_group() out" in ends[0].output
    assert ends[1].output == ""
    assert [path.name for path in folder.glob("checkpoints/*.pt")] == ["step-00000002.pt"]
    assert '"kind": "end"' in (folder / "metrics.jsonl").read_text()


def end_the_group_too_early() -> None:
    with cluster_ddp.distributed() as world:
        shard = world.shard(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=2)
        checkpoint = cluster_ddp.Checkpointer(world, shard=shard, run_dir=os.environ["FOLDER"])
        loop = checkpoint.epochs(1)
        next(loop)
        torch.distributed.destroy_process_group()
        calls = {
            "step": checkpoint.step,
            "barrier": world.barrier,
            "sum": lambda: world.sum(1.0),
            "all_reduce": lambda: world.all_reduce(torch.ones(1)),
            "gather": lambda: world.gather(1),
            "gather_to_main": lambda: world.gather_to_main(1),
            "broadcast": lambda: world.broadcast(1),
            "own error": lambda: {}["missing"],
        }
        calls[os.environ["CALL"]]()


@pytest.mark.parametrize("call", ["step", "barrier", "sum", "all_reduce", "gather", "gather_to_main", "broadcast"])
def test_a_process_group_that_the_script_ends_too_early_is_named(tmp_path: Path, call: str) -> None:
    more = {"FOLDER": str(tmp_path / "run"), "CALL": call}
    ends = run_ranks(end_the_group_too_early, [slurm_step(r, 2, job_id=JOB_ID + 5) | more for r in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [1, 1], ends
    everything = "".join(end.output for end in ends)
    assert "Traceback" not in everything
    assert everything.count("destroy_process_group()).\n  Hint: leave that call out") == 1


def test_an_own_error_after_the_process_group_has_ended_is_the_one_that_is_shown(tmp_path: Path) -> None:
    more = {"FOLDER": str(tmp_path / "run"), "CALL": "own error"}
    (end,) = run_ranks(end_the_group_too_early, [more], tmp_path)
    assert end.exit_code == 1
    assert end.output.count("Traceback") == 1 and "KeyError: 'missing'" in end.output


def rank_1_leaves() -> None:
    with cluster_ddp.distributed() as world:
        world.barrier()
        if world.rank == 1:
            raise SystemExit(0)


def test_leaving_without_an_error_is_none(tmp_path: Path) -> None:
    ends = run_ranks(rank_1_leaves, [slurm_step(rank, 2, job_id=JOB_ID + 2) for rank in range(2)], tmp_path)
    assert ends[1].exit_code == 0
    assert ends[1].output == ""


def topology_error() -> None:
    with cluster_ddp.distributed():
        raise AssertionError


def test_an_error_before_the_world_is_there_is_a_short_block(tmp_path: Path) -> None:
    env = slurm_step(0, 2, job_id=JOB_ID, RANK="1")
    (end,) = run_ranks(topology_error, [env], tmp_path)
    assert end.exit_code == 1
    assert end.output.startswith("[rank 0 ")
    assert "RANK=1, SLURM_PROCID=0" in end.output
    assert "Traceback" not in end.output


@pytest.mark.parametrize(
    "module",
    [(), pytest.param(TORCHRUN, marks=pytest.mark.full)],
)
def test_the_same_script_as_one_process_and_under_torchrun(tmp_path: Path, module: tuple[str, ...]) -> None:
    script = tmp_path / "script with blanks.py"
    script.write_text(
        textwrap.dedent("""
            import cluster_ddp
            with cluster_ddp.distributed() as world:
                total = world.sum(1)
                world.print(f"{world.topology.launcher} {total:g}")
        """)
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, *module, str(script)], env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S)
    )
    said = re.findall(r"^(?:torchrun|single|manual|slurm) \d$", done.stdout, re.MULTILINE)
    assert said == (["torchrun 2"] if module else ["single 1"]), done.stderr


@pytest.mark.full
def test_submitits_local_executor(tmp_path: Path) -> None:
    import submitit

    def sum_of_ranks() -> float:  # local, so that it is pickled whole
        import cluster_ddp

        with cluster_ddp.distributed() as world:
            return world.sum(world.rank + 1)

    executor = submitit.LocalExecutor(folder=tmp_path)
    executor.update_parameters(tasks_per_node=2, timeout_min=2, gpus_per_node=0)
    job = executor.submit(sum_of_ranks)
    assert job.results() == [3.0, 3.0]


def test_the_interface_of_the_route_is_found() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("no-such-host.invalid") is None


def sum_on_a_slow_device() -> None:
    ends: list[float] = []

    def for_device(*_: object, **__: object) -> None:
        time.sleep(0.1)
        ends.append(time.monotonic())

    with cluster_ddp.distributed(cuda=False) as world:
        last_progress.note_step()
        interruptible_wait.for_device = for_device
        world.sum(1)
        print("progress:", last_progress.last_s >= ends[-1])


def test_a_sum_is_progress_once_the_device_has_it(tmp_path: Path) -> None:
    """A GPU waits in it for ranks that are late; the hang watch must not count that time twice."""
    ends = run_ranks(sum_on_a_slow_device, [slurm_step(rank, 2, job_id=JOB_ID + 6) for rank in range(2)], tmp_path)
    assert [(end.exit_code, "progress: True" in end.output) for end in ends] == [(0, True)] * 2, ends

import json
import os
import subprocess
import sys

STEP = {
    "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "h1", "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip


def env_door(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster_ddp", "env", *arguments],
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
    )


def test_table() -> None:
    lines = dict(line.split(maxsplit=1) for line in env_door(**STEP).stdout.splitlines())
    assert lines["launcher"] == "slurm"
    assert lines["master_port"] == "10071"
    assert lines["array_task_id"] == "-"


def test_json() -> None:
    fields = json.loads(env_door("--json", **STEP).stdout)
    assert (fields["rank"], fields["world_size"], fields["nodes"], fields["cpus_per_task"]) == (1, 2, ["h1"], None)


def test_export_is_for_the_shell() -> None:
    script = 'eval "$("$1" -m cluster_ddp env --export)"; env'
    # The quoting of a value that would be code if it were not quoted.
    hostile = "h;touch x"
    done = subprocess.run(
        ["sh", "-c", script, "sh", sys.executable],
        env={"PATH": os.environ["PATH"], **STEP, "MASTER_ADDR": hostile},
        capture_output=True,
        text=True,
    )
    values = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    assert {name: values[name] for name in expected} == expected
    assert (values["MASTER_ADDR"], values["MASTER_PORT"]) == (hostile, "10071")


def test_an_error_is_one_block_and_status_2() -> None:
    done = env_door(RANK="0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("cluster-ddp env: error: ")
    assert len(done.stderr.splitlines()) == 3
    assert "Hint:" in done.stderr

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from cluster_ddp.errors import SpecError
from cluster_ddp.submission.spec import JobSpec
from cluster_ddp.submission.validation import normalized_time

GOOD: dict[str, Any] = {"name": "job", "command": ("python", "x.py")}


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "größe_1.5+x"},
        {"nodes": 16, "gpus_per_node": 8, "gpu_type": "a100-sxm4"},
        {"partition": "gpu,gpu-long", "account": "proj/sub", "qos": "high", "constraint": "[a100|h100]&ib"},
        {"array": "0-7"},
        {"array": "1,3-9:2%4", "command": ("x", "--seed={array_task_id}")},
        {"signal": "R:USR1@120"},
        {"mem": "32G", "after": "12"},
        {"after": "afterany:12:13_4,afternotok:15"},
        {"launcher": "fork", "requeue": False},
        {"container": "/a b/it's.sif", "container_binds": ("/data:/mnt/data",), "container_overlays": ("/o.sqsh",)},
        {"container_image": "nvcr.io#nvidia/pytorch:25.10-py3"},
        {
            "sbatch_options": (
                "--reservation=course",
                "--exclusive",
                "--wait-all-nodes=1",
                "--export-file=/my/env",
                "--mail-type=END,FAIL",
            )
        },
        {"command": ()},
        {"venv": "/a b/'c'/venv"},
        {"modules": ("cuda/12.8", "gcc/13")},
        {"exclude": "node3,node[07-08]-ib", "requeue": False, "restarts": 2},
        {"restarts": 1, "spare_nodes": 3, "hang_restart_s": 30, "restart_args": "--resume 'o o/last.pth' --x=$(y)"},
        {"sbatch_options": ("--requeue=expedite",), "requeue": True},
    ],
)
def test_good(fields: dict[str, Any]) -> None:
    JobSpec(**(GOOD | fields))


NASTY = ["", "a b", "a\nb", "a\n#SBATCH --nodes=9", "$(touch x)", "`x`", "a'b", 'a"b', "a\\b", "a;b", "a#b"]
TEXTS = ("name", "gpu_type", "mem", "partition", "account", "qos", "constraint", "array", "signal", "exclude")


@pytest.mark.parametrize(
    "value", ["--a b", "--a=b\n#SBATCH --nodes=9", "-p gpu", "x", "--a=$(touch x)", "--a='b'", "--A"]
)
def test_nasty_options_are_refused(value: str) -> None:
    with pytest.raises(SpecError, match="sbatch_options must be"):
        JobSpec(**GOOD, sbatch_options=(value,))


@pytest.mark.parametrize("value", ["--nodes=3", "--gres=gpu:1", "--output=x", "--wrap=x", "--hold", "--ntasks=4"])
def test_what_has_a_field_is_no_option(value: str) -> None:
    with pytest.raises(SpecError, match="an option that cluster-ddp does not set itself"):
        JobSpec(**GOOD, sbatch_options=(value,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("nodes", -1),
        ("nodes", 1.5),
        ("nodes", True),
        ("command", "python x.py"),
        ("gpus_per_node", 0),
        ("cpus_per_task", 0),
        ("command", ("",)),
        ("command", (1,)),
        ("nodes", "2"),
        ("launcher", "mpirun"),
        ("requeue", "yes"),
        ("after", "12; x"),
        ("begin", "16:00; x"),
        ("container", "a\nb"),
        ("container_image", "a b"),
        ("container_binds", ("a,b",)),
        ("container_overlays", ("/o.sqsh",)),
        ("setup", ("a\0b",)),
        ("mem", "32GB"),
        ("mem", "٣G"),
        ("time", "٣"),
        ("array", "0-3:0"),
        ("array", "5-2"),
        ("array", "0-3%0"),
        ("modules", ("--force",)),
        ("container_binds", ("/data",)),
        ("exclude", "node[3-"),
        ("exclude", "node[4-3]"),
        ("exclude", ","),
        ("restarts", -1),
        ("restarts", True),
        ("spare_nodes", -1),
        ("spare_nodes", 1),
        ("max_mem", "64G"),
        ("max_mem", "much"),
        ("hang_restart_s", -1),
        ("hang_restart_s", 30),
        ("restart_args", "--resume 'o"),
        ("restart_args", "a\nb"),
        ("restart_args", ("--resume",)),
        ("sbatch_options", ("--requeue=never",)),
        ("sbatch_options", ("--exclude=node3",)),
        ("sbatch_options", 5),
        *(
            ("sbatch_options", (f"--{name}",))
            for name in ("wait", "wai", "quiet", "help", "usage", "version", "parsable")
        ),
        ("array", "0-99999999"),
        ("array", "99999999"),
        ("array", "0-9,0-99999999999999999999"),
        ("array", "0-9%" + 5000 * "9"),
        ("share", None),
        ("sbatch_options", ("--part=x",)),
        ("time", 30),
        ("command", ("a\0b",)),
        ("command", ("x", "{array_task_id}")),
        ("modules", ("cuda; rm",)),
        ("venv", "a\nb"),
        ("conda_env", "a\nb"),
        ("description", "a\n#SBATCH --nodes=9"),
        ("name", "-x"),
        ("time", "soon"),
        *((field, value) for field in TEXTS for value in NASTY),
    ],
)
def test_bad_values_are_named(field: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"{field} must be"):
        JobSpec(**(GOOD | {field: value}))


def test_what_needs_a_requeue() -> None:
    with pytest.raises(SpecError, match="sbatch_options must be"):
        JobSpec(**GOOD, requeue=False, sbatch_options=("--requeue=expedite",))


@pytest.mark.parametrize(
    ("spares", "gpus", "words"),
    [
        (0, 4, ""),
        (1, 4, "1 spare node of 3: its 4 GPUs wait idle"),
        (1, 1, "1 spare node of 3: its 1 GPU waits idle"),
        (2, 4, "2 spare nodes of 4: their 8 GPUs wait idle"),
    ],
)
def test_spare_nodes_are_no_ranks_and_have_a_price(spares: int, gpus: int, words: str) -> None:
    spec = JobSpec(**GOOD, nodes=2, gpus_per_node=gpus, restarts=1, spare_nodes=spares)
    assert (spec.spares, spec.all_nodes, spec.world_size) == (words, 2 + spares, 2 * gpus)


def test_one_environment_only() -> None:
    with pytest.raises(SpecError, match="conda_env must be left out"):
        JobSpec(**GOOD, venv="a", conda_env="b")
    with pytest.raises(SpecError, match="container_image must be left out"):
        JobSpec(**GOOD, container="a", container_image="b")


def test_a_grid_makes_the_array() -> None:
    spec = JobSpec(name="x", command=("t", "{seed}", "{lr}"), grid={"seed": ("1", "2"), "lr": ("a", "b", "c")})
    assert spec.array == "0-5"
    assert replace(spec, array="0-5%2").array == "0-5%2"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": ("t", "{seed}"), "array": "0-9"}, "array must be 0-1"),
        ({"command": ("t",)}, "the command has no {seed}, so"),
        ({"command": ("t", "{seed}", "{sed}")}, "Did you mean seed?"),
    ],
)
def test_a_grid_must_fit(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        JobSpec(name="x", grid={"seed": ("1", "2")}, **fields)


def test_braces_without_a_grid_are_only_braces() -> None:
    JobSpec(name="x", command=("awk", "{print}", '{"a": 1}'))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("30", "0-00:30:00"),
        ("90", "0-01:30:00"),
        ("30:15", "0-00:30:15"),
        ("1:30:00", "0-01:30:00"),
        ("36:00:00", "1-12:00:00"),
        ("2-12", "2-12:00:00"),
        ("2-12:30", "2-12:30:00"),
        ("2-12:30:15", "2-12:30:15"),
        ("unlimited", "UNLIMITED"),
    ],
)
def test_time_in_all_of_slurms_forms(text: str, normal: str) -> None:
    assert normalized_time(text) == normal
    assert JobSpec(**GOOD, time=text).time == normal


@pytest.mark.parametrize("text", ["", "0", "0:00", "-5", "1h", "1:2:3:4", "5 ", "1-", "1.5", "2-12:30:15:00"])
def test_bad_times(text: str) -> None:
    with pytest.raises(SpecError, match="time must be"):
        normalized_time(text)

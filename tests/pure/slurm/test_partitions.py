"""What is made of sinfo's words, which an executable on a temporary PATH says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster_ddp.errors import SlurmError
from cluster_ddp.slurm.partitions import NodeGroup, read


@pytest.fixture
def sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a sinfo that prints some lines; its arguments and environment are written beside it."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(*lines: str) -> Path:
        (tmp_path / "answer").write_text("".join(f"{line}\n" for line in lines))
        noted = f'printf "%s\\n" "$@" >{tmp_path}/arguments; /usr/bin/env >{tmp_path}/environment'
        path = tmp_path / "sinfo"
        path.write_text(f"#!/bin/sh\n{noted}\nexec /bin/cat {tmp_path}/answer\n")
        path.chmod(0o755)
        return tmp_path

    return make


def line(**fields: Any) -> str:
    words = {"partition": "main", "up": "up", "state": "idle", "nodes": 4, "cpus": 8, "mem": 16000, "time": "30:00"}
    return "|".join(map(str, ({**words, "gres": "gpu:2"} | fields).values()))


def test_a_heterogeneous_cluster(sinfo) -> None:
    # As 22.05.8 printed it for nodes with typed, untyped and no GPUs, and a partition without nodes.
    sinfo(
        "main*|up|idle|2|8|16000|1-00:00:00|gpu:A100:2",
        "main*|up|down*|1|8|16000|1-00:00:00|gpu:2",
        "cpu|up|mixed|1|64|515000|30:00|(null)",
        "off|inactive|idle|1|8|16000|infinite|gpu:2",
        "empty|up|n/a|0|0|0|infinite|(null)",
    )
    main: dict[str, Any] = {
        "partition": "main",
        "default": True,
        "up": True,
        "cpus": 8,
        "mem_mb": 16000,
        "time_limit_s": 86400,
    }
    main, cpu, off, empty = (
        main,
        {"partition": "cpu", "default": False, "up": True},
        {"partition": "off", "default": False, "up": False, "time_limit_s": None},
        {"partition": "empty", "default": False, "up": True, "time_limit_s": None},
    )
    assert read() == [
        NodeGroup(**main, usable=True, nodes=2, gpus={"A100": 2}),
        NodeGroup(**main, usable=False, nodes=1, gpus={"": 2}),
        NodeGroup(**cpu, usable=True, nodes=1, cpus=64, mem_mb=515000, time_limit_s=1800, gpus={}),
        NodeGroup(**off, usable=True, nodes=1, cpus=8, mem_mb=16000, gpus={"": 2}),
        NodeGroup(**empty, usable=False, nodes=0, cpus=0, mem_mb=0, gpus={}),
    ]


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:2", {"": 2}),
        ("gpu", {"": 1}),
        ("gpu:a100", {"a100": 1}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100:2(S:0),gpu:v100:1", {"a100": 2, "v100": 1}),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", {"a100": 4}),
        ("gpu:a100:4(S:0,2-3),shard:16", {"a100": 4}),
        ("gpu:tesla:no_consume:2", {"tesla": 2}),
        ("gpu:no_consume:2", {"": 2}),
        ("gpu:nvidia_a100_1g.5gb:7", {"nvidia_a100_1g.5gb": 7}),
        ("gpu:sim:1K", {"sim": 1024}),
        ("gpu:0", {}),
        ("lustre:1,gpus:3,mps:200,craynetwork:4", {}),
        ("(null)", {}),
        ("", {}),
    ],
)
def test_gres(sinfo, gres: str, gpus: dict[str, int]) -> None:
    sinfo(line(gres=gres))
    [group] = read()
    assert group.gpus == gpus
    assert group.gpus_of(None) == sum(gpus.values())
    assert group.gpus_of("a100") == gpus.get("a100", 0)


@pytest.mark.parametrize(
    ("states", "usable"),
    [
        (
            "idle idle~ idle# mixed mixed- mix allocated alloc allocated+ completing comp planned plnd reserved resv",
            True,
        ),
        ("powered_down powering_up powering_down power_down reboot reboot^ idle@ idle% idle! idle* allocated$", True),
        ("down down* down~ drained drain drained* draining draining@ drng fail failing failg future futr", False),
        ("inval maint unknown unk* DOWN n/a", False),
    ],
)
def test_states(sinfo, states: str, usable: bool) -> None:
    sinfo(*(line(state=state) for state in states.split()))
    assert [group.usable for group in read()] == [usable] * len(states.split())


@pytest.mark.parametrize(
    ("text", "time_limit_s"),
    [("infinite", None), ("n/a", None), ("30:00", 1800), ("12:30:00", 45000), ("1-00:00:00", 86400), ("1:05", 65)],
)
def test_time_limits(sinfo, text: str, time_limit_s: int | None) -> None:
    sinfo(line(time=text))
    assert read()[0].time_limit_s == time_limit_s


@pytest.mark.parametrize(
    "other", ["CLUSTER: two", "", "main|up", line(nodes="many"), line(time="soon"), line(cpus="8+"), line() + "|x"]
)
def test_a_line_that_cannot_be_read_is_left_out(sinfo, other: str) -> None:
    sinfo(other)
    assert read() == []
    sinfo(other, line(), other, line(nodes=1))
    assert [group.nodes for group in read()] == [4, 1]


def test_the_call(sinfo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sinfo(line())
    monkeypatch.setenv("SINFO_PARTITION", "debug")
    monkeypatch.setenv("SLURM_CONF", "/etc/hosts")
    options = ["--all", "--noheader", "--exact", "--noconvert", "--format=%P|%a|%T|%D|%c|%m|%l|%G"]
    read()
    environment = (folder / "environment").read_text()
    assert "SLURM_CONF=/etc/hosts" in environment
    assert "SINFO_" not in environment
    assert (folder / "arguments").read_text().splitlines() == options
    read(cluster="two", env={"PATH": str(folder), "SLURM_CONF": "/etc/passwd", "SINFO_ALL": "1"})
    environment = (folder / "environment").read_text()
    assert "SLURM_CONF=/etc/passwd" in environment
    assert "SINFO_" not in environment
    assert (folder / "arguments").read_text().splitlines() == [*options, "--clusters=two"]


def test_without_sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="there is no sinfo"):
        read()

"""CPUs near a GPU; the system's files and calls are stood in for."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster_ddp.runtime.device import binding

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8-9\n", {0, 1, 2, 3, 8, 9}), ("5\n", {5}), ("\n", set()), ("0-1,4", {0, 1, 4})]
)
def test_parse(text: str, cpus: set[int]) -> None:
    assert binding.parse(text) == cpus


@pytest.mark.parametrize(
    ("local", "usable", "cpus_per_task", "bound", "said"),
    [
        ("0-3", range(8), 4, {0, 1, 2, 3}, False),
        ("0-3", range(4), 4, None, False),  # they are near already
        ("0-3", range(2, 6), 2, {2, 3}, False),
        ("0-3", range(2, 6), 4, None, True),  # dealt out to two sockets: two of four would be too few
        ("0-3", range(4, 8), 4, None, True),
        ("", range(8), 4, None, False),
        (None, range(8), 4, None, False),  # nobody tells
    ],
)
def test_a_process_runs_near_its_gpu_where_it_has_the_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    local: str | None,
    usable: range,
    cpus_per_task: int,
    bound: set[int] | None,
    said: bool,
) -> None:
    folder = tmp_path / "0000:5e:00.0"
    folder.mkdir()
    if local is not None:
        (folder / "local_cpulist").write_text(f"{local}\n")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x5E, pci_device_id=0)
    calls: list[set[int]] = []
    monkeypatch.setattr(binding, "_PCI", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(usable))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: calls.append(cpus))
    monkeypatch.setattr(logging.getLogger("cluster_ddp"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("cluster_ddp"), "propagate", False)
    binding.bind_cpus(GPU, cpus_per_task, told=True)
    assert calls == ([] if bound is None else [bound])
    assert ("--distribution=block:block" in caplog.text) == said

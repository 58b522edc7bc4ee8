"""A real Slurm for the tests in this folder: one sandbox for the whole session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import ROOT, Cluster, sandbox_name, skip

from cluster_ddp.errors import DataError, SandboxError
from cluster_ddp.mnist import files
from cluster_ddp.sandbox import cluster, packages, releases


@pytest.fixture(scope="session")
def machine() -> None:
    """A machine that can play a cluster; Slurm is installed if need be."""
    try:
        packages.install()
        packages.require()
    except SandboxError as error:
        skip(str(error))


@pytest.fixture(scope="session")
def slurm(machine: None, pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """Four nodes with two GPUs each."""
    name, version = sandbox_name("test"), pytestconfig.getoption("--slurm-version")
    try:
        prefix = None if version is None else releases.fetch(version)
        layout = cluster.up(name, nodes=4, gpus_per_node=2, slurm=prefix)
    except SandboxError as error:  # a container that may not make network namespaces, say
        skip(str(error))
    try:
        # The environment of these tests first on the PATH, as in a shell where it is activated.
        env = cluster.environment(name)
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        yield Cluster(layout, env, pytestconfig.getoption("--launcher"))
    finally:
        cluster.down(name)


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real MNIST: the checkout's data/, or made from the files in $MNIST_FROM."""
    try:
        files.check(ROOT / "data")
        return ROOT / "data"
    except DataError:
        folder = tmp_path_factory.mktemp("mnist")
    source = os.environ.get("MNIST_FROM", "")
    if not source:
        skip("MNIST is not at hand: run scripts/download_data.py, or set MNIST_FROM to a folder with its files")
    command = [sys.executable, "scripts/download_data.py", "--data-dir", str(folder), "--from", source]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder

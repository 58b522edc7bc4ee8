"""A real Slurm for the tests in this folder: sandboxes of the system's and of the newest, for the whole session."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, sandbox_name, skip_without_slurm

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox import cluster, prerequisites, slurm_download


@pytest.fixture(scope="session")
def machine() -> None:
    """A machine that can play a cluster; Slurm is installed if need be."""
    try:
        prerequisites.install()
        prerequisites.require()
    except SandboxError as error:
        skip_without_slurm(error)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests marked every_slurm on the newest Slurm, too, unless --slurm-version names one for all tests.

    All have the parameter, so that pytest puts those of one Slurm together, and makes what they share once for each.
    """
    if "slurm" in metafunc.fixturenames:
        version = metafunc.config.getoption("--slurm-version")
        versions = [pytest.param(version, id=version or "system")]
        if not version and metafunc.definition.get_closest_marker("every_slurm"):
            versions.append(pytest.param(slurm_download.NEWEST, id=slurm_download.NEWEST, marks=pytest.mark.full))
        metafunc.parametrize("slurm", versions, indirect=True)


@pytest.fixture(scope="session")
def sandboxes(machine: None, pytestconfig: pytest.Config) -> Iterator[Callable[[str | None], Cluster]]:
    """Start a sandbox of a Slurm at its first use: four nodes with two GPUs each. They stay until the session's end."""
    started: dict[str | None, Cluster] = {}

    def sandbox(version: str | None) -> Cluster:
        if version not in started:
            name = sandbox_name("test" if version is None else f"test{version.replace('.', '')}")
            layout = cluster.up(name, nodes=4, gpus_per_node=2, slurm=version and slurm_download.fetch(version))
            # The environment of these tests first on the PATH, as in a shell where it is activated.
            env = cluster.environment(name)
            env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
            started[version] = Cluster(layout, env, pytestconfig.getoption("--launcher"))
        return started[version]

    yield sandbox
    for one in started.values():
        cluster.down(one.name)


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest, sandboxes: Callable[[str | None], Cluster]) -> Cluster:
    """The sandbox to test on."""
    try:
        return sandboxes(request.param)
    except SandboxError as error:  # a container that may not make network namespaces, say
        skip_without_slurm(error)

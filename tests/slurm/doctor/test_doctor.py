"""The doctor on a real Slurm: its first finding names the fault that was made, and it is silent where there is none.

All faults of one step are made at the same time, each in a step of its own in one allocation of two nodes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import doctor_faults as faults
import pytest
from cluster import ROOT, Cluster, Place, output, sandbox_name, selected, skip_without_slurm
from doctor_faults import Fault, Variant
from slowness import scaled, stays, wait_until

import cluster_ddp
from cluster_ddp.doctor import login_node_checks
from cluster_ddp.doctor.checks import all_checks, task_allocation
from cluster_ddp.errors import SandboxError
from cluster_ddp.run.names import File
from cluster_ddp.sandbox import cluster as sandbox
from cluster_ddp.sandbox import network, prerequisites
from cluster_ddp.slurm import commands

TIMEOUT_S = 120.0
AT_ONCE = 5
HOLD = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=2 --gres=gpu:2
cd "$FOLDER"
{faults}
touch begun
sleep 900
"""
STEP = ("--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2")


@dataclass(frozen=True)
class Said:
    """What a step of the doctor has said."""

    status: int
    verdict: dict[str, Any]
    output: str

    @property
    def first(self) -> dict[str, Any]:
        assert self.verdict["findings"], self.output
        return self.verdict["findings"][0]


@dataclass(frozen=True)
class Allocation:
    """Two nodes with two GPUs each, for steps."""

    cluster: Cluster
    job: int
    folder: Path

    def step(self, name: str, command: Sequence[str], options: Sequence[str] = STEP) -> tuple[int, str, str]:
        """Run a step in a folder of its own; its exit status and output."""
        folder = self.folder / name
        _furnish(folder)
        srun = ["srun", f"--jobid={self.job}", "--overlap", "--kill-on-bad-exit=0", f"--chdir={folder}", *options]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**self.cluster.env, "PYTHONPATH": path, "PYTHON": sys.executable}
        env.pop("OMP_NUM_THREADS", None)
        done = subprocess.run(
            [*srun, *command],
            env=env,
            capture_output=True,
            text=True,
            timeout=scaled(TIMEOUT_S),
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, done.stdout, done.stderr

    def doctor(self, name: str, fault: Fault) -> Said:
        """The doctor in a step with a fault."""
        lines = f'set -e\n{fault.lines}\nexec "$@"'
        command = [sys.executable, "-m", "cluster_ddp.doctor", "--json", *fault.arguments]
        options = [*STEP, *fault.options]
        status, out, errors = self.step(name, ["unshare", "--mount", "bash", "-c", lines, "bash", *command], options)
        verdicts = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(verdicts) == 1, f"{fault.title}: {len(verdicts)} verdicts, status {status}\n{out}\n{errors}"
        return Said(status, verdicts[0], f"{out}\n{errors}")

    def healthy(self, name: str, variant: Variant) -> Said:
        """The doctor in a step that has no fault."""
        words = [*variant.before, *variant.launcher, "cluster_ddp.doctor", "--json", *variant.arguments]
        status, out, errors = self.step(name, ["bash", "-c", " ".join(words)], [*STEP, *variant.options])
        verdicts = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(verdicts) == 1, f"{variant.title}: {len(verdicts)} verdicts, status {status}\n{out}\n{errors}"
        return Said(status, verdicts[0], f"{out}\n{errors}")

    def on_node(self, node: str, lines: str) -> None:
        """Run lines of bash in a node's network namespace; @node1 is its address."""
        for address, name in self.cluster.layout.hosts_by_address.items():
            lines = lines.replace(f"@{name}", address)
        namespace = network.NAMESPACE_ROOT / self.cluster.layout.namespace(node)
        subprocess.run(["nsenter", f"--net={namespace}", "bash", "-ec", lines], check=True)


def _furnish(folder: Path) -> None:
    torch_folder = (task_allocation.torch_versions() or {})["folder"]
    for name in ("run", "data", "half", "other", "older/torch", "ahead", "slow", "thrice", "hangs", "ends/torch"):
        (folder / name).mkdir(parents=True)
    for name in ("train", "valid", "test"):
        (folder / "data" / name).write_text(name)
        (folder / "other" / name).write_text(name.upper())
        if name != "test":
            (folder / "half" / name).write_text(name)
    (folder / "older/torch/__init__.py").write_text('raise ImportError("libcudart.so.13: cannot open it")\n')
    (folder / "older/torch/version.py").write_text("__version__ = '1.0.0'\ncuda = None\n")
    hangs = "import os, time\nreal = os.listdir\ndef listdir(path='.'):\n"
    hangs += "    time.sleep(60 if str(path).endswith('data') else 0)\n    return real(path)\nos.listdir = listdir\n"
    (folder / "hangs/sitecustomize.py").write_text(hangs)
    (folder / "ends/torch/__init__.py").write_text("import os\nos._exit(7)\n")
    (folder / "ends/torch/version.py").write_text((Path(torch_folder) / "version.py").read_text())
    slow = "import builtins, time\nreal = builtins.__import__\ndef slow(name, *rest, **more):\n"
    slow += "    if name == 'torch' and slow.seconds:\n        time.sleep(slow.seconds)\n        slow.seconds = 0\n"
    slow += "    return real(name, *rest, **more)\nslow.seconds = 4\nbuiltins.__import__ = slow\n"
    (folder / "slow/sitecustomize.py").write_text(slow)
    thrice = "import builtins, sys\nreal, mm = builtins.__import__, []\ndef slow(name, *rest, **more):\n"
    thrice += "    found, torch = real(name, *rest, **more), sys.modules.get('torch')\n"
    thrice += "    if torch and not mm and not torch.__spec__._initializing:\n        mm.append(torch.mm)\n"
    thrice += "        torch.mm = lambda a, b: [mm[0](a, b) for _ in range(3)][0]\n"
    thrice += "    return found\nbuiltins.__import__ = slow\n"
    (folder / "thrice/sitecustomize.py").write_text(thrice)
    (folder / "ahead/sitecustomize.py").write_text("import time\nt = time.time\ntime.time = lambda: t() + 60\n")


@pytest.fixture(scope="module")
def allocation(machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Allocation]:
    """A sandbox of its own: its nodes get firewalls."""
    name = sandbox_name("doctor")
    try:
        prerequisites.install(("nft",), ("nftables",))
        layout = sandbox.up(name, nodes=2, gpus_per_node=2)
    except SandboxError as error:
        skip_without_slurm(error)
    env = {**sandbox.environment(name)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    one = Cluster(layout, env)
    folder = tmp_path_factory.mktemp("it's a doctor")
    doctor = shlex.join([sys.executable, "-m", "cluster_ddp.doctor", "--quick", "--json"])
    lines = [
        f'{shlex.join(fault.options)} {doctor} >batch-{number}.json; echo "$?" >>batch-{number}.json'
        for number, fault in enumerate(faults.IN_THE_BATCH_SHELL)
    ]
    script = HOLD.format(faults="\n".join(lines))
    options = (f"--chdir={folder}", f"--output={folder}/hold.out")
    submitted = commands.submit(
        text=script, options=options, env={**env, "FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    )
    wait_until(lambda: (folder / "begun").exists(), said=lambda: (folder / "hold.out").read_text())
    yield Allocation(one, submitted.job_id, folder)
    sandbox.down(name)


@pytest.fixture(scope="module")
def at_once(allocation: Allocation, request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Said]]]:
    """The doctor with each fault that concerns one step only."""
    copy = allocation.folder / "copy" / "cluster_ddp"
    shutil.copytree(Path(str(cluster_ddp.__file__)).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "_later.py").write_text("")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            fault.title: pool.submit(allocation.doctor, str(number), fault)
            for number, fault in enumerate(faults.AT_ONCE)
            if fault in selected(request, "fault")
        }


@pytest.fixture(scope="module")
def healthy(
    allocation: Allocation, at_once: dict[str, Future[Said]], request: pytest.FixtureRequest
) -> Iterator[dict[str, Future[Said]]]:
    """The doctor where there is no fault."""
    for one in at_once.values():
        one.exception()  # they have ended: a busy machine is no fault either, but slow
    with ThreadPoolExecutor(2) as pool:
        yield {
            variant.title: pool.submit(allocation.healthy, f"healthy {number}", variant)
            for number, variant in enumerate(faults.HEALTHY)
            if variant in selected(request, "variant")
        }


def parameters(made: Sequence[Fault]) -> list[object]:
    """Faults as parameters; `make test` has those that documents promise to find."""
    return [
        pytest.param(one, id=one.title, marks=[] if one.title in faults.PROMISED else pytest.mark.full) for one in made
    ]


def check(said: Said, fault: Fault) -> None:
    """Whether the first finding names the fault."""
    text = f"{said.first['what']} {said.first['evidence']} {said.first['hint']}"
    assert said.first["check"] == fault.check, said.output
    for part in fault.found:
        assert part in text, f"{part!r} is not in: {text}\n{said.output}"
    assert bool(said.status) != said.first["is_warning"], said.output  # srun reports a killed task's status, too


@pytest.mark.fault(
    "loopback is down on a node; MASTER_PORT differs by task; two nodes share one address; no free ports; packets get "
    "lost; gloo lacks the transport; 12 open files",
    "the doctor's first finding names it",
    bound="a minute",
    also=("test_the_first_finding_names_the_fault_of_the_network",),
)
@pytest.mark.parametrize("fault", parameters(faults.AT_ONCE))
def test_the_first_finding_names_the_fault(fault: Fault, at_once: dict[str, Future[Said]]) -> None:
    check(at_once[fault.title].result(), fault)


@pytest.mark.parametrize("fault", parameters(faults.NETWORK))
def test_the_first_finding_names_the_fault_of_the_network(
    fault: Fault, at_once: dict[str, Future[Said]], allocation: Allocation
) -> None:
    for one in at_once.values():
        one.exception()  # they have ended
    try:
        for node, lines in fault.on_nodes:
            allocation.on_node(node, lines)
        check(allocation.doctor(f"network {faults.NETWORK.index(fault)}", fault), fault)
    finally:
        for node, lines in fault.undone:
            allocation.on_node(node, lines)


def test_the_status_is_the_verdicts_though_srun_ends_the_tasks(
    at_once: dict[str, Future[Said]], allocation: Allocation
) -> None:
    """After the first bad status srun sends TERM to the others."""
    for one in at_once.values():
        one.exception()
    command = ("env", "GLOO_SOCKET_IFNAME=ib0", sys.executable, "-m", "cluster_ddp.doctor", "--quick")
    status, out, errors = allocation.step("ended", command, [*STEP, "--kill-on-bad-exit=1"])
    assert (status, "GLOO_SOCKET_IFNAME names an interface" in out + errors) == (2, True), out + errors


@pytest.mark.full
def test_a_closed_stdout_does_not_change_the_status(at_once: dict[str, Future[Said]], allocation: Allocation) -> None:
    for one in at_once.values():
        one.exception()
    doctor = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, "-m", "cluster_ddp.doctor", "--quick"]
    status, out, errors = allocation.step("closed", doctor)
    assert (status, out, "Traceback" in errors) == (0, "", False), errors
    status, out, errors = allocation.step("closed, ill", ["env", "GLOO_SOCKET_IFNAME=ib0", *doctor])
    assert (status, out, "Traceback" in errors) == (2, "", False), errors


@pytest.mark.full
@pytest.mark.parametrize("variant", faults.HEALTHY, ids=lambda variant: variant.title)
def test_no_alarm(variant: Variant, healthy: dict[str, Future[Said]]) -> None:
    said = healthy[variant.title].result()
    assert said.verdict["sound"] and not said.verdict["findings"] and said.status == 0, said.output
    tiers = [tier["name"] for tier in said.verdict["tiers"]]
    several_nodes = "--nodes=1" not in variant.options
    expected = ["nodes", *(["network"] if several_nodes else []), *([] if variant.arguments else ["torch", "training"])]
    assert tiers == expected, said.output


def on_a_login_node(allocation: Allocation, folder: Path, lines: str, arguments: Sequence[str]) -> Said:
    script = f'set -e; cd "$1"; shift\n{lines}\nexec "$@"'
    command = [sys.executable, "-m", "cluster_ddp.doctor", "--json", *arguments]
    done = allocation.cluster.run("unshare", "--mount", "bash", "-c", script, "bash", str(folder), *command)
    text = done.stdout + done.stderr
    assert done.stdout.startswith("{"), text
    return Said(done.returncode, json.loads(done.stdout), text)


@pytest.mark.parametrize("fault", faults.ON_A_LOGIN_NODE, ids=lambda fault: fault.title)
def test_a_fault_of_a_login_node_is_found(fault: Fault, allocation: Allocation, tmp_path: Path) -> None:
    said = on_a_login_node(allocation, tmp_path, fault.lines, fault.arguments)
    found = next(one for one in said.verdict["findings"] if one["check"] == fault.check)
    assert said.status == (1 if "--strict" in fault.arguments else 2), said.output
    for part in fault.found:
        assert part in f"{found['what']} {found['evidence']} {found['hint']}", said.output


def test_a_sound_login_node(allocation: Allocation, tmp_path: Path) -> None:
    said = on_a_login_node(allocation, tmp_path, "", ())
    assert said.status == 0 and "main: 2 nodes, 2 GPUs each" in said.output, said.output
    assert {one["check"] for one in said.verdict["findings"]} <= {"node_local"}, said.output  # pytest works in /tmp
    done = allocation.cluster.run(sys.executable, "-m", "cluster_ddp.doctor", "--wait-s", "0")
    assert done.returncode == 2 and "--wait-s 0" in done.stderr


@pytest.mark.parametrize("number", range(len(faults.IN_THE_BATCH_SHELL)))
def test_the_first_finding_names_the_fault_of_a_batch_script(number: int, allocation: Allocation) -> None:
    text = (allocation.folder / f"batch-{number}.json").read_text()
    verdict, status = text.splitlines()
    check(Said(int(status), json.loads(verdict), text), faults.IN_THE_BATCH_SHELL[number])


def test_each_check_that_can_be_shown_here_is_shown() -> None:
    made = (*faults.AT_ONCE, *faults.NETWORK, *faults.IN_THE_BATCH_SHELL, *faults.ON_A_LOGIN_NODE)
    shown = {fault.check for fault in made}
    of_rank_0 = {name for checks in all_checks.OF_RANK_0.values() for name in checks}
    everyone = {one.name for one in all_checks.ALL} | of_rank_0 | {*login_node_checks.CHECKS}
    assert shown <= everyone
    # GPUs, InfiniBand, control groups and faults of hardware are not here: tests/pure/doctor has stand-ins.
    elsewhere = {"gpu_health", "same_gpu", "locked_memory", "memory_limit", "out_of_memory"}
    elsewhere |= {"rendezvous", "all_reduce", "gradients"}
    assert everyone - shown == elsewhere


@pytest.fixture(scope="module")
def place(allocation: Allocation) -> Iterator[Place]:
    """A folder to submit from, on the same sandbox. The allocation is given back: its GPUs are needed."""
    commands.run(["scancel", str(allocation.job)], env=allocation.cluster.env)
    folder = allocation.folder / "submitted"
    folder.mkdir()
    yield Place(allocation.cluster, folder)


@pytest.mark.full
def test_two_tasks_of_an_array_at_once_are_sound(place: Place, healthy: dict[str, Future[Said]]) -> None:
    """Each is a job of its own on both nodes."""
    for one in healthy.values():
        one.exception()
    doctor = shlex.join([sys.executable, "-m", "cluster_ddp.doctor", "--quick", "--json"])
    script = f"""#!/bin/bash
#SBATCH --array=0-1 --nodes=2 --ntasks-per-node=1 --gres=gpu:1 --output=task-%a.out
touch begun-$SLURM_ARRAY_TASK_ID
until [[ -e begun-0 && -e begun-1 ]]; do sleep 0.1; done
srun {doctor} >task-$SLURM_ARRAY_TASK_ID.json
echo "status $?"
"""
    env = {**place.slurm.env, "PYTHONPATH": str(ROOT)}
    commands.submit(text=script, options=(f"--chdir={place.folder}",), env=env)
    logs = [place.folder / f"task-{task}.out" for task in range(2)]
    wait_until(lambda: all(log.exists() and "status" in log.read_text() for log in logs))
    for log in logs:
        assert log.read_text() == "status 0\n"
        verdict = json.loads(log.with_suffix(".json").read_text())
        assert not verdict["findings"] and verdict["subject"].startswith("2 ranks on node1, node2"), verdict


@pytest.mark.full
def test_the_doctor_is_submitted_with_the_options_of_a_job(place: Place, healthy: dict[str, Future[Said]]) -> None:
    for one in healthy.values():
        one.exception()
    doctor = (sys.executable, "-m", "cluster_ddp.doctor")
    well = place.submit("--quick", "--nodes", "2", "--gpus-per-node", "2", "--no-check", program=doctor)
    assert well.returncode == 0, well.stdout + well.stderr
    assert "4 ranks on node1, node2" in well.stdout and "No problem found." in well.stdout
    ill = place.submit("--quick", "--nodes", "2", "--gpus-per-node", "1", "--no-check",
                       "--setup", "export GLOO_SOCKET_IFNAME=ib0", program=doctor)  # fmt: skip
    assert ill.returncode == 2, ill.stdout + ill.stderr
    assert "error: GLOO_SOCKET_IFNAME names an interface that is not there: ib0." in ill.stdout
    refused = place.submit("--nodes", "2", "--array", "a=1,2", program=doctor)
    assert refused.returncode == 2 and "leave out --array" in refused.stderr


@pytest.mark.parametrize(
    ("launcher", "gpus"),
    [("srun", 1), pytest.param("fork", 2, marks=pytest.mark.full)],
)
def test_a_job_begins_with_the_doctor(launcher: str, gpus: int, place: Place, healthy: dict[str, Future[Said]]) -> None:
    script = place.folder / "begins.py"
    script.write_text("print('The training begins.')\n")
    command = ("--launcher", launcher, "--nodes", "2", "--gpus-per-node", str(gpus), "--doctor")
    run = place.start(*command, "--", "python", str(script))
    said = place.completed(run)
    tiers = re.findall(r"^  (?:nodes|network) +ok +([0-9.]+) s", said, re.MULTILINE)
    assert len(tiers) == 2, said
    assert "No problem found." in said and said.count("The training begins.") == 2 * gpus
    broken = place.start(*command, "--setup", "export GLOO_SOCKET_IFNAME=ib0", "--", "python", str(script))
    assert place.end_of(broken).state == "FAILED"
    said = output(broken)
    assert "The training begins." not in said
    assert "Failed first, with status 2: rank 0 on node1: GLOO_SOCKET_IFNAME names an interface" in said


def test_a_node_that_dies_is_named_while_slurm_does_not_know_it(place: Place, healthy: dict[str, Future[Said]]) -> None:
    """Its link goes down: no connection closes, and slurmctld notices it later. The last test: node2 is lost."""
    nodes = ("--nodes", "2", "--gpus-per-node", "1", "--no-requeue")
    training = (
        "--dataset",
        "digits",
        "--epochs",
        "9",
        "--batch-size",
        "9",
        "--model",
        "convnet",
        "--hang-warning-s",
        "2",
    )
    script = str(ROOT / "tests/slurm/faults/paced_training.py")
    run = place.start(*nodes, "--", "env", "PACE_S=0.3", "python", script, *training)
    hang, seen = run / File.HANG, run / File.STACK.format(0)
    is_done = '"doing": "paced_step"'  # a step
    wait_until(lambda: seen.exists() and is_done in seen.read_text(), said=lambda: output(run))
    stays(lambda: not hang.exists(), 2)
    namespace = network.NAMESPACE_ROOT / place.slurm.layout.namespace("node2")
    subprocess.run(["nsenter", f"--net={namespace}", "ip", "link", "set", "eth0", "down"], check=True)
    wait_until(hang.exists, said=lambda: output(run))
    told = re.fullmatch(
        r"rank 0 on node1 waits in (?:all_reduce|broadcast)( #\d+)? \((\w+\.py):\d+\); "
        r"rank 1 on node2 does not answer: it is stopped, or its node is gone; seen last: .* \(\w+\.py:\d+\)\n",
        hang.read_text(),
    )
    assert told, hang.read_text()
    done = place.submit("--autopsy", str(run), program=(sys.executable, "-m", "cluster_ddp.doctor"))
    assert done.returncode == 2 and "takes no other words" in done.stderr  # --launcher srun
    said = place.slurm.run(sys.executable, "-m", "cluster_ddp.doctor", "--autopsy", str(run))
    assert said.returncode == 0 and said.stdout.startswith(hang.read_text().rstrip()), said.stdout + said.stderr
    assert f"stacks of rank 0 on node1: {run}" in said.stdout

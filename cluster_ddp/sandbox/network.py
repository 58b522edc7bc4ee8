"""The sandbox's network: a bridge, and for every host a namespace with a link to it.

Also the processes of a sandbox: all that run in its namespaces, so none is overlooked.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from cluster_ddp.errors import SandboxError
from cluster_ddp.sandbox.layout import Layout, namespace_prefix

NAMESPACE_ROOT = Path("/run/netns")  # where ip(8) keeps named namespaces
INTERFACES = Path("/sys/class/net")


def ip(*arguments: str) -> str:
    """Run ip(8).

    Raises:
        SandboxError: it failed; the error has its message.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise SandboxError(
            f"Building the sandbox's network with: ip {' '.join(arguments)}",
            done.stderr.strip() or f"exit status {done.returncode}.",
            "run it as root, where the kernel allows network namespaces, bridges and veth pairs; "
            "most containers do not (docker run --privileged does)",
        )
    return done.stdout


def subnet_is_free(layout: Layout) -> bool:
    """Whether neither a route nor an interface of the machine uses the layout's subnet or bridge."""
    wanted = ipaddress.ip_network(f"{layout.address(0)}/24")
    routes = (route.get("dst", "default") for route in json.loads(ip("-json", "route") or "[]"))
    used = (ipaddress.ip_network(dst, strict=False) for dst in routes if dst != "default")
    return not (INTERFACES / layout.bridge).exists() and not any(wanted.overlaps(network) for network in used)


def build(layout: Layout) -> None:
    """Make the bridge, the namespaces and their links.

    Raises:
        SandboxError: the kernel refuses.
    """
    alias = namespace_prefix(layout.name)
    ip("link", "add", layout.bridge, "type", "bridge")
    ip("link", "set", layout.bridge, "alias", alias)
    ip("addr", "add", f"{layout.address(1)}/24", "dev", layout.bridge)
    ip("link", "set", layout.bridge, "up")
    for address, host in layout.hosts_by_address.items():
        namespace, link = layout.namespace(host), layout.link(host)
        ip("netns", "add", namespace)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", link, "alias", alias, "master", layout.bridge, "up")
        ip("-netns", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        ip("-netns", namespace, "link", "set", "eth0", "up")
        ip("-netns", namespace, "link", "set", "lo", "up")


def enter(layout: Layout, host: str, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` on a host: its network, its hostname, its /etc/hosts.

    `ip netns exec` would remount /sys, and slurmd then finds no cgroup file system: hence nsenter.
    """
    setup = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
    inside = ["sh", "-c", setup, "sh", host, str(layout.hosts), *command]
    namespace = NAMESPACE_ROOT / layout.namespace(host)
    return ["nsenter", f"--net={namespace}", "unshare", "--uts", "--mount", *inside]


def namespaces(name: str) -> list[Path]:
    """The paths of a sandbox's namespaces that exist, also after a crash."""
    return sorted(NAMESPACE_ROOT.glob(f"{namespace_prefix(name)}*"))


def processes(name: str) -> list[int]:
    """The ids of all processes in a sandbox's namespaces."""
    return processes_in(namespaces(name))


def processes_in(paths: Iterable[Path]) -> list[int]:
    """The ids of all processes in these network namespaces."""
    inodes = {_inode(path) for path in paths} - {None}
    pids = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in pids if _inode(Path(f"/proc/{pid}/ns/net")) in inodes]


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:  # it has ended
        return None


def end_processes(name: str, grace_s: float = 3.0) -> None:
    """End every process of a sandbox: TERM, then, after `grace_s` seconds, KILL until none is left."""
    deadline = time.monotonic() + grace_s
    sent = signal.SIGTERM
    while pids := processes(name):
        if time.monotonic() > deadline:
            sent = signal.SIGKILL
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
        time.sleep(0.1)


def interfaces(name: str) -> list[str]:
    """The bridge and the links of a sandbox that exist, known by their alias."""
    return sorted(path.parent.name for path in INTERFACES.glob("*/ifalias") if _alias(path) == namespace_prefix(name))


def _alias(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # another sandbox has just removed it
        return ""


def remove(name: str) -> None:
    """Remove a sandbox's links, bridge and namespaces.

    The kernel removes a namespace's links too, but only some time after it.
    """
    for interface in interfaces(name):
        ip("link", "delete", interface)
    for path in namespaces(name):
        ip("netns", "delete", path.name)

"""On a spare node: waits, so that the job learns when the node is lost; examines the node before ranks start on it."""

from __future__ import annotations

import os
import subprocess

from cluster_ddp.agent import place, python_command
from cluster_ddp.agent.channel.client import Client
from cluster_ddp.agent.notes import one_line
from cluster_ddp.agent.options import Options
from cluster_ddp.agent.task import signals
from cluster_ddp.agent.task.orders import Orders
from cluster_ddp.slurm.variables import node_name

SPARE = "spare"
"""In place of the number of a start, for orders to spares."""

_LIMIT_S = 30.0


def run(options: Options) -> int:
    """Wait for orders until the job is over. Returns the exit status.

    Signals are held: Slurm warns all steps of a job (--signal, preemption), and this one has nothing to save.
    """
    host = node_name(os.environ)
    client = Client.of_job(os.environ)
    client.always["spare"] = True
    client.say("hello", ranks=[], host=host, task=None)
    orders = Orders(client, SPARE, lambda: None)
    while client.is_connected and (order := orders.wait())["kind"] == "examine":
        if host in order["nodes"]:
            client.say("examined", host=host, fault=_examined(options))
    return 0


def _examined(options: Options) -> str:
    """What is wrong with this node, in words; empty if nothing is."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_STEP")}
    try:
        done = subprocess.run(
            python_command.doctor(options.command),
            env={**env, **place.ALONE},
            preexec_fn=signals.let_come,  # else the doctor could end nothing by TERM
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"the doctor did not end within {_LIMIT_S:g} s"
    except OSError as error:
        return f"the doctor can't be started: {error}"
    said = done.stdout or done.stderr
    fault = one_line(said.partition("error: ")[2] or said) or f"the doctor ended with status {done.returncode}"
    return fault if done.returncode else ""

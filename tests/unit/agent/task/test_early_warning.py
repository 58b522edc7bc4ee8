"""What runs in each task of a step."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from slowness import scaled

RANK = "trap 'echo saved; exit 75' USR1; while :; do sleep 0.1; done"


def test_a_warning_before_the_command_is_started_is_kept_for_it() -> None:
    """It would end the agent, and with it the job: here the agent waits for an answer of the job's."""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    world = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "cluster_ddp.agent", "task", "--", "bash", "-c", RANK]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(scaled(60))
        env = {**os.environ, **slurm, **world, "CLUSTER_DDP_CHANNEL": f"127.0.0.1:{server.getsockname()[1]}"}
        task = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        connection, _ = server.accept()
        task.send_signal(signal.SIGUSR1)
        connection.close()
    said, _ = task.communicate(timeout=scaled(60))
    assert (said, task.returncode) == ("saved\n", 75)

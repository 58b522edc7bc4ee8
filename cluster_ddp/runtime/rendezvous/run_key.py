"""The key of a run: its ranks prove with it that they belong to the run."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cluster_ddp.agent.secret import Key
from cluster_ddp.protocol import Env
from cluster_ddp.slurm.topology import Topology


class RunKey(Key):
    """The key that only the ranks of one run have: it differs from those of the job's other steps."""

    @staticmethod
    def of(topology: Topology, env: Mapping[str, str]) -> RunKey:
        """Return the key of the run that a rank belongs to.

        Args:
            topology: the rank's place.
            env: an environment, such as os.environ, with the secret in `Env.SECRET`.
        """
        if topology.world_size == 1:
            return RunKey.of_one_process()
        return RunKey(os.fsencode(env.get(Env.SECRET, "")), topology.key)

    @staticmethod
    def of_one_process() -> RunKey:
        """Return a random key, for a run of one process."""
        return RunKey(os.urandom(32))

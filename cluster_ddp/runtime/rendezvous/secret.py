"""The key of a run, made of the job's secret: the ranks prove with it that they belong to the run.

The batch script makes a new secret at each start of the job, and srun passes it to the tasks in their environment. This
process never sends it: others see only HMACs, each for one purpose.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from cluster_ddp.contract import Env
from cluster_ddp.slurm.topology import Topology


class RunKey:
    """The key that only the ranks of one run have.

    Args:
        secret: the job's secret; if empty, anybody can compute the key.
        run: a text that differs between runs, such as `Topology.key`.
    """

    def __init__(self, secret: bytes, run: str) -> None:
        self.is_secret = bool(secret)
        """Whether it is made of a secret."""
        self._key = hmac.digest(secret, run.encode(), "sha256")

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
        return RunKey(os.urandom(32), "")

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of some parts for a purpose, in hexadecimal digits.

        Args:
            purpose: so that an HMAC for one purpose is useless for another.
            parts: only the last one may contain line breaks.
        """
        return hmac.digest(self._key, b"\n".join([purpose.encode(), *parts]), "sha256").hex().encode()

    def proves(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Return whether `mac` is the HMAC of the parts for the purpose, in constant time."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

"""How the ranks of one run know each other: a key that is made of the job's secret, and what is proven with it.

The batch script makes the secret anew at each start of the job, and srun hands it to the tasks in their environment.
It leaves this process in no form: what others see are HMACs of it, for one purpose each.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping

from cluster_ddp.contract import Env
from cluster_ddp.slurm.topology import Topology


class RunKey:
    """What only the ranks of one run have.

    Args:
        secret: the job's; empty where nobody has made one: then the key can be computed by anybody.
        run: what tells this run from others of the same job.
    """

    def __init__(self, secret: bytes, run: str) -> None:
        self.is_secret = bool(secret)
        """Whether it is worth anything."""
        self._key = hmac.digest(secret, run.encode(), "sha256")

    @staticmethod
    def of(topology: Topology, env: Mapping[str, str]) -> RunKey:
        """The key of the run that a rank belongs to; `env` is such as os.environ."""
        if topology.world_size == 1:
            return RunKey.of_one_process()
        return RunKey(os.fsencode(env.get(Env.SECRET, "")), topology.key)

    @staticmethod
    def of_one_process() -> RunKey:
        """A key that nobody else has."""
        return RunKey(os.urandom(32), "")

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """The HMAC-SHA256 of some bytes for a purpose, in hexadecimal digits. No part but the last has a line break."""
        return hmac.digest(self._key, b"\n".join([purpose.encode(), *parts]), "sha256").hex().encode()

    def proves(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Whether that is the `mac` of it, in a time that does not tell how much of it is right."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

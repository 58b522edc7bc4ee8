"""The sealed lines of the channel: see the package."""

from __future__ import annotations

import json
import os
from typing import Any

from cluster_ddp.agent.secret import Key

Message = dict[str, Any]
"""What is said: it has a `kind`."""

LONGEST_LINE = 1 << 20
CHUNK = 1 << 16
SEND_S = 5.0
"""How long a message may take to be sent, where the other side does not read."""


class Lines:
    """The lines of a connection, as one side writes and reads them."""

    def __init__(self, key: Key, nonces: bytes, own: str, other: str) -> None:
        self._key, self._nonces, self._own, self._other = key, nonces, own, other
        self._written = self._read = 0

    def seal(self, message: Message) -> bytes:
        """Return the line of a message."""
        text = json.dumps(message).encode()
        self._written += 1
        return self._key.mac(self._own, self._nonces, b"%d" % self._written, text) + b" " + text + b"\n"

    def open(self, line: bytes) -> Message:
        """Return the message of a line.

        Raises:
            ValueError: the line is not sealed with the key, or out of order.
        """
        mac, _, text = line.partition(b" ")
        self._read += 1
        if not self._key.proves(mac, self._other, self._nonces, b"%d" % self._read, text):
            raise ValueError("a line that is not sealed")
        return dict(json.loads(text))


def new_nonce() -> bytes:
    """Return what a side begins with: so nobody can repeat what was said on another connection."""
    return os.urandom(16).hex().encode()

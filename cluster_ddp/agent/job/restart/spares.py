"""What is known of the spare nodes: their agents examine them, and a connection ends with its node."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cluster_ddp.agent.channel.lines import Message

# How long a spare may take to examine its node.
_EXAMINED_S = 30.0
_LOST = "Its connection is lost."
_SILENT = f"It did not examine itself within {_EXAMINED_S:g} s."


class Spares:
    """What is known of the spares. All methods may be called in any thread."""

    def __init__(self, nodes: Sequence[str] = ()) -> None:
        self._changed = threading.Condition()
        self._faults: dict[str, str | None] = dict.fromkeys(nodes, "")
        self._lost: list[str] = []

    @property
    def nodes(self) -> list[str]:
        """All of them."""
        return list(self._faults)

    @property
    def lost(self) -> list[str]:
        """Those whose connection has ended."""
        with self._changed:
            return list(self._lost)

    def hear(self, message: Message) -> None:
        """Take a message of a spare."""
        if message["kind"] == "examined":
            with self._changed:
                self._faults[message["host"]] = message["fault"]
                self._changed.notify_all()

    def gone(self, host: str) -> None:
        """Note that a spare's connection has ended."""
        with self._changed:
            self._lost.append(host)
            self._faults[host] = _LOST
            self._changed.notify_all()

    def ask(self, nodes: Sequence[str]) -> None:
        """Forget earlier answers of spares."""
        with self._changed:
            self._faults.update({node: None for node in nodes if node not in self._lost})

    def answers(self, nodes: Sequence[str]) -> dict[str, str]:
        """Wait for the answers of spares. Returns node -> what is wrong, for those that can't be used."""
        with self._changed:
            self._changed.wait_for(lambda: all(self._faults[node] is not None for node in nodes), _EXAMINED_S)
            found = {node: _SILENT if (fault := self._faults[node]) is None else fault for node in nodes}
        return {node: fault for node, fault in found.items() if fault}

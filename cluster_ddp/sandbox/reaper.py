"""`python -m cluster_ddp.sandbox.reaper NAME PROCESS`: remove a sandbox once the process that wants it has ended.

`cluster.keep` starts it, in a session of its own: what interrupts or kills that process does not reach this one.
"""

from __future__ import annotations

import os
import selectors
import sys

from cluster_ddp.sandbox import cluster


def main() -> None:
    """Wait for the end of the process, in whatever way it comes (pidfd_open(2)), then remove the sandbox."""
    name, process = sys.argv[1], int(sys.argv[2])
    try:
        ended = os.pidfd_open(process)
        if os.getppid() == process:  # else it has ended already, and its id may be another's
            with selectors.DefaultSelector() as selector:
                selector.register(ended, selectors.EVENT_READ)
                selector.select()
    except ProcessLookupError:
        pass
    cluster.down(name)


if __name__ == "__main__":
    main()

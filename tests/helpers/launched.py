"""What the ranks of the launchers' contract run: `python launched.py JOB` (`launchers.py` says what must come of it).

Imports no torch: it costs more than all the rest. Ranks and their test meet by files in the run directory.
"""

import atexit
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

RANK, RUN_DIR = int(os.environ["RANK"]), Path(os.environ["CLUSTER_DDP_RUN_DIR"])
RESTARTS = int(os.environ.get("CLUSTER_DDP_START", "0"))
told = []


def tell(name: str, text: str = "") -> None:
    """Append to a file of this rank."""
    with open(RUN_DIR / f"{name}-{RANK}", "a") as file:
        file.write(f"{text}\n")


def wait_for(*names: str) -> None:
    while not all((RUN_DIR / name).exists() for name in names):
        time.sleep(0.02)


def compute() -> None:
    """Until somebody ends this rank. That nobody does is a failure of its own."""
    time.sleep(90)
    sys.exit(99)


def hear(*names: str) -> None:
    """Note each signal that comes."""

    def handler(number: int, frame: object) -> None:
        told.append(number)
        tell(f"got-{signal.Signals(number).name[3:]}")

    for name in names:
        signal.signal(signal.Signals[f"SIG{name}"], handler)


def fail(how: str) -> None:
    """Rank 1 fails while rank 0 computes."""
    if RANK != 1:
        compute()
    wait_for("begun-0")
    if how == "raises":
        raise ValueError("the one that matters")
    if how == "exits":
        os._exit(3)
    if how == "memory":
        bytearray(400 << 20)
    if how == "aborts":
        atexit.register(os.abort)
    else:
        os.kill(os.getpid(), {"killed": signal.SIGKILL, "crashes": signal.SIGSEGV}[how])


def meets() -> None:
    """The ranks talk to each other without cluster_ddp, and not on the port that they were given."""
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 7)
    if RANK == 0:
        with socket.create_server(("", where[1])) as server:
            tell("listens")
            with server.accept()[0] as peer:
                peer.recv(1)
    else:
        wait_for("listens-0")
        with socket.create_connection(where) as peer:
            time.sleep(0.5)
            peer.send(b"x")


def hears() -> None:
    """Signals come before there is a handler, and after. In the end all is well."""
    wait_for("go")
    hear("USR1", "USR2", "HUP", "INT", "ALRM")
    wait_for("end")


def stops() -> None:
    """As `hears`; then it is told to stop. Rank 0 has saved before rank 1. The next start fails in another way."""
    if RESTARTS and RANK == 1:
        wait_for(f"begun{RESTARTS}-0")  # its failure ends rank 0
        sys.exit(3)
    if RESTARTS:
        compute()
    wait_for("go")
    hear("USR1", "USR2", "TERM")
    while signal.SIGTERM not in told and not (RUN_DIR / "end").exists():
        time.sleep(0.02)
    if RANK == 1:
        try:
            raise ValueError("of the first start")
        except ValueError:
            traceback.print_exc()
        time.sleep(1)
    tell("saved")
    sys.exit(75)


def cancelled() -> None:
    """It would stop in time: nobody is to start it again."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    tell("ready")
    compute()


JOBS = {"hears": hears, "stops": stops, "cancelled": cancelled, "meets": meets}
JOBS |= dict.fromkeys(("parent", "keeper", "lost", "ended"), compute)

if __name__ == "__main__":
    sys.stdout.write(f"rank {RANK}, start {RESTARTS}\n")  # at once: print writes the line's end apart
    tell(f"begun{RESTARTS or ''}", f"{os.getpid()} {socket.gethostname()}")
    JOBS.get(sys.argv[1], lambda: fail(sys.argv[1]))()

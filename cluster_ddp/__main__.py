"""`cluster-ddp VERB …`: the same as `python -m cluster_ddp.VERB …`."""

from __future__ import annotations

import difflib
import sys
from importlib import import_module

VERBS = {
    "env": "show this process's place in its job",
    "train": "train the MNIST CNN under DDP",
    "sandbox": "a real multi-node Slurm on this machine",
}
_MODULES = {"sandbox": "cluster_ddp.sandbox.__main__"}


def main() -> int:
    """Hand the command line to the verb's module. Returns the exit status."""
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in VERBS:
        module = import_module(_MODULES.get(verb, f"cluster_ddp.{verb}"))
        return int(module.main(sys.argv[2:]))
    listing = "\n".join(f"  {name:9}{text}" for name, text in VERBS.items())
    if verb in ("-h", "--help"):
        print(f"usage: cluster-ddp VERB [OPTIONS]\n\n{listing}")
        return 0
    nearest = difflib.get_close_matches(verb, VERBS, n=1)
    guess = f" Did you mean {nearest[0]}?" if nearest else ""
    print(f"cluster-ddp: error: no verb {verb!r}.{guess} Verbs:\n{listing}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""`python -m cluster_ddp.submit`, which is `cluster-ddp submit`."""

import sys

from cluster_ddp.cli.submit import main

if __name__ == "__main__":
    sys.exit(main())

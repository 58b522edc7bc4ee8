"""What runs inside every rank: rendezvous, the world of ranks, shards of data, logging and metrics. Needs torch."""

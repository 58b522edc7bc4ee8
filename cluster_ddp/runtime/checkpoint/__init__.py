"""Training that can be stopped at any moment, and goes on as if nothing had happened.

training   `Checkpoint`: when to save, to load, to stop
resume     which checkpoint is loaded
state      all that a training goes on from
folder     the checkpoints of a run: the newest are kept, damaged ones set aside; written in the background
file       one of them: its format, its digest
fit        whether one is of this training
rng        the random number generators
"""

from cluster_ddp.runtime.checkpoint.training import Checkpoint

__all__ = ["Checkpoint"]

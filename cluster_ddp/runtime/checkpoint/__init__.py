"""Training that can be stopped at any moment, and goes on as if nothing had happened.

training   `Checkpoint`: all that a training goes on from; when it is saved, loaded, and when the training stops
interval   how often
folder     the checkpoints of a run: the newest are kept, damaged ones set aside; written in the background
file       one of them: its format, its digest
fit        whether one is of this training
rng        the random number generators
"""

from cluster_ddp.runtime.checkpoint.training import Checkpoint

__all__ = ["Checkpoint"]

"""What follows a failure, or a stop in time: whether, where and with which nodes the ranks are started again.

recovery     after a failed start: the nodes at fault, what follows, lost nodes given back
failures     the failures so far; what follows, by these and the nodes that are left
job_nodes    which nodes train, and what is known of the spares
requeue      Slurm starts the job again, under its own id
"""

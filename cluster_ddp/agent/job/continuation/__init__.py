"""How a job continues after its end.

requeue  Slurm starts it again, under its own id
chain    where it is not to be requeued: the next job, which waits for its end
"""

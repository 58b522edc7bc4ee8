"""On the batch host, or on this machine without Slurm: from the start of a job's ranks to what follows from their end.

launch          which of the two
slurm_job       a job of Slurm
local_job       a job on this machine
step            srun's command
tasks           the tasks of a job of Slurm: their steps and their channel
hearing         what the tasks have said
restart         what follows a failure
ranks_and_gpus  what is said of a job whose tasks are not as many as its GPUs
report          the last lines of the job's log
requeue         the requeue of a job
scontrol        Slurm's commands, and its configuration
allocation      what Slurm says of the job itself: its nodes, its array, its times
"""

"""Starts the ranks of a job and says how they ended: on the batch host, around ranks, or on this machine.

Where it runs is where it stands: `job` on the batch host, or this machine; `task` around each rank. A submission
freezes it into the run directory, so it needs the standard library only, of Python 3.9 or later, and of this package no
more than `submission.frozen_agent` lists.

job             on the batch host: the start of the ranks, their end, what follows
task            around each rank
__main__        `job`, `task`, `rank` and `unpack`
options         the options of `cluster-ddp launch`, which are the job's
place           the environment of the ranks: MASTER_ADDR, MASTER_PORT, RANK …
grid            the values of an array's tasks
python_command  where the script or module of a Python command begins
threads         threads that take no signals
channel         sealed lines between the tasks and the job
secret          the key made of the job's secret, by which they recognise each other
notes           what a rank leaves for the process around it: why it failed, that it was stopped, that it has joined
outcome         who failed first and why: one record for each start of a job, outcome.json
log_words       what logs say of a failure that no agent has told: srun's and Slurm's words, Python's last error
"""

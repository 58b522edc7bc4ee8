"""Jobs of Slurm that hold several tasks of an array each, so many at a time (`submit --pack`).

pack             a job that holds tasks: starts an agent for each, and what follows from their ends
packed_job       such an agent: its options, and an environment in which the job looks like the task's own
task_time_limit  ends a task at its time limit, or if it is cancelled
"""

"""Arrays whose tasks share jobs (`--pack`).

allocation    the jobs that Slurm sees, with the resources of several tasks
task_status   the status of a task, by that of the job that holds it
"""

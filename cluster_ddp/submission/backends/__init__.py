"""What runs a job: Slurm, or this machine.

slurm          sbatch, scontrol, scancel
local          this machine; the agent runs the ranks there
submitit_task  the pickles that submitit's runner loads in each task
held_status    the status of an array's task that another job holds, by that of this job
job_identity   what tells a job from another one with the same id
"""

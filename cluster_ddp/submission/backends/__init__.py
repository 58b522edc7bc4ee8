"""What runs a job: Slurm, or this machine.

slurm          sbatch, scontrol, scancel
local          this machine; the agent runs the ranks there
submitit_task  the pickles that submitit's runner loads in each task
packed_status  the status of a task of `--pack`, by that of the job that holds it
job_identity   what tells a job from another one with the same id
"""

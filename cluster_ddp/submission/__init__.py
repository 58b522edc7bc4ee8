"""From a job as data (`spec`) to a plan (`planning`) to a submission (`submit_plan`), on Slurm or this machine.

No torch. jinja2, submitit and other slow imports are imported on use.
"""

"""What we ask of Slurm, or of this machine: a job as data (`spec`), a plan (`planning`), submitted (`submission`).

No torch; jinja2, submitit and what else takes time to import are imported on use.
"""

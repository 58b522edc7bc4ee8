"""What we ask of Slurm, or of this machine: a job as data (`spec`), as text (`render`), submitted (`submission`).

No torch; jinja2, submitit and what else takes time to import are imported on use.
"""

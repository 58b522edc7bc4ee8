"""What we ask of Slurm: a job as data (`spec`), then as text (`render`). No torch; jinja2 is imported on use."""

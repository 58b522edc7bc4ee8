"""From a job as data (`spec`) to a script (`planning`) to a job (`submit_plan`), on Slurm or this machine.

No torch. jinja2, submitit and other slow imports are imported on use.

job_options  the options of a job, each defined once
spec         JobSpec: a job as data
spec_rules   what its fields say of each other
validation   what the fields of a JobSpec may hold, and the error of one that holds something else
grids        the values of an array's tasks
planning     from a JobSpec to a plan: scheduler, name of the run directory, script
pack         an array whose tasks share jobs
render       the script, from templates
submit_plan  from a plan to a submitted job, or nothing
job          a submitted job: state, result, logs
resume       a new job in the run directory of an earlier one
run_dirs     run directories: made, filled and read
frozen       copies that a job starts with: the agent, the code, the environment
checks       what is checked before
backends     what runs a job: Slurm, or this machine
cli          the command line
"""

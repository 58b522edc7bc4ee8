"""What `cluster-ddp VERB` runs; each module of a verb has its `parser` and `main`.

submit      submits a job to Slurm, or runs it on this machine
init        the first settings and job script of a project
env         the place of this process in its job
launch      starts ranks in a job that exists already, or on this machine
status      the state and progress of jobs and trainings
logs        what a job has printed
cancel      ends jobs
report      what became of a run, and how it used its CPUs, memory and GPUs
memory      whether a model fits in a GPU, from its shapes
export      a checkpoint's weights as a plain file for other tools
fetch       copies run directories from a cluster that is reached by ssh
completion  what lets bash or zsh complete command lines

train is at the top of the package, since batch scripts call it as a module; doctor, scaling and sandbox are packages.
"""

"""What Slurm says: its variables, hostlists and commands. Standard library only; imports no other part of the package
but `run.names`, `errors` and `waiting_notice`.

topology     a process's place in its job
environment  reads it from the variables of each launcher
variables    Slurm's variable names, and their values
port         a rendezvous port for every job step
hostlist     expands node[1-4]
commands     the caller of sbatch, squeue and the others
job_status   the status of jobs
reasons      why a job waits or has ended, in words
partitions   nodes, CPUs, memory, GPUs and limits, by sinfo; the accounts that a user may charge, and that they take
"""

"""On the batch host, or on this machine without Slurm: from the start of a job's ranks to what follows from their end.

launch_job      which of the two, and what has to be right before its ranks start
slurm_job       a job of Slurm, from its start to what follows from its end
start_loop      the starts of a job's ranks
local_job       a job on this machine
srun_step       srun's command
tasks           the tasks of a job: their step and their channel
task_reports    what the tasks have said
pack            jobs that hold several tasks of an array
restart         what follows a failure, or a stop in time
chain           where a job is not to be requeued: an array whose tasks run one after the other
job_log         writes to the job's log, and reads its last lines
slurm_commands  runs Slurm's commands; its configuration, when the job started and will end
inherited_env   a job's environment: completed where a shell lacks some of it, cleaned of another job's
"""

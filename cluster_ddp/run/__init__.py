"""The run directory: the one package between all who write to it and all who read it.

Standard library only, of Python 3.9 or later: a submission freezes it with the agent.

names         environment variables, files, kinds of records: what a submission and the ranks of its job share
files         writes and reads files and folders
ownership     who else could have written a file or a folder
places        where run directories are, what they are called, the links runs/NAME-ID
spec_file     what was submitted: spec.json
job_file      which job has a run directory: job.json
failure_kind  what kind of failure an exception is
outcome       how a start of the ranks ended, and what failed first
start         one start of the ranks: how it began, how it ended, what followed
turns         the starts of a job that another job holds, in its journal
journal       what the run's jobs had, how each start of their ranks ended, and what followed: job.jsonl
fence         takes a run directory away from an older start of the job
"""

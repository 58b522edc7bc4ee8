"""What a submission freezes, so that nothing that is changed later changes a job that waits or is requeued.

frozen_agent   the agent as one file, which the job starts with
code_snapshot  a copy of the code (--snapshot)
venv_archive   the virtual environment as one file (--stage-env)
"""

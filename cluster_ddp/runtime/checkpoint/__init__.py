"""Training that can be stopped at any moment, and resumes as if nothing had happened.

checkpointer    when to save, to load, to stop
resume          which checkpoint is loaded
state           all that a training resumes from
host_copy       a copy of it in the host's memory, while training continues
folder          the checkpoints of a run: the newest are kept, damaged ones set aside; written in the background
file            one of them: its format, its digest
compatibility   whether one is of this training
rng             the random number generators
interval        how often to save
stop_agreement  after which step all ranks stop
time_limit      when the job ends, by the clock
"""

"""Training that can be stopped at any moment, and resumes as if nothing had happened.

checkpointer     what a script calls
step_boundary    what happens between two steps: saving and stopping
saver            copies the state and has it written
restore          which checkpoint a training resumes from; weights from one without a training
parts            whatever has a state
state            all that a training resumes from
host_copy        a copy of the state in the host's memory, so that training continues during a save
folder           the checkpoints of a run: writes in the background, keeps the newest, sets damaged ones aside
checkpoint_file  one checkpoint file: its format and digest
compatibility    whether a checkpoint belongs to this training
sharded/         the same for models that are sharded over the ranks
exactness/       what a resume must get back bit for bit; what no checkpoint can have, which is said at a save
export           a checkpoint's weights as a plain file for other tools, or all of it for DCP
save_interval    how often to save
stop_agreement   after which step all ranks stop; when to stop before the end of the job's time
"""

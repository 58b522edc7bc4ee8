"""What a resume must get back bit for bit, and what no checkpoint can have, which is said at a save.

optimizer_state      loading the state of an optimizer without a cast, for parameters in the same or in other groups
module_settings      which parameters train, and numbers in the attributes of modules
part_states          counts, tensors and optimizers in parts that their state_dict() lacks
script_state         variables and objects that the script keeps
made_anew            what a script makes anew after a resume, and otherwise than at first
loop_variables       which variables a loop carries, by its source
shard_iterators      what takes a shard's batches on their way to the loop
other_modules        modules that change and are no part
changes_before_loop  parts that a script changes after its Checkpointer
rank_differences     parts that differ between ranks: a checkpoint has rank 0's
state_digest         by which these two compare
gradients            gradients that no optimizer has used, or twice
unsaved              all that no checkpoint has, and its words
"""

"""`cluster-ddp export`: what a checkpoint holds, in one process, for other tools. No model is made.

saved_parts   the parts of a checkpoint, with their values
weights_file  a model's weights as model.pt or model.safetensors
dcp_folder    all parts as a folder of torch.distributed.checkpoint
whole_output  an output that appears whole or not at all, and replaces nothing
"""

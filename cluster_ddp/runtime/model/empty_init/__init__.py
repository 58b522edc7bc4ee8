"""`World.empty_init`: a model's constructor without memory for its tensors.

recorder   records what the constructor does
recording  what is recorded of it
replay     makes the tensors, each rank its shards
"""

"""The parts of examples/detection.py: options, data, model and optimizer, mean average precision."""

"""Faults, made for real in a sandbox, and `make chaos`: training under random ones."""

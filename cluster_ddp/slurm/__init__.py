"""What Slurm says: its variables, hostlists and commands. Standard library only; imports no other part of the package
but `protocol` and `errors`."""

"""What a job uses instead of the originals: a copy of the code, and the virtual environment as one file."""

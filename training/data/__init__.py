"""What the model reads: prepared token files, the text that every machine has, and mock data."""

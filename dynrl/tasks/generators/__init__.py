"""Generators: new tasks from what succeeded and what failed."""

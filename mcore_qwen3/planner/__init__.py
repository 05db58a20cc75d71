"""Estimates of a run before it starts: memory of the heaviest rank and time of a step. Standard library alone."""

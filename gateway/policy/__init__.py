"""Decisions without I/O: the same functions run live and in a simulator. Standard library only."""

"""Prompts that were computed once: their keys and values in memory, in a file, in a folder of files."""

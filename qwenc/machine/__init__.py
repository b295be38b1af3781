"""The machine: which CPUs, how many threads, which folders."""

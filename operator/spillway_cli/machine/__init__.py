"""This machine: its memory, cores, GPUs, and its measured profile."""

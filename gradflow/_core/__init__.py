"""Helpers that every room may use: checks, parameter vectors, types, progress bars, the
file format, the machine's limits and compilation."""

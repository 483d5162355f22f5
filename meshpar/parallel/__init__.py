"""Strategies: one file for each parallelism."""

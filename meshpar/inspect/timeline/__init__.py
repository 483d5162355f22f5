"""Simulation of a compiled program: durations of its kernels and collectives, and their overlap."""

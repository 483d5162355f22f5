"""The compiled program simulated: how long its kernels and collectives take, and which of them overlap."""

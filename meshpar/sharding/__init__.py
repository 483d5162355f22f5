"""Meshes and sharding rules for parameters and activations of NNX, Linen and plain models."""

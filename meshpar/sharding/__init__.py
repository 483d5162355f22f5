"""Meshes, sharding rules and their application to parameters and activations of NNX, Linen and plain models."""

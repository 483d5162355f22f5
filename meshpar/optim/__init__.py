"""Optimizers and optimizer state on a mesh."""

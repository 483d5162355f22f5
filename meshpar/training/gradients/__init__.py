"""Gradient engines, which compute the gradients of a training step for different strategies."""

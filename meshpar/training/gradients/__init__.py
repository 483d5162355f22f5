"""How gradients are made, where XLA is not left to do it."""

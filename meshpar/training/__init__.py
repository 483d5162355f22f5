"""The training step, its state, the loop around it, and its checkpoints."""

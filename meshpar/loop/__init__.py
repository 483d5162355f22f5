"""The training loop: steps, hooks, checkpoints, metrics and coordination between processes."""

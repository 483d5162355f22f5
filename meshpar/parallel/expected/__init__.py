"""The collectives that each parallelism adds to a training step."""

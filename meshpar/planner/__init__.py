"""Predictions without compilation: hardware figures, costs, memory, and the search over meshes."""

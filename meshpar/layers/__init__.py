"""The layer stack of a model: the scan over layers, remat policies, precision, losses and auxiliary values."""

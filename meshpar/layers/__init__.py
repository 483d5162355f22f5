"""The layer stack of a model: the scan over layers, precision, losses and auxiliary values."""

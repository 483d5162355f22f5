"""The layer stack of a model: scan over layers, remat, precision, losses and auxiliary values."""

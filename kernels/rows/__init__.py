"""Operators over rows: norms, softmaxes, sums and means."""

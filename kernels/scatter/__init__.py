"""Additions at indices, in the order of the indices."""

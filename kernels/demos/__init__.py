"""Kernels that show a cause and are nobody's stock."""

"""Elementwise operators whose formula would depend on where an element lies."""

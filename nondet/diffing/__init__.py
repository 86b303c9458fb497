"""Two run files side by side: what appeared, what went, what moved, and what could not be compared."""

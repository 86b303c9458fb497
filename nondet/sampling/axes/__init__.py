"""The axes of `nondet sample --vary`: what is varied alone, over which values, and what proves that it took effect."""

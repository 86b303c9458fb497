"""Mixtures of experts: grouped products, the choice of experts, and the sum over them."""

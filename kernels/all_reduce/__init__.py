"""Sums over the ranks of a process group, in an order that the message's size does not touch."""

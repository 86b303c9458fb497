"""Proofs, by bits and on this machine, that implementations belong to a numerics class (`nondet.core.registry`)."""

"""Sampled completions: a load plan, a continuous-batching engine, and what the divergence looks like."""

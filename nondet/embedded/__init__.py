"""The model that ships with nondet (README.md beside this file is its card), and the prompt chosen for it."""

__all__ = ["DEFAULT_PROMPT"]

# Measured (tables in the card): under stock bf16 kernels and mixed load its greedy completions diverge on an H200
# and in every CPU setting tried, mostly from token 5 on, and the branches read as sentences.
DEFAULT_PROMPT = "For example, the"

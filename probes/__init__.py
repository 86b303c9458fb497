"""What is asked of an operator: one file a probe. A probe names cases and variants; never compares, times or prints."""

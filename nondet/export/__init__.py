"""Run files as data frames (pandas) and as figures to publish (matplotlib)."""

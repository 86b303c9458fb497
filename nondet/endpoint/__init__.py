"""Servers asked over HTTP: what goes in, what comes back, and whether it may be believed."""

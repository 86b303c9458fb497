"""Servers asked over HTTP: what goes in, what comes back, and whether it may be believed.

`nondet.endpoint.client.connect(url, model=...)` gives a client; `nondet.endpoint.exchange` says what it takes and what
it gives.
"""

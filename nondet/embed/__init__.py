"""Encoders: whether a text's vector depends on its batch, and what that does to its neighbours."""

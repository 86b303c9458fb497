"""Attention: one order of reduction for prefill, chunks and decode; a file for each device."""

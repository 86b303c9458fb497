"""Products: one chain along K into one float32 accumulator; tiles and libraries that are proven to follow it."""

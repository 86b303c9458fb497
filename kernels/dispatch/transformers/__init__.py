"""Stand-ins for parts of transformers that no aten operator covers as a whole."""

"""What puts the invariant kernels under torch and transformers (`block.batch_invariant`)."""

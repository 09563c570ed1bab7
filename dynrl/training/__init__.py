"""Training: state, step, warm start, checkpoints."""

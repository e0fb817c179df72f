"""Training: the DeepSpeed engine, the loop, checkpoints and monitoring."""

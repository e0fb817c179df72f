"""What a model and its yardsticks are worth on held-out text."""

"""Evaluation: the held-out loss of a model beside its yardsticks."""

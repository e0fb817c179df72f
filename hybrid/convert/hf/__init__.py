"""Hugging Face transformers, both ways: our models as theirs, and their transformers as ours."""

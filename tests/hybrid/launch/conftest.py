"""The tiny recipe and its data, as in the tests of training."""

from ..train.conftest import tiny_recipe

__all__ = ["tiny_recipe"]

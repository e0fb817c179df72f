"""What a model's memory does with a text, token by token, as a page to read."""

from .page import inspect as inspect

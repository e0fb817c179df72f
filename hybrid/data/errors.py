"""What goes wrong with data, for people."""


class DataError(ValueError):
    """Sources, tokenizers or prepared data that cannot be used, and what would be."""

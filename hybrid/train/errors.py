"""What goes wrong with training, for people."""


class TrainError(ValueError):
    """Training cannot start or go on; the message says why and what to do."""

"""What goes wrong with training, for people."""

LOST_EXIT_CODE = 69
"""Other processes of the run are gone or silent: the same command goes on from the newest checkpoint
(EX_UNAVAILABLE)."""


class TrainError(ValueError):
    """Training cannot start or go on; the message says why and what to do."""

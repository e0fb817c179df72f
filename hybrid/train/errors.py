"""What goes wrong with training, for people."""

STOPPED_EXIT_CODE = 75
"""Asked to stop (SIGTERM) and saved: the same command goes on from there (EX_TEMPFAIL)."""
LOST_EXIT_CODE = 69
"""Other processes of the run are gone or silent: the same command goes on from the newest checkpoint
(EX_UNAVAILABLE)."""


class TrainError(ValueError):
    """Training cannot start or go on; the message says why and what to do."""

    exit_code = 2


class LostError(TrainError):
    """Another process of the run is gone; nothing is wrong with what was asked."""

    exit_code = LOST_EXIT_CODE


def words(error: Exception) -> str:
    """An error in a few words; one of the system's with the file it is about."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error) or type(error).__name__

"""What goes wrong, for people: one base class, an exit code each, and an error in a few words."""

from hybrid.layers.errors import LayerError as LayerError
from hybrid.layers.errors import UserError as UserError

STOPPED_EXIT_CODE = 75
"""Asked to stop (SIGTERM) and saved: the same command goes on from there (EX_TEMPFAIL)."""
LOST_EXIT_CODE = 69
"""Other processes of the run are gone or silent: the same command goes on from the newest checkpoint
(EX_UNAVAILABLE)."""

DEFECT_EXIT_CODE = 70
"""An error that is no UserError: a defect of the program, whose traceback lies in a file (EX_SOFTWARE)."""


class DataError(UserError):
    """Sources, tokenizers or prepared data that cannot be used, and what would be."""


class ConvertError(UserError):
    """A foreign model that is broken or not what it says; the message names the key or tensor."""


class NotSupported(ConvertError):
    """A foreign model that may be fine, but uses something this project does not have."""


class CheckFailed(ConvertError):
    """A conversion whose result is not what it should be; nothing was kept."""

    exit_code = 1


class LaunchError(UserError):
    """Nothing was started; the message names the file, line, option or host, and what is allowed."""


class TrainError(UserError):
    """Training cannot start or go on; the message says why and what to do."""


class LostError(TrainError):
    """Another process of the run is gone; nothing is wrong with what was asked."""

    exit_code = LOST_EXIT_CODE


def words(error: BaseException) -> str:
    """Describe an error in a few words; one of the system's with the file it is about."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    return str(error) or type(error).__name__

"""Models of other projects, one file a format."""

from hybrid.errors import UserError


class ConvertError(UserError):
    """A foreign model that is broken or not what it says; the message names the key or tensor."""


class NotSupported(ConvertError):
    """A foreign model that may be fine, but uses something this project does not have."""


class CheckFailed(ConvertError):
    """A conversion whose result is not what it should be; nothing was kept."""

    exit_code = 1

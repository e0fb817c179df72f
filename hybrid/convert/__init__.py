"""Models of other projects, one file a format."""

from hybrid.errors import UserError


class ConvertError(UserError):
    """A foreign model that is broken or not what it says; the message names the key or tensor."""


class NotSupported(ConvertError):
    """A foreign model that may be fine, but uses something this project does not have."""

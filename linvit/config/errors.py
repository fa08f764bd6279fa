"""Errors whose text is one line for a person."""


class UserError(ValueError):
    """A mistake that a person can mend; its text is one line that says where, what, and what is allowed."""


class RunEnded(RuntimeError):
    """A run that ended before its time, for a reason that its text tells in one line."""

    advice = ""
    """What to do next."""


class ConfigError(UserError):
    """A mistake in the configuration."""


def reason_of(error: BaseException) -> str:
    """Another library's error on one line; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__

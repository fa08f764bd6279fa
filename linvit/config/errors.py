"""Errors whose text is one line for a person."""


def printable(text: str) -> str:
    """Text on one line whatever it quotes: names of files may hold line breaks, or bytes that are no text."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


class UserError(ValueError):
    """A mistake that a person can mend; its text is one line that says where, what, and what is allowed."""

    def __str__(self) -> str:
        return printable(super().__str__())


class RunEnded(RuntimeError):
    """A run that ended before its time, for a reason that its text tells in one line."""

    advice = ""
    """What to do next."""


class Interrupted(RunEnded):
    """Training was asked to stop, and did so after writing a checkpoint."""

    interrupted = True
    advice = "the same command goes on from there"


class ConfigError(UserError):
    """A mistake in the configuration."""


def reason_of(error: BaseException) -> str:
    """Another library's error on one line; its kind where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__

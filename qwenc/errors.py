"""Failures that a user can cause. `str(error)` is one clear sentence; the CLI prints it and exits with `exit_code`."""


class QwencError(Exception):
    """A model that cannot be found, read or held, a full disk, non-finite logits: anything a user can cause or mend."""

    exit_code = 1


class UsageError(QwencError):
    """A setting out of range, an empty prompt, a prompt longer than the context."""

    exit_code = 2

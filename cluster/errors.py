"""Errors of the cluster side, apart from the engine's own."""


class StartError(Exception):
    """The application does not come up, through no mistake of its user; the message is one line."""

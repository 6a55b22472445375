"""Errors of the router. Every one knows the HTTP answer it becomes."""


class NoReplicaError(Exception):
    """No replica can serve now: none is up, or all are draining."""

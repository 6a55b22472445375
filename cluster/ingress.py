"""What stands in front of Serve's own handling of a request; Serve imports `middlewares` by its path."""

from starlette.middleware import Middleware

from router.header_guard import HeaderGuard


def middlewares() -> list[Middleware]:
    """Return the ASGI middleware of every HTTP server of a cluster, outermost last."""
    return [Middleware(HeaderGuard)]

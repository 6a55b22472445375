"""Grafana's HTTP API, as far as it is needed here, through the package grafana-api.

That package is of 2020: its generic client is used for everything, and this is the only file that knows it.
"""

from typing import Any, Final
from urllib.parse import urlsplit

import requests
from grafana_api.grafana_api import GrafanaAPI, GrafanaClientError, GrafanaException

TIMEOUT_S: Final = 10.0


class GrafanaError(Exception):
    """Grafana cannot be used, or refused; one line for the user."""


class GrafanaConflictError(GrafanaError):
    """409 or 412: somebody else has changed what was to be written."""


class Grafana:
    """One Grafana, one login. Blocking."""

    def __init__(self, url: str, login: str | tuple[str, str], *, verify: bool = True) -> None:
        """`login` is a service account's token, or user and password. Raises GrafanaError for a bad URL."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise GrafanaError(f"{url}: the port is not a number") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise GrafanaError(f"{url} is not a URL like https://grafana.example.com")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        path = parts.path.strip("/")
        self.url: Final = url.rstrip("/")
        self._api = GrafanaAPI(
            login,
            host=host,
            port=port,
            url_path_prefix=f"{path}/" if path else "",
            protocol=parts.scheme,
            verify=verify,
            timeout=TIMEOUT_S,
        )

    def get(self, path: str) -> Any:
        """Return what is there, None for a 404. Raises GrafanaError."""
        return self._call("GET", path)

    def post(self, path: str, body: Any) -> Any:
        """Create something. Raises GrafanaError, GrafanaConflictError."""
        return self._existing(self._call("POST", path, body), path)

    def put(self, path: str, body: Any) -> Any:
        """Replace something. Raises GrafanaError, GrafanaConflictError."""
        return self._existing(self._call("PUT", path, body), path)

    def delete(self, path: str) -> None:
        """Take something away; one that is gone already is no error. Raises GrafanaError."""
        self._call("DELETE", path)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        try:
            answer = getattr(self._api, method)(path, json=body)
        except GrafanaException as error:
            if isinstance(error, GrafanaClientError) and error.status_code == 404:
                return None
            raise self._refusal(error, method, path) from None
        except requests.exceptions.JSONDecodeError:
            raise GrafanaError(
                f"{self.url} answers {path} with something that is not JSON: no Grafana?"
            ) from None
        except requests.exceptions.RequestException as error:
            raise GrafanaError(f"{self.url} cannot be reached: {_reason(error)}") from None
        except TypeError:  # how the package takes an error page that mentions a "message"
            raise GrafanaError(
                f"{self.url} answers {path} with an error that is not JSON: no Grafana?"
            ) from None
        if not isinstance(answer, dict | list):
            raise GrafanaError(f"{self.url} answers {path} with something unexpected: no Grafana?")
        return answer

    def _existing(self, answer: Any, path: str) -> Any:
        if answer is None:
            raise GrafanaError(f"{self.url} has nothing at {path}: is it older than Grafana 9?")
        return answer

    def _refusal(self, error: GrafanaException, method: str, path: str) -> GrafanaError:
        status = error.status_code
        said = error.response.get("message", "") if isinstance(error.response, dict) else ""
        if status == 401:
            return GrafanaError(f"{self.url} does not accept this token or password")
        if status == 403:
            return GrafanaError(f"this login may not {method} {path}: {said or 'no permission'}")
        if status in (409, 412):
            return GrafanaConflictError(f"{path}: changed by somebody else meanwhile: {said}")
        return GrafanaError(f"{self.url} answers {method} {path} with {status}: {said or 'no reason given'}")


def _reason(error: Exception) -> str:
    """Return the innermost cause of a failed connection."""
    cause: BaseException = error
    while cause.__context__ is not None:
        cause = cause.__context__
    return " ".join(str(cause).split())[:200] or type(error).__name__

"""What the load tool raises. Everything here is meant to be read by the person at the terminal."""


class LoadError(Exception):
    """The run cannot start or cannot be trusted; the message says what to change."""


class TraceError(LoadError):
    """A trace file is malformed. `line` and `column` count from 1."""

    def __init__(self, path: str, line: int, column: int, problem: str) -> None:
        super().__init__(path, line, column, problem)
        self.path = path
        self.line = line
        self.column = column
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.problem}"


class ProtocolError(Exception):
    """A server sent bytes that are not what they claim to be. Counted, never fatal for a run."""

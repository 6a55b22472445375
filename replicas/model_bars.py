"""transformers draws progress bars on stderr; this turns them into calls of a Progress."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from transformers.utils import logging

from replicas.progress import Progress


@contextmanager
def report_bars(what: str, progress: Progress) -> Iterator[None]:
    """Within the block, send every bar of transformers to `progress` under the name `what`."""

    def make_bar(_factory: Any, args: Any, kwargs: Any) -> _Bar:
        iterable = args[0] if args else kwargs.get("iterable")
        total = kwargs.get("total") or (len(iterable) if hasattr(iterable, "__len__") else None)
        return _Bar(iterable, total, lambda share: progress(what, share))

    progress(what, None)
    previous = logging.set_tqdm_hook(make_bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


class _Bar:
    """What transformers uses of tqdm."""

    def __init__(self, iterable: Any, total: int | None, report: Callable[[float | None], None]) -> None:
        self._iterable, self._total, self._report = iterable, total, report
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        self._done += n
        self._report(min(1.0, self._done / self._total) if self._total else None)

    def close(self) -> None:
        pass

    def set_description(self, *_: Any, **__: Any) -> None:
        pass

    def set_postfix(self, *_: Any, **__: Any) -> None:
        pass

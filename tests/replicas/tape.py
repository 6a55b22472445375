"""CUDA graphs on a CPU: what torch computes is recorded once, then repeated on the same addresses.

Like a graph it forgets everything but the operations and their tensors: whatever Python would decide anew at
a later call stays as it was when it was recorded.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves

Run = Callable[[], None]


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        assert made, f"{func} brings something to the host: a graph cannot hold that"
        # A view of an input, or an operation in place, has its effect without being copied anywhere.
        fresh = [x.untyped_storage().data_ptr() not in inputs for x in made]

        def again() -> None:
            results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for target, result, is_fresh in zip(made, results, fresh, strict=True):
                if is_fresh:
                    target.copy_(result)

        self.calls.append(again)
        return out


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Record a call of `function` as one operation, whatever it does inside: a kernel's stand-in."""

    def call(*args: Any, **kwargs: Any) -> Any:
        recording = _get_current_dispatch_mode()
        if not isinstance(recording, _Recording):
            return function(*args, **kwargs)
        with _disable_current_modes():
            out = function(*args, **kwargs)

        def again() -> None:
            for target, result in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(target, Tensor):
                    target.copy_(result)

        recording.calls.append(again)
        return out

    return call


def record(run: Callable[[], None]) -> Callable[[], None]:
    """As CudaRecorder."""
    run()
    recording = _Recording()
    with recording:
        run()

    def replay() -> None:
        for call in recording.calls:
            call()

    return replay

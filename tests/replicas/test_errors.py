import inspect
import pickle

import pytest

from replicas import errors
from replicas.errors import EngineError, PromptTooLongError

EXAMPLES = [PromptTooLongError(5000, 4096)] + [
    error_type("message")
    for _, error_type in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error_type, EngineError) and error_type is not PromptTooLongError
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_survives_pickling(error: EngineError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))

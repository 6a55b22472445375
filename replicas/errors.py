"""Errors of the engine. All of them survive pickling: positional arguments only."""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigError(EngineError):
    """The configuration cannot work; the message names the field, the value and the limit."""


class ModelError(EngineError):
    """The model cannot be found, read or served; the message says which and why."""


class UnsupportedModelError(ModelError):
    """The architecture needs something that the paged path does not offer."""


class RequestError(EngineError):
    """A request that can never run on this engine; the message is fit for a client."""


class PromptTooLongError(RequestError):
    """The prompt leaves no room for a single output token."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(num_prompt_tokens, max_model_len)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len

    def __str__(self) -> str:
        return (
            f"the prompt has {self.num_prompt_tokens} tokens; at most {self.max_model_len - 1} "
            f"fit into the context of {self.max_model_len}"
        )


class ConstraintError(EngineError):
    """A sequence's grammar cannot be followed; one line for the client."""


class IntegrityError(EngineError):
    """The KV cache's books do not balance. Always a bug; the message carries the numbers."""

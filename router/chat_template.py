"""Chat templates: a model's Jinja program, run sandboxed and bounded, as transformers would run it."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDER_S: Final = 2.0
"""A template takes microseconds per message; one that runs this long was given far too many."""
MAX_RENDERED_CHARS: Final = 64 << 20
_TICK: Final = "__headway_tick"
_OWN_VARIABLES: Final = frozenset({"messages", "add_generation_prompt", "tools", _TICK})
"""What a request says elsewhere, or not at all."""
_END_MARK: Final = "\x02headway-end-of-message\x03"
# What a template can raise when the messages are not what it expects.
_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplateError(Exception):
    """The template refused the messages, failed on them, or took too long; fit for a client."""


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    The caps stop what messages can provoke. The template itself comes from the model's folder, which the
    operator chose: the sandbox keeps it from the process, its memory use is only bounded by its output.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],  # bos_token, eos_token, ... as the tokenizer names them
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Compile `source`. Raises ChatTemplateError with the line of a syntax error."""
        try:
            self._template = _Environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from None
        self._variables = dict(variables)
        self._clock = clock
        self.knows_developer: Final = "developer" in source
        """Templates that do not know this role get `system`, which it replaced."""
        self.knows_tools: Final = "tools" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt, by default ready for the assistant's turn. Raises ChatTemplateError.

        With `continue_final_message` it ends where the text of the last message ends instead.
        """
        if taken := sorted(_OWN_VARIABLES & variables.keys()):
            raise ChatTemplateError(f"the chat template's variable {taken[0]} cannot be set")
        variables = {**variables, "tools": tools}
        if not continue_final_message:
            return self._render(messages, add_generation_prompt, variables)
        *before, last = messages
        marked = {**last, "content": last["content"] + _END_MARK + " "}
        text = self._render([*before, marked], False, variables)
        prompt, mark, rest = text.rpartition(_END_MARK)
        if not mark:
            raise ChatTemplateError("the chat template does not show the message that is to be continued")
        # A template that trims messages would have trimmed this one too.
        return prompt if rest.startswith(" ") else prompt.rstrip()

    def _render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        deadline = self._clock() + MAX_RENDER_S
        parts: list[str] = []
        num_chars = 0

        def tick() -> str:
            if self._clock() > deadline:
                raise ChatTemplateError("the chat template took too long for these messages")
            return ""

        try:
            for part in self._template.generate(
                {
                    "documents": None,
                    **self._variables,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                    _TICK: tick,
                }
            ):
                tick()
                parts.append(part)
                num_chars += len(part)
                if num_chars > MAX_RENDERED_CHARS:
                    raise ChatTemplateError("the rendered chat is too long")
        except _TEMPLATE_FAULTS as error:
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from None
        return "".join(parts)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' template environment, plus a look at the clock in every loop and macro."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies = [(loop.lineno, loop.body) for loop in tree.find_all(jinja2.nodes.For)]
        bodies += [(macro.lineno, macro.body) for macro in tree.find_all(jinja2.nodes.Macro)]
        for lineno, body in bodies:
            tick = jinja2.nodes.Call(jinja2.nodes.Name(_TICK, "load"), [], [], None, None)
            statement = jinja2.nodes.ExprStmt(tick).set_lineno(lineno, override=True)
            body.insert(0, statement.set_environment(self))
        return tree


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

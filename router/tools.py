"""Tools of a chat request: checked, chosen, and turned into a grammar where a call is demanded."""

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from router.errors import bad_value, unsupported
from router.grammar import MAX_GRAMMAR_BYTES, WHITE_SPACE, check_combination, checked, schema_grammar
from router.protocol import ChatBody, NamedToolChoice, ToolDefinition
from router.tool_calls import ToolCallParser
from router.tool_formats import ToolFormat, calls_lark

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_MODES: Final = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that an answer may call."""

    names: frozenset[str]
    parallel: bool
    named: bool
    """The request names the tool: its call ends with `stop`, as OpenAI documents."""
    form: ToolFormat

    def parser(self) -> ToolCallParser:
        """Return a parser for one output."""
        return ToolCallParser(self.form, self.names, parallel=self.parallel)


def tool_use(body: ChatBody, form: ToolFormat) -> ToolUse | None:
    """Check the request's tools; None = it may call none. Raises ApiError 400."""
    tools = body.tools or []
    _check_tools(tools)
    choice = body.tool_choice
    if not tools:
        for field in ("tool_choice", "parallel_tool_calls"):
            value = getattr(body, field)
            if value is not None and value not in ("none", "auto"):
                raise bad_value(field, f"{field} is only allowed with tools")
        return None
    names = frozenset(tool.function.name for tool in tools)
    if isinstance(choice, NamedToolChoice):
        if choice.type != "function":
            raise unsupported("tool_choice.type", "must be function")
        if choice.function.name not in names:
            raise bad_value("tool_choice", "tool_choice names none of the tools")
        names = frozenset([choice.function.name])
    elif choice is not None and choice not in _MODES:
        raise bad_value("tool_choice", f"tool_choice must be one of {', '.join(_MODES)}, or name a function")
    if choice == "none":
        return None
    named = isinstance(choice, NamedToolChoice)
    parallel = body.parallel_tool_calls is not False and not named
    return ToolUse(names=names, parallel=parallel, named=named, form=form)


def tool_grammar(body: ChatBody, use: ToolUse, special_ids: dict[str, int]) -> str:
    """Return the grammar of an answer whose calls must be well-formed; "" = nothing demands that.

    A call is demanded by tool_choice; that calls which come follow their schema, by a tool's `strict`.
    Raises ApiError 400.
    """
    required = use.named or body.tool_choice == "required"
    tools = [tool.function for tool in body.tools or () if tool.function.name in use.names]
    if not required and not any(tool.strict for tool in tools):
        return ""
    check_combination(body, "tools")
    free: dict[str, Any] = {"type": "object"}
    schemas = {}
    for index, tool in enumerate(tools):
        schema = tool.parameters or free
        if not required and not tool.strict:
            schema = free
        text = json.dumps(schema | {"x-guidance": _JSON_OPTIONS})
        schema_grammar(text, f"tools[{index}].function.parameters")
        schemas[tool.name] = text
    lark = calls_lark(
        use.form,
        schemas,
        opening_id=special_ids.get(use.form.opening),
        parallel=use.parallel,
        required=required,
    )
    return checked(lark, "tools", "a set of tools")


_JSON_OPTIONS: Final = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "lenient": False}


def _check_tools(tools: list[ToolDefinition]) -> None:
    if len(tools) > MAX_TOOLS:
        raise bad_value("tools", f"tools must hold at most {MAX_TOOLS} tools")
    seen: set[str] = set()
    num_bytes = 0
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        if tool.type != "function":
            raise unsupported(f"{param}.type", "must be function")
        if not _NAME.match(tool.function.name):
            raise bad_value(
                f"{param}.function.name", f"{param}.function.name must be 1 to 64 letters, digits, _ or -"
            )
        if tool.function.name in seen:
            raise bad_value(f"{param}.function.name", f"{param}.function.name occurs twice")
        seen.add(tool.function.name)
        num_bytes += len(json.dumps(tool.function.parameters))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise bad_value(
            "tools", f"the parameters of all tools must not have more than {MAX_GRAMMAR_BYTES} bytes"
        )

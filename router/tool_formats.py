"""How models write tool calls: the formats, by the words of their chat templates.

hermes   <tool_call>\\n{"name": "f", "arguments": {}}\\n</tool_call>       also Qwen
llama3   {"name": "f", "parameters": {}}                                several with "; " between
mistral  [TOOL_CALLS][{"name": "f", "arguments": {}}]
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_ANY_TEXT: Final = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way to write calls. Every call is a JSON object with a name and arguments."""

    name: str
    opening: str
    """Stands before the calls; "" = they begin the answer."""
    closing: str
    """Stands after each call; "" = nothing does."""
    separators: str
    """Characters that may stand between `opening` and calls, and around them."""
    arguments: str
    """The key of the arguments."""
    special_opening: bool = False
    """`opening` is a special token."""

    def call(self, name: str, arguments: str) -> str:
        """Write one call without what stands around it."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": {arguments}}}'


HERMES: Final = ToolFormat(
    name="hermes", opening="<tool_call>", closing="</tool_call>", separators=" \n", arguments="arguments"
)
LLAMA3: Final = ToolFormat(name="llama3", opening="", closing="", separators=" \n;", arguments="parameters")
MISTRAL: Final = ToolFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    closing="",
    separators=" \n[],",
    arguments="arguments",
    special_opening=True,
)


def format_of_template(source: str) -> ToolFormat:
    """Recognise a format by the template; hermes for one that knows no tools (see `describe`)."""
    if MISTRAL.opening in source:
        return MISTRAL
    if HERMES.opening not in source and "tools" in source and '"parameters"' in source:
        return LLAMA3
    return HERMES


def describe(tools: Sequence[dict[str, Any]]) -> str:
    """Say in words, for a system message, which tools there are: for templates that know none (hermes)."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You may call one or more functions to assist with the user query.\n"
        f"The functions, as JSON schemas, within <tools></tools>:\n<tools>\n{lines}\n</tools>\n"
        "For each call, return a JSON object with its name and arguments within <tool_call></tool_call>:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )


def calls_lark(
    form: ToolFormat,
    schemas: dict[str, str],  # tool name -> JSON schema of its arguments, with its limits
    *,
    opening_id: int | None,  # token id of a special opening
    parallel: bool,
    required: bool,
) -> str:
    """Return the Lark grammar of an answer that calls these tools, or that need not if not `required`."""
    body = [f"body: {' | '.join(f'tool_{i}' for i in range(len(schemas)))}"]
    for i, (name, schema) in enumerate(schemas.items()):
        before = json.dumps(form.call(name, "")[:-1])
        body.append(f'tool_{i}: {before} args_{i} "}}"')
        body.append(f"args_{i}: %json {schema}")
    opening = f"<[{opening_id}]>" if form.special_opening else json.dumps(form.opening)
    rules = _hermes if form is HERMES else _llama3 if form is LLAMA3 else _mistral
    return "\n".join([*rules(opening, parallel, required), *body]) + "\n"


def _hermes(opening: str, parallel: bool, required: bool) -> list[str]:
    closing = json.dumps("\n" + HERMES.closing)
    if required:
        more = " (/\\n?/ call)*" if parallel else ""
        return [f"start: call{more}", f'call: {opening} "\\n" body {closing}']
    return [
        f"start: tagged{'*' if parallel else '?'} rest",
        f'tagged: trigger "\\n" body {closing}',
        f"trigger[lazy]: ANY {opening}",
        # After the last call no other may begin; the lazy trigger takes precedence where one may.
        "rest: ANY" if parallel else "rest: /[^<]*/",
        f"ANY: {_ANY_TEXT}",
    ]


def _llama3(opening: str, parallel: bool, required: bool) -> list[str]:  # noqa: ARG001 - has none
    calls = 'calls: body (";" / ?/ body)*' if parallel else "calls: body"
    if required:
        return ["start: calls", calls]
    return ["start: calls | other", calls, r"other: /([^{ \n](.|\n)*)?/"]


def _mistral(opening: str, parallel: bool, required: bool) -> list[str]:
    more = ' ("," / ?/ body)*' if parallel else ""
    calls = f'calls: {opening} "[" body{more} "]"'
    return ["start: calls" if required else f"start: {_ANY_TEXT} | {_ANY_TEXT} calls", calls]

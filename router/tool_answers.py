"""Tool calls in the answer bodies: parts of an output -> what clients parse."""

import uuid

from router.answers import AssistantMessage, Delta, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from router.tool_calls import Part
from router.tools import ToolUse


def whole_message(tools: ToolUse, text: str) -> AssistantMessage:
    """Return the message of an output that has finished."""
    parser = tools.parser()
    content: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    for part in [*parser.feed(text), *parser.flush()]:
        if part.call is None:
            content.append(part.text)
            continue
        if part.name is not None:
            names.append(part.name)
            arguments.append([])
        arguments[part.call].append(part.arguments)
    calls = [
        ToolCall(_new_id(), FunctionCall(name, "".join(pieces)))
        for name, pieces in zip(names, arguments, strict=True)
    ]
    if not calls:
        return AssistantMessage("".join(content))
    return AssistantMessage("".join(content) or None, tool_calls=calls)


def delta_of(part: Part) -> Delta:
    """Return the delta for a part of a stream."""
    if part.call is None:
        return Delta(content=part.text)
    if part.name is None:
        call = ToolCallDelta(index=part.call, function=FunctionDelta(arguments=part.arguments))
    else:
        function = FunctionDelta(name=part.name, arguments=part.arguments)
        call = ToolCallDelta(index=part.call, id=_new_id(), type="function", function=function)
    return Delta(tool_calls=[call])


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"

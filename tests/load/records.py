"""Records as a worker would have sent them, from the few numbers that matter to a test."""

from array import array
from typing import Any

import msgspec

from load.record import RequestRecord

_BASE = RequestRecord(
    script=0, turn=0, tenant=0, due_s=0.0, first_sent_s=0.0, sent_s=0.0, done_s=1.0, output_s=b"", status=200,
    attempts=1, is_cancelled=False, is_slow=False, failure=None, detail="", asked_input_tokens=10,
    asked_output_tokens=4, finish_reason="length", prompt_tokens=10, output_tokens=None, cached_tokens=None,
    queue_wait_ms=None,
)  # fmt: skip


def record(sent_s: float = 0.0, *output_s: float, **fields: Any) -> RequestRecord:
    """A request sent (when due) at `sent_s` whose output events came at `output_s`, one token each."""
    made = msgspec.structs.replace(
        _BASE,
        due_s=sent_s,
        first_sent_s=sent_s,
        sent_s=sent_s,
        output_s=array("d", output_s).tobytes(),
        done_s=output_s[-1] if output_s else sent_s,
        output_tokens=len(output_s),
        asked_output_tokens=len(output_s),
    )
    return msgspec.structs.replace(made, **fields)

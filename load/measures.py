"""Latencies of one request, each one formula. Milliseconds.

TTFT  from sending the attempt that was accepted to its first output.
ITL   the gaps between tokens: the gap before an event, and a zero for every further token that came with
      it. A list, never a mean; percentiles are over the tokens of all requests.
Event gaps  the same without the zeros: what tools report that do not know how many tokens an event holds.
Max gap  the longest gap of one request: what its reader noticed.
TPOT  (last output - first output) / (tokens - 1): one mean per request.
E2E   from sending to the end of the stream.
"""

import numpy as np

from load.record import RequestRecord
from load.statistics import Floats
from load.tenants import Slo


def is_answered(record: RequestRecord) -> bool:
    """Whether the whole answer arrived."""
    return record.failure is None and not record.is_cancelled


def is_judged(record: RequestRecord) -> bool:
    """Whether its gaps and its success say something about the server: not when we hang up or dawdle."""
    return not record.is_cancelled and not record.is_slow


def ttft_ms(record: RequestRecord) -> float | None:
    """First output after the accepted attempt was sent; None without output."""
    if not record.output_s:
        return None
    return (record.output_at[0] - record.sent_s) * 1e3


def retry_wait_ms(record: RequestRecord) -> float:
    """From the first attempt to the accepted one."""
    return (record.sent_s - record.first_sent_s) * 1e3


def num_tokens(record: RequestRecord) -> int:
    """Output tokens as the server counts them; where it does not say, the events that brought output."""
    if record.output_tokens is not None and record.failure is None:
        return record.output_tokens
    return len(record.output_at)


def event_gaps_ms(record: RequestRecord) -> Floats:
    """Gaps between output events. [num_events - 1]"""
    return np.diff(np.frombuffer(record.output_s)) * 1e3


def itl_ms(record: RequestRecord) -> Floats:
    """Gaps between tokens. [max(num_events, num_tokens) - 1]"""
    gaps = event_gaps_ms(record)
    bundled = num_tokens(record) - len(record.output_at)
    if bundled > 0 and len(record.output_at):
        gaps = np.concatenate((gaps, np.zeros(bundled)))
    return gaps


def max_gap_ms(record: RequestRecord) -> float | None:
    """Longest gap; None with fewer than two output events."""
    gaps = event_gaps_ms(record)
    return float(gaps.max()) if len(gaps) else None


def tpot_ms(record: RequestRecord) -> float | None:
    """Mean time per output token after the first; None with fewer than two tokens."""
    tokens = num_tokens(record)
    if tokens < 2 or len(record.output_at) < 2:
        return None
    return (record.output_at[-1] - record.output_at[0]) / (tokens - 1) * 1e3


def e2e_ms(record: RequestRecord) -> float:
    """From sending the accepted attempt to the end of the stream."""
    return (record.done_s - record.sent_s) * 1e3


def keeps(record: RequestRecord, slo: Slo | None) -> bool:
    """Whether the answer arrived whole and met every target. Waiting for a retry counts as waiting."""
    if not is_answered(record):
        return False
    if slo is None:
        return True
    waited = retry_wait_ms(record)
    first = ttft_ms(record)
    if slo.ttft is not None and (first is None or waited + first > slo.ttft):
        return False
    if slo.e2e is not None and waited + e2e_ms(record) > slo.e2e:
        return False
    mean_gap = tpot_ms(record)
    if slo.tpot is not None and mean_gap is not None and mean_gap > slo.tpot:
        return False
    gaps = itl_ms(record)
    return slo.itl is None or not len(gaps) or float(np.quantile(gaps, 0.99)) <= slo.itl

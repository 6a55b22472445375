"""Traffic from ServeGen's client fits: many clients, each with a rate, a burstiness and lengths of its own.

Source: Xiang et al., ServeGen (arXiv:2505.09999), per-client figures of real traffic; what is drawn from
them here is new traffic of the same kind, not a recording. Input and output lengths are drawn independently.
"""

import random
from itertools import pairwise
from typing import Final

import msgspec

from load.arrivals import RatePoint, RateProfile, draw_arrivals, unit_gaps
from load.errors import LoadError
from load.trace import FOLDER, Trace, TraceRow

PREFIX: Final = "servegen:"
WINDOW_S: Final = 600.0
"""ServeGen measured whether clients are active in windows of this length."""
MAX_CV: Final = 100.0


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """One client's fits."""

    model: str
    client: str
    mean_rps: float
    active_window_frac: float
    cv_iat_rate_weighted: float
    """Coefficient of variation of its gaps."""
    input_tokens_q: tuple[float, ...]
    output_tokens_q: tuple[float, ...]


class Clients(msgspec.Struct, frozen=True, kw_only=True):
    """All clients of the file."""

    quantiles: tuple[float, ...]
    clients: tuple[Client, ...]


def read_clients() -> Clients:
    """Read the bundled fits."""
    return msgspec.json.decode((FOLDER / "servegen-clients.json").read_bytes(), type=Clients)


def servegen_trace(model: str, duration_s: float, rng: random.Random) -> Trace:
    """Draw `duration_s` of traffic of all clients of a model. Raises LoadError for an unknown model."""
    fits = read_clients()
    clients = [client for client in fits.clients if client.model == model]
    if not clients:
        known = ", ".join(sorted({client.model for client in fits.clients}))
        raise LoadError(f"ServeGen has no model {model!r}; there are {known}")
    rows = [row for client in clients for row in _client_rows(client, fits.quantiles, duration_s, rng)]
    if not rows:
        raise LoadError(f"no client of {model} sends anything within {duration_s:g} s: take longer")
    rows.sort(key=lambda row: row.at_s)
    return Trace(name=PREFIX + model, rows=tuple(rows), has_arrivals=True)


def _client_rows(
    client: Client, quantiles: tuple[float, ...], duration_s: float, rng: random.Random
) -> list[TraceRow]:
    profile = _activity(client, duration_s, rng)
    next_gap = unit_gaps("gamma", min(MAX_CV, max(0.05, client.cv_iat_rate_weighted)), rng)
    return [
        TraceRow(
            at_s,
            inverse_cdf(rng.random(), quantiles, client.input_tokens_q),
            inverse_cdf(rng.random(), quantiles, client.output_tokens_q),
            (),
            client.client,
        )
        for at_s in draw_arrivals(profile, next_gap)
    ]


def _activity(client: Client, duration_s: float, rng: random.Random) -> RateProfile:
    """A client sends in some windows and is silent in others; its mean rate is over both."""
    points = []
    at_s = 0.0
    while at_s < duration_s:
        is_active = rng.random() < client.active_window_frac
        rate = client.mean_rps / client.active_window_frac if is_active else 0.0
        end_s = min(duration_s, at_s + WINDOW_S)
        points += [RatePoint(at_s, rate), RatePoint(end_s, rate)]
        at_s = end_s
    return RateProfile(tuple(points))


def inverse_cdf(u: float, quantiles: tuple[float, ...], values: tuple[float, ...]) -> int:
    """Return the length at rank `u`, linear between known quantiles and flat outside them."""
    if u <= quantiles[0]:
        return max(1, round(values[0]))
    for (q0, v0), (q1, v1) in pairwise(zip(quantiles, values, strict=True)):
        if u <= q1:
            return max(1, round(v0 + (v1 - v0) * (u - q0) / (q1 - q0)))
    return max(1, round(values[-1]))

"""Profile: how long the steps of one kind of replica take, and what memory it has."""

import math
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from cluster import itl_targets
from cluster.config import ClusterConfig
from replicas.config import ModelShape, ResolvedConfig, resolve
from replicas.errors import ConfigError
from replicas.step_time import StepShape

FOLDER: Final = Path(__file__).parent / "profiles"


class RowTime(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A point of the step's time over its new tokens."""

    num_tokens: int
    seconds: float


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a step: replicas.step_time's formula with known coefficients."""

    rows: tuple[RowTime, ...]
    """By new tokens, ascending; straight lines between the points, and the last line goes on."""
    query_key_pair_s: float
    read_token_s: float
    sample_s: float

    @classmethod
    def linear(
        cls,
        *,
        step_s: float,
        new_token_s: float = 0.0,
        query_key_pair_s: float = 0.0,
        read_token_s: float = 0.0,
        sample_s: float = 0.0,
    ) -> "StepTimes":
        """Return times that are linear in the new tokens, too."""
        return cls(
            rows=(RowTime(0, step_s), RowTime(1, step_s + new_token_s)),
            query_key_pair_s=query_key_pair_s,
            read_token_s=read_token_s,
            sample_s=sample_s,
        )

    def seconds(self, shape: StepShape) -> float:
        """Return how long a step of this shape takes."""
        rows = self.rows
        index = bisect_right(rows, shape.num_new_tokens, key=_num_tokens)
        index = max(1, min(index, len(rows) - 1))
        low, high = rows[index - 1], rows[index]
        slope = (high.seconds - low.seconds) / (high.num_tokens - low.num_tokens)
        return (
            low.seconds
            + slope * (shape.num_new_tokens - low.num_tokens)
            + self.query_key_pair_s * shape.prefill_work
            + self.read_token_s * shape.kv_read_tokens
            + self.sample_s * shape.num_sampling
        )


def _num_tokens(row: RowTime) -> int:
    return row.num_tokens


class Noise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many times as long as they should steps take: quantiles, from the least to the most, equally far
    apart, with straight lines between them."""

    decodes: tuple[float, ...]
    """Of steps that only decode."""
    prefills: tuple[float, ...]
    """Of steps with prompt tokens."""

    def draw(self, shape: StepShape, draw: Random) -> float:
        """Return a factor for a step of this shape. Each is drawn for itself."""
        quantiles = self.prefills if shape.prefill_work else self.decodes
        rank = draw.random() * (len(quantiles) - 1)
        low = int(rank)
        return quantiles[low] + (quantiles[low + 1] - quantiles[low]) * (rank - low)


class SharedHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replicas that slow each other down, because they run on the same cores, caches or memory."""

    replicas: int
    """For each host; the last one may have fewer."""
    slowdown: float
    """A step takes `1 + slowdown * n` times as long while n other replicas of its host are in a step, too."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of replica: a model on a machine."""

    name: str
    source: str
    """Where the numbers come from."""
    steps: StepTimes
    max_position_embeddings: int
    kv_bytes_per_token: int
    kv_bytes: int
    """Of the KV pool."""
    block_size: int
    cold_start_s: float
    """From the decision to start a replica until it serves."""
    shared_host: SharedHost | None = None
    """None = each replica has a machine, or its part of one, to itself."""
    noise: Noise | None = None
    """None = each step takes what it should."""

    def timer(self, draw: Random) -> Callable[[StepShape], float]:
        """Return what says how long the steps of a replica take that has its host to itself."""
        steps, noise = self.steps, self.noise
        if noise is None:
            return steps.seconds
        return lambda shape: steps.seconds(shape) * noise.draw(shape, draw)

    def seconds_beside_all(self, shape: StepShape) -> float:
        """Return how long a step takes while every replica that shares its host is in one."""
        host = self.shared_host
        alone_s = self.steps.seconds(shape)
        return alone_s if host is None else alone_s * (1 + host.slowdown * (host.replicas - 1))

    def resolve(self, config: ClusterConfig) -> ResolvedConfig:
        """Return what an engine of this profile runs with. Raises ConfigError."""
        shape = ModelShape(
            max_position_embeddings=self.max_position_embeddings,
            kv_bytes_per_token=self.kv_bytes_per_token,
            preferred_block_size=self.block_size,
        )
        resolved = resolve(config.engine, shape, config.engine.kv_cache_memory or self.kv_bytes)
        return msgspec.structs.replace(
            resolved, tier_itl_target_ms=itl_targets.promised(config.tiers) | resolved.tier_itl_target_ms
        )


def load_profile(name: str) -> Profile:
    """Read a bundled profile by its name, or a JSON file. Raises ConfigError."""
    path = Path(name)
    if not path.suffix:
        path = FOLDER / f"{name}.json"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        bundled = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise ConfigError(f"profile {name!r}: {error.strerror}; bundled: {bundled}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    _check(path, profile)
    return profile


def _check(path: Path, profile: Profile) -> None:
    rows = profile.steps.rows
    tokens = [row.num_tokens for row in rows]
    times = [row.seconds for row in rows]
    if len(rows) < 2 or tokens != sorted(set(tokens)) or times != sorted(times):
        raise ConfigError(f"{path}: steps.rows must be two or more points, both numbers ascending")
    coefficients = (profile.steps.query_key_pair_s, profile.steps.read_token_s, profile.steps.sample_s)
    for number in (*times, *coefficients, profile.cold_start_s):
        if not (math.isfinite(number) and number >= 0):
            raise ConfigError(f"{path}: {number} is no duration")
    if times[-1] <= 0:
        raise ConfigError(f"{path}: a step must take some time")
    _check_optional(path, profile)


def _check_optional(path: Path, profile: Profile) -> None:
    noise, host = profile.noise, profile.shared_host
    for quantiles in () if noise is None else (noise.decodes, noise.prefills):
        is_sorted = list(quantiles) == sorted(quantiles) and len(quantiles) >= 2
        if not (is_sorted and quantiles[0] > 0 and math.isfinite(quantiles[-1])):
            raise ConfigError(f"{path}: noise must be two or more positive numbers of each kind, ascending")
    if host is not None and host.replicas < 2:
        raise ConfigError(f"{path}: shared_host.replicas: {host.replicas} is less than 2")
    if host is not None and not (math.isfinite(host.slowdown) and host.slowdown >= 0):
        raise ConfigError(f"{path}: shared_host.slowdown: {host.slowdown} is no number from 0 on")

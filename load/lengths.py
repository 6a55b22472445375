"""How many tokens: distributions of lengths, read from short strings."""

import math
import random
from typing import Literal

import msgspec

from load.errors import LoadError

MAX_TOKENS = 10_000_000


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution over whole numbers of at least 1."""

    law: Literal["fixed", "uniform", "lognormal"]
    a: float
    """The value; the smallest; the median."""
    b: float = 0.0
    """Unused; the largest; sigma of the logarithm."""
    most: int = MAX_TOKENS

    def draw(self, rng: random.Random) -> int:
        """Return one length."""
        if self.law == "fixed":
            value = self.a
        elif self.law == "uniform":
            value = rng.randint(int(self.a), int(self.b))
        else:
            value = self.a * math.exp(rng.gauss(0.0, self.b))
        return max(1, min(self.most, round(value)))


def parse_lengths(text: str) -> Lengths:
    """Read `256`, `uniform:16:512` or `lognormal:MEDIAN:SIGMA[:MOST]`. Raises LoadError."""
    law, *numbers = text.split(":") if ":" in text else ("fixed", text)
    try:
        if law == "fixed":
            lengths = Lengths(law="fixed", a=int(numbers[0]))
        elif law == "uniform" and len(numbers) == 2:
            lengths = Lengths(law="uniform", a=int(numbers[0]), b=int(numbers[1]))
        elif law == "lognormal" and len(numbers) in (2, 3):
            most = int(numbers[2]) if len(numbers) == 3 else MAX_TOKENS
            lengths = Lengths(law="lognormal", a=float(numbers[0]), b=float(numbers[1]), most=most)
        else:
            raise ValueError
    except ValueError:
        raise LoadError(f"{text!r} is none of 256, uniform:16:512, lognormal:MEDIAN:SIGMA[:MOST]") from None
    is_in_order = lengths.law != "uniform" or lengths.a <= lengths.b
    if not (
        1 <= lengths.a <= MAX_TOKENS and 0 <= lengths.b <= MAX_TOKENS and is_in_order and lengths.most >= 1
    ):
        raise LoadError(f"{text!r} does not describe lengths of 1 to {MAX_TOKENS} tokens")
    return lengths

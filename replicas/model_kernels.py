"""Kernels between the matrix products of a transformer layer, fp32, compiled by numba.

Each treats rows first .. last - 1 and reads nothing else, so that several threads can share a call. Sums run
in one order fixed by the width of a row: over its sixteen lanes in parallel, then over the lanes from the
first. So a row's bits depend on the row alone. Rows are contiguous and whole lanes wide.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from replicas.attention import lanes
from replicas.attention.numba_kernels import exp

LANES: Final = lanes.WIDTH
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_STEPS = np.float32(255.0)


@njit(nogil=True, cache=True, error_model="numpy")
def rms_norm(
    out: Any,  # [rows, width]
    x: Any,  # [rows, width]
    weight: Any,  # [width]
    eps: Any,
    first: Any,
    last: Any,
) -> None:
    """out = x / sqrt(mean(x * x) + eps) * weight."""
    width = x.shape[1]
    for row in range(first, last):
        base = row * width
        squares = lanes.splat(_ZERO)
        for i in range(0, width, LANES):
            value = lanes.load(x, base + i)
            squares = lanes.fma(value, value, squares)
        mean = lanes.total(squares) / np.float32(width)
        scale = lanes.splat(_ONE / np.sqrt(mean + eps))
        for i in range(0, width, LANES):
            value = lanes.mul(lanes.load(x, base + i), scale)
            lanes.store(out, base + i, lanes.mul(value, lanes.load(weight, i)))


@njit(nogil=True, cache=True, error_model="numpy")
def add_rms_norm(
    out: Any,  # [rows, width]
    x: Any,  # [rows, width]; changed
    update: Any,  # [rows, width]
    weight: Any,  # [width]
    eps: Any,
    first: Any,
    last: Any,
) -> None:
    """x += update, then as `rms_norm`."""
    width = x.shape[1]
    for i in range(first * width, last * width, LANES):
        lanes.store(x, i, lanes.add(lanes.load(x, i), lanes.load(update, i)))
    rms_norm(out, x, weight, eps, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def norm_heads(
    x: Any,  # [rows, heads, head_dim]; changed
    first_head: Any,
    last_head: Any,
    weight: Any,  # [head_dim]
    eps: Any,
    first: Any,
    last: Any,
) -> None:
    """Normalise each of the heads first_head .. last_head - 1 as `rms_norm` does a row."""
    heads, head_dim = x.shape[1], x.shape[2]
    for row in range(first, last):
        for head in range(first_head, last_head):
            base = (row * heads + head) * head_dim
            squares = lanes.splat(_ZERO)
            for i in range(0, head_dim, LANES):
                value = lanes.load(x, base + i)
                squares = lanes.fma(value, value, squares)
            mean = lanes.total(squares) / np.float32(head_dim)
            scale = lanes.splat(_ONE / np.sqrt(mean + eps))
            for i in range(0, head_dim, LANES):
                value = lanes.mul(lanes.load(x, base + i), scale)
                lanes.store(x, base + i, lanes.mul(value, lanes.load(weight, i)))


@njit(nogil=True, cache=True, error_model="numpy")
def rotate(
    x: Any,  # [rows, heads, head_dim]; changed
    num_heads: Any,  # the first so many heads are rotated
    cos: Any,  # [rows, head_dim]
    sin: Any,  # [rows, head_dim]
    first: Any,
    last: Any,
) -> None:
    """Rotate the two halves of each head against each other (Su et al., RoFormer, 2021)."""
    half = x.shape[2] // 2
    for row in range(first, last):
        for head in range(num_heads):
            for i in range(half):
                a, b = x[row, head, i], x[row, head, i + half]
                x[row, head, i] = a * cos[row, i] - b * sin[row, i]
                x[row, head, i + half] = b * cos[row, i + half] + a * sin[row, i + half]


@njit(nogil=True, cache=True, error_model="numpy")
def silu_mul(
    out: Any,  # [rows, width]
    gate_up: Any,  # [rows, 2 * width]
    first: Any,
    last: Any,
) -> None:
    """out = gate / (1 + exp(-gate)) * up."""
    width = out.shape[1]
    zero, one = lanes.splat(_ZERO), lanes.splat(_ONE)
    for row in range(first, last):
        for i in range(0, width, LANES):
            gate = lanes.load(gate_up, row * 2 * width + i)
            up = lanes.load(gate_up, row * 2 * width + width + i)
            silu = lanes.div(gate, lanes.add(one, exp(lanes.sub(zero, gate))))
            lanes.store(out, row * width + i, lanes.mul(silu, up))


@njit(nogil=True, cache=True, error_model="numpy")
def quantise(
    out: Any,  # [rows, width] uint8
    scales: Any,  # [rows]
    zeros: Any,  # [rows] int32
    x: Any,  # [rows, width]
    first: Any,
    last: Any,
) -> None:
    """Round each row so that x = (out - zero) * scale; its range, extended to hold 0, fills 0 .. 255.

    A value that is not finite makes the row's scale NaN, so that it cannot pass for a number.
    """
    width = x.shape[1]
    none = lanes.splat(_ZERO)
    for row in range(first, last):
        highs = lows = strange = none  # lows with changed sign
        for i in range(0, width, LANES):
            value = lanes.load(x, row * width + i)
            strange = lanes.fma(value, none, strange)
            highs = lanes.clamp_below(value, highs)
            lows = lanes.clamp_below(lanes.sub(none, value), lows)
        low, span = lanes.largest(lows), lanes.largest(highs) + lanes.largest(lows)
        scales[row] = span / _STEPS + lanes.total(strange)
        inverse = _STEPS / span if span > _ZERO else _ZERO
        zero = np.rint(low * inverse)
        zeros[row] = np.int32(zero)
        factor, shift = lanes.splat(inverse), lanes.splat(zero)
        for i in range(0, width, LANES):
            value = lanes.round_even(lanes.mul(lanes.load(x, row * width + i), factor))
            # Both are rounded, so their sum can reach 256: 255 is stored.
            lanes.store_bytes(out, row * width + i, lanes.add(value, shift))


@njit(nogil=True, cache=True, error_model="numpy")
def dequantise(
    out: Any,  # [rows, width]
    sums: Any,  # [rows, width] int32
    scales: Any,  # [rows]
    zeros: Any,  # [rows] int32
    column_scales: Any,  # [width]
    column_sums: Any,  # [width] int32; of the weights
    bias: Any,  # [width]
    first: Any,
    last: Any,
) -> None:
    """out = (sums - zero * column sum) * scale * column scale + bias."""
    width = out.shape[1]
    for row in range(first, last):
        scale, zero = scales[row], zeros[row]
        for i in range(width):
            whole = np.int32(sums[row, i] - zero * column_sums[i])
            out[row, i] = np.float32(whole) * scale * column_scales[i] + bias[i]


@njit(nogil=True, cache=True, error_model="numpy")
def rescore(
    logits: Any,  # [rows, vocab_size]; changed
    hidden: Any,  # [rows, width]
    weight: Any,  # [vocab_size, width]
    first: Any,
    last: Any,
) -> None:
    """Compute a row's best logits anew from full-precision weights.

    Best is what reaches the smallest of 2 * LANES maxima, each over every so many-th token: at least the best
    2 * LANES tokens, some 130 as a rule, found in one pass.
    """
    vocab_size, width = logits.shape[1], hidden.shape[1]
    for row in range(first, last):
        base = row * vocab_size
        a = b = lanes.splat(np.float32(-np.inf))
        for i in range(0, vocab_size - 2 * LANES + 1, 2 * LANES):
            a = lanes.clamp_below(lanes.load(logits, base + i), a)
            b = lanes.clamp_below(lanes.load(logits, base + i + LANES), b)
        zero = lanes.splat(_ZERO)
        lowest = -lanes.largest(lanes.sub(zero, lanes.clamp_above(a, b)))
        for token in range(vocab_size):
            if logits[row, token] >= lowest:
                total = lanes.splat(_ZERO)
                for i in range(0, width, LANES):
                    total = lanes.fma(
                        lanes.load(hidden, row * width + i), lanes.load(weight, token * width + i), total
                    )
                logits[row, token] = lanes.total(total)

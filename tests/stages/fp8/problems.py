"""What tests of FP8 attention share: problems with scales, and how near a kernel must be to the exact rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashnumba import fp8
from flashnumba.stages import fp8_heads
from flashnumba.stages.flash_forward.reference import dense
from flashnumba.stages.fp8 import reference

__all__ = ["Problem", "made"]


@dataclass(frozen=True, eq=False)
class Problem:
    """Codes ``[B, H, rows, D]`` with scales, by name."""

    codes: dict[str, np.ndarray]
    scales: dict[str, Any]
    fmt: str
    causal: bool
    scale: float | None = None

    @property
    def values(self) -> list[np.ndarray]:
        return [fp8.dequantize(self.codes[x], self.scales[f"{x}_descale"], self.fmt) for x in "qkv"]

    def expected(self, weights: str, step: int = 64) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) with every rounding where a kernel has it."""
        return reference.attention(
            *self.codes.values(), self.fmt, **self.scales, scale=self.scale, causal=self.causal, weights=weights,
            step=step,
        )  # fmt: skip

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) of what the codes stand for in float64."""
        return dense(*self.values, self.scale, self.causal)

    def run(self, plan: Any, machine: str) -> tuple[np.ndarray, np.ndarray]:
        return fp8_heads.forward(
            *self.codes.values(), plan, fmt=self.fmt, **self.scales, causal=self.causal, scale=self.scale,
            machine=machine,
        )  # fmt: skip

    def why_wrong(self, results: tuple[np.ndarray, np.ndarray], weights: str, machine: str, step: int = 64) -> str:
        """What is not as near to the reference as it should be; empty if all is.

        A result is rounded to bfloat16: it may be the next one. On a GPU 2^x is approximate and sums have another
        order, so a weight near the middle between two e4m3 numbers may be the other one. Two of the heaviest of a row
        may. With float16 weights that is a 128th of it, and everywhere so, as parts of the keys have their own maximum.
        """
        o, lse = (np.asarray(x).astype(np.float64) for x in results)
        o_ref, lse_ref = (x.astype(np.float64) for x in self.expected(weights, step))
        if not np.array_equal(np.isfinite(o), np.isfinite(o_ref)) or not np.array_equal(
            lse == -np.inf, lse_ref == -np.inf
        ):
            return "other positions are not finite"
        with np.errstate(invalid="ignore"):
            heaviest = np.exp(self._greatest() - self.exact()[1])[..., None]  # [B, H, M, 1]
        heaviest = np.where(np.isfinite(heaviest), heaviest, 0)
        other = 2 * heaviest * (2.0**-11 if weights == "float16" else 2.0**-4 if machine == "cuda" else 0)
        size = np.nanmax(np.abs(self.values[2]), initial=0)
        with np.errstate(invalid="ignore"):
            far = np.abs(o - o_ref) - (2.0**-7 * np.abs(o_ref) + 1e-6 * size + other * size)
            apart = np.abs(lse - lse_ref) - (
                2e-5 * (1 + np.abs(lse_ref)) + np.broadcast_to(other, (*lse.shape, 1))[..., 0]
            )
        if np.nanmax(far, initial=-1) > 0:
            at = np.unravel_index(np.nanargmax(far), far.shape)
            return f"o at {[int(i) for i in at]} is {o[at]:.6g}, not {o_ref[at]:.6g}"
        return "lse is off" if np.nanmax(apart, initial=-1) > 0 else ""

    def _greatest(self) -> np.ndarray:
        """The greatest score of each row: ``[B, H, M]``."""
        q, k, _ = (x.astype(np.float64) for x in self.values)
        k = np.repeat(k, q.shape[1] // k.shape[1], 1)
        s = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        m, n = s.shape[-2:]
        if self.causal:
            s = np.where(np.arange(n) <= np.arange(m)[:, None] + n - m, s, -np.inf)
        return s.max(-1, initial=-np.inf)


def made(
    m: int, n: int, d: int, fmt: str = "e4m3", scaling: str = "head", *, heads: int = 1, kv_heads: int = 1,
    batch: int = 1, causal: bool = False, scale: float | None = None, seed: int = 0,
) -> Problem:  # fmt: skip
    """Normal numbers; no two heads, blocks, rows or columns are alike, and scales of 3 to 60 would be missed."""
    rng = np.random.default_rng((seed, m, n, d, batch, heads))
    q = rng.standard_normal((batch, heads, m, d)) * np.geomspace(0.5, 2, max(m, 1))[:m, None]
    k = rng.standard_normal((batch, kv_heads, n, d)) + 0.3 * np.arange(kv_heads)[:, None, None]
    v = rng.standard_normal((batch, kv_heads, n, d)) + np.linspace(-1, 1, d) + np.arange(kv_heads)[:, None, None]
    v = v * (1 + np.arange(n) // 64 * 3)[:, None]
    k = k * (1 + 0.5 * (np.arange(n) // 64 % 2))[:, None]
    quantised = {
        name: fp8.quantize(x.astype(np.float32), fmt, scaling) for name, x in zip("qkv", (q, k, v), strict=True)
    }
    codes = {name: one[0] for name, one in quantised.items()}
    return Problem(codes, {f"{name}_descale": one[1] for name, one in quantised.items()}, fmt, causal, scale)

"""Problems of latent attention with small tiles, run on either machine and judged in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from flashnumba.compare import Comparison, compare
from flashnumba.machine import launcher
from flashnumba.machine.emulator import Fault
from flashnumba.stages.flash_mla import combine, mma, reference
from flashnumba.stages.flash_mla.schedule import schedule
from flashnumba.stages.flash_mla.sizes import MLATiles

ONE = MLATiles(16, 32, 2, slots=2, held=True, d=192, dv=128)
"""A warp has all rows of S, and Q in registers."""
SHARED = MLATiles(32, 32, 4, row_parts=2, slots=3, d=320, dv=256)
"""Warps share rows and keys of S; Q stays in shared memory."""
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass
class Problem:
    """``cache`` is what kernels get, ``held`` what it stands for."""

    q: np.ndarray
    cache: np.ndarray
    held: np.ndarray
    table: np.ndarray
    lengths: np.ndarray
    scale: float
    causal: bool
    element: str
    dv: int

    def judged(self, o: np.ndarray, lse: np.ndarray) -> list[Comparison]:
        given = (self.table, self.lengths, self.scale, self.causal, self.dv)
        exact = reference.paged(self.q, self.held, *given)
        low = reference.rounded(self.q, self.held.astype(self.q.dtype), *given)
        return [compare(*three) for three in zip((o, lse), exact, low, strict=True)]


def problem(
    tiles: MLATiles, s: int, h: int, lengths: list[int], *, element: str = "float16", causal: bool = True,
    scale: float = 192**-0.5, size: float = 1.0, seed: int = 0,
) -> Problem:  # fmt: skip
    """Normal numbers times ``size``, in pages of no order; nobody may read what lies behind a request's tokens."""
    rng = np.random.default_rng(seed)
    b, most, dtype = len(lengths), max(1, *(-(-n // 64) for n in lengths)), TYPES[element]
    table = rng.permutation(b * most + 2)[: b * most].reshape(b, most).astype(np.int32)
    q = (size * rng.standard_normal((b, s, h, tiles.d))).astype(dtype)
    cache = np.full((b * most + 2, 64, tiles.d), np.nan, dtype)
    for i, length in enumerate(lengths):
        for page in range(-(-length // 64)):
            count = min(64, length - 64 * page)
            cache[table[i, page], :count] = rng.standard_normal((count, tiles.d))
    return Problem(q, cache, cache.astype(np.float64), table, np.array(lengths, np.int32), scale, causal, element,
                   tiles.dv)  # fmt: skip


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array


def decode(
    given: Problem, tiles: MLATiles, machine: str = "emulator", *, parts: int = 3, code: str = "", broken: str = "",
    merge: str = "", seed: int = 0, arch: str = "80",
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(o, lse) by the kernels, which find NaN in all that they write."""
    b, s, h, _ = given.q.shape
    made, rows = schedule(given.lengths, parts), s * h
    states = int(made.num_splits[-1])
    acc, m, l = (np.full(x, np.nan, np.float32) for x in ((states, rows, tiles.dv), (states, rows), (states, rows)))
    o, lse = np.full((b, s, h, tiles.dv), np.nan, given.q.dtype), np.full((b, h, s), np.nan, np.float32)
    attend = mma.make_decode(tiles, given.element, arch, code=code, broken=broken)
    join = combine.make_combine(given.element, tiles.dv, "90" if merge == "wait" else "80", broken=merge)
    scale, emulate = np.float32(given.scale), {"seed": seed} if machine == "emulator" else None
    args = (bits(given.q), bits(given.cache), given.table, given.lengths, made.parts, made.num_splits, acc, m, l,
            bits(o), lse, scale, np.int32(given.causal))  # fmt: skip
    launcher.launch(
        attend, parts * -(-rows // tiles.bm), tiles.threads, args, shared=tiles.shared, machine=machine, emulate=emulate
    )
    args = (made.num_splits, acc, m, l, bits(o), lse, scale)
    launcher.launch(join, b * rows, join.threads, args, machine=machine, emulate=emulate)
    return o, lse


def prefill(given: Problem, tiles: MLATiles, machine: str = "emulator", *, broken: str = "", seed: int = 0):
    """(o, lse) of requests of one length, whose rows lie one after the other."""
    b, s, h, _ = given.q.shape
    n = int(given.lengths[0])
    kv = np.stack([reference.gather(given.cache, given.table[i], n) for i in range(b)])
    o, lse = np.full((b, s, h, tiles.dv), np.nan, given.q.dtype), np.full((b, h, s), np.nan, np.float32)
    made = mma.make_prefill(tiles, given.element, "80", broken=broken)
    args = (bits(given.q), bits(kv), bits(o), lse, np.float32(given.scale), np.int32(given.causal))
    launcher.launch(
        made, b * -(-s * h // tiles.bm), tiles.threads, args, shared=tiles.shared, machine=machine,
        emulate={"seed": seed} if machine == "emulator" else None,
    )  # fmt: skip
    return o, lse


def right(given: Problem, result: tuple[np.ndarray, np.ndarray]) -> None:
    for said in given.judged(*result):
        assert said.ok, said


def caught(given: Problem, run) -> str:
    """What betrays a planted fault: the name of the emulator's, or ``wrong`` for a result beyond its budget."""
    try:
        result = run()
    except Fault as fault:
        return type(fault).__name__
    return "" if all(said.ok for said in given.judged(*result)) else "wrong"

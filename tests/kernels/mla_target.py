"""Every flash_mla kernel once on a GPU, small, compared with the reference: what compute-sanitizer is pointed at.

::

    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python -m tests.kernels.mla_target
    done
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

from flashnumba import mla
from flashnumba.compare import compare
from flashnumba.stages.flash_mla import cache, codec, reference
from flashnumba.stages.flash_mla.schedule import schedule

SCALE, BFLOAT16 = 192**-0.5, np.dtype(ml_dtypes.bfloat16)
LENGTHS = [150, 0, 3, 64]


def main(machine: str = "cuda") -> int:
    """Print a line a launch; 1 if one of them is wrong."""
    rng, wrong = np.random.default_rng(0), 0

    def told(name: str, *verdicts) -> None:
        nonlocal wrong
        wrong += not all(verdict.ok for verdict in verdicts)
        print(f"{name}: {'; '.join(map(str, verdicts))}", flush=True)

    lengths = np.array(LENGTHS, np.int32)
    table = rng.permutation(14)[:12].reshape(4, 3).astype(np.int32)
    for heads, tokens, dtype, fmt, parts in (
        (16, 1, BFLOAT16, "", 3), (5, 3, np.dtype(np.float16), "", 40), (16, 2, BFLOAT16, "", 3),
        (128, 1, BFLOAT16, "", 3), (16, 1, BFLOAT16, "e4m3", 3), (16, 1, np.dtype(np.float16), "e5m2", 40),
        (16, 2, BFLOAT16, "e4m3", 3), (64, 1, BFLOAT16, "e4m3", 3), (64, 1, BFLOAT16, "e5m2", 3),
    ):  # fmt: skip
        rows = rng.standard_normal((14, codec.PAGE, 576)).astype(dtype)
        q = rng.standard_normal((4, tokens, heads, 576)).astype(dtype)
        stored = codec.quantize(rows, fmt) if fmt else rows
        held = codec.dequantize(stored, fmt, rotated=dtype) if fmt else rows.astype(np.float64)
        for request, pages in enumerate(table):  # what lies behind a request's tokens is NaN
            for i, page in enumerate(pages):
                stored[page, max(0, LENGTHS[request] - codec.PAGE * i) :] = 0xFF if fmt else np.nan
        planned, given = schedule(lengths, parts), (table, lengths, SCALE, tokens > 1)
        got = mla.mla_decode(
            q, stored[:, :, None], table, lengths, 512, planned.parts, planned.num_splits, SCALE, tokens > 1,
            is_fp8_kvcache=bool(fmt), fmt=fmt or "e4m3", machine=machine,
        )  # fmt: skip
        judges = reference.paged(q, held, *given), reference.rounded(q, held.astype(dtype), *given)
        told(f"decode {dtype.name} {tokens} x {heads} rows {fmt} {parts} parts", *map(compare, got, *judges))
    for s, n, dtype in ((24, 90, BFLOAT16), (24, 20, np.dtype(np.float16)), (3, 70, BFLOAT16)):
        q, kv = rng.standard_normal((1, s, 5, 576)).astype(dtype), rng.standard_normal((1, n, 1, 576)).astype(dtype)
        pages = np.zeros((2, codec.PAGE, 576), dtype)
        pages.reshape(-1, 576)[:n] = kv[0, :, 0]
        given = (np.array([[0, 1]]), [n], SCALE, True)
        judges = reference.paged(q, pages.astype(np.float64), *given), reference.rounded(q, pages, *given)
        got = mla.mla_prefill(q, kv, 512, SCALE, True, machine=machine)
        told(f"prefill {dtype.name} {s} tokens {n} keys", *map(compare, got, *judges))
    rows = rng.standard_normal((2, 70, 576)).astype(BFLOAT16)
    for fmt in (None, *codec.FORMATS):
        grown = mla.MLACache(6, 2, 192, like=rows, fmt=fmt, machine=machine)
        for new in (rows[:, :63], rows[:, 63:]):
            grown.append(new.copy())
        exact = codec.quantize(rows, fmt) if fmt else rows
        found = [grown.k_cache[pages[:2], :, 0].reshape(128, -1)[:70] for pages in grown.block_table]
        same = np.array_equal(np.stack(found).view(np.uint8), exact.view(np.uint8))
        wrong += not same
        print(f"append {fmt or 'as it is'}: {'ok' if same else 'other bytes'}", flush=True)
        if fmt:
            tokens = np.zeros((70, exact.shape[-1]), np.uint8)
            cache.quantize(rows[0], tokens, code=cache.CODES[fmt], machine=machine, arch="90a")
            same = np.array_equal(tokens, exact[0])
            wrong += not same
            print(f"quantize {fmt}: {'ok' if same else 'other bytes'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

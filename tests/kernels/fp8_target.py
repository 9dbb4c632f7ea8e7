"""Every fp8 kernel once on a GPU, small, compared with the reference: what compute-sanitizer is pointed at.

::

    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python -m tests.kernels.fp8_target
    done
"""

from __future__ import annotations

import sys

import numpy as np

from flashnumba.stages.fp8 import codec, convert, mma
from tests.stages.fp8.problems import made

WEIGHTS = {"k32": "e4m3", "emulated": "float16", "split": "float16"}


def main() -> int:
    """Print a line a launch; 1 if one of them is wrong."""
    wrong = 0

    def told(name: str, why: str) -> None:
        nonlocal wrong
        wrong += bool(why)
        print(f"{name}: {why or 'ok'}", flush=True)

    for d, fmt, scaling, causal in (
        (64, "e4m3", "head", True), (128, "e4m3", "block", True), (128, "e5m2", "head", False),
        (256, "e4m3", "head", True), (100, "e5m2", "block", True),
    ):  # fmt: skip
        for name, plan in mma.PLANS.items():
            problem = made(3 if name == "split" else 130, 200, d, fmt, scaling, heads=2, kv_heads=1, causal=causal)
            why = problem.why_wrong(problem.run(plan, "cuda"), WEIGHTS[name], "cuda")
            told(f"{name} {fmt} d {d} by {scaling}{' causal' if causal else ''}", why)
    x = (np.random.default_rng(0).standard_normal(1001) * 100).astype(np.float32)
    for fmt in codec.FORMATS:
        once, twice = codec.encode(x, fmt), codec.encode_by_float16(x, fmt)
        for way in convert.ENCODERS:
            if way != "upper_byte" or fmt == "e5m2":
                expected = once if way in ("instructions", "integers") else twice
                same = np.array_equal(convert.encode(x, fmt, way, "cuda"), expected)
                told(f"encode {fmt} by {way}", "" if same else "other codes")
        for way in convert.DECODERS:
            same = np.array_equal(convert.decode(once, fmt, way, "cuda"), codec.decode(once, fmt))
            told(f"decode {fmt} by {way}", "" if same else "other values")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

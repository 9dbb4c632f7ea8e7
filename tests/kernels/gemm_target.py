"""Every gemm kernel once on a GPU, small, compared with the reference: what compute-sanitizer is pointed at.

::

    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python -m tests.kernels.gemm_target
    done
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

from flashnumba.compare import compare
from flashnumba.stages.gemm.matmul import KERNELS, matmul
from flashnumba.stages.gemm.reference import low_precision, naive

HALVES = ("mma", "wgmma")


def main() -> int:
    """Print a line a launch; 1 if one of them is wrong."""
    rng, wrong = np.random.default_rng(0), 0
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        for m, n, k in ((100, 120, 72), (33, 65, 31), (256, 264, 136)):
            a, b = rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)
            columns = np.asfortranarray(a), np.asfortranarray(b)
            for majors, x, y in (("rows", a, b), ("columns", *columns), ("mixed", columns[0], b)):
                for kernel in KERNELS:
                    aligned = not any(size * a.dtype.itemsize % 16 for size in (m, n, k))
                    if kernel in HALVES and (dtype == np.float32 or (kernel == "wgmma" and not aligned)):
                        continue
                    verdict = compare(matmul(x, y, kernel=kernel, machine="cuda"), naive(a, b), low_precision(a, b))
                    wrong += not verdict.ok
                    print(f"{np.dtype(dtype).name} {m} x {n} x {k} {majors} {kernel}: {verdict}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

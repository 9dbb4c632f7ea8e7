"""Every softmax kernel once on a GPU, small, compared with the reference: what compute-sanitizer is pointed at.

::

    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python -m tests.kernels.softmax_target
    done
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

from flashnumba.compare import compare
from flashnumba.stages.online_softmax import simt as online
from flashnumba.stages.softmax import simt as three_pass
from flashnumba.stages.softmax.reference import low_precision, safe


def main() -> int:
    """Print a line a launch; 1 if one of them is wrong."""
    rng, wrong = np.random.default_rng(0), 0
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        for rows, cols in ((37, 33), (50, 128), (20, 1000), (9, 4099), (5, 32768), (3, 100_000)):
            x = (rng.standard_normal((rows, cols)) * 3).astype(dtype)
            expected, low = safe(x), low_precision(x)
            for stage in (three_pass, online):
                for kernel in (*stage.KERNELS, "auto"):
                    narrow = cols * x.dtype.itemsize % 16 != 0
                    if kernel == "one_pass" and cols * x.dtype.itemsize > (8192 if narrow else 131072):
                        continue
                    if kernel == "split_ahead" and narrow:
                        continue
                    for out in (None, x.copy()):
                        given = x if out is None else out
                        verdict = compare(stage.softmax(given, out, kernel=kernel, machine="cuda"), expected, low)
                        wrong += not verdict.ok
                        where = "out of place" if out is None else "in place"
                        print(f"{np.dtype(dtype).name} {rows} x {cols} {kernel} {where}: {verdict}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

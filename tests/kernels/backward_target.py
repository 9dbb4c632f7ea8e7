"""Every backward kernel once on a GPU, small, compared with the reference: what compute-sanitizer is pointed at.

::

    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python -m tests.kernels.backward_target
    done
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

from flashnumba.compare import compare
from flashnumba.stages.backward import plans
from tests.stages.backward.backward_cases import GRADIENTS, Case, normal, run
from tests.stages.flash_forward.attention_cases import LAYOUTS

__all__ = ["checked", "main"]

CASES = (
    (130, 200, 64, 2, 1, True, ""),
    (150, 300, 128, 4, 2, False, ""),
    (3, 300, 128, 2, 1, True, ""),
    (300, 3, 64, 2, 2, True, ""),
    (70, 90, 256, 1, 1, True, ""),
    (33, 65, 20, 2, 2, False, "one element off"),
    (33, 65, 96, 2, 2, True, "heads inside rows"),
)
"""Rows, keys, columns, heads, heads of k, causal, and the layout of q, v and do."""


def checked(case: Case, name: str) -> str:
    """``"ok"``, what is wrong, or why the kernel does not take the case."""
    try:
        results = run(plans()[name], case, "cuda")
    except ValueError as error:
        return f"not taken: {error}"
    wrong = [
        f"{which} {verdict}"
        for which, *each in zip(GRADIENTS, results, case.expected, case.lowprec, strict=True)
        if not (verdict := compare(*each)).ok
    ]
    return f"WRONG: {'; '.join(wrong)}" if wrong else "ok"


def main() -> int:
    """Print a line a launch; 1 if one of them is wrong."""
    wrong = 0
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
        for m, n, d, heads, kv_heads, causal, layout in CASES:
            if dtype != np.float16 and d not in (64, 20):
                continue
            case = normal(m, n, d, dtype, batch=2, heads=heads, kv_heads=kv_heads, causal=causal, with_dlse=causal)
            if layout:
                case = case.with_arrays(f"{case.name}, {layout}", LAYOUTS[layout], ("q", "v", "do"))
            for name in plans():
                said = checked(case, name)
                wrong += said.startswith("WRONG")
                print(f"{np.dtype(dtype).name} {case.name} {name}: {said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

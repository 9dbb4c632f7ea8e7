"""Every kernel of attention's forward once on a GPU, small, compared with the reference: what compute-sanitizer is
pointed at. It takes what to run, as ``staged_buffers`` or ``staged_buffers.tile_1``; all if nothing is named.

::

    for tool in memcheck racecheck synccheck initcheck; do
        compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 1 python -m tests.kernels.forward_target
    done
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

from flashnumba.stages.causal_balance import mma as causal_balance
from flashnumba.stages.chained_gemm import mma as chained_gemm
from flashnumba.stages.flash_forward import mma, simt, wgmma
from flashnumba.stages.heads import Plan, Shape
from flashnumba.stages.staged_buffers import mma as staged_buffers
from flashnumba.tiles.specialised_tiles import tiles_for
from tests.stages.flash_forward.attention_cases import LAYOUTS, normal, right, run


def staying(shape: Shape) -> Plan:
    """``wgmma`` with two blocks, which go from one row tile to the next."""
    return wgmma.plan_of(shape, tiles_for(shape.d, shape.n), 2)


PLANS = {
    "flash_forward": {**simt.PLANS, **mma.PLANS, **wgmma.PLANS, "wgmma_staying": staying},
    "chained_gemm": chained_gemm.PLANS,
    "staged_buffers": staged_buffers.PLANS,
    "causal_balance": causal_balance.PLANS,
}
SHAPES = (
    (130, 200, 64, 2, 1, True, ""),
    (100, 300, 128, 4, 2, False, ""),
    (3, 700, 128, 8, 1, True, ""),
    (70, 90, 256, 1, 1, True, ""),
    (33, 65, 20, 2, 2, False, "one element off"),
    (33, 65, 96, 2, 2, True, "heads inside rows"),
)


def main(wanted: list[str]) -> int:
    """Print a line a launch; 1 if one of them is wrong."""
    wrong = 0
    for stage in PLANS:
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32):
            for m, n, d, heads, kv_heads, causal, layout in SHAPES:
                case = normal(m, n, d, dtype, batch=2, heads=heads, kv_heads=kv_heads, causal=causal)
                case = case.with_arrays(case.name, LAYOUTS[layout]) if layout else case
                for name, plan in PLANS[stage].items():
                    if wanted and not {stage, f"{stage}.{name}"} & set(wanted):
                        continue
                    if dtype == np.float32 and name != "simt":
                        continue
                    if dtype != np.float16 and d not in (64, 20):
                        continue
                    try:
                        good = right(run(plan, case, "cuda"), case)
                    except ValueError as refused:
                        print(f"{stage}.{name} refuses {case.name}: {refused}", flush=True)
                        continue
                    wrong += not good
                    print(f"{np.dtype(dtype).name} {case.name} {layout} {stage}.{name}: {'ok' if good else 'WRONG'}")
                    sys.stdout.flush()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

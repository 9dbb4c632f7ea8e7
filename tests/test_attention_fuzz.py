"""attention() on problems that nobody chose, against float64: the NumPy path, kernels on the emulator and on a GPU.

How many: ``FLASHNUMBA_FUZZ`` multiplies the number of examples and makes their choice random; at 1, as in CI, it is the
same each time::

    FLASHNUMBA_FUZZ=20 pytest -n0 tests/test_attention_fuzz.py
"""

from __future__ import annotations

import os
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from flashnumba import attention
from flashnumba.attention import KERNELS as ALL_KERNELS
from flashnumba.compare import assert_close, budget
from flashnumba.stages.flash_forward.reference import low_precision
from tests.attention_strategy import problems
from tests.stages.flash_forward.attention_cases import Case

TIMES = int(os.environ.get("FLASHNUMBA_FUZZ", "1"))
HALF = (np.float16, ml_dtypes.bfloat16)

KERNELS = [name for name in ALL_KERNELS if not name.startswith("fp8.")]
"""Those of 8 bits have tests of their own."""
MAPPED = "flash_forward.wgmma"
"""What takes arrays by tensor maps alone."""


def fuzz(examples: int, shrink: bool = True):
    """Settings. Without ``shrink`` a failing example is reported as it was found: a smaller one would take minutes."""
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    phases = [phase for phase in Phase if shrink or phase not in (Phase.shrink, Phase.explain)]
    return settings(
        max_examples=examples * TIMES, deadline=None, derandomize=TIMES == 1, suppress_health_check=slow, phases=phases
    )


def judged(case: Case, backend: str) -> None:
    options = {"causal": case.causal, "scale": case.scale, "return_lse": True, "backend": backend}
    judge(attention(case.q, case.k, case.v, **options), case)


def judge(results: tuple[np.ndarray, np.ndarray], case: Case) -> None:
    """Within the budget of the worst of several orders of summation, as one may be right by luck: of six where the
    result is float32, as lse always is, and of two where it is rounded to 16 bits."""
    rng = np.random.default_rng(0)
    lows = [case.lowprec]
    for _ in range(5):
        columns, keys = rng.permutation(case.q.shape[-1]), rng.permutation(case.k.shape[-2])
        keys = np.sort(keys) if case.causal else keys
        q, k = case.q[..., columns], case.k[..., keys, :][..., columns]
        lows.append(low_precision(q, k, case.v[..., keys, :], case.scale, case.causal))
    for at, name in enumerate(("o", "lse")):
        expected = case.expected[at]
        orders = lows if name == "lse" or case.q.dtype == np.float32 else lows[:2]
        worst = max((low[at] for low in orders), key=lambda low, expected=expected: budget(expected, low))
        assert_close(results[at], expected, worst, what=f"{name} of {case.name}")


@fuzz(80)
@given(problems(150, 150))
def test_numpy(case: Case) -> None:
    judged(case, "numpy")


@fuzz(5)
@given(problems(700, 700, 64, 1))
def test_numpy_with_several_tiles(case: Case) -> None:
    judged(case, "numpy")


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_on_the_emulator(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashnumba.machine import gpu

    monkeypatch.setattr(gpu, "unavailable", lambda: "not asked for")
    float32_too = () if kernel != "flash_forward.simt" else (np.float32,)

    @fuzz(3, shrink=False)
    @given(problems(40, 150, 64, 1, HALF + float32_too, mapped=kernel == MAPPED))
    def small(case: Case) -> None:
        judged(case, kernel)

    small()


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [*KERNELS, "auto"])
def test_kernels_on_a_gpu(kernel: str) -> None:
    """Arrays of a library on the GPU where there is one, else copied there and back."""
    torch = sys.modules.get("torch")
    dtypes = HALF if kernel in ("flash_forward.mma", "flash_forward.split", MAPPED) else (*HALF, np.float32)

    @fuzz(60, shrink=False)
    @given(problems(600, 1300, 256, 2, dtypes, mapped=kernel == MAPPED))
    def large(case: Case) -> None:
        judged(case, kernel)
        if torch is not None and torch.cuda.is_available() and case.q.dtype == np.float16:
            on_gpu = [torch.from_numpy(np.ascontiguousarray(x)).cuda() for x in (case.q, case.k, case.v)]
            options = {"causal": case.causal, "scale": case.scale, "return_lse": True, "backend": kernel}
            for _ in range(2):
                o, lse = attention(*on_gpu, **options)
                judge((o.cpu().numpy(), lse.cpu().numpy()), case)

    large()

"""The stage: its real cases, every rung on them, and its figure."""

from __future__ import annotations

import numpy as np

from flashnumba.ladder import find
from flashnumba.stages.chained_gemm import FP8, is_fp8, panels, plans
from flashnumba.stages.chained_gemm.layouts import accumulators, operands, unit
from flashnumba.stages.flash_forward import reference

STAGE = find("chained_gemm")


def test_cases():
    cases = STAGE.cases("emulator", False)
    for case in cases:
        q, k, v, causal = (case.inputs[name] for name in ("q", "k", "v", "causal"))
        expected, _ = reference.dense(q, k, v, causal=bool(causal))
        np.testing.assert_allclose(case.reference, expected, rtol=1e-10, atol=1e-13)
        if is_fp8(case):
            for x in (q, k, v):
                np.testing.assert_array_equal(x, x.astype(FP8).astype(np.float16))
    assert [is_fp8(case) for case in cases] == [False, False, True]
    assert [bool(case.inputs["causal"]) for case in cases] == [False, True, True]


def test_rungs_take_what_they_are_for():
    whole, _, eight = STAGE.cases("emulator", False)
    kernels = {rung.name: rung for rung in STAGE.kernels}
    assert set(plans()) == {name for name, rung in kernels.items() if rung.takes(whole)}
    assert {f"fp8_{name}" for name in plans()} == {name for name, rung in kernels.items() if rung.takes(eight)}
    assert all(rung.takes(whole) and rung.takes(eight) for rung in STAGE.references)


def test_owners_are_lanes():
    mmac = unit("mmac16x16x16")
    held, wanted = panels.owners(accumulators(mmac, 16)), panels.owners(operands(mmac, 16))
    assert held[3].tolist() == [3, 19, 35, 51] * 4
    assert wanted[3].tolist() == [lane for lane in (3, 19, 35, 51) for _ in range(4)]

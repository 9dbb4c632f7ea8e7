"""The stage: its real cases, what its figure shows, and the machine code that the lesson shows. Rungs are run by
``test_ladder.py``, and all of them on all cases by the lesson, which draws them too."""

from __future__ import annotations

import numpy as np

from flashnumba import fp8
from flashnumba.ladder import find
from flashnumba.stages.flash_forward.reference import dense
from flashnumba.stages.fp8 import coded, count, few, panels, plans, stand_for, study

STAGE = find("fp8")


def test_cases():
    cases = STAGE.cases("emulator", False)
    for case in cases:
        codes, descales, fmt = coded(case)
        for one, exact in zip(zip(codes, descales.values(), strict=True), stand_for(case), strict=True):
            np.testing.assert_allclose(fp8.dequantize(*one, fmt), exact, rtol=1e-6)
        expected, _ = dense(*stand_for(case), causal=bool(case.inputs["causal"]))
        np.testing.assert_allclose(case.reference, expected, rtol=1e-10, atol=1e-13)
    assert [few(case) for case in cases] == [False, False, True]
    assert {str(case.inputs["fmt"]) for case in cases} == {"e4m3", "e5m2"}
    assert {rung.name for rung in STAGE.kernels} == set(plans())


def test_pictures_by_numbers():
    assert panels.quads().tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    for column, key in enumerate(panels.quads()):
        assert column % 8 // 2 == key // 4, "each lane has the keys that it wants"
    assert study.number_line("e4m3")[[0, 1, -1]].tolist() == [0, 2.0**-9, 448]
    assert len(study.number_line("e5m2")) == 124
    errors = study.relative_errors(np.linspace(1, 2, 1000).astype(np.float32)[None], "e5m2")
    assert 0.1 < errors.max() <= 0.125
    assert 0 < study.twice_rounded(np.random.default_rng(0).standard_normal(10**5).astype(np.float32), "e4m3") < 0.01


def test_what_the_assembler_makes_of_products_of_8_bits():
    """The recorded loops: on sm_89 products of 32 and no conversion but P's, on sm_90 none of them and many."""
    code = count.recorded()
    loops = {(loop["arch"], loop["kernel"], loop["element"]): loop for loop in code["loops"]}
    assert set(loops) == {(arch, *kernel) for arch in ("89", "90a") for kernel in count.LOOPS}
    ours, unpacked = (loops[arch, "k32", "float8_e4m3fn"] for arch in ("89", "90a"))
    products = 2 * ours["rows"] * ours["keys"] * 128 // (16 * 8 * 32)
    sums = ours["rows"] // 16 * ours["keys"] // 32
    assert ours["opcodes"]["QMMA"] == products + sums and "HMMA" not in ours["opcodes"]
    assert ours["opcodes"]["F2FP"] == ours["rows"] * ours["keys"] // 32 // 2, "two weights of a lane in each"
    assert "QMMA" not in unpacked["opcodes"] and unpacked["opcodes"]["F2FP"] > unpacked["opcodes"]["HMMA"]
    assert any("QMMA" in line for line in code["excerpts"]["89"])
    assert any("UNPACK" in line for line in code["excerpts"]["90a"])

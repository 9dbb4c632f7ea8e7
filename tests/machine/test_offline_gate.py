"""The offline gate: every kernel, on every architecture it claims, compiles to what it should.

No local memory, no double precision, no remark of ptxas (a serialised wgmma, an ignored setmaxnreg), a block that fits,
and no spill beyond the few bytes listed here because they were measured to pay.
"""

from __future__ import annotations

import pytest

from flashnumba.ladder import compile_cases
from flashnumba.machine.compiler import why_not
from flashnumba.machine.gate import problems

SPILLS_THAT_PAY: dict[tuple[str, str], int] = {
    ("flash_forward.mma float16 d 128, tiles for sm_90a", "90a"): 4,  # 1.09 of FlashAttention-2; without, 1.02
}
"""Bytes of spill stores allowed for (name of the case, architecture)."""

LADDER = list(compile_cases())
CASES = [(case, arch) for case in LADDER for arch in case.architectures]


def test_the_ladder_has_kernels_of_different_names():
    assert LADDER
    names = [case.name for case in LADDER]
    assert len(names) == len(set(names))


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
@pytest.mark.parametrize(("case", "arch"), CASES, ids=[f"{case.name}-{arch}" for case, arch in CASES])
def test_a_kernel_compiles_to_what_it_should(case, arch):
    assert problems(case, arch, SPILLS_THAT_PAY.get((case.name, arch), 0)) == []


def test_no_exception_outlives_its_kernel():
    assert set(SPILLS_THAT_PAY) <= {(case.name, arch) for case, arch in CASES}

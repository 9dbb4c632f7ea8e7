"""The offline gate: every kernel, on every architecture it claims, compiles to what it should and to what is recorded.

No local memory, no double precision, no remark of ptxas (a serialised wgmma, an ignored setmaxnreg), a block that fits,
and no spill beyond the few bytes listed here because they were measured to pay.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashnumba.ladder import compile_cases
from flashnumba.machine.compiler import CompileCase, compile_kernel, why_not
from flashnumba.machine.gate import problems
from flashnumba.machine.resources import compiler, read, resources_of

SPILLS_THAT_PAY: dict[tuple[str, str], int] = {
    # Two slots of 64 keys: 1.07 to 1.16 of FlashAttention-2 on an H200; one slot of 32, without spills, 0.92 to 1.06.
    ("flash_forward.mma float16 d 128, tiles for sm_90a", "90a"): 4,
    ("flash_forward.mma bfloat16 d 128, tiles for sm_90a", "90a"): 4,
    # The same kernel by another name; and one that has to have the tiles of those that it is compared with.
    ("chained_gemm.registers float16 d 128, tiles for sm_90a", "90a"): 4,
    ("chained_gemm.registers bfloat16 d 128, tiles for sm_90a", "90a"): 4,
    ("chained_gemm.shared float16 d 64, tiles for sm_90a", "90a"): 4,
    # Products of FP8 that the assembler unpacks to float16 take more registers than there are at D = 256: addresses are
    # spilled, and two are read again in a step. Tiles that spill less are slower on an H200: 0.98 of its speed with one
    # slot, 0.93 with eight warps. Nobody chooses it there: fp8.emulated, without spills, is 1.13 times as fast.
    ("fp8.k32 e4m3fn d 256, tiles for sm_90a", "90a"): 60,  # 48 stored, 72 loaded
    ("fp8.k32 e4m3fn d 256, tiles for sm_90a", "100a"): 16,
    # Two words of V are under way at a time. On sm_90a that spills nothing and is 1.11 times as fast; on sm_100a it was
    # not measured, for want of one.
    ("fp8.emulated e4m3fn d 128, tiles for sm_100a", "100a"): 8,
    # Latent attention keeps 16 rows of Q in 144 registers. It was not timed on these GPUs, for want of one.
    ("flash_mla.decode bfloat16 16 rows, for sm_86", "86"): 4,
    ("flash_mla.decode bfloat16 16 rows, for sm_86", "89"): 4,
}
"""Bytes of spill stores allowed for (name of the case, architecture)."""

LADDER = list(compile_cases())
EVERY = [(case, arch) for case in LADDER for arch in case.architectures]
ALL = os.environ.get("FLASHNUMBA_GATE") == "all"
LAST = ("gemm", "backward")
"""Stages whose first kernel is the simplest; their last is compiled."""
SAMPLE: dict[str, CompileCase] = {}
for _case in LADDER:
    _stage = _case.name.split(".")[0]
    if _stage not in SAMPLE or _stage in LAST:
        SAMPLE[_stage] = _case
CASES = EVERY if ALL else [(c, c.architectures[i % len(c.architectures)]) for i, c in enumerate(SAMPLE.values())]
"""What is compiled here: a case of each stage for one of the architectures it may run on, in turn; with
FLASHNUMBA_GATE=all everything, which takes more than half an hour. The record that ``flashnumba resources --json``
wrote answers for the rest: what is compiled is compared with it."""

RECORD = Path(__file__).parents[2] / "docs" / "results" / "resources.json"
VERSIONS, RECORDED = read(RECORD)
AGAIN = "`flashnumba resources --json docs/results/resources.json` writes it anew"


def test_the_ladder_has_kernels_of_different_names():
    assert LADDER
    names = [case.name for case in LADDER]
    assert len(names) == len(set(names))


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "the compiler is installed")
@pytest.mark.parametrize(("case", "arch"), CASES, ids=[f"{case.name}-{arch}" for case, arch in CASES])
def test_a_kernel_compiles_to_what_it_should(case, arch):
    assert problems(case, arch, SPILLS_THAT_PAY.get((case.name, arch), 0)) == []
    if compiler() != VERSIONS:
        pytest.skip(f"nothing to remark; recorded with {VERSIONS}, here is {compiler()}")
    made = compile_kernel(case.kernel, case.signature, arch)
    assert RECORDED.get((case.name, arch)) == resources_of(case, made), AGAIN


def test_the_record_has_every_kernel_and_nothing_to_remark():
    launched = [(case.name, arch) for case, arch in EVERY]
    assert sorted(RECORDED) == sorted(launched), AGAIN
    for key, row in RECORDED.items():
        assert row.local_memory == 0 and not row.f64 and row.budget.blocks > 0, key
        assert row.spills <= 2 * SPILLS_THAT_PAY.get(key, 0), f"{key}: stored and loaded"


def test_no_exception_outlives_its_kernel():
    assert set(SPILLS_THAT_PAY) <= {(case.name, arch) for case, arch in EVERY}

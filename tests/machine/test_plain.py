"""The plain forms of conversions give the bits of the array forms."""

import numpy as np
import pytest

from flashnumba.machine.instruction import REGISTRY
from flashnumba.machine.instructions import convert  # noqa: F401  (declares them)

QUICK = sorted(name for name, declared in REGISTRY.items() if declared.quick is not None)


def test_there_are_some():
    assert {"ex2_approx", "pack_f16x2", "pack_bf16x2", "f16x2_low", "bf16x2_high"} <= set(QUICK)


def _bits(value) -> int:
    return int(np.asarray(value, np.float32).view(np.uint32)) if isinstance(value, np.floating) else int(value)


@pytest.mark.parametrize("name", QUICK)
def test_equal_to_the_array_form(name):
    declared = REGISTRY[name]
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 32, 3000, np.uint32)
    edges = np.array(
        [0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x477FF000, 0x33000000], np.uint32
    )
    moderate = rng.normal(0, 30, 3000).astype(np.float32).view(np.uint32)
    bits = np.concatenate([edges, words, moderate])
    kinds = {"f32": lambda b: b.view(np.float32), "u32": lambda b: b, "u16": lambda b: b.astype(np.uint16)}
    columns = [kinds[o.type](np.roll(bits, 7 * i)) for i, o in enumerate(declared.operands)]
    with np.errstate(all="ignore"):
        expected = declared.emulate(*columns)
        for i in range(len(bits)):
            given = [c[i] if c.dtype.kind == "f" else int(c[i]) for c in columns]
            got = declared.quick(*given)
            assert isinstance(got, (np.float32, int)), type(got)
            if not (np.isnan(expected[i]) and np.isnan(got)):
                assert _bits(got) == _bits(expected[i]), (name, given)

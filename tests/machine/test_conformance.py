"""The emulator gives what a GPU gave: every instruction, bit for bit, on inputs recorded on hardware."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashnumba.machine.emulator.tensor_core import settings
from flashnumba.machine.instruction import REGISTRY
from flashnumba.machine.instructions import APPROXIMATIONS
from tests.machine.conformance import cases

VECTORS = Path(__file__).parent / "conformance" / "vectors.npz"
RECORD = "on a GPU: python tests/machine/conformance/record.py tests/machine/conformance/vectors.npz"
NAMES = [i.name for i in cases.recorded_instructions()]


@cache
def vectors() -> tuple[dict[str, Any], Any]:
    if not VECTORS.exists():
        pytest.fail(f"no recorded vectors at {VECTORS.name}; {RECORD}", pytrace=False)
    held = np.load(VECTORS)
    return json.loads(str(held["index"])), held


def compared(name: str, hardware: np.ndarray, emulator: np.ndarray, inputs: dict[str, np.ndarray]) -> tuple[int, str]:
    """(values that differ in any bit, what is wrong with them or nothing)."""
    assert hardware.dtype == emulator.dtype and hardware.shape == emulator.shape, (hardware.dtype, emulator.shape)
    bits = np.dtype(f"u{hardware.dtype.itemsize}")
    wrong = differs = hardware.view(bits) != emulator.view(bits)
    if name in APPROXIMATIONS:
        bound = APPROXIMATIONS[name]
        finite = np.isfinite(hardware) & np.isfinite(emulator)
        with np.errstate(invalid="ignore"):
            distance = np.abs(hardware.astype(np.float64) - emulator)
            # A result at the edge of the subnormal range may be flushed on one side only.
            allowed = np.maximum(bound.ulps * np.spacing(np.abs(emulator)).astype(np.float64), 2.0**-126)
        wrong = differs & ~(finite & (distance <= np.maximum(allowed, bound.absolute)))
    if not wrong.any():
        return int(differs.sum()), ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    given = {operand: values[at[:2]] for operand, values in inputs.items()}
    return int(differs.sum()), (
        f"{name}: {int(wrong.sum())} of {wrong.size} results are wrong, {int(differs.sum())} differ; the first at "
        f"[group, lane] {at}: hardware {hardware[at]!r} ({hardware.view(bits)[at]:#x}), "
        f"emulator {emulator[at]!r} ({emulator.view(bits)[at]:#x}); the lane's inputs: {given}"
    )


def check(name: str, entry: dict[str, Any], held: Any) -> int:
    """Emulate a recorded instruction and compare; returns how many values differ within an allowed bound."""
    inputs = {operand: held[key] for operand, key in entry["inputs"].items()}
    before = held[entry["before"]] if "before" in entry else None
    outputs, after = cases.emulated(REGISTRY[name], inputs, before)
    assert outputs.keys() == entry["outputs"].keys()
    differing = 0
    for operand, key in entry["outputs"].items():
        count, wrong = compared(name, held[key], outputs[operand], inputs)
        assert not wrong, wrong
        differing += count
    if after is not None:
        np.testing.assert_array_equal(after, held[entry["after"]], err_msg=f"{name}: memory afterwards, by byte")
    return differing


@pytest.mark.parametrize("name", NAMES)
def test_the_emulator_gives_what_the_gpu_gave(name: str, record_property: Any) -> None:
    about, held = vectors()
    assert name in about["instructions"], f"{name} has no vector ({about['failed'].get(name, 'new?')}); {RECORD}"
    with settings.using(arch=about["arch"]):
        differing = check(name, about["instructions"][name], held)
    record_property("differing", differing)
    print(f"{name} on {about['device']}: {differing} values differ")


def test_the_recording_is_complete_and_current() -> None:
    about, held = vectors()
    assert not about["failed"], f"not recorded: {about['failed']}"
    assert set(about["instructions"]) == set(NAMES), f"the recording is of other instructions than there are; {RECORD}"
    assert VECTORS.stat().st_size < 1 << 20
    assert {
        key
        for entry in about["instructions"].values()
        for part in ("inputs", "outputs")
        for key in entry[part].values()
    } <= set(held.files)


NOTICED = ["pack_f16x2", "ldmatrix_x4_trans", "mma_m16n8k16_bf16", "st_shared_v4", "ex2_approx", "shfl_up", "vote_any"]


@pytest.mark.parametrize("name", NOTICED)
def test_a_wrong_result_is_noticed(name: str) -> None:
    """What the comparison is worth: the emulation's own outputs pass, and with one value spoilt they do not."""
    inputs = cases.inputs_of(REGISTRY[name])
    before = cases.memory_before(len(next(iter(inputs.values())))) if cases.space_of(REGISTRY[name]) else None
    outputs, after = cases.emulated(REGISTRY[name], inputs, before)
    held = {f"in {k}": v for k, v in inputs.items()} | {f"out {k}": v.copy() for k, v in outputs.items()}
    entry: dict[str, Any] = {"inputs": {k: f"in {k}" for k in inputs}, "outputs": {k: f"out {k}" for k in outputs}}
    if after is not None:
        entry |= {"before": "before", "after": "after"}
        held |= {"before": before, "after": after.copy()}
    assert check(name, entry, held) == 0
    spoilt = next((v for k, v in held.items() if k.startswith("out")), held.get("after"))
    flat = spoilt.reshape(-1).view(np.uint8)
    flat[2] ^= 1 if spoilt.dtype == bool else 0x10
    with pytest.raises(AssertionError):
        check(name, entry, held)

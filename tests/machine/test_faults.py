"""The fault gallery: every planted fault is named, at its line, whatever the order of threads; unbroken kernels
raise none."""

import pickle
import re
from collections import Counter

import pytest

from flashnumba.machine import emulator
from flashnumba.machine.emulator import Fault, faults
from tests.machine.gallery import GALLERY, run
from tests.machine.gallery.page import PAGE, refreshed

SEEDS = range(8)
KINDS = [k for k in vars(emulator).values() if isinstance(k, type) and issubclass(k, Fault) and k is not Fault]
entries = pytest.mark.parametrize("entry", GALLERY, ids=lambda e: e.name)


@entries
def test_unbroken_kernel_is_clean_and_right(entry):
    for seed in SEEDS:
        run(entry, broken=False, seed=seed)


@entries
def test_planted_fault_is_named_in_every_order(entry):
    for seed in SEEDS:
        with pytest.raises(Fault) as caught:
            run(entry, broken=True, seed=seed)
        fault = caught.value
        assert type(fault) is entry.fault, f"seed {seed}: {fault}"
        first = faults.describe(fault.where[0]) if fault.where else fault.message
        assert entry.line in first, f"seed {seed}: {fault}"
        assert all(0 <= t < entry.block for t in fault.threads)
        if entry.threads is not None:
            assert fault.threads == entry.threads, f"seed {seed}"
        if fault.where:  # found while the kernel ran
            assert fault.block == (0, 0, 0) and fault.threads
            assert "block (0, 0, 0)" in str(fault) and f"{faults.ranges(fault.threads)}\n" in str(fault)


def test_every_kind_of_fault_is_in_the_gallery():
    planted = Counter(entry.fault for entry in GALLERY)
    assert set(planted) == set(KINDS)
    assert len(GALLERY) >= 25 and len({e.name for e in GALLERY}) == len(GALLERY)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_kind_says_what_it_means_and_how_to_mend_it(kind):
    assert kind.meaning != Fault.meaning and kind.mend
    assert f"to mend it: {kind.mend}" in str(kind("something"))


def test_a_fault_is_a_runtime_error_that_reads_as_its_report():
    entry = next(e for e in GALLERY if e.name == "race_of_writers")
    with pytest.raises(RuntimeError) as caught:
        run(entry, broken=True)
    report = str(caught.value)
    assert report.splitlines()[0].startswith(
        "Race: thread 1 writes shared byte 0 (s[0]), which thread 0 wrote at memory.py:"
    )
    assert "in block (0, 0, 0), threads 0-1" in report
    assert "in one_writer: s[0] = x[0]" in report.splitlines()[2]


def test_a_fault_crosses_a_process_boundary():
    entry = GALLERY[0]
    with pytest.raises(Fault) as caught:
        run(entry, broken=True)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value) and str(again) == str(caught.value)
    assert again.threads == caught.value.threads and again.block == (0, 0, 0)


@pytest.mark.parametrize(
    "name", ["static_shared_memory", "out_of_bounds_shared", "deadlock_arrivals", "accumulator_in_flight"]
)
def test_some_faults_are_found_with_checks_off(name, monkeypatch):
    from tests.machine.gallery import entry as module

    unchecked = module.launch
    monkeypatch.setattr(module, "launch", lambda *args, **more: unchecked(*args, checks=False, **more))
    entry = next(e for e in GALLERY if e.name == name)
    with pytest.raises(entry.fault):
        run(entry, broken=True)


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([7, 6, 6], "6-7"), (range(128), "0-127")]
)
def test_ranges(numbers, text):
    assert faults.ranges(numbers) == text


def test_the_page_on_reading_a_fault_shows_what_the_gallery_says():
    page = PAGE.read_text(encoding="utf-8")
    assert page == refreshed(page), "run python -m tests.machine.gallery.page"
    sections = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    assert {kind.__name__ for kind in KINDS} <= sections

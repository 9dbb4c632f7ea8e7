"""Blocks a multiprocessor, against NVIDIA's own calculation and the notes' sums."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashnumba.machine.occupancy import MACHINES, NOTES, budget, draw_budget, machine_of

# What cuda_occupancy.h of CUDA 13.5 answers, for machines with the sizes of the programming guide:
# arch, threads, registers, shared bytes, barriers -> blocks.
RECORDED = """
     75  128  32      0 0  8
     75  256  65      0 1  3
     75  384 168  32768 4  1
     75 1024  64      0 1  1
     75 1024  65      0 1  0
     75   96 255      0 0  2
     75   32  16      0 0  16
     75  128  40  65536 1  1
     75  128  40  65537 1  0
     75 1056  16      0 0  0
     75  352  54  25875 0  2
     75   96 153   6168 2  4
     75   64 145  14070 0  4
     75   96 127  27405 0  2
     80  128  32      0 0  16
     80  256  65      0 1  3
     80  384 168  83456 4  1
     80 1024  64      0 1  1
     80 1024  65      0 1  0
     80   96 255      0 0  2
     80   32  16      0 0  32
     80  128  40 166912 1  1
     80  128  40 166913 1  0
     80 1056  16      0 0  0
     80  256  39  72226 3  2
     80   64 160  16226 1  6
     80   64 163  76748 3  2
     80   64  72   6105 1  14
     86  128  32      0 0  12
     86  256  65      0 1  3
     86  384 168  50688 4  1
     86 1024  64      0 1  1
     86 1024  65      0 1  0
     86   96 255      0 0  2
     86   32  16      0 0  16
     86  128  40 101376 1  1
     86  128  40 101377 1  0
     86 1056  16      0 0  0
     86  320 123   9453 0  1
     86  320 159  44695 1  1
     86  128 164  37434 1  2
     86  384  40  35896 0  2
     89  128  32      0 0  12
     89  256  65      0 1  3
     89  384 168  50688 4  1
     89 1024  64      0 1  1
     89 1024  65      0 1  0
     89   96 255      0 0  2
     89   32  16      0 0  24
     89  128  40 101376 1  1
     89  128  40 101377 1  0
     89 1056  16      0 0  0
     89   64 174  13497 3  4
     89  448  96  30513 3  1
     89  384  92  16280 1  1
     89  256  36  37645 2  2
     90  128  32      0 0  16
     90  256  65      0 1  3
     90  384 168 116224 4  1
     90 1024  64      0 1  1
     90 1024  65      0 1  0
     90   96 255      0 0  2
     90   32  16      0 0  32
     90  128  40 232448 1  1
     90  128  40 232449 1  0
     90 1056  16      0 0  0
     90  512 103  95609 3  1
     90  320 171   9594 0  0
     90  448  58  99239 2  2
     90  160 141  55272 0  2
    100  128  32      0 0  16
    100  256  65      0 1  3
    100  384 168 116224 4  1
    100 1024  64      0 1  1
    100 1024  65      0 1  0
    100   96 255      0 0  2
    100   32  16      0 0  32
    100  128  40 232448 1  1
    100  128  40 232449 1  0
    100 1056  16      0 0  0
    100   96 158  75107 2  3
    100  352 193  45898 3  0
    100  480  33 110096 0  2
    100  288 137  91362 0  1
    120  128  32      0 0  12
    120  256  65      0 1  3
    120  384 168  50688 4  1
    120 1024  64      0 1  1
    120 1024  65      0 1  0
    120   96 255      0 0  2
    120   32  16      0 0  24
    120  128  40 101376 1  1
    120  128  40 101377 1  0
    120 1056  16      0 0  0
    120   64 195  20290 3  4
    120  320 199  25283 2  0
    120   32 134  23295 1  4
    120  128 142   3863 1  3
"""

NVIDIA = [machine for name, machine in MACHINES.items() if name != "notes"]


@pytest.mark.parametrize("row", RECORDED.strip().splitlines(), ids=str.strip)
def test_blocks_are_those_of_cuda_occupancy_h(row):
    arch, *numbers = row.split()
    threads, registers, shared, barriers, blocks = map(int, numbers)
    answer = budget(arch, threads=threads, registers=registers, shared=shared, barriers=barriers)
    assert answer.blocks == blocks


def test_the_notes_sums():
    """256 threads of 256 registers are 256 KB; 768 / 256 = 3 blocks; 64 / 3 = 21 KB of LDS each."""
    answer = budget("notes", threads=256, registers=256, shared=21 * 1024)
    assert 4 * answer.takes["registers"] == 256 * 1024
    assert answer.admits == {"registers": 3, "shared memory": 3}
    assert answer.blocks == 3
    assert answer.warps == 12
    assert answer.occupancy is None
    assert NOTES.shared_within(3) // 1024 == 21
    assert NOTES.registers_within(3, 256) == 256
    assert budget(NOTES, threads=256, registers=256, shared=22 * 1024).admits["shared memory"] == 2
    assert budget(NOTES, threads=1088, registers=16).blocks == 0


def test_the_limiting_resources_are_named():
    both = budget(90, threads=384, registers=168, shared=164928)
    assert both.blocks == 1
    assert both.limited_by == ("registers", "shared memory")
    assert both.warps == 12
    assert both.occupancy == 12 / 64
    assert budget(80, threads=1024, registers=16).limited_by == ("threads",)
    assert budget(86, threads=32, registers=16).limited_by == ("block slots",)
    assert budget(120, threads=32, registers=16, barriers=16).limited_by == ("barriers",)
    assert budget(80, threads=32, registers=16, barriers=16).limited_by == ("block slots",)


def test_a_full_machine_is_full():
    assert budget(80, threads=256, registers=32).occupancy == 1
    assert budget("120a", threads=256, registers=40).occupancy == 1


def test_a_block_that_cannot_be_launched_has_no_place():
    assert budget(80, threads=1025, registers=16).blocks == 0
    assert budget(80, threads=1024, registers=65).blocks == 0
    assert budget(80, threads=128, registers=16, shared=163 * 1024 + 1).blocks == 0
    assert budget(75, threads=128, registers=16, shared=64 * 1024).blocks == 1


def test_register_allocation_comes_in_256_a_warp():
    one, next_ = (budget(80, threads=128, registers=n).takes["registers"] for n in (33, 40))
    assert one == next_ == 4 * 1280


@given(st.sampled_from(NVIDIA), st.integers(1, 32), st.integers(1, 1024))
def test_registers_within_is_the_largest_number_that_fits(machine, blocks, threads):
    within = machine.registers_within(blocks, threads)
    if within == 0:
        assert budget(machine, threads=threads, registers=1).blocks < blocks
        return
    assert budget(machine, threads=threads, registers=within).blocks >= blocks
    if within < machine.max_registers:
        assert budget(machine, threads=threads, registers=within + 1).admits["registers"] < blocks


def test_registers_within_knows_the_other_limits():
    hopper = machine_of("90")
    assert hopper.registers_within(4, 1024) == hopper.registers_within(33, 32) == hopper.registers_within(1, 4096) == 0
    assert hopper.registers_within(2, 1024) == 32


@given(st.sampled_from([*NVIDIA, NOTES]), st.integers(1, 32))
def test_shared_within_is_the_largest_amount_that_fits(machine, blocks):
    within = machine.shared_within(blocks)
    if within:
        assert budget(machine, threads=32, registers=16, shared=within).admits["shared memory"] >= blocks
    more = budget(machine, threads=32, registers=16, shared=within + 1)
    assert more.admits["shared memory"] < blocks or (machine.shared_unit > 1 and within == 0)


@pytest.mark.parametrize("name", ["75", 80, "86", "89", "90", "90a", "100a", "120a", "notes"])
def test_a_machine_by_its_architecture(name):
    assert machine_of(name) is MACHINES[str(name).removesuffix("a")]


def test_an_unknown_machine_is_refused():
    with pytest.raises(ValueError, match="arch '70' is not one of 75, 80, 86, 89, 90, 100, 120, notes"):
        budget(70, threads=32, registers=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"registers": 0}, "registers is 0; it must be at least 1"),
        ({"shared": -1}, "shared is -1; it cannot be negative"),
        ({"barriers": -1}, "barriers is -1; it cannot be negative"),
    ],
)
def test_impossible_numbers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        budget(80, **{"threads": 128, "registers": 32, **changes})


def test_no_blocks_is_no_question():
    with pytest.raises(ValueError, match="blocks is 0"):
        machine_of(80).shared_within(0)


def test_the_picture_has_a_bar_a_resource_and_a_piece_a_block():
    shown = [budget("notes", threads=256, registers=256, shared=21 * 1024), budget(80, threads=128, registers=255)]
    axes = draw_budget(shown)
    try:
        assert [ax.get_title(loc="left").split(":")[0] for ax in axes] == ["the notes' machine", "sm_80"]
        assert [label.get_text() for label in axes[0].get_yticklabels()] == ["registers", "shared memory"]
        # A bar for the whole and three blocks, for each of two resources.
        assert len(axes[0].patches) == 2 * (1 + 3)
        assert len(axes[1].patches) == 4 * (1 + 2)
        assert "256 of 768 KB a block: 3 blocks (limit)" in [text.get_text() for text in axes[0].texts]
    finally:
        plt.close(axes[0].figure)


def test_the_picture_goes_where_it_is_told():
    figure, ax = plt.subplots()
    try:
        answer = budget(80, threads=1024, registers=64, shared=1024)
        assert draw_budget(answer, [ax])[0] is ax
        assert ax.get_title(loc="left") == "sm_80: 1 block of 1024 threads, occupancy 50%"
    finally:
        plt.close(figure)

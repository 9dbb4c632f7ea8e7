# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Softmax: overflow, three passes, and who reads what
#
# Attention begins with a softmax, and almost everything that makes attention fast or slow is already in it: numbers
# that overflow, data that is read again and again, and threads that must agree on a maximum before any of them can go
# on.
#
# ## What you will be able to do
#
# - say at which score a softmax overflows in float16, and why subtracting the maximum is exact in theory and safe in
#   practice;
# - read three GPU kernels, in Python, that compute it, and say which thread reads which element and how often;
# - count the bytes a kernel must move, and from them the least time it can take;
# - draw what a warp asks of memory with one instruction, and say what coalescing is and why 16 bytes a load are
#   better than 2;
# - read a fault that the emulator reports when a barrier is missing.
#
# You need Python and NumPy; no GPU. Kernels run on the emulator, or on your GPU if this computer has one.

# %%
import math

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

from flashnumba import lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.access_map import draw_instruction, draw_map, draw_sweeps
from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.emulator.accesses import record
from flashnumba.machine.function import kernel
from flashnumba.machine.numba import cuda, float32
from flashnumba.machine.occupancy import NOTES, budget, draw_budget, machine_of
from flashnumba.stages.softmax import reference, simt
from flashnumba.tiles import online, reduce

lesson.style()
stage = find("softmax")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# A query is compared with $N$ keys and gets $N$ scores $x_0 \dots x_{N-1}$. Softmax makes weights of them, positive
# and adding up to one:
#
# $$p_j = \frac{e^{x_j}}{\sum_i e^{x_i}}$$
#
# **Predict.** The largest float16 number is 65504. At which score does $e^x$ no longer fit? And in float32, and in
# bfloat16, which has the exponent of float32 and 8 bits of precision?

# %%
limits = [np.finfo(np.float16), ml_dtypes.finfo(ml_dtypes.bfloat16), np.finfo(np.float32)]
lesson.table(
    ("type", "largest number", "exp(x) overflows above x =", "relative step"),
    [(f.dtype.name, f"{float(f.max):.4g}", f"{math.log(float(f.max)):.2f}", f"{float(f.eps):.2g}") for f in limits],
)

# %% [markdown]
# Are real scores that large? Here are the queries and keys of a trained transformer (all-MiniLM-L6-v2) reading the
# text of a licence, and their scaled scores $QK^T/\sqrt{32}$.

# %%
data = load_minilm()
scores = data.scores(layer=0, head=2)  # [512 queries, 512 keys]
peak = int(scores.max(1).argmax())
print(f"scores from {scores.min():.1f} to {scores.max():.1f}")
print(f"rows with a score above 11.09: {(scores.max(1) > 11.09).sum()} of {len(scores)}")

# %% [markdown]
# Every row of this head overflows float16. Once a numerator is infinite the quotient is $\infty/\infty$, which is
# NaN.
#
# The way out is to divide numerator and denominator by the same $e^m$, with $m = \max_i x_i$:
#
# $$p_j = \frac{e^{x_j - m}}{d}, \qquad d = \sum_i e^{x_i - m}$$
#
# Nothing was approximated: it is the same fraction. But every exponent is now at most 0, so no term overflows; and
# one exponent is exactly 0, so $1 \le d \le N$ and we never divide by something tiny. Terms far below the maximum
# become 0: those below about $2^{-126}$, which float32 kernels flush to 0. That is harmless: even a million of them add
# less to $d \ge 1$ than float32 can hold.
#
# The price is order. The sum needs the maximum, and the maximum needs the whole row. The quotient needs the sum, and
# the sum needs the whole row again. So there are **three passes** over the row: maximum, sum, quotient.
#
# ## The reference
#
# A reference is NumPy, in float64, as plain as possible. This is the formula as written:

# %%
lesson.show_source(reference.naive, first="with np.errstate")

# %% [markdown]
# and this is the safe form. Two lines deserve a second look: the one with `m == -np.inf` and the one with `d == 0`.

# %%
lesson.show_source(reference.safe, first="x = x.astype")

# %% [markdown]
# A row whose scores are all $-\infty$ is a row in which every key is masked. Its maximum is $-\infty$, and
# $-\infty - (-\infty)$ is NaN. We define such a row to have weights 0.
#
# **Predict** what these four rows give, before you run the next cell: `[0, 0]`, `[1000, 0]`, `[-inf, -inf]`,
# `[nan, 0]`.

# %%
rows = np.array([[0, 0], [1000, 0], [-np.inf, -np.inf], [np.nan, 0]])
lesson.table(
    ("row", "naive, float64", "safe"),
    list(zip(rows, reference.naive(rows), reference.safe(rows), strict=True)),
)

# %% [markdown]
# ## The kernels
#
# A GPU runs thousands of threads. They come in **warps** of 32 that execute one instruction together, and in
# **blocks** of up to 32 warps that share a small fast memory and can wait for one another. The question of every
# kernel is the same: who reads what, and how do those who read parts agree?
#
# ### One warp a row
#
# Lane $l$ of the warp takes columns $l, l + 32, l + 64, \dots$ Three loops are the three passes.

# %%
lesson.show_source(simt.make_warp_per_row("float16", 4))

# %% [markdown]
# Some lines are not part of the formula. `term`, `total` and `lost` make a compensated sum (Kahan's): in a row of
# $2^{20}$ columns a lane adds 32768 terms, and `lost` is the rounding error of the last sum, which the next term makes
# up for. `no_anchor` and `row_step` are for planted faults, as in *Break it* below; here they are `False` and 1.
#
# Between the loops 32 lanes hold 32 partial maxima. `over_max` makes one of them.
#
# **Predict.** A shuffle lets each lane read a register of one other lane. How many shuffles does it take until
# *every* lane knows the maximum of all 32?

# %%
lesson.show_source(simt.make_warp_per_row("float16", 4), part="over_max")

# %% [markdown]
# Five: in round $i$ each lane exchanges with the lane whose number differs in bit $i$, so after round $i$ it knows
# $2^{i+1}$ values. No shared memory and no barrier; lanes of a warp are in step.
#
# `exponential`, `anchor` and `inverse` are the arithmetic that all kernels share. `anchor` is the reference's first
# special line, `inverse` its second.

# %%
lesson.show_source(online.anchor)

# %%
lesson.show_source(online.inverse)

# %% [markdown]
# ### One block a row
#
# A row of a million elements would keep one warp busy while the rest of the GPU watches. Here all warps of a block
# share a row. The loops are the same with a wider step; only the agreement is new.

# %%
lesson.show_source(simt.make_block_per_row("float16", 256), first="for row in range")

# %%
lesson.show_source(simt.make_block_per_row("float16", 256), part="block_max")

# %% [markdown]
# Each warp reduces by shuffles, and its lane 0 writes one number to shared memory. Then comes the one barrier:
# **every** warp must have written before **any** warp reads. Then each warp reduces the partial results again, for
# itself, which costs five shuffles and saves a second barrier.
#
# ### Wide loads
#
# The third kernel does the same with 16 bytes a load instead of one element.

# %%
lesson.show_source(simt.make_vectorized("float16", 256, 16), first="for row in range", last="origin = anchor")

# %% [markdown]
# ## On real data
#
# Each kernel gets real scores, and its result is compared with float64. The budget is twice what the same mathematics
# loses in float32 and in rounding the result, plus four float32 steps. The naive form in float16 is *meant* to fail: if
# it did not, we would have shown nothing.

# %%
with lesson.timed(f"all on the {machine}"):
    results = [
        measure(stage, rung, case, machine)
        for case in stage.cases(machine, False)
        for rung in stage.rungs
        if rung.takes(case)
    ]
lesson.table(
    ("kernel", "machine", "rows x columns", "largest error", "budget", "verdict"),
    [
        (r.rung.name, r.machine, r.case.size, r.comparison.error, r.comparison.budget, f"{r.verdict} {r.note}")
        for r in results
    ],
)

# %%
stage.draw(results)

# %% [markdown]
# ## Who reads what
#
# Before a kernel is fast it must not waste reads. The emulator can write down every access, so let us look instead of
# guessing: three kernels on rows of 256 float16 elements.
#
# **Predict.** How often is each element read? Does the answer differ between the three kernels?

# %%
x = scores[peak % 128 :: 128, :256].astype(np.float16)  # 4 rows
out = np.empty_like(x)
runs = {
    "warp_per_row": record(simt.make_warp_per_row("float16", 4), 1, 128, (x, out)),
    "block_per_row": record(simt.make_block_per_row("float16", 64), 4, 64, (x, out)),
    "vectorized": record(simt.make_vectorized("float16", 32, 16), 4, 32, (x, out)),
}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
for ax, (name, run) in zip(axes, runs.items(), strict=True):
    draw_map(ax, run, "x", x.shape, x.itemsize)
    ax.set_title(f"{name}: {ax.get_title(loc='left')}")
plt.show()

# %% [markdown]
# Dark cells are reads, three of them each; the white lines separate warps. `warp_per_row` has four rows a block, one
# a warp, and neighbouring lanes take neighbouring columns, which makes the stripes. In `vectorized` a lane takes 8
# columns at once.
#
# The three passes are plain when the accesses of one warp are drawn in the order in which they were made:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), sharey=True)
for ax, (name, run) in zip(axes, runs.items(), strict=True):
    draw_sweeps(ax, run, "x", "out", x.shape[1], x.itemsize)
    ax.set_title(name)
    ax.xaxis.get_major_locator().set_params(integer=True)
for ax in axes[1:]:
    ax.set_ylabel("")
axes[0].legend(markerscale=3)
plt.show()

# %% [markdown]
# Up, up, and up again with a write beside each read. The same three passes; but `warp_per_row` makes 32 accesses a
# lane and `vectorized` makes 4. (`block_per_row` shows one of its two warps; the other takes the columns between.)
#
# ### Coalescing: what one instruction asks of memory
#
# When a warp executes a load, 32 lanes give 32 addresses at once. Memory hands out **sectors** of 32 bytes. If the
# lanes' bytes lie side by side, few sectors serve them all: the load is *coalesced*. If they lie apart, each lane
# gets a sector of its own and most of its bytes are thrown away.
#
# To see the difference, here is the kernel that everybody writes first. Its threads have a row each.


# %%
@kernel(threads=32)
def thread_per_row(x, out):
    row = cuda.threadIdx.x
    m = float32(-math.inf)
    for col in range(x.shape[1]):
        m = max(m, float32(x[row, col]))
    out[row] = m


# %% [markdown]
# **Predict.** 32 lanes load one float16 each, 64 bytes in all. How many sectors do they touch if each lane has a row
# of its own? If lanes have neighbouring columns? And with 16 bytes a lane?

# %%
tall = scores[:32, :64].astype(np.float16)
naive_run = record(thread_per_row, 1, 32, (tall, np.empty(32, np.float32)))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8))
shown = {"thread_per_row": naive_run, "warp_per_row": runs["warp_per_row"], "vectorized": runs["vectorized"]}
sectors = []
for ax, (name, run) in zip(axes, shown.items(), strict=True):
    used, fetched = draw_instruction(ax, run, "x")
    sectors.append((name, used, fetched // 32, f"{used / fetched:.0%}"))
    ax.set_title(f"{name}\n{ax.get_title(loc='left')}")
plt.show()
lesson.table(("one load of one warp", "bytes used", "sectors of 32 bytes", "of what is fetched, used"), sectors)

# %% [markdown]
# Blue is what lanes ask for, the bands are sectors. A thread a row fetches 32 sectors for 64 useful bytes. A warp a
# row fetches 2, and uses all of them. Nothing about the *amount* of work differs, only who does which part.
#
# Why then 16 bytes? `vectorized` also uses all it fetches, so the traffic is the same. But one instruction brings 512
# bytes instead of 64: 8 times fewer loads to issue, and 8 times more bytes on their way while a lane waits. 16 bytes
# a lane is the widest load there is. It asks for an address that is a multiple of 16, in every row, so a row of 500
# float16 elements (1000 bytes) only allows 8.
#
# ### Bytes by count
#
# **Predict.** Three passes read, the last one writes. How many bytes does a softmax over `rows` x `cols` elements of
# `itemsize` bytes move?


# %%
def bytes_by_formula(rows: int, cols: int, itemsize: int) -> int:
    reads, writes = 3, 1
    return (reads + writes) * rows * cols * itemsize


lesson.table(
    ("kernel", "loaded, counted", "stored, counted", "counted", "formula", "loads of one lane, a row"),
    [
        (
            name, run.report.loaded, run.report.stored, run.report.loaded + run.report.stored,
            bytes_by_formula(*x.shape, x.itemsize), int((run.of("x", block=0)["thread"] == 0).sum()),
        )
        for name, run in runs.items()
    ],
)  # fmt: skip

# %% [markdown]
# Counted and computed agree to the byte. (Caches make a GPU's real traffic smaller: a row that was just read is
# probably still in L2 for the second pass. The count is what the kernel *asks* for.)
#
# ### The floor
#
# Is a softmax limited by memory at all? For each element it computes two exponentials and about ten other
# instructions, and moves 8 bytes (float16). An H200 has 132 multiprocessors that can each start 16 exponentials a
# clock, near 1.8 GHz: about $3.8\cdot10^{12}$ a second, enough for $1.9\cdot10^{12}$ elements. Its memory moves
# $4.25\cdot10^{12}$ bytes a second (a device-to-device copy, read and write together, measured), enough for
# $0.53\cdot10^{12}$ elements. Memory gives out first, so the bytes decide, and bytes over bandwidth is the least time
# that a kernel with this traffic can take.

# %%
BANDWIDTH = 4.25e12  # bytes a second; a copy on an H200, read + write


def floor_us(elements: int, itemsize: int, moves: int) -> float:
    """Microseconds that so much traffic takes at the speed of a copy."""
    return moves * elements * itemsize / BANDWIDTH * 1e6


elements = 2**28
lesson.table(
    ("2^28 elements", "bytes in memory", "3 reads + 1 write, us", "1 read + 1 write, us"),
    [
        (t, f"{elements * n / 2**20:.0f} MiB", round(floor_us(elements, n, 4)), round(floor_us(elements, n, 2)))
        for t, n in (("float16", 2), ("float32", 4))
    ],
)

# %% [markdown]
# The last column is half of the one before it: nothing forces three reads, if a row could stay on the chip between
# the passes. That is the next lesson.
#
# What was measured on an H200:

# %%
lesson.show_results(simt.KERNELS)

# %% [markdown]
# And on this computer's GPU, if it has one:

# %%
if machine == "cuda":
    print(lesson.speeds(simt.softmax, simt.KERNELS, np.resize(scores.astype(np.float16), (2**17, 2048))))
else:
    print("no GPU here")

# %% [markdown]
# ### Occupancy
#
# A multiprocessor hides the time a load takes by having other warps to run. How many fit depends on what a block
# takes: registers, shared memory, warp slots. Registers come from the compiler, which needs no GPU.

# %%
names = ["warp_per_row", "block_per_row", "vectorized"]
found = {name: lesson.resources(f"softmax.{name} float16 4096") for name in names}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
budgets = [budget("90", threads=r.threads, registers=r.registers, shared=r.shared) for r, _ in found.values()]
lesson.table(
    ("kernel", "threads", "registers a thread", "shared bytes", "blocks that fit", "limit", "warp slots filled"),
    [
        (name, r.threads, r.registers, r.shared, b.blocks, ", ".join(b.limited_by), f"{b.occupancy:.0%}")
        for b, (name, (r, _)) in zip(budgets, found.items(), strict=True)
    ],
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 3, figsize=(13, 3.2))
figure.get_layout_engine().set(wspace=0.06)
draw_budget(budgets, axes)
for ax, name in zip(axes, names, strict=True):
    ax.set_title(f"{name}\n{ax.get_title(loc='left')}", fontsize=10)
for ax in axes[1:]:
    ax.set_yticklabels([])
plt.show()

# %% [markdown]
# Each bar is what a multiprocessor has; its pieces are what the resident blocks take; the resource that admits the
# fewest blocks is red. Shared memory is next to nothing here. Every kernel fills at least half of the warp slots, so
# occupancy is no reason to prefer one. What differs is how many bytes each warp has on its way: 64 for a load of one
# element a lane, 512 for a wide one.
#
# ## Break it
#
# The block reduction has one barrier. Take it away. Each kernel of this project can be made with a planted fault;
# this one leaves out the barrier before the maximum is read.
#
# **Predict.** Which thread will complain, and about what?

# %% tags=["break-it"]
broken = simt.make_block_per_row("float16", 128, broken="barrier")
x = scores[peak % 64 :: 64].astype(np.float16)  # 8 rows of 512
out = np.empty_like(x)
try:
    launch(broken, len(x), 128, (x, out))
except Fault as fault:
    print(fault)

# %% [markdown]
# Read it from the top: the kind of fault and what happened, two accesses and nothing that orders them; the block and
# the threads; the line, and the line that called it; and what would mend it. Thread 1 belongs to warp 0, which went
# on to read all partial maxima. Thread 32 is lane 0 of warp 1, which had yet to write its own. Which of the two came
# first in this run does not matter: no barrier says that it must be so.
#
# What would a GPU have done? It does not check. The emulator can look away too, and then the result depends on the
# order in which threads happen to run, which `seed` decides:

# %% tags=["break-it"]
ref, low = reference.safe(x), reference.low_precision(x)
rows_wrong = []
for seed in range(4):
    launch(broken, len(x), 128, (x, out), checks=False, seed=seed)
    wrong = [not compare(out[i], ref[i], low[i]).ok for i in range(len(x))]
    rows_wrong.append((seed, f"{sum(wrong)} of {len(x)}"))
lesson.table(("order of threads (seed)", "rows that are wrong"), rows_wrong)

# %% [markdown]
# No crash, no message, weights that look like weights; and some rows are even right. That is why the emulator judges
# by what the barriers *order*, not by how a run turns out.
#
# One more: with the wrong distance between rows the kernel leaves the array.

# %% tags=["break-it"]
try:
    launch(simt.make_warp_per_row("float16", 4, broken="row"), 2, 128, (x, out))
except Fault as fault:
    print(fault)

# %% [markdown]
# ## Exercises
#
# ### 1. Count sectors
#
# Write the function that says how many sectors of 32 bytes a warp's load touches, from the byte address of each lane
# and the bytes a lane loads (a lane's bytes never straddle a sector: addresses are multiples of the size).


# %%
def sectors_touched(addresses: np.ndarray, nbytes: int) -> int:
    """``addresses``: 32 integers."""
    # your code


# %% tags=["exercise"]
lanes = np.arange(32)


def sectors_are_right() -> bool:
    cases = [(2 * lanes, 2, 2), (16 * lanes, 16, 16), (1024 * lanes, 2, 32), (2 * lanes + 30, 2, 3), (0 * lanes, 4, 1)]
    return all(sectors_touched(addresses, n) == expected for addresses, n, expected in cases)


lesson.check("sectors_touched", sectors_are_right, "A sector's number is the address divided by 32, rounded down.")

# %% [markdown]
# <details><summary>What is asked here in other words</summary>
#
# Two addresses are in the same sector if they agree after division by 32. So count the different quotients.
#
# </details>


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def sectors_touched(addresses: np.ndarray, nbytes: int) -> int:
    return len(np.unique(addresses // 32))


lesson.check("sectors_touched", sectors_are_right)

# %% [markdown]
# ### 2. Write a kernel: log-sum-exp
#
# Training and FlashAttention keep one number a row, $\operatorname{lse} = \log \sum_i e^{x_i} = m + \log d$. Write a
# kernel that computes it, one warp a row, without overflow. Two passes are enough, as no quotient is asked for.
# Everything you need is in `warp_per_row` above.

# %%
over_max, over_sum = reduce.lanes_max(), reduce.lanes_sum()
exponential = online.exponential


@kernel(threads=32)
def log_sum_exp(x, out):
    """``x [rows, columns]`` float16, ``out [rows]`` float32; one block of one warp a row."""
    row, lane, cols = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    # your code


# %% tags=["exercise"]
def log_sum_exp_is_right() -> bool:
    x = scores[peak % 64 :: 64, :500].astype(np.float16)
    out = np.full(len(x), np.nan, np.float32)
    launch(log_sum_exp, len(x), 32, (x, out))
    m = x.max(1).astype(np.float64)
    return bool(np.allclose(out, m + np.log(np.exp(x - m[:, None]).sum(1)), rtol=1e-6))


lesson.check("log_sum_exp", log_sum_exp_is_right, "One loop for m, one for d; over_max, over_sum; lane 0 writes.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
@kernel(threads=32)
def log_sum_exp(x, out):
    row, lane, cols = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    m = float32(-math.inf)
    for col in range(lane, cols, 32):
        m = max(m, float32(x[row, col]))
    m = over_max(m)
    d = float32(0)
    for col in range(lane, cols, 32):
        d += exponential(float32(x[row, col]), m)
    d = over_sum(d)
    if lane == 0:
        out[row] = m + math.log(d)


lesson.check("log_sum_exp", log_sum_exp_is_right)

# %% [markdown]
# A plain sum is fine for 500 columns: a lane adds at most 16 terms, so there is no `lost` here.
#
# What does your kernel do to a row of $-\infty$? `anchor` is the answer there, too.
#
# ## Two machines, side by side
#
# These notes began on another machine: a Hygon DCU, whose waves have 64 lanes and whose compute units have 768 KB of
# registers and 64 KB of local memory (LDS) for blocks of 256 threads. The mathematics does not change. The numbers
# do:

# %%
pair = [machine_of("90"), NOTES]
by_registers = [budget(m, threads=256, registers=m.max_registers, shared=21 * 1024) for m in pair]
lesson.table(
    ("", "NVIDIA sm_90 (H200)", "the notes' machine"),
    [
        ("lanes that step together", *(m.warp for m in pair)),
        ("exchanges of a reduction over them", *(int(math.log2(m.warp)) for m in pair)),
        ("partial results of a 256-thread block", *(256 // m.warp for m in pair)),
        ("bytes of one wide load (16 a lane)", *(16 * m.warp for m in pair)),
        ("registers of a multiprocessor, KB", *(4 * m.registers // 1024 for m in pair)),
        ("shared memory (LDS) of it, KB", *(m.shared // 1024 for m in pair)),
        ("blocks of 256 threads with all registers they may have", *(b.blocks for b in by_registers)),
        (
            "... and the shared memory that each then may have, KB",
            *(m.shared_within(b.blocks) // 1024 for m, b in zip(pair, by_registers, strict=True)),
        ),
    ],
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12, 3.2))
figure.get_layout_engine().set(wspace=0.06)
draw_budget(by_registers, axes)
plt.show()

# %% [markdown]
# Blocks of 256 threads, each with all the registers it may have and 21 KB of shared memory. On the notes' machine 768
# / 256 = 3 blocks, and 64 / 3 = 21 KB of LDS each: that is the sum by which the notes lay out their buffers. An H200
# has a third of the registers and more shared memory, so the same block is alone. A softmax needs almost no shared
# memory, at most 256 bytes a block. Registers are its limit too, but they still leave 50 to 75 % of the warp slots
# filled.
#
# ## Limits
#
# - Three passes read each element three times. Caches soften it on a GPU; the count stays.
# - `warp_per_row` on long rows and `block_per_row` on few rows leave a GPU idle.
# - The emulator's seconds say nothing about a GPU. Its bytes, accesses and faults do.
# - Bytes are counted as the kernel asks for them. Sectors half used, as in `thread_per_row`, cost more than the count
#   says.
# - Exponentials use `ex2.approx` on a GPU and NumPy here: results agree within the budget, not to the bit.
#
# ## What next
#
# Lesson 2 asks whether the first two passes can be one, and whether a row may be cut into parts that never meet until
# the end. Both answers are the same small operator, and FlashAttention is built on it.

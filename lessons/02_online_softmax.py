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
# # 2. Online softmax: one pass for two numbers, and an operator that merges
#
# Lesson 1 read every element three times: for the maximum, for the sum, for the quotient. The first two look as if
# they must wait for one another. They need not. What makes that possible is one line of algebra, and FlashAttention
# is built on it.
#
# ## What you will be able to do
#
# - derive the recurrence for $(m, d)$ and prove it in three lines;
# - merge the states of two parts of a row, say why the order of merging does not matter, and treat empty parts right;
# - read kernels that touch each element twice, in one block or over several, and check their bytes by count;
# - say why a missing barrier is a race, why a forgotten factor is *not* a fault, and which test finds it;
# - choose the kernel for a shape.

# %%
import math
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from flashnumba import lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.access_map import draw_sweeps
from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.emulator.accesses import record
from flashnumba.machine.function import kernel
from flashnumba.machine.numba import cuda, float32
from flashnumba.machine.occupancy import NOTES, budget, draw_budget, machine_of
from flashnumba.stages.figures import BLUE, GREY, ORANGE, RED
from flashnumba.stages.online_softmax import draw_tree, reference, simt
from flashnumba.stages.rows import Shape
from flashnumba.stages.softmax.reference import safe
from flashnumba.stages.softmax.simt import make_block_per_row
from flashnumba.tiles import online, reduce

lesson.style()
stage = find("online_softmax")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# Read the row once and keep two numbers: $m_j$, the largest of the first $j$ scores, and $d_j$, the sum of their
# exponentials *in units of* $e^{m_j}$. When a new score raises the maximum, the unit changes, and the sum so far is
# converted:
#
# $$m_j = \max(m_{j-1}, x_j), \qquad d_j = d_{j-1}\,e^{m_{j-1} - m_j} + e^{x_j - m_j}, \qquad m_0 = -\infty,\; d_0 = 0$$
#
# **Claim:** $m_j = \max_{i \le j} x_i$ and $d_j = \sum_{i \le j} e^{x_i - m_j}$ for every $j$.
#
# *Proof* by induction. For $j = 0$ both are the maximum and the sum of nothing. If it holds for $j - 1$, then
#
# $$d_j = \Big(\sum_{i \le j-1} e^{x_i - m_{j-1}}\Big) e^{m_{j-1} - m_j} + e^{x_j - m_j}
#       = \sum_{i \le j-1} e^{x_i - m_j} + e^{x_j - m_j} = \sum_{i \le j} e^{x_i - m_j}. \qquad\blacksquare$$
#
# At the end $p_j = e^{x_j - m} / d$, as before. And as before nothing overflows: every exponent is at most 0, and
# $1 \le d_j \le j$ once a finite score was seen.
#
# ### From one element to a whole part
#
# What the recurrence does with one more element, it can do with a whole other part of the row. Let $(m_a, d_a)$ and
# $(m_b, d_b)$ be the states of two parts. The state of both together is
#
# $$(m_a, d_a) \oplus (m_b, d_b) = \big(m,\; d_a e^{m_a - m} + d_b e^{m_b - m}\big), \qquad m = \max(m_a, m_b)$$
#
# A single element is the state $(x, 1)$, so the recurrence is $\oplus$ with one-element parts.
#
# **Why the order does not matter.** A state $(m, d)$ says the same as the pair $(m, S)$ with $S = d\,e^m$, the plain
# sum of exponentials. In that form $\oplus$ is $(\max(m_a, m_b),\, S_a + S_b)$: a maximum and an addition. Both are
# associative and commutative, so $\oplus$ is. ($S$ may be too large for any number format; $d$ never is. That is the
# whole point of the unit.)
#
# **Nothing is the identity.** The state of no elements is $(-\infty, 0)$, and merging it changes nothing, provided
# that its factor is taken to be 0. Careful: if *both* parts are empty, or masked throughout, the formula says
# $e^{-\infty - (-\infty)} = e^{\text{NaN}}$. The factor of an empty part is 0 **by definition**; empty merged with
# empty is empty.
#
# So a row may be cut anywhere, its parts handled anywhere, and the results merged in any order: lanes of a warp,
# warps of a block, blocks of a grid, and later, GPUs.
#
# **Predict.** A row of 512 scores in no particular order: how often does the running maximum change?

# %%
data = load_minilm()
scores = data.scores(layer=0, head=2)  # [512, 512]
changes = [int((np.diff([state[0] for state in reference.steps(row)]) > 0).sum()) + 1 for row in scores[::16]]
harmonic = sum(1 / j for j in range(1, 513))
print(f"{np.mean(changes):.1f} times, the mean of {len(changes)} real rows; 1 + 1/2 + ... + 1/512 = {harmonic:.1f}")

# %% [markdown]
# The $j$-th score is the largest so far with probability $1/j$ if the order is random, so the expected number is
# $1 + 1/2 + \dots + 1/N \approx \ln N + 0.58$. Real scores have some order, so it is a little more. Either way,
# nearly all steps of the recurrence multiply by $e^0 = 1$, and fast attention kernels leave the factor out then.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, (running, tree) = plt.subplots(1, 2, figsize=(12.5, 4.4))
row = data.scores(0, 0)[scores.max(1).argmax()]
m, d = np.array(list(reference.steps(row))).T
at = np.arange(1, len(row) + 1)
running.plot(at, row, ".", ms=3, color=GREY, alpha=0.6, label="score x")
running.step(at, m, where="post", color=BLUE, lw=2, label="running maximum m")
running.set(title="one real row, read once", xlabel="elements read", ylabel="score")
running.set_ylim(row.min() - 1.5, row.max() + 0.4)
right = running.twinx()
right.plot(at, d, color=ORANGE, lw=1.3, label="running sum d")
right.set_ylabel("d, in units of exp(m)", color=ORANGE)
right.spines["right"].set_visible(True)
handles = [*running.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
right.set_ylim(bottom=-20)
right.legend(handles=handles, loc="lower right", fontsize=9, ncols=3)
draw_tree(tree, row)
plt.show()

# %% [markdown]
# Left: whenever the blue line steps up, the orange one falls, as the sum is put into larger units. Right: the same
# row cut into eight parts, merged two by two from the bottom up; in each box $m$ above $d$. The box at the top is the
# right end of the left picture.
#
# ## The reference
#
# The recurrence and the merge, as they stand:

# %%
lesson.show_source(reference.factor)

# %%
lesson.show_source(reference.merge)

# %%
lesson.show_source(reference.steps, first="m, d = empty")

# %% [markdown]
# **Predict** whether merging in different orders gives the same bits, in float64 and in float32.


# %%
def merged(order: np.ndarray, dtype: type) -> tuple[float, float]:
    """The state of a row with even weights in 32 parts, merged one after the other in an order."""
    parts = [reference.scan(part, dtype) for part in np.array_split(even, 32)]
    state = reference.empty((), dtype)
    for i in order:
        state = reference.merge(state, parts[i])
    return float(state[0]), float(state[1])


even = data.scores(layer=2, head=0)[0]
rng = np.random.default_rng(0)
orders = [rng.permutation(32) for _ in range(40)]
for dtype in (np.float64, np.float32):
    sums = np.array([merged(order, dtype)[1] for order in orders])
    print(f"{np.dtype(dtype).name}: {len(set(sums))} different sums; they spread by {np.ptp(sums) / sums.mean():.1g}")

# %% [markdown]
# Mathematics says "equal"; floating-point addition is not quite associative, so the last bits depend on the order.
# Therefore the kernels below merge in a **fixed** order, and their results are the same bits every time.
#
# ## The kernels
#
# ### Two passes
#
# `two_pass` follows the idea to the letter: one pass for $(m, d)$, one for the quotient. A step of the recurrence
# takes in several loaded vectors at once, so the factor is computed once for all of them.

# %%
two_pass = simt.make_two_pass("float32", 64, 16, 2)
lesson.show_source(two_pass, part="take_in")

# %%
lesson.show_source(two_pass, first="for row in range")

# %% [markdown]
# **Predict.** `block_per_row` of lesson 1 met at two barriers a row, one for the maximum and one for the sum. How
# many does this one need?
#
# One. Each warp brings a whole state, in units of its *own* maximum, and the states are merged:

# %%
lesson.show_source(two_pass, part="block_merge")

# %% [markdown]
# ### One pass
#
# If the row still lies in registers when the sum is known, it need not be read again. `one_pass` holds it there: each
# thread loads its vectors once, takes their maximum and their sum, merges, and writes.

# %%
one_pass = simt.make_one_pass("float32", 64, 4, 1, 16, exact=True)
lesson.show_source(one_pass, first="for row in range")

# %% [markdown]
# One read, one write: less is not possible, as the result must be written and the input seen. Registers set the
# limit: 1024 threads that hold 32 words of 4 bytes hold 128 KB, a row of 32768 float32 or 65536 float16 elements.
#
# ### Over several blocks
#
# For longer rows, cut them. `split` gives each chunk of a row to a block, which holds it in registers. Then the
# blocks must exchange their states, through global memory:

# %%
split = simt.make_split("float32", 32, 2, 16, exact=True)
lesson.show_source(split, first="if thread < 32:", last="row_state[1] =")

# %%
lesson.show_source(split, part="merge_row")

# %% [markdown]
# Three things make this right, and each would be a bug if it were left out:
#
# - **One word.** $m$ and $d$ are 32 bits each and travel as one 64-bit word. A reader sees both or neither, never the
#   new $m$ with the old $d$. And as nothing but the word is handed over, no fence is needed.
# - **A word of zero means "not yet".** No real state is zero: $m = -\infty$ has bits of its own, and any other $m$
#   has $d \ge 1$.
# - **Co-residence.** A block that waits occupies its place. If the blocks it waits for never got one, all would wait
#   for ever. So the launch is cooperative, no more blocks than the GPU runs at once; and each block draws its next
#   chunk from a counter, so the one with the smallest unfinished chunk never waits for a chunk that nobody has taken.
#
# A block that waits for its neighbours moves no data. From sm_90 on `split_ahead` hides that wait: the copy engine
# brings the next chunks into shared memory meanwhile, and a block publishes its next chunk's word before it waits for
# the current row. The bytes are the same. How such copies work is for a later lesson.
#
# ## On real data
#
# Rows of one head in float16, and long rows: what one query scores in all twelve heads, laid end to end in float32.

# %%
with lesson.timed(f"all on the {machine}"):
    results = [
        measure(stage, rung, case, machine)
        for case in stage.cases(machine, False)
        for rung in stage.rungs
        if rung.takes(case)
    ]
lesson.table(
    ("kernel", "machine", "rows x columns", "traffic", "largest error", "budget", "verdict"),
    [
        (r.rung.name, r.machine, r.case.size, str(r.rung.traffic), r.comparison.error, r.comparison.budget, r.verdict)
        for r in results
    ],
)

# %%
stage.draw(results)

# %% [markdown]
# ## Who reads what
#
# Two rows of 1024 float32 elements, four kernels, every access written down.
#
# **Predict** the four pictures: how many times does each kernel sweep over the row?

# %%
wide = np.concatenate([data.scores(0, head) for head in range(12)], axis=1)  # [512, 6144]
x = wide[:2, :1024].astype(np.float32)
out = np.empty_like(x)
CHUNKS = 4
scratch = np.zeros(1 + len(x) * CHUNKS, np.uint64)
runs = {
    "block_per_row": record(make_block_per_row("float32", 64), 2, 64, (x, out)),
    "two_pass": record(two_pass, 2, 64, (x, out)),
    "one_pass": record(one_pass, 2, 64, (x, out)),
    "split": record(split, CHUNKS, 32, (x, out, scratch)),
}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 4, figsize=(13, 3.4), sharey=True)
for ax, (name, run) in zip(axes, runs.items(), strict=True):
    for block in range(CHUNKS) if name == "split" else (0,):
        draw_sweeps(ax, run, "x", "out", x.shape[1], x.itemsize, block=block, row=0)
    ax.set_title(f"{name}{f', {CHUNKS} blocks' if name == 'split' else ''}")
    ax.xaxis.get_major_locator().set_params(integer=True)
for ax in axes[1:]:
    ax.set_ylabel("")
handles, labels = axes[0].get_legend_handles_labels()
axes[0].legend(handles, labels, markerscale=3, loc="lower right", fontsize=9)
plt.show()

# %% [markdown]
# Each picture shows what the first warp of a block does to row 0. Three sweeps, two sweeps, one sweep; and in `split`
# four blocks take a quarter of the row each. Between reading and writing its blocks exchange words, which are not in
# this picture. They are in the next:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, (parts, words) = plt.subplots(1, 2, figsize=(12, 3.2), width_ratios=(1.5, 1))
run = runs["split"]
length = x.shape[1] // CHUNKS
for block in range(CHUNKS):
    chunks = np.unique(run.of("x", block=block)["offset"] // x.itemsize // length)
    for chunk in chunks:
        r, c = divmod(int(chunk), CHUNKS)
        parts.barh(block, length - 8, left=c * length + 4, color=(BLUE, ORANGE)[r], height=0.7)
        label = f"row {r}, chunk {c}"
        parts.text((c + 0.5) * length, block, label, ha="center", va="center", color=("white", "black")[r])
    for store, fill, edge in ((False, "#a9cfe8", "none"), (True, "none", RED)):
        word = np.unique(run.of("scratch", store=store, block=block)["offset"] // 8 - 1)
        words.plot(word, [block] * len(word), "s", ms=15, mew=2, mfc=fill, mec=edge)
parts.set(xlabel="column", ylabel="block", title="who reads which part of x")
parts.set(xlim=(0, x.shape[1]), ylim=(CHUNKS - 0.5, -0.5))
parts.set_yticks(range(CHUNKS))
words.plot([], [], "s", ms=9, mfc="#a9cfe8", mec="none", label="read")
words.plot([], [], "s", ms=9, mfc="none", mec=RED, mew=2, label="written")
words.set(xlabel="word of chunk", ylabel="block", title="who reads and writes which word", yticks=range(CHUNKS))
words.set(xlim=(-0.6, 7.6), ylim=(CHUNKS - 0.4, -0.6))
words.set_xticks(range(8), [f"{i // CHUNKS}.{i % CHUNKS}" for i in range(8)])
words.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# A word is named by row and chunk. A block writes the word of each chunk that it drew, and reads the words of all
# chunks of that row.
#
# ### Bytes by count
#
# **Predict.** The array has 2048 elements of 4 bytes. What will the emulator count for each kernel? And how much does
# the exchange of words cost?

# %%
formula = {"block_per_row": (3, 1), "two_pass": (2, 1), "one_pass": (1, 1), "split": (1, 1)}


def moved(run, *arrays: str) -> int:
    """Bytes of these arrays that were loaded or stored."""
    return sum(int(run.of(a, store=s)["nbytes"].sum()) for a in arrays for s in (False, True))


rows = []
for name, run in runs.items():
    reads, writes = formula[name]
    total = run.report.loaded + run.report.stored
    data_bytes = moved(run, "x", "out")
    rows.append((name, f"{reads}R+{writes}W", (reads + writes) * x.nbytes, data_bytes, total - data_bytes))
lesson.table(("kernel", "traffic", "by formula", "counted, x and out", "counted, words and tickets"), rows)

# %% [markdown]
# The data is counted to the byte. What `split` adds depends on the number of chunks, not on their size, and on how
# often a block looks before a word is there. These chunks have 1 KB; real ones have 32 KB, and then it vanishes.
#
# ### The floor, and what was measured

# %%
BANDWIDTH = 4.25e12  # bytes a second; a copy on an H200, read + write, measured
elements = 2**28
lesson.table(
    ("2^28 elements", "3R+1W, us", "2R+1W, us", "1R+1W, us"),
    [(t, *(round(k * elements * n / BANDWIDTH * 1e6) for k in (4, 3, 2))) for t, n in (("float16", 2), ("float32", 4))],
)

# %%
lesson.show_results(simt.KERNELS)

# %%
if machine == "cuda":
    print(lesson.speeds(simt.softmax, simt.KERNELS, np.resize(scores.astype(np.float16), (2**13, 2**15))))
else:
    print("no GPU here")

# %% [markdown]
# ### Registers hold the row
#
# What is bought with registers must be paid for in occupancy. Measured, for an H200:

# %%
names = ["two_pass float16 32768", "one_pass float16 1024", "one_pass float16 32768"]
names += ["split float16 262144", "split_ahead float16 262144"]
found = {name: lesson.resources(f"online_softmax.{name}") for name in names}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
budgets = {
    title: budget("90", threads=r.threads, registers=r.registers, shared=r.shared) for title, (r, _) in found.items()
}
lesson.table(
    (
        "kernel, element, columns",
        "threads",
        "registers a thread",
        "spilled bytes",
        "blocks that fit",
        "limit",
        "warp slots filled",
    ),
    [
        (title, r.threads, r.registers, r.spills, b.blocks, ", ".join(b.limited_by), f"{b.occupancy:.0%}")
        for (title, (r, _)), b in zip(found.items(), budgets.values(), strict=True)
    ],
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12, 3.2))
figure.get_layout_engine().set(wspace=0.06)
chosen = ["one_pass float16 1024", "one_pass float16 32768"]
draw_budget([budgets[title] for title in chosen], axes)
for ax, title in zip(axes, chosen, strict=True):
    ax.set_title(f"{title}\n{ax.get_title(loc='left')}", fontsize=10)
axes[1].set_yticklabels([])
plt.show()

# %% [markdown]
# A long row takes registers: 64 KB of it lie in the register file of a multiprocessor that has 256 KB. About half of
# the warp slots stay empty; yet all loads of a row are on their way at once, and that is what keeps memory busy.
#
# ### Which kernel for which shape
#
# The rule of the package, drawn. A warp or a block holds the row while it can; few long rows are split although one
# block could hold them, as the other multiprocessors would have nothing to do. `two_pass` is not in the picture: the
# launch falls back to it where the GPU cannot run enough blocks at once.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), sharey=True)
fills = {"one_pass": "#cfe2f0", "split": "#f6dfae", "split_ahead": "#cdeadf"}
for ax, (element, arch) in zip(axes, (("float16", "90"), ("float32", "90"), ("float16", "80")), strict=True):
    kinds = [[simt.choose(Shape(element, 1 << r, 1 << c, 16, arch)) for c in range(4, 21)] for r in range(21)]
    codes = np.array([[list(fills).index(kind) for kind in line] for line in kinds])
    ax.imshow(codes, origin="lower", cmap=ListedColormap(list(fills.values())), vmin=0, vmax=2, aspect="auto")
    for code, kind in enumerate(fills):
        r, c = np.nonzero(codes == code)
        if len(r):
            ax.text(c.mean(), r.mean(), kind.replace("split_", "split_\n"), ha="center", va="center")
    ax.set_xticks(range(0, 17, 4), [f"$2^{{{c}}}$" for c in range(4, 21, 4)])
    ax.set_yticks(range(0, 21, 4), [f"$2^{{{r}}}$" for r in range(0, 21, 4)])
    ax.set(xlabel="columns", title=f"{element} on sm_{arch}, 16-byte aligned")
axes[0].set_ylabel("rows")
plt.show()

# %% [markdown]
# ### Does the order of addition matter?
#
# The sum is kept in float32. One thread that adds $N$ terms one after the other rounds $N$ times; 32 lanes that add
# $N/32$ terms each, merged as a tree, round $N/32 + 5$ times along any path.
#
# **Predict.** How do the two errors grow with $N$?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
flat = np.concatenate([data.scores(2, 0)[i::16] for i in range(16)], axis=1)  # [32, 8192], a head with even weights
sizes = [2**k for k in range(4, 14)]
errors = {1: [], 32: []}
for n in sizes:
    some = flat[:, :n].astype(np.float32)
    exact = reference.scan(some)[1]
    for lanes in errors:
        got = reference.split(some, lanes, np.float32)[1]
        errors[lanes].append(np.sqrt((((got - exact) / exact) ** 2).mean()))
figure, ax = plt.subplots(figsize=(7.5, 3.8))
ax.loglog(sizes, errors[1], "o-", color=ORANGE, label="one thread, the recurrence as written")
ax.loglog(sizes, errors[32], "s-", color=BLUE, label="32 lanes, merged as a tree")
ax.axhline(2.0**-24, color=GREY, ls="--", lw=1)
ax.text(sizes[0], 2.0**-24 * 1.12, "half a float32 step", color=GREY, fontsize=9)
ax.set(xlabel="elements in the row", ylabel="relative error of d", title="32 real rows: root mean square")
ax.set_xscale("log", base=2)
ax.legend(fontsize=9)
plt.show()

# %% [markdown]
# From 16 to 8192 elements the error of one thread grows from $8\cdot10^{-8}$ to $1.3\cdot10^{-6}$; that of the tree
# only from $4\cdot10^{-8}$ to $8\cdot10^{-8}$. The tree is not only parallel, it is also more exact. Both are far below
# the $5\cdot10^{-4}$ that rounding the result to float16 costs.
#
# ## Break it
#
# ### A race
#
# The kernels use two sets of shared words in turns, so that one barrier a row is enough. Use one set instead, and let
# a block have two rows.
#
# **Predict.** Which two accesses have no barrier between them?

# %% tags=["break-it"]
try:
    launch(simt.make_two_pass("float32", 64, 16, 2, broken="buffers"), 1, 64, (x, out))
except Fault as fault:
    print(fault)

# %% [markdown]
# Warp 0 is through with row 0 and writes its state of row 1, while warp 1 may still be reading the states of row 0.
# The report names the write, the thread, and the line of the read. With the barrier itself removed:

# %% tags=["break-it"]
try:
    launch(simt.make_two_pass("float32", 64, 16, 2, broken="barrier"), 1, 64, (x, out))
except Fault as fault:
    print(fault)

# %% [markdown]
# ### A wrong answer that is no fault
#
# Now forget the factor: add sums that are in different units.
#
# **Predict.** What will the emulator say?

# %% tags=["break-it"]
launch(simt.make_two_pass("float32", 64, 16, 2, broken="rescale"), 2, 64, (x, out))
print("no fault")
print(compare(out, safe(x), reference.low_precision(x)))

# %% [markdown]
# Nothing: every access is in order, the arithmetic is just wrong. Only the comparison with float64 finds it. That is
# why every kernel has both a reference and an emulator. It also needs the right *data*: where the maximum of the row
# comes first, or all parts have the same maximum, every factor is 1, and the broken kernel is right.

# %% tags=["break-it"]
same = np.zeros_like(x)
launch(simt.make_two_pass("float32", 64, 16, 2, broken="rescale"), 2, 64, (same, out))
print(compare(out, safe(same), reference.low_precision(same)))

# %% [markdown]
# ### Infinity minus infinity
#
# A fully masked part has $m = -\infty$. Merge two of them without the special case:


# %% tags=["break-it"]
def naive_merge(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    m = np.maximum(a[0], b[0])
    with np.errstate(invalid="ignore"):
        return m, a[1] * np.exp(a[0] - m) + b[1] * np.exp(b[0] - m)


empty = (np.float64(-np.inf), np.float64(0))
print("without:", *naive_merge(empty, empty))
print("with:   ", *map(float, reference.merge(empty, empty)))

masked = x.copy()
masked[0, :] = -np.inf  # a row with every key masked
masked[1, :512] = -np.inf  # a row whose first half is masked
launch(two_pass, 2, 64, (masked, out))
print("masked row:", out[0, :3], "  half masked:", out[1, :2], out[1, 512:].sum())

# %% [markdown]
# ### A wait for nobody
#
# And `split` without the line that publishes a block's word:

# %% tags=["break-it"]
try:
    silent = simt.make_split("float32", 32, 2, 16, exact=True, broken="publish")
    launch(silent, 2, 32, (x[:1, :512], out[:1, :512], np.zeros(3, np.uint64)))  # one row of two chunks
except Fault as fault:
    print(fault)

# %% [markdown]
# Who waits for what, group by group: lanes 0 and 1 for a word each that stays 0, the other lanes of their warp for
# them. On a GPU this program does not end, and says nothing.
#
# ## Exercises
#
# ### 1. A third component: attention
#
# Attention wants $o = \sum_j p_j v_j$, where $v_j$ is a row of $V$. Carry the sum along, not yet divided by $d$:
# $a = \sum_j e^{x_j - m} v_j$. A part's state is then $(m, d, a)$, and $o = a / d$ at the very end. Write the merge.
# You have then written the heart of FlashAttention.

# %%
State = tuple[float, float, np.ndarray]


def merge_attention(left: State, right: State) -> State:
    """The state of two parts; ``m`` and ``d`` are numbers, ``a`` is ``[32]``."""
    # your code


# %% tags=["exercise"]
def attention_is_right() -> bool:
    query, values = 100, data.v[0, 2].astype(np.float64)  # [512, 32]
    x = scores[query]

    def state(part: slice) -> State:
        m = x[part].max(initial=-np.inf)
        e = np.exp(x[part] - m) if len(x[part]) else np.zeros(0)
        return m, e.sum(), e @ values[part]

    cuts = [0, 0, 7, 100, 300, 512]  # the first part is empty
    total = state(slice(0, 0))
    for a, b in pairwise(cuts):
        total = merge_attention(total, state(slice(a, b)))
    _, d, a = total
    return bool(np.allclose(a / d, safe(x) @ values, rtol=1e-12))


lesson.check("merge_attention", attention_is_right, "a changes its units as d does; reference.factor has empty parts.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def merge_attention(left: State, right: State) -> State:
    m = np.maximum(left[0], right[0])
    f, g = reference.factor(left[0], m), reference.factor(right[0], m)
    return m, left[1] * f + right[1] * g, left[2] * f + right[2] * g


lesson.check("merge_attention", attention_is_right)

# %% [markdown]
# ### 2. A kernel: the state of a row
#
# One warp a row: each lane runs the recurrence over its columns, reading each element **once**; then the lanes merge.
# Write $m$ and $d$. `rescale(m_from, m_to)` is the factor, with the empty part taken care of;
# `exponential(x, anchor(m))` is $e^{x - m}$.

# %%
over_max, over_sum = reduce.lanes_max(), reduce.lanes_sum()
rescale, exponential, anchor = online.rescale, online.exponential, online.anchor


@kernel(threads=32)
def row_state(x, m_out, d_out):
    """``x [rows, columns]`` float32; ``m_out``, ``d_out`` ``[rows]`` float32; one block of one warp a row."""
    row, lane, cols = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    # your code


# %% tags=["exercise"]
def row_state_is_right() -> bool:
    some = x[:, :200].copy()
    some[1, 40:80] = -np.inf
    m, d = np.full((2, len(some)), np.nan, np.float32)
    report = launch(row_state, len(some), 32, (some, m, d))
    m_ref, d_ref = reference.scan(some)
    right = np.allclose(m, m_ref) and np.allclose(d, d_ref, rtol=1e-6)
    if right and report.loaded > some.nbytes:
        print(f"right, but {report.loaded} bytes were read where {some.nbytes} are enough")
    return bool(right and report.loaded == some.nbytes)


lesson.check("row_state", row_state_is_right, "Keep x[row, col] in a variable; merge with over_max, rescale, over_sum.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
@kernel(threads=32)
def row_state(x, m_out, d_out):
    row, lane, cols = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    m = float32(-math.inf)
    d = float32(0)
    for col in range(lane, cols, 32):
        value = x[row, col]
        larger = max(m, value)
        d = d * rescale(m, larger) + exponential(value, anchor(larger))
        m = larger
    top = over_max(m)
    d = over_sum(d * rescale(m, top))
    if lane == 0:
        m_out[row] = top
        d_out[row] = d


lesson.check("row_state", row_state_is_right)

# %% [markdown]
# ## Two machines, side by side
#
# The merge does not care how many lanes a wave has. Its cost does, and so does the length of a row that one block can
# hold. Below, blocks of 256 threads that keep half of their registers for the row.

# %%
pair = [machine_of("90"), NOTES]
full = [budget(m, threads=256, registers=m.max_registers, shared=21 * 1024) for m in pair]
lesson.table(
    ("", "NVIDIA sm_90 (H200)", "the notes' machine"),
    [
        ("exchanges to merge the states of a wave", *(int(math.log2(m.warp)) for m in pair)),
        ("states to merge in a block of 256 threads", *(256 // m.warp for m in pair)),
        ("KB of a row in a block: 128 words a thread", *(256 * 128 * 4 // 1024 for m in pair)),
        ("such blocks on a multiprocessor, all registers taken", *(b.blocks for b in full)),
        ("KB of rows on a multiprocessor at once", *(b.blocks * 256 * 128 * 4 // 1024 for b in full)),
        ("shared memory for the merge, two sets of (m, d), bytes", *(2 * 2 * 4 * (256 // m.warp) for m in pair)),
    ],
)

# %% [markdown]
# With three times the registers, the notes' machine holds three blocks where an H200 holds one: while one block waits
# for its rows, two others work. An H200 gets the same from smaller pieces: 32 words a thread, and 512 or 1024 threads.
#
# ## Limits
#
# - `one_pass` ends at 128 KB a row; unaligned rows end earlier, as loads are then narrow and a word holds less.
# - `split` needs all blocks of a row to run at the same time, and 64 rows or fewer before it pays on rows one block
#   could hold.
# - The emulator counts looks in vain, but in its own order of threads; how often a GPU's blocks look is another number.
# - Merging in a fixed order gives the same bits each time on one machine; another number of chunks gives other last
#   bits.
# - Of 16-bit rows the exponentials are computed twice, for the sum and for the quotient: registers hold the scores,
#   not them.
#
# ## What next
#
# The state $(m, d, a)$ of exercise 1 is FlashAttention. What is missing is the speed of its two matrix products, and
# those are the next lessons: tiles, shared memory, and tensor cores.

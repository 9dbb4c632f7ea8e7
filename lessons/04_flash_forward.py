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
# # 4. FlashAttention: attention without the matrix of scores
#
# Attention multiplies two matrices, takes a softmax of every row, and multiplies again. The matrix in between has a
# number for every pair of query and key, and it is what makes plain attention slow and large. Lessons 1 to 3 built the
# parts: a softmax that needs one pass, an operator that merges, and tiles that feed tensor cores. Here they become one
# kernel, and the matrix is gone.
#
# ## What you will be able to do
#
# - say what is kept of a row while its keys pass by, and prove that the division can wait until the end;
# - read two kernels that do it, on CUDA cores and on tensor cores, and say what each step reads, writes and waits for;
# - count tiles, bytes, bank conflicts and blocks before you measure anything;
# - say why the maximum must be rounded once, and how a mask that is forgotten can hide;
# - cut the keys of one query into parts, and merge what comes of them.

# %%
import math
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

from flashnumba import lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions.fragments import a_map, c_map
from flashnumba.machine.numba import cuda, float32
from flashnumba.machine.occupancy import NOTES, budget, draw_budget, machine_of
from flashnumba.stages import heads
from flashnumba.stages.figures import BLUE, GREEN, ORANGE, RED
from flashnumba.stages.flash_forward import count, moved_by_mma, moved_by_simt, panels, plans, reference
from flashnumba.stages.flash_forward.mma import make_mma
from flashnumba.stages.flash_forward.simt import make_simt
from flashnumba.stages.flash_forward.simt_tiles import Tiles
from flashnumba.stages.flash_forward.split import plan_split
from flashnumba.stages.flash_forward.split import tiles_for as split_tiles
from flashnumba.stages.flash_forward.wgmma import make_wgmma
from flashnumba.tiles import online, reduce
from flashnumba.tiles.attention import make_steps
from flashnumba.tiles.forward import make_attend, tiles_for
from flashnumba.tiles.sizes import AttentionTiles
from flashnumba.tiles.specialised_consumer import make_take_step
from flashnumba.tiles.specialised_producer import make_ring
from flashnumba.tiles.specialised_steps import make_consumer_steps
from flashnumba.tiles.specialised_tiles import SpecialisedTiles
from flashnumba.tiles.specialised_tiles import tiles_for as specialised_tiles
from flashnumba.tiles.swizzle import place_of

lesson.style()
stage = find("flash_forward")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# $M$ queries and $N$ keys of $D$ numbers each; every key has a value, also of $D$ numbers.
#
# $$S = \tfrac{1}{\sqrt D}\,Q K^T, \qquad P = \operatorname{softmax}(S), \qquad O = P V$$
#
# $Q$, $K$, $V$ and $O$ are thin; $S$ and $P$ are $M \times N$.
#
# **Predict.** One head has 4096 queries and keys of 64 numbers in float16. How large are Q, K, V and O together, and
# how large is S? And with 65536?

# %%
lesson.table(
    ("queries = keys", "Q, K, V, O", "S alone", "S over the rest"),
    [
        (n, f"{4 * n * 64 * 2 / 2**20:g} MiB", f"{n * n * 2 / 2**20:g} MiB", f"{n / (4 * 64):g} times")
        for n in (512, 4096, 65536)
    ],
)

# %% [markdown]
# Nobody wants S. It is written, read for the softmax, written as P, and read again: all that traffic for numbers that
# are used once. The way out is to take keys in blocks, and to be done with a block of S before the next is made. Lesson
# 2 showed how a softmax is built from blocks, with a maximum $m$ and a sum $l$. Attention needs a third thing, the
# weighted sum of values, in the same units:
#
# $$m' = \max\big(m, \max_j S_j\big), \qquad \alpha = e^{m - m'}, \qquad P_j = e^{S_j - m'}$$
# $$l' = \alpha\, l + \sum_j P_j, \qquad a' = \alpha\, a + \sum_j P_j V_j, \qquad m_0 = -\infty,\; l_0 = 0,\; a_0 = 0$$
#
# where $j$ runs over the keys of the block. At the end $O = a / l$, and the row's $\operatorname{lse} = m + \ln l$ is
# kept for the backward pass.
#
# **Why the division can wait.** After any block, $l = \sum_j e^{S_j - m}$ and $a = \sum_j e^{S_j - m} V_j$ over all
# keys so far: for $l$ this is the claim of lesson 2, and the proof never used what is summed, only that each term has
# the factor $e^{S_j - m}$. So $a / l$ is exact attention to the keys so far, and only the last one is wanted. One
# division a row instead of one a block; and the factor $\alpha$ is the only thing that ever touches $a$ again.
#
# What is kept for a row: $D + 2$ numbers, whatever $N$ is.
#
# ### The picture
#
# Rows are cut into tiles as well. A block of threads owns a tile of rows, keeps their states, and walks along its keys.
# With a causal mask, key $j$ is visible to query $i$ if $j \le i + N - M$: the *last* query sees the last key, as in a
# text that goes on where a cache of earlier keys ends.
#
# **Predict.** 1000 queries, 1500 keys, tiles of 128 x 128: 96 tiles. How many have to be computed? And in how many of
# these must single elements be masked?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12.5, 4.6), width_ratios=(1.5, 1))
panels.draw_tiles(axes[0], 1000, 1500, 128, 128)
panels.draw_tiles(axes[1], 1000, 600, 128, 128)
axes[1].set_title("1000 queries, 600 keys, causal")
plt.show()

# %% [markdown]
# Left, 68 of the 96 tiles are computed, and masks concern 16 of these: two in every row of tiles, as the diagonal does
# not meet the tiles' corners. (In the last row the second of them also ends at key 1500.) The other 52 need no
# comparison at all. Right, the first 400 queries see nothing: $O = 0$ and $\operatorname{lse} = -\infty$ by definition,
# and never NaN.

# %%
cases = [(4096, 4096), (1024, 4096), (1000, 1500), (1000, 600), (1, 4096)]
rows = []
for m, n in cases:
    kinds = count.tile_kinds(m, n, 128, 128, causal=True)
    rows.append((m, n, kinds.size, *(int((kinds == kind).sum()) for kind in (count.FULL, count.MASKED, count.SKIPPED))))
lesson.table(("queries", "keys", "tiles of 128 x 128", "computed whole", "computed and masked", "skipped"), rows)

# %% [markdown]
# ## The reference
#
# All scores at once, in float64, is what every other result is judged by:

# %%
lesson.show_source(reference.attend, first="with np.errstate", last="return normalise")

# %% [markdown]
# and this is the recurrence, key block by key block:

# %%
lesson.show_source(reference.blocked, first="m, l, acc = empty")

# %%
lesson.show_source(reference.normalise)

# %% [markdown]
# `alpha` is `exp(m - m')`, with $-\infty - (-\infty)$ taken care of, as in lesson 2. The last line of `normalise` is
# the row that saw nothing.
#
# Here are the queries, keys and values of a trained transformer (all-MiniLM-L6-v2) reading the text of a licence. One
# query, 512 keys, in blocks of 64:

# %%
data = load_minilm()
q, k, v = (x[0, 2] for x in (data.q, data.k, data.v))  # layer 0, head 2: [512, 32] each
query = 300
exact, _ = reference.dense(q[query : query + 1], k, v)
states = list(reference.blocked(q[query : query + 1], k, v, block=64))
lesson.table(
    ("keys", "m", "l", "alpha", "|acc|", "|acc / l - O|"),
    [
        (
            f"to {64 * (i + 1)}", f"{m[0]:.2f}", f"{l[0]:.4f}",
            "-" if i == 0 else f"{np.exp(states[i - 1][0][0] - m[0]):.2g}",
            f"{np.linalg.norm(acc):.3f}", f"{np.linalg.norm(acc[0] / l[0] - exact):.2g}",
        )
        for i, (m, l, acc) in enumerate(states)
    ],
)  # fmt: skip

# %% [markdown]
# **Predict.** This head is sharp: a few keys get nearly all the weight. In which block are they, and what happens to
# what was summed before?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, (running, values) = plt.subplots(1, 2, figsize=(12.5, 4.2), width_ratios=(1.25, 1))
panels.draw_running(running, q, k, v, query, block=64)
shown = np.stack([acc[0] / l[0] for _, l, acc in states] + [exact[0]])  # [9, 32]
limit = np.abs(shown).max()
picture = values.imshow(shown, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
values.set_yticks(range(9), [f"to {64 * (i + 1)}" for i in range(8)] + ["all at once"], fontsize=9)
values.axhline(7.5, color="black", lw=1)
values.set(xlabel="column of O", ylabel="keys", title="acc / l after each block of keys")
figure.colorbar(picture, ax=values)
plt.show()

# %% [markdown]
# Whenever $m$ steps up, the old sum is worth less: `alpha` is 0.79 after a small step, $10^{-6}$ after a large
# one, and then the picture on the right starts anew. After the block with the largest score nothing changes any more,
# although three of the eight blocks are still to come. That is a sharp head of a real model; with random numbers every
# block would matter a little.
#
# ## The kernels
#
# ### simt: the algorithm as it stands
#
# A block of 128 threads owns 64 rows of one head. Sixteen neighbouring threads share a row; each holds its part of S
# and of `acc` in registers. Here is the walk along the keys.

# %%
simt = make_simt(Tiles(32, blocks=1), "float16")
lesson.show_source(simt, first="for key in range(0, keys", last="multiply_pv")

# %% [markdown]
# Read it against the formulas: products, scale, mask (only where the tile touches the diagonal or the end), the
# recurrence, and the product with V. `keys` is where the block's last row stops seeing anything. The barriers stand
# between those who write a piece of K or V and those who read it. Words like `late` and `short` plant faults, as
# *Break it* does; they are `False` and 0 here, and `k_free`, `v_ready` and their like, with a barrier each, are `True`.

# %%
lesson.show_source(simt, part="online_softmax")

# %% [markdown]
# This is the reference's loop body, a row at a time. `over_max` makes the maximum of the sixteen threads' maxima; the
# sum is left in sixteen parts, as only its final value is asked for. `acc` is multiplied by `alpha` where it lies.
#
# One thing is awkward. A thread has *some keys* of its rows of P. For `acc` it needs *all keys*, for some columns. So P
# goes through shared memory, `put_p`, and every weight is read back by all sixteen.
#
# ### mma: what tensor cores change
#
# A tensor core multiplies a $16 \times 16$ by a $16 \times 8$ matrix in one instruction of a warp, and keeps the result
# in registers: each of the 32 lanes has four numbers. Which four is fixed, and so is which numbers of the operands a
# lane must bring.
#
# **Predict.** Two results side by side make a $16 \times 16$ piece of S. The next product wants a $16 \times 16$ piece
# of P, whose elements are exponentials of those of S. How many numbers must lanes exchange?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
owner_s, owner_p = np.full((2, 16, 16), -1)
for lane in range(32):
    for tile in range(2):
        for row, column in c_map("m16n8k16")[lane]:
            owner_s[row, column + 8 * tile] = lane
    for row, column in a_map("m16n8k16")[lane].reshape(-1, 2):
        owner_p[row, column] = lane
figure, axes = plt.subplots(1, 2, figsize=(11, 4.6))
for ax, owner, title in zip(axes, (owner_s, owner_p), ("S: two results", "P: one operand"), strict=True):
    ax.imshow(owner % 4, cmap="Blues", vmin=-1, vmax=6)
    for row, column in np.ndindex(16, 16):
        ax.text(column, row, owner[row, column], ha="center", va="center", fontsize=7)
    ax.axhline(7.5, color="white", lw=2)
    ax.axvline(7.5, color="white", lw=2)
    ax.set(xlabel="key", ylabel="query", title=f"{title}; the lane that holds an element", xticks=(0, 7, 8, 15))
    ax.set_yticks((0, 7, 8, 15))
plt.show()
print("elements that are not where they are wanted:", int((owner_s != owner_p).sum()))

# %% [markdown]
# None. A lane rounds its eight numbers of S to 16 bits, packs them two by two, and has its part of the operand. Nothing
# of S or P leaves registers. (On other machines, and for 8-bit numbers, this is not so; the next stage is about that.)

# %%
tiles = AttentionTiles(64, 64, 64, warps=4)
steps = make_steps(tiles, "float16")
lesson.show_source(steps.exponentials)

# %%
lesson.show_source(steps.softmax_pv)

# %% [markdown]
# A warp owns whole rows, and a row lies in four lanes, so its maximum takes two exchanges. That is all the
# communication there is: no barrier, no shared memory.

# %%
lesson.show_source(steps.raise_maximum)

# %% [markdown]
# `lazy` leaves the multiplications by `alpha` out where no row of the warp has a new maximum. It costs a vote, and is
# exact: the factor would have been 1.
#
# ### The swizzle
#
# `ldmatrix` brings operands from shared memory: in each of four cycles, if all goes well, eight lanes give the
# addresses of eight rows, 16 bytes each. Shared memory has 32 banks of 4 bytes, so eight rows can be read at once if
# they lie in eight different groups of four banks. Rows of 64 halves are 128 bytes long: without care all eight lie in
# the *same* group. So chunk $c$ of row $r$ is stored at place $c \oplus (r \bmod 8)$ (lesson 3).
#
# **Predict.** How many cycles does one `ldmatrix` of four matrices take, without the swizzle and with it?


# %%
def cycles(rows: np.ndarray, chunks: np.ndarray, columns: int, swizzled: bool) -> int:
    """Of one ldmatrix.x4: eight lanes at a time; as many as the fullest group of banks is asked for."""
    in_row = 4 if columns <= 32 else -(-columns // 64) * 8  # chunks of 16 bytes from row to row
    group = place_of(rows, chunks, in_row, swizzled) // 16 % 8  # [32]
    return sum(int(np.bincount(eight).max()) for eight in group.reshape(4, 8))


lanes = np.arange(32)
patterns = {
    "Q, a 16 x 16 operand": (lanes & 15, lanes >> 4),
    "K, two 16 x 8 operands": ((lanes & 7) + 8 * (lanes >> 4), lanes >> 3 & 1),
    "V, two of them, transposed": (lanes & 15, lanes >> 4),
}
lesson.table(
    ("ldmatrix.x4 of", "D", "cycles, in order", "cycles, swizzled"),
    [
        (name, d, *(cycles(*pattern, d, swizzled) for swizzled in (False, True)))
        for name, pattern in patterns.items()
        for d in (32, 64, 128)
    ],
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(11, 2.9), sharey=True)
for ax, swizzled in zip(axes, (False, True), strict=True):
    row, chunk = np.mgrid[:8, :8]
    offset = place_of(row, chunk, 8, swizzled)
    cells = np.zeros((8, 8), int)
    cells[offset // 128, offset // 16 % 8] = chunk
    ax.imshow(cells == 2, cmap="Oranges", vmin=0, vmax=1.6, aspect="auto")
    for r, c in np.ndindex(8, 8):
        ax.text(c, r, f"c{cells[r, c]}", ha="center", va="center", fontsize=8)
    ax.set_xticks(range(8), [f"{4 * i}-{4 * i + 3}" for i in range(8)], fontsize=8)
    ax.set(xlabel="banks", title="swizzled" if swizzled else "in order")
axes[0].set_ylabel("row of the tile")
figure.suptitle("where the eight chunks of a row lie; a quarter of an ldmatrix.x4 reads c2 of eight rows", fontsize=10)
plt.show()

# %% [markdown]
# Without the swizzle a read takes eight times as long; four times where D is 32, as two rows then share a line of the
# banks. Writing is not hurt: eight neighbouring threads copy a whole row, whatever the order of its chunks.
#
# ### The schedule
#
# `cp.async` copies from global to shared memory behind the threads' back. They go on, and wait later: a wait says "my
# copies have arrived", a barrier after it says "everybody's have". Where to put them is the schedule. Here is the loop:

# %%
attend = make_attend(tiles_for(64, "90a"), "float16")
lesson.show_source(attend, part="attend_all", first="for j in range(int64(0), last)", last="softmax_pv(s, acc")

# %% [markdown]
# (`early`, `no_barrier` and `no_v_barrier` plant faults.) With **one slot** for K and one for V, the copy of each
# travels under the other's product: V while S is made, the next K during the softmax and the product with V. Two
# barriers a step. With **two slots** both travel a whole step ahead, and one barrier is left.
#
# A small model, to see the difference: a copy of a tile takes 1.3 units of time (one after the other, if several are
# under way), the product of Q and K takes 1, the softmax and the product with V take 1.6.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def schedule(slots: int, steps: int, copy: float, qk: float, pv: float) -> tuple[list, float]:
    """Bars (what, lane, start, length) of the two schedules, and how long a step takes once it runs."""
    bars, free, now, arrived, ends = [], 0.0, 0.0, {}, []

    def start_copy(name):
        nonlocal free
        begin = max(free, now)
        free = begin + copy
        arrived[name] = free
        bars.append((name, 1, begin, copy))

    def wait_for(*names):
        nonlocal now
        there = max([now, *(arrived[name] for name in names)])
        if there > now:
            bars.append(("", 2, now, there - now))
        now = there

    def product(name, length):
        nonlocal now
        bars.append((name, 0, now, length))
        now += length

    start_copy("K0")
    if slots == 2:
        start_copy("V0")
    for j in range(steps):
        wait_for(*([f"K{j}"] if slots == 1 else [f"K{j}", f"V{j}"]))
        if slots == 2 and j + 1 < steps:
            start_copy(f"K{j + 1}")
            start_copy(f"V{j + 1}")
        if slots == 1:
            start_copy(f"V{j}")
        product(f"S{j}", qk)
        if slots == 1:
            wait_for(f"V{j}")
            if j + 1 < steps:
                start_copy(f"K{j + 1}")
        product(f"P{j} V{j}", pv)
        ends.append(now)
    return bars, ends[-1] - ends[-2]


figure, axes = plt.subplots(2, 1, figsize=(12.5, 3.6), sharex=True)
for ax, slots in zip(axes, (1, 2), strict=True):
    bars, a_step = schedule(slots, 6, 1.3, 1.0, 1.6)
    for name, lane, start, length in bars:
        color = {0: BLUE if name.startswith("S") else GREEN, 1: ORANGE, 2: "#f4c7b5"}[lane]
        ax.barh(min(lane, 1) if lane < 2 else 0, length, left=start, color=color, edgecolor="white", height=0.8)
        ax.text(start + length / 2, lane % 2, name, ha="center", va="center", fontsize=8, color="white")
    ax.set_yticks([0, 1], ["threads", "copies"])
    ax.invert_yaxis()
    ax.set_title(f"{'one slot' if slots == 1 else 'two slots'}: a step takes {a_step:.1f}, 2.6 of it products")
axes[1].set_xlabel("time; pale: threads wait")
plt.show()

# %% [markdown]
# One slot leaves no slack: each copy must fit under *one* product, and V's, under the shorter one, does not. Two slots
# let both copies share the whole step. They begin later, and cost the shared memory for K and V a second time; and
# blocks of one slot that lie side by side on a multiprocessor hide each other's waits as well. Which is better depends
# on D and on the machine; `tiles_for` holds what was measured.
#
# ### Base 2, and a maximum that is rounded once
#
# The hardware has $2^x$, not $e^x$. So exponents are scaled by $f = \log_2 e / \sqrt D$ and the weight of a key is
# $2^{s f - m}$: one fused multiply-add and one exponential, where $m$ is the running maximum of $s f$.
#
# Now take scores near $10^5$, which the conventions of this project allow. Neighbouring float32 numbers are $2^{-6}$
# apart there (in base 2, $1.4\cdot10^5$). A product that is rounded can be wrong by half of that, and $2^{0.0078}$ is
# 0.5 % too much weight. Three ways to write the same formula:


# %%
def weights(s: np.ndarray, f: np.float32, block: int, how: str) -> np.ndarray:
    """``s [N]`` float32 -> the weights of a row, block by block in float32; each is carried along as acc would be."""
    m, p = np.float32(-np.inf), np.zeros(0)
    for part in np.split(s, len(s) // block):
        if how == "products rounded":  # s f and m f, one at a time
            m_next = max(m, part.max())
            alpha = np.exp2(np.float32(m * f) - np.float32(m_next * f))
            new = np.exp2(part * f - np.float32(m_next * f))
        elif how == "alpha from other roundings":  # fused, but alpha takes the difference first
            m_next = max(m, part.max())
            alpha = np.exp2(np.float32((m - m_next) * f))
            new = np.exp2((part.astype(float) * f - np.float32(m_next * f)).astype(np.float32))
        else:  # m is rounded, and then it is what it is
            m_next = max(m, np.float32(part.max() * f))
            alpha = np.exp2(np.float32(m - m_next))
            new = np.exp2((part.astype(float) * f - m_next).astype(np.float32))
        m, p = m_next, np.concatenate([p * (alpha if len(p) else 0), new.astype(float)])
    return p / p.sum()


rng = np.random.default_rng(0)
rows = []
for size in (1e1, 1e3, 1e5):
    s = (size + np.linspace(0, 3, 256) + rng.uniform(0, 3, 256)).astype(np.float32)  # the maximum grows
    ideal = np.exp(s.astype(float) - s.max())
    ideal /= ideal.sum()
    ways = ("products rounded", "alpha from other roundings", "rounded once")
    f = np.float32(np.log2(np.e))
    rows.append((f"{size:g}", *(f"{np.abs(weights(s, f, 32, how) / ideal - 1).max():.1e}" for how in ways)))
lesson.table(("scores near", *ways), rows, "Largest relative error of a weight.")

# %% [markdown]
# In the first way each key has an error of its own. In the second, keys of one block are right beside each other, but
# blocks are not. In the third $m$ is not the exact maximum either; but the *same* $m$ stands in every weight, in $l$,
# in $\alpha$ and in the LSE, so its error cancels. That is the comment in the kernel: the running maximum of $s f$,
# rounded once. (`simt` subtracts first and multiplies then, which is also right, for one instruction more an element.)
#
# ### split: when queries are few
#
# A model that writes text asks one query at a time, of each head, before all keys so far. Then one block of threads has
# one row, and walks along thousands of keys alone.
#
# **Predict.** 8 heads of keys and values, 64 query heads, 8192 keys, an H200 with 132 multiprocessors. How many of them
# have work, with a block for each head of keys?

# %%
decode = heads.Shape("float16", 1, 64, 8, 1, 8192, 128, multiprocessors=132)
plan = plan_split(decode)
parts, units = plan.scratch["m_parts"][0], decode.kv_heads
few = split_tiles(decode.d, decode.group)
key_steps = -(-decode.n // (few.bn * few.teams))
each = -(-key_steps // parts)
print(f"{units} blocks of {key_steps} steps without a split; {units * parts} of {each} steps with {parts} parts")


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def draw_multiprocessors(ax, blocks: int) -> None:
    """132 squares, darker for more blocks."""
    held = np.full(12 * 11, blocks // 132)
    held[: blocks % 132] += 1
    ax.imshow(held.reshape(11, 12), cmap="Blues", vmin=0, vmax=2, aspect="equal")
    ax.set_xticks(np.arange(-0.5, 12), [])
    ax.set_yticks(np.arange(-0.5, 11), [])
    ax.grid(color="white", lw=2)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title(f"{blocks} blocks: {(held > 0).sum()} of 132 busy")


figure, (alone, cut, curve) = plt.subplots(1, 3, figsize=(13, 3.8), width_ratios=(1, 1, 1.5))
draw_multiprocessors(alone, units)
draw_multiprocessors(cut, units * parts)
tried = np.arange(1, key_steps + 1)
steps_each = np.ceil(units * tried / 132) * (np.ceil(key_steps / tried) + 1)  # 1 for what a part leaves
curve.plot(tried, steps_each, color=BLUE, lw=1.5)
curve.plot(parts, steps_each[parts - 1], "o", color=RED, label=f"chosen: {parts} parts")
curve.set(xscale="log", yscale="log", xlabel="parts", ylabel="steps")
curve.set_title("steps of the busiest multiprocessor")
curve.set_xticks((1, 4, 16, 64, 256), (1, 4, 16, 64, 256))
curve.set_yticks((4, 8, 16, 32, 64), (4, 8, 16, 32, 64))
curve.minorticks_off()
curve.legend()
plt.show()

# %% [markdown]
# Eight of 132, and each reads keys at the speed of one multiprocessor. Cut into parts, nearly all have work; the plan
# takes as many as give each one block, which fills its shared memory. A block has four warps, and a step is a tile of
# keys for each of them: no warp waits for another, and two tiles of all four, 128 KB, are on their way at any time.
# What a part leaves is an unfinished state $(m, l, a)$ a row, in float32: its warps' states are merged in shared
# memory, and a second kernel merges those of the parts. Query heads that share a head of keys are rows of one tile, so
# that keys are read once for all eight.
#
# Flash decoding, where this comes from, passes on the finished $O_s$ and $\operatorname{lse}_s$ of each part. A float32
# lse of $10^5$ has lost what tells parts apart, for the reason above; $m$ and $l$ apart have not. The merge itself is
# your first exercise.
#
# ### wgmma: warps with roles
#
# `mma` leaves three things on the table on Hopper. Its threads load every operand into registers, and compute addresses
# for that. Each warp has its softmax after its own product, while tensor cores wait unless another warp happens to
# multiply. And `mma.sync` reaches about 0.6 of what the tensor cores can do. The last kernel of this stage is
# FlashAttention-3's: four warps together, a *warpgroup*, multiply 64 rows by operands that stay in shared memory; the
# copy engine brings them; and warpgroups have roles.
#
#     warpgroup 0    producer     one thread orders Q, and tiles of K and V, slot by slot
#     warpgroups 1.. consumers    64 rows each, in turn: S_j and P V_j-1 are started, then S_j becomes weights
#
# **Predict.** A consumer's product $S_j$ takes about 512 cycles, its product with V as many, its softmax about 1100.
# Two consumers share the tensor cores. What share of the time are these busy if each consumer waits for its own
# products, and what if the softmax of one runs beside the products of the other, and beside its own product with V?

# %%
product, softmax = 512, 1100
apart, beside = 2 * 2 * product / (2 * (2 * product + softmax)), 2 * 2 * product / max(4 * product, product + softmax)
print(f"busy {apart:.0%} of the time one after the other, {beside:.0%} beside one another at best")

# %% [markdown]
# What waits for what is then the whole kernel. A step of a consumer, in the order in which it starts things:

# %%
wide = SpecialisedTiles(64, 64)
step = make_take_step(wide, "float16", make_ring(wide, False), make_consumer_steps(wide, "float16"), False)
lesson.show_source(step)

# %% [markdown]
# `begin` waits for K and for the consumer's turn, a named barrier that the other consumer opens when its two products
# have been started. `look` lets K's slot go; `weigh` makes weights in place, as P of the step before is still an
# operand of the product that runs. Registers of a consumer's thread, beside what the producer gives up:

# %%
lesson.table(
    ("D", "rows x keys", "consumers", "O, S and P", "registers", "KB of shared memory"),
    [
        (d, f"{t.bm} x {t.bn}", t.consumers, t.operands, t.registers, round(t.shared / 1024))
        for d in (64, 128, 256)
        for t in (specialised_tiles(d, 4096),)
    ],
)

# %% [markdown]
# One block fills a multiprocessor, so nobody else works while a block begins and ends. Therefore blocks stay: as many
# as multiprocessors, and each goes from one tile of rows to the next, under a causal mask in pairs of equal work.
# Copies for the next tile travel while O of this one is divided and written. (With D = 256 there is no room for O
# beside Q: under a causal mask each tile of rows has a block of its own.)
#
# **Predict.** Where does that help more, with 1024 tokens or with 16384?

# %%
lesson.table(
    ("1024 tokens, D", "mask", "a block for each tile of rows", "blocks that stay"),
    [(128, "all", 469, 512), (64, "all", 363, 392), (64, "causal", 215, 245)],
    "TFLOP/s of an H200, measured by hand in one run.",
)

# %% [markdown]
# With 1024 keys a tile of rows is soon done, so its beginning and end weigh much; with 16384 it was 1 to 3 %. Fewer
# than 512 keys with D up to 64 are still left to `mma`, and fewer than 2048 with D up to 32: a block has 192 rows
# there.
#
# ## On real data
#
# Each kernel on one head of the real data (on a GPU, on all 36), judged by a softmax of all scores in float64. The
# budget is twice what the same mathematics loses with float32 inside and P and O rounded to float16.

# %%
with lesson.timed(f"all on the {machine}"):
    results = [
        measure(stage, rung, case, machine)
        for case in stage.cases(machine, False)
        for rung in stage.rungs
        if rung.takes(case)
    ]
lesson.table(
    ("kernel", "machine", "queries x keys x D", "largest error", "budget", "verdict"),
    [(r.rung.name, r.machine, r.case.size, r.comparison.error, r.comparison.budget, r.verdict) for r in results],
)

# %%
stage.draw(results)

# %% [markdown]
# `flashnumba.attention(q, k, v, causal=True)` chooses among these kernels by the shape. It can return the LSE as well,
# which has a budget of its own, much smaller, as nothing in it is rounded to 16 bits:

# %%
few_queries = q[360:380]
_, lse = heads.forward(few_queries, k, v, plans()["mma"], causal=True, machine=machine)
_, ideal = reference.dense(few_queries, k, v, causal=True)
_, low = reference.low_precision(few_queries, k, v, causal=True)
print(compare(lse, ideal, low))

# %% [markdown]
# ## Who reads what
#
# ### Bytes by count
#
# S is gone, but K and V are read by every tile of rows. **Predict.** 90 queries, 200 keys of 32 float16 numbers, tiles
# of 32 queries: how many bytes does `mma` move, and how many of these are K and V? And if it is causal?


# %%
def emulate(made, tiles, q, k, v, *, causal=False, scale=None, **options):
    """One head through one kernel on the emulator: (o, lse) and the report."""
    shape = (1, 1, *q.shape)
    q, k, v = (x[None, None] for x in (q, k, v))
    o, lse = np.full(shape, np.nan, q.dtype), np.full(shape[:3], np.nan, np.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    args = (q, k, v, o, lse, np.float32(scale), np.int32(causal))
    blocks = -(-q.shape[2] // tiles.bm)
    report = launch(made, blocks, tiles.threads, args, shared=tiles.shared, **options)
    return (o[0, 0], lse[0, 0]), report


def emulate_roles(tiles, q, k, v, broken=""):
    """The same of the kernel of warpgroups, which gets tensor maps."""
    made = make_wgmma(tiles, "float16", broken=broken)
    blocks, o = -(-len(q) // tiles.bm), np.full((1, 1, *q.shape), np.nan, q.dtype)
    arrays = {name: np.ascontiguousarray(x)[None, None] for name, x in zip("qkv", (q, k, v), strict=True)} | {"o": o}
    lse = np.full((1, 1, len(q)), np.nan, np.float32)
    maps = heads.maps_for(heads.Launch(made, blocks, tiles.threads, boxes=tiles.boxes), arrays, "float16")
    args = (arrays["q"], arrays["k"], lse, np.float32(q.shape[-1] ** -0.5), np.int32(0), *maps.values())
    launch(made, blocks, tiles.threads, args, shared=tiles.shared)
    return o[0, 0], lse[0, 0]


small = AttentionTiles(32, 32, 32, warps=2)
small_mma = make_mma(small, "float16")
rows = []
for causal in (False, True):
    _, report = emulate(small_mma, small, q[:90], k[:200], v[:200], causal=causal)
    shape = heads.Shape("float16", 1, 1, 1, 90, 200, 32, causal)
    moved = count.fused(shape, small.bm, small.bn)
    rows.append(("causal" if causal else "all", report.loaded + report.stored, moved.total, moved.once, moved.again))
lesson.table(("mask", "counted by the emulator", "by formula", "each once", "K and V again"), rows)

# %% [markdown]
# Counted and computed agree to the byte. Larger tiles of rows read K and V less often. At a real size:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12.5, 3.2))
for ax, causal in zip(axes, (False, True), strict=True):
    shape = heads.Shape("float16", 1, 1, 1, 4096, 4096, 64, causal)
    functions = {"not fused": count.unfused, "simt": moved_by_simt, "mma": moved_by_mma, "least": count.floor}
    panels.draw_bytes(ax, {name: function(shape) for name, function in functions.items()})
    ax.set_title(f"one head of 4096 x 4096 x 64{', causal' if causal else ''}")
axes[1].get_legend().remove()
plt.show()

# %% [markdown]
# And most of what is left costs no device memory: the blocks of a head run at about the same time and read the same K
# and V, 1 MB, which the L2 cache holds. S of several heads, 32 MB each, it would not hold.
#
# ### The floor
#
# Is attention limited by memory, then? Two products of $2 M N D$ operations each, over at least $Q$, $K$, $V$ and $O$:

# %%
PEAK, BANDWIDTH = 989e12, 4.25e12  # an H200's tensor cores, dense float16, by its data sheet; a copy, measured
rows = []
for m, n in ((4096, 4096), (512, 512), (1, 8192)):
    shape = heads.Shape("float16", 1, 1, 1, m, n, 64)
    operations = 4 * m * n * 64
    nbytes = {"fused": count.floor(shape).total, "not fused": count.unfused(shape).total}
    for name, size in nbytes.items():
        limit = "arithmetic" if operations / PEAK > size / BANDWIDTH else "memory"
        rows.append((f"{m} x {n} x 64", name, f"{operations / size:.0f}", limit))
note = f"An H200 does {PEAK / BANDWIDTH:.0f} operations in the time of a byte (206 with the data sheet's 4.8 TB/s)."
lesson.table(("one head", "", "operations a byte", "limited by"), rows, note)

# %% [markdown]
# That is the whole case for FlashAttention: fused, attention is limited by arithmetic, and may use what tensor cores
# give. Decoding stays limited by memory whatever one does, as each key is used for one query; there, only the number of
# multiprocessors that read matters.
#
# What was measured on an H200, beside torch's FlashAttention-2 and cuDNN (columns of all heads together 2048; half of
# the operations are counted under a causal mask):

# %%
held = lesson.results("attention")
rows = []
for size in held["sizes"] if held else ():
    for one in size["measured"]:
        if size["n"] == 4096 and one["name"] in ("wgmma", "mma") and one["seconds"]:
            of = ("-" if one[peer] is None else f"{one[peer]:.2f}" for peer in ("of_fa2", "of_cudnn"))
            rate = f"{one['flops_per_second'] / 1e12:.0f}"
            rows.append((size["d"], "causal" if size["causal"] else "all", one["name"], rate, *of))
lesson.table(("4096 tokens, D", "mask", "kernel", "TFLOP/s", "times FlashAttention-2", "times cuDNN"), rows)

# %% [markdown]
# `mma` has about a third of the peak: 1.03 to 1.13 times as much as FlashAttention-2, which is built from the same
# instructions, and less than cuDNN, which has `wgmma` (lesson 3). Our kernel with `wgmma` has 0.40 to 0.62 of the peak,
# 1.02 to 1.17 of cuDNN's speed in this run. On this computer's GPU, if it has one:

# %%
if machine == "cuda":
    from flashnumba.bench.timing import time_gpu

    wide, rows = (2, 16, 4096, 128), []
    there = [cuda.to_device(rng.standard_normal(wide, np.float32).astype(np.float16)) for _ in range(3)]
    for causal in (False, True):
        operations = 4 * math.prod(wide) * wide[2] / (2 if causal else 1)
        for name in ("simt", "mma"):
            seconds = time_gpu(lambda name=name, causal=causal: heads.forward(*there, plans()[name], causal=causal))
            rate = f"{operations / seconds / 1e12:.0f}"
            rows.append((name, "causal" if causal else "all", f"{seconds * 1e3:.2f}", rate))
    print(lesson.table((f"{wide} float16", "mask", "ms", "TFLOP/s"), rows))
else:
    print("no GPU here")

# %% [markdown]
# ### Registers and shared memory
#
# What a block takes, and how many a multiprocessor of an H200 holds:

# %%
names = ["simt float16 d 128 by 16 bytes, sm_90 on", "mma float16 d 64, tiles for sm_90a"]
names += ["mma float16 d 128, tiles for sm_90a", "split float16 d 128 8 rows, for sm_90a"]
found = {name: lesson.resources(f"flash_forward.{name}") for name in names}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
budgets = {n: budget("90", threads=r.threads, registers=r.registers, shared=r.shared) for n, (r, _) in found.items()}
lesson.table(
    ("kernel", "threads", "registers a thread", "shared, KB", "spilled bytes", "blocks", "limit", "warp slots"),
    [
        (
            name.split(",")[0], r.threads, r.registers, f"{r.shared / 1024:.0f}", r.spills, b.blocks,
            ", ".join(b.limited_by), f"{b.occupancy:.0%}",
        )
        for (name, (r, _)), b in zip(found.items(), budgets.values(), strict=True)
    ],
)  # fmt: skip

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12, 3.2))
figure.get_layout_engine().set(wspace=0.06)
chosen = ["simt float16 d 128 by 16 bytes, sm_90 on", "mma float16 d 128, tiles for sm_90a"]
draw_budget([budgets[name] for name in chosen], axes)
for ax, name in zip(axes, chosen, strict=True):
    ax.set_title(f"{name.split(',')[0]}\n{ax.get_title(loc='left')}", fontsize=10)
axes[1].set_yticklabels([])
plt.show()

# %% [markdown]
# Occupancy is low, and meant to be. For D = 128 a thread of `mma` holds 128 numbers of O and 64 of S: what is in
# registers is not read again. Few warps are enough where each has much to do between two waits.
#
# ## Break it
#
# ### No wait
#
# The barrier is there, but nobody waits for the copies.
#
# **Predict.** On a GPU, what would you see, with 90 queries and 200 keys?

# %% tags=["break-it"]
x, y, z = q[:90], k[:200], v[:200]
try:
    emulate(make_mma(small, "float16", broken="wait"), small, x, y, z)
except Fault as fault:
    print(fault)

# %% [markdown]
# On a GPU, most of the time, the right result: the copies are quick and the first product is late. Until the machine is
# busy. The emulator lets copies arrive as late as they are allowed to, so the read is always caught. Without the
# barrier:

# %% tags=["break-it"]
try:
    emulate(make_mma(small, "float16", broken="barrier"), small, x, y, z)
except Fault as fault:
    print(fault)

# %% [markdown]
# `simt` has no copies of that kind: its threads load into registers and store to shared memory. There the barrier after
# the store is what can be forgotten.

# %% tags=["break-it"]
few_rows = Tiles(32, bm=8, bn=32, bk=8, rows=2)
try:
    emulate(make_simt(few_rows, "float16", broken="k_ready"), few_rows, x[:8], y[:64], z[:64])
except Fault as fault:
    print(fault)

# %% [markdown]
# Warps with roles have more to forget. A consumer that lets V's slot go as soon as it has started the product, and one
# that does not wait for its turn's products before it packs P:

# %% tags=["break-it"]
for broken in ("release", "pv_wait"):
    try:
        emulate_roles(wide, x, y, z, broken)
    except Fault as fault:
        print(f"{broken}: {fault}")

# %% [markdown]
# ### No rescale
#
# Leave out the multiplication of `acc` by $\alpha$.
#
# **Predict.** Which of the two judges will notice, the emulator or the comparison?


# %% tags=["break-it"]
def judged(made, tiles, q, k, v, **options):
    (o, _), _ = emulate(made, tiles, q, k, v, checks=False, **options)
    ideal, low = (f(q, k, v)[0] for f in (reference.dense, reference.low_precision))
    print(f"{made.__name__.split('.')[-1]}: {compare(o, ideal, low)}")


judged(make_mma(small, "float16", broken="rescale"), small, x, y, z)
judged(make_simt(few_rows, "float16", broken="rescale"), few_rows, x[64:72], y[:96], z[:96])

# %% [markdown]
# All accesses are in order; the arithmetic is wrong, so only the comparison sees it. As in lesson 2 it needs data in
# which the maximum grows.
#
# ### No mask at the end
#
# 200 keys do not fill seven tiles of 32. The last tile's missing keys are zeros in shared memory, so their scores are
# 0, and a kernel that forgets to mask them gives each the weight $e^{0 - m}$. Two real heads:

# %% tags=["break-it"]
for head in (2, 6):
    x, y, z = data.q[0, head, :32], data.k[0, head, :200], data.v[0, head, :200]
    largest = (x.astype(float) @ y.astype(float).T / math.sqrt(32)).max(1)
    print(f"head {head}: the rows' largest scores are {largest.min():.1f} to {largest.max():.1f}")
    judged(make_mma(small, "float16", broken="tail"), small, x, y, z)
    judged(make_simt(few_rows, "float16", broken="tail"), few_rows, x[:8], y, z)

# %% [markdown]
# In head 2 scores are large, $e^{-m}$ is nothing, and the wrong kernel passes. In head 6 they are small, and it is
# caught. A test with one kind of data would have told you that the kernel is right. So tests here use many: heads of
# all kinds, scores of $10^5$, scores of $-10^5$, all keys alike.
#
# ### A maximum rounded twice
#
# The first of the three ways above, planted in `simt`: multiply by $\log_2 e$ before the difference is taken.

# %% tags=["break-it"]
large = np.zeros((3, 64, 32), np.float32)  # q, k, v: scores of 102400 and a little more
large[0, :, :2] = 320, 1
large[1, :, 0] = 320
large[1, :, 1] = 0.5 * (np.arange(64) % 11)
large[2] = rng.standard_normal((64, 32))
x, y, z = large
for broken in ("", "product"):
    (o, _), _ = emulate(make_simt(few_rows, "float32", broken=broken), few_rows, x[:8], y, z, scale=1.0, checks=False)
    low = reference.low_precision(x[:8], y, z, 1.0)[0]
    print(f"{broken or 'whole'}: {compare(o, reference.dense(x[:8], y, z, 1.0)[0], low)}")

# %% [markdown]
# ## Exercises
#
# ### 1. The merge of split-KV
#
# Each part leaves $(m_s, l_s, a_s)$ of a row. Write what makes them one row: $M = \max_s m_s$, every part in units of
# $e^M$, then the quotient and the LSE. A part may have seen nothing: $m_s = -\infty$, $l_s = 0$, $a_s = 0$. All parts
# may have: then $O = 0$ and $\operatorname{lse} = -\infty$, and no NaN or warning on the way.


# %%
def merge_parts(m: np.ndarray, l: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, float]:
    """``m``, ``l`` ``[S]`` and ``a`` ``[S, D]`` -> (o ``[D]``, lse)."""
    # your code


# %% tags=["exercise"]
def merge_is_right() -> bool:
    row = q[query : query + 1]
    cuts = [0, 0, 64, 100, 350, 512]  # the first part is empty
    parts = [reference.empty((1, 32))] * 5
    for i, (a, b) in enumerate(pairwise(cuts)):
        for parts[i] in reference.blocked(row, k[a:b], v[a:b]):
            pass
    m, l, acc = (np.stack([part[i][0] for part in parts]) for i in range(3))
    with np.errstate(all="raise", under="ignore"):
        o, lse = merge_parts(m, l, acc)
        nothing, no_lse = merge_parts(m[:1], l[:1], acc[:1])
    o_ref, lse_ref = reference.dense(row, k, v)
    right = np.allclose(o, o_ref[0], rtol=1e-12) and math.isclose(lse, lse_ref[0], rel_tol=1e-12)
    return bool(right and (nothing == 0).all() and no_lse == -np.inf)


lesson.check("merge_parts", merge_is_right, "A weight is exp(m_s - M) where l_s > 0, else 0; divide once, at the end.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def merge_parts(m: np.ndarray, l: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, float]:
    top = m.max()
    if top == -np.inf:
        return np.zeros(a.shape[1]), -np.inf
    weight = np.exp(m - top)
    total = (weight * l).sum()
    return (weight[:, None] * a).sum(0) / total, top + np.log(total)


lesson.check("merge_parts", merge_is_right)

# %% [markdown]
# ### 2. A kernel: FlashAttention in one warp
#
# One warp a query, D = 32: lane $c$ has column $c$ of the query, of every key, of every value, and of `acc`. A score is
# the sum over the lanes of $q_c k_{jc}$. Walk along the keys, **one at a time**, with $(m, l, acc)$, and read each key
# and value once. `over_sum` is the sum over the warp, in every lane; `rescale(m_from, m_to)` is $\alpha$, and
# `exponential(s, anchor(m))` is $e^{s - m}$.

# %%
over_sum = reduce.lanes_sum()
rescale, exponential, anchor = online.rescale, online.exponential, online.anchor


@kernel(threads=32)
def one_warp(q, k, v, o, lse, scale):
    """``q [M, 32]``, ``k``, ``v [N, 32]`` float16; ``o [M, 32]``, ``lse [M]`` float32; one warp a query."""
    row, lane, keys = cuda.blockIdx.x, cuda.threadIdx.x, k.shape[0]
    # your code


# %% tags=["exercise"]
def one_warp_is_right() -> bool:
    some = q[query : query + 3], k[250:330], v[250:330]
    o, lse = np.full((3, 32), np.nan, np.float32), np.full(3, np.nan, np.float32)
    report = launch(one_warp, 3, 32, (*some, o, lse, np.float32(32**-0.5)))
    for got, expected in zip((o, lse), reference.dense(*some), strict=True):
        if not np.allclose(got, expected, rtol=1e-5, atol=1e-5):
            return False
    least = some[0].nbytes + 3 * (some[1].nbytes + some[2].nbytes)
    if report.loaded > least:
        print(f"right, but {report.loaded} bytes were read where {least} are enough")
    return report.loaded == least


lesson.check("one_warp", one_warp_is_right, "s = over_sum(float32(q[row, lane]) * float32(k[j, lane])) * scale")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
@kernel(threads=32)
def one_warp(q, k, v, o, lse, scale):
    row, lane, keys = cuda.blockIdx.x, cuda.threadIdx.x, k.shape[0]
    mine = float32(q[row, lane])
    m = float32(-math.inf)
    l = float32(0)
    acc = float32(0)
    for j in range(keys):
        s = over_sum(mine * float32(k[j, lane])) * scale
        larger = max(m, s)
        alpha = rescale(m, larger)
        p = exponential(s, anchor(larger))
        l = l * alpha + p
        acc = acc * alpha + p * float32(v[j, lane])
        m = larger
    o[row, lane] = acc / l
    if lane == 0:
        lse[row] = m + math.log(l)


lesson.check("one_warp", one_warp_is_right)

# %% [markdown]
# Twelve lines, and attention of any length in a few registers. It is also slow: every key is read for every query, and
# five exchanges serve one score. All the rest of this lesson is about reading a key for 128 queries.
#
# ## Two machines, side by side
#
# The notes that this project began with are about a Hygon DCU. Its matrix instruction makes a $16 \times 16$ result
# from waves of 64 lanes; lane $l$ holds of it row $l \bmod 16$ and columns $\lfloor l/16 \rfloor + 4v$ in register $v$,
# but must bring of an operand row $l \bmod 16$ and columns $4 \lfloor l/16 \rfloor + v$.

# %%
lane, v_ = np.mgrid[:64, :4]
owner = np.full((2, 16, 16), -1)
owner[0, lane % 16, lane // 16 + 4 * v_] = lane
owner[1, lane % 16, 4 * (lane // 16) + v_] = lane
moved = int((owner[0] != owner[1]).sum())
pair = [machine_of("90"), NOTES]
lesson.table(
    ("", "NVIDIA sm_90 (mma.sync)", "the notes' machine (mmac)"),
    [
        ("lanes that hold a piece of 16 x 16 scores", 32, 64),
        ("of its 256 numbers, in another lane than P needs them", int((owner_s != owner_p).sum()), moved),
        ("lanes that share a row: exchanges for its maximum", "4: 2", "4: 2"),
        ("registers of a multiprocessor, KB", *(4 * m.registers // 1024 for m in pair)),
        ("shared memory (LDS) of it, KB", *(m.shared // 1024 for m in pair)),
        ("largest block, KB of shared memory", *(m.block_shared // 1024 for m in pair)),
        ("tiles of 64 x 128 halves in that, 16 KB each", *(m.block_shared // (16 * 1024) for m in pair)),
        ("the same, if three blocks are to fit", *(m.shared_within(3) // (16 * 1024) for m in pair)),
    ],
)

# %% [markdown]
# There, three quarters of P are in the wrong lane, so P must be exchanged, or the columns of K be dealt out so that the
# result falls right; the next stage has three ways. And with 21 KB of shared memory a block, whole tiles of K and V in
# two slots are out of the question: the notes cut them into quarters, which is the stage after that. An H200 has the
# shared memory and lacks the registers.
#
# ## Limits
#
# - What a query may not see has weight 0. But 0 times infinity or NaN in V is NaN, in tiles that are computed.
# - P is rounded to 16 bits before it meets V. That, with the rounding of O, is the whole error budget; float32 inputs
#   go to `simt`, which rounds neither.
# - The sums' order is fixed: the same bits each time. Another tile size gives other last bits.
# - Bytes were counted, not measured. Times on the emulator say nothing; the schedule above is a model.
# - Causal work is uneven: the last tiles of rows have the most. The longest start first here, or are paired with the
#   shortest where blocks stay; more is to be had.
#
# ## What next
#
# The preview above, that S's registers are P's operand, was luck. The next stage takes it apart: three ways out where
# it does not hold. Then come schedules with more slots, and triangles shared out evenly.

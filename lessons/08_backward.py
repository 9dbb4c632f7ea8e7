# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Backward: gradients through scores that were never stored
#
# The forward pass threw its scores away; that was its point. Training asks for the gradients of Q, K and V, and they go
# through every one of those scores. So they are computed again, tile by tile, from Q, K and one number a row. It takes
# five matrix products where the forward has two, and a decision: who adds up dQ?
#
# ## What you will be able to do
#
# - derive the five products, and the one number a row that normalising costs;
# - count what computing again takes, and what it saves: operations against bytes;
# - read the kernels that make dQ by rows, and dK and dV by keys;
# - say where atomics come from, what they save, and why the same call then gives other bits;
# - see each mistake of a backward pass by the gradient that it spoils.

# %%
import matplotlib.pyplot as plt
import numpy as np

from flashnumba import lesson
from flashnumba.compare import compare
from flashnumba.data import load_minilm
from flashnumba.ladder import find, measure
from flashnumba.machine.emulator import Fault, launch
from flashnumba.machine.function import kernel
from flashnumba.machine.instructions import shfl_xor
from flashnumba.machine.numba import cuda, float32
from flashnumba.machine.occupancy import NOTES, budget, machine_of
from flashnumba.stages import heads
from flashnumba.stages.backward import count, mma_dkdv, mma_keys, one_pass, reference, rows
from flashnumba.stages.backward.mma import launch_dkdv, launch_dq, plan_one_pass_with
from flashnumba.stages.backward.mma_dq import make_dq
from flashnumba.stages.backward.mma_tiles import Tiles, dkdv_tiles, dq_tiles, one_pass_tiles
from flashnumba.stages.backward.problem import Plan, rows_scratch
from flashnumba.stages.figures import BLUE, GREEN, ORANGE
from flashnumba.stages.flash_forward.reference import dense as attend

lesson.style()
stage = find("backward")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# $$S = \tfrac{1}{\sqrt D} Q K^T, \qquad P = \operatorname{softmax}(S), \qquad O = P V$$
#
# Some loss $\ell$ is made of $O$, and somebody gives us $dO = \partial \ell / \partial O$. Two of the three steps are
# products, and the chain rule of a product is two products:
#
# $$dV = P^T dO, \quad dP = dO\, V^T \qquad \text{and} \qquad dQ = \tfrac{1}{\sqrt D}\, dS\, K, \quad
# dK = \tfrac{1}{\sqrt D}\, dS^T Q.$$
#
# Between them lies the softmax. A weight $P_{ij} = e^{S_{ij}} / \sum_k e^{S_{ik}}$ falls when any other score of its
# row rises:
#
# $$\frac{\partial P_{ik}}{\partial S_{ij}} = P_{ik} (\delta_{kj} - P_{ij}) \quad\Rightarrow\quad
# dS_{ij} = P_{ij} \Big( dP_{ij} - \underbrace{\textstyle\sum_k P_{ik}\, dP_{ik}}_{\Delta_i} \Big).$$
#
# With $P$ made again from $Q$ and $K$ that is five products. **Predict.** What is the sum of a row of $dS$? And how
# large is $dS_{ij}$ where $P_{ij}$ is nearly 1?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
data = load_minilm()
q, k, v = (x[0, 2, 340:404].astype(np.float64) for x in (data.q, data.k, data.v))  # [64, 32] each
do = np.random.default_rng(0).normal(size=q.shape)
p = reference.weights(q @ k.T / np.sqrt(32))  # [64, 64]
dp = do @ v.T
ds = p * (dp - (p * dp).sum(1, keepdims=True))
figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
for ax, (name, x, colours) in zip(
    axes, (("P", p, "Blues"), ("dP", dp, "RdBu"), ("dS", ds, "RdBu")), strict=True
):  # fmt: skip
    most = np.abs(x).max()
    ax.imshow(x, cmap=colours, vmin=0 if name == "P" else -most, vmax=most)
    ax.set(title=f"{name}: a trained head, 64 tokens", xlabel="key", ylabel="query")
plt.show()
print(f"largest |sum of a row of dS|: {np.abs(ds.sum(1)).max():.1e}; largest |dS|: {np.abs(ds).max():.2f}")

# %% [markdown]
# Zero: adding one number to all scores of a row changes no weight. And small on both ends: a weight near 0 cannot fall,
# and one near 1 has nobody to take from. The gradient lives where attention is undecided.
#
# ### Two identities
#
# Neither $P$ nor $\Delta$ needs to be kept. The forward left $\text{lse}_i = \ln \sum_j e^{S_{ij}}$, so any tile of
# weights is one exponential away, $P_{ij} = e^{S_{ij} - \text{lse}_i}$, with no maximum to look for. And
#
# $$\Delta_i = \sum_j P_{ij} \,(dO_i \cdot V_j) = dO_i \cdot \sum_j P_{ij} V_j = dO_i \cdot O_i$$
#
# asks for two rows of $D$ numbers, not for two of $N$.

# %%
o = p @ v
print(f"largest difference: {np.abs((o * do).sum(1) - (p * dp).sum(1)).max():.1e}")

# %% [markdown]
# Whoever uses lse too, say to merge two attentions, gives its gradient as well. Since $\partial\, \text{lse}_i /
# \partial S_{ij} = P_{ij}$, it goes where $\Delta$ stands, with the other sign.
#
# ### What computing again costs, and saves
#
# A library of plain products keeps $P$ and reads it twice, writes $dP$ and $dS$, and reads them again. Computing $S$
# again is $2 M N D$ operations more, a quarter beside the four that are needed anyway.
#
# **Predict.** One head, 4096 tokens, $D = 128$, float16. How many MB does the plain way move, and how many the kernels
# that make P again?

# %%
lesson.show_source(count.unfused)

# %%
lesson.show_source(count.by_rows_and_keys)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def problem(n: int, d: int = 128, causal: bool = False) -> heads.Shape:
    """One head of n tokens."""
    return heads.Shape("float16", 1, 1, 1, n, n, d, causal)


def ways_of(d: int) -> dict:
    """Bytes moved, by way, for a problem of so many columns."""
    of_rows, of_keys, of_both = (f(d, "90a").own for f in (dq_tiles, dkdv_tiles, one_pass_tiles))
    return {
        "not fused": count.unfused,
        "by rows, then by keys": lambda shape: count.by_rows_and_keys(shape, of_rows, of_keys),
        "one pass, atomics": lambda shape: count.one_pass(shape, of_both),
    }


lengths = 2 ** np.arange(9, 16)
figure, axes = plt.subplots(1, 2, figsize=(13, 3.8))
for (name, way), colour in zip(ways_of(128).items(), (ORANGE, BLUE, GREEN), strict=True):
    moved = np.array([way(problem(int(n))) for n in lengths])
    axes[0].plot(lengths, moved / 2**20, "o-", color=colour, label=name)
    kept = {"not fused": 2 * lengths, "by rows, then by keys": 12}.get(name, 12 + 4 * 128) * lengths
    axes[1].plot(lengths, kept / 2**20, "o-", color=colour, label=name)
axes[0].set(title="bytes moved, no cache: one head, D = 128", ylabel="MB")
axes[1].set(title="memory beside inputs and results", ylabel="MB")
for ax in axes:
    ax.set(xscale="log", yscale="log", xlabel="tokens")
    ax.set_xticks(lengths, lengths)
    ax.minorticks_off()
    ax.legend()
plt.show()

# %% [markdown]
# Both grow with the square of the length, as every score is needed: what a block of threads reads again is rows of Q,
# of K. But rows come by tiles of 64 or 128, and a tile's bytes serve that many scores; a stored score serves once. And
# they lie in a cache: a head's K and V are 2 MB here, the scores 32. Memory tells the rest: three numbers a row, or P.
#
# **Predict.** An H200 computes up to 600 TFLOP/s with instructions of this kind and reads 4.8 TB/s. To read a weight of
# two bytes, or to compute it again from two rows of 64 numbers: which is quicker?

# %%
flops, bandwidth = 600e12, 4.8e12
table = []
for d in (64, 128, 256):
    again, read = 2 * d / flops, 2 / bandwidth
    table.append((d, f"{again * 1e12:.2f}", f"{read * 1e12:.2f}", f"{8 * 2 / bandwidth * 1e12:.2f}"))
lesson.table(
    ("D", "compute it again, ps", "read it, ps", "write and read P, dP and dS, ps"), table,
    "For each pair of query and key, at the GPU's peaks. The third: eight passes over two bytes, one the forward's.",
)  # fmt: skip

# %% [markdown]
# At $D = 64$ computing takes half as long as reading, at 128 as long. It is the writing and reading of all the rest
# that decides, and that P does not fit: at 32768 tokens one head's P is 2 GB. What was measured, beside torch:

# %%
measured = lesson.results("backward")
table = []
for size in measured["sizes"] if measured else ():
    by_name = {one["name"]: one for one in size["measured"]}
    cells = []
    for name in ("torch, FlashAttention-2", "torch, cuDNN", "mma", "one_pass"):
        one = by_name.get(name, {})
        cells.append(f"{one['flops_per_second'] / 1e12:.0f}" if one.get("seconds") else "-")
    extra = [by_name.get(name, {}).get("extra_bytes") for name in ("mma", "one_pass")]
    cells += ["-" if e is None else f"{e / 2**20:.1f}" for e in extra]
    about = f"{size['batch']} x {size['heads']} x {size['n']}{' causal' if size['causal'] else ''}"
    table.append((size["d"], about, *cells))
lesson.table(
    ("D", "B x H x N", "FA2", "cuDNN", "mma", "one_pass", "mma, extra MB", "one_pass, extra MB"), table,
    "TFLOP/s of five products, whatever a kernel makes again.",
)  # fmt: skip

# %% [markdown]
# ## The reference
#
# The definition, all scores at once, in float64:

# %%
lesson.show_source(reference.dense, first="q64, do64 =")

# %% [markdown]
# And block by block of keys, from what the forward left:

# %%
lesson.show_source(reference.blocked, first="for start in range(0, n, block):")

# %% [markdown]
# A gradient is easy to test: move one number and see what the loss does. Here the loss is
# $\ell = \sum dO \circ O + \sum d\text{lse} \circ \text{lse}$, causal, with more keys than rows.

# %%
rng = np.random.default_rng(1)
sizes = {"q": (5, 8), "k": (9, 8), "v": (9, 8)}
given = {name: rng.standard_normal(shape) for name, shape in sizes.items()}
do_small, dlse = rng.standard_normal((5, 8)), rng.standard_normal(5)


def loss(arrays: dict[str, np.ndarray]) -> float:
    """The loss of q, k and v."""
    o, lse = attend(*arrays.values(), causal=True)
    return float((o * do_small).sum() + (lse * dlse).sum())


found = reference.dense(*given.values(), do_small, causal=True, dlse=dlse)
for name, gradient in zip(given, found, strict=True):
    moved = np.zeros_like(gradient)
    for at in np.ndindex(gradient.shape):
        for sign in (1, -1):
            near = {x: a.copy() for x, a in given.items()}
            near[name][at] += sign * 1e-5
            moved[at] += sign * loss(near) / 2e-5
    print(f"d{name}: largest difference from finite differences {np.abs(moved - gradient).max():.1e}")

# %% [markdown]
# ## The kernels
#
# First a small one: each row's $\Delta$, minus dlse, by a few lanes. It also says how to make the row's weights again.
# Where lse is large, a float32 has too few digits for it, and the row asks its keys once more.

# %%
lesson.show_source(rows.make_rows("float16", 16, 8))

# %% [markdown]
# Then dQ, as the forward goes: a block has rows of Q and dO, and K and V pass by. Per tile of keys three products. What
# was P in the forward is dS here: it stays in registers, and is the operand of the next product as it lies.

# %%
of_rows = dq_tiles(128, "90a")
lesson.show_source(make_dq(of_rows, "float16"), first="for j in range")

# %% [markdown]
# dK and dV belong to keys. A block has rows of K and V, and Q and dO pass by: everything is transposed, $S^T = K Q^T$,
# so that $P^T$ and $dS^T$ again lie as the operands that they are next. Four products.

# %%
of_keys = dkdv_tiles(128, "80")
lesson.show_source(mma_dkdv.make_dkdv(of_keys, "float16"), part="body", first="while more:")

# %% [markdown]
# If several heads of Q read one head of K, their rows pass by one after the other, in the same block: the sum over the
# group costs nothing and has a fixed order.
#
# Three and four are seven, not five: S and dP are made twice. Five is possible. In the second kernel dS is there; all
# that is missing is $dQ \mathrel{+}= dS\,K$. But dQ's rows belong to nobody there. Every block of keys has a part of
# each, and they must be added up in memory:

# %%
lesson.show_source(mma_keys.make_add_dq(one_pass_tiles(128, "90a"), "float16", "80"))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12, 3.6))
grid = np.tril(np.ones((8, 8)))
for ax, (name, owner) in zip(
    axes, (("dQ by rows: a block adds along its row", np.arange(8)[:, None]),
           ("by keys: a block walks down, and adds to every dQ", np.arange(8)[None])), strict=True
):  # fmt: skip
    ax.imshow(np.where(grid > 0, owner + np.zeros((8, 8)), np.nan), cmap="tab10", vmin=0, vmax=9)
    ax.set(title=name, xlabel="tile of keys", ylabel="tile of rows")
plt.show()

# %% [markdown]
# That is where atomics come from. On the right eight blocks want to add to the last row tile, at times of their own.
# The buffer has to be float32, as a float16 sum of many parts would lose them; it has to be zero before, and is rounded
# after:

# %%
lesson.show_source(one_pass.make_finish(one_pass_tiles(128, "90a"), "float16"))

# %% [markdown]
# ### What repeatability costs
#
# Float addition is not associative. **Predict.** 64 parts of a dQ are added in 200 orders, in float32. How many
# different results does one element have? And after rounding to float16?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
q, k, v = (x[0, 2].astype(np.float64) for x in (data.q, data.k, data.v))  # [512, 32] each
do = np.random.default_rng(0).normal(size=q.shape)
p = reference.weights(q @ k.T / np.sqrt(32))
ds = p * (do @ v.T - (p * (do @ v.T)).sum(1, keepdims=True))
parts = np.stack([ds[:64, 8 * i : 8 * i + 8] @ k[8 * i : 8 * i + 8] for i in range(64)]).astype(np.float32)
orders = [np.random.default_rng(seed).permutation(64) for seed in range(200)]
sums = np.stack([np.add.accumulate(parts[order], 0)[-1] for order in orders])  # [200, 64, 32]
different = [np.array([len(np.unique(c)) for c in sums.astype(kind).reshape(200, -1).T]) for kind in ("f4", "f2")]
figure, ax = plt.subplots(figsize=(9, 3.4))
ax.hist(different, bins=np.arange(0.5, 32), label=["in float32", "rounded to float16"], color=[BLUE, ORANGE])
ax.set(xlabel="different results of one element of dQ, of 200 orders", ylabel="elements", title="a trained head")
ax.legend()
plt.show()
print(f"elements that do not always have the same bits in float16: {(different[1] > 1).mean():.1%}")

# %% [markdown]
# A dozen or two in float32; in float16 most are always the same, some are not. None of them is wrong. But a training
# run that is started twice goes two ways, and a fault that shows in one run of ten cannot be looked for. So the kernels
# that `attention_backward` takes by itself make two products again and add in a fixed order;
# `backend="backward.one_pass"` says in so many words that it does not.
#
# ### Registers
#
# dK and dV, S and dP: four accumulators at a time.

# %%
wanted = ("mma dq", "mma dk dv", "one_pass")
found = {name: lesson.resources(f"backward.{name} float16 d 128, tiles for sm_90a") for name in wanted}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
held = {n: budget("90", threads=r.threads, registers=r.registers, shared=r.shared) for n, (r, _) in found.items()}
lesson.table(
    ("kernel, D = 128", "threads", "registers a thread", "spilled bytes", "shared, KB", "blocks a multiprocessor"),
    [
        (name, r.threads, r.registers, r.spills, f"{r.shared / 1024:.0f}", held[name].blocks)
        for name, (r, _) in found.items()
    ],
)

# %% [markdown]
# All of them. With dK and dV both in a warp's registers, 16 keys are all it can have at $D = 128$, where the forward
# has 32 rows; and each tile of Q and dO is read from shared memory for those 16 alone. So there two warps share 32
# keys: each makes S and dP for half of a step's queries, one adds up dV and the other dK, and they exchange halves of P
# and dS.
#
# ## On real data
#
# Each kernel on one head of the real data (on a GPU, on all 36), judged by float64; dQ, dK and dV together.

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
# ## Who reads what
#
# **Predict.** One pass makes two products less. Does it also move less?

# %%
table = []
for n in (1024, 4096, 16384):
    for d in (64, 128):
        shape = problem(n, d)
        table.append((n, d, *(f"{way(shape) / 2**20:.0f}" for way in ways_of(d).values())))
lesson.table(("tokens", "D", *(f"{name}, MB" for name in ways_of(64))), table, "One head, no cache.")

# %% [markdown]
# No. An atomic addition reads and writes four bytes where a kernel by rows reads K and V once more, two bytes each.
# What it saves is work for the tensor cores. The additions happen in the L2 cache; as long as dQ's buffer fits there,
# or passes through it in order, they are cheap.
#
# Longer tiles of keys mean fewer blocks that add:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
own = np.array([16, 32, 64, 128, 256])
figure, ax = plt.subplots(figsize=(8.5, 3.6))
for d, colour in ((64, BLUE), (128, ORANGE)):
    shape = problem(4096, d)
    ax.plot(own, [count.one_pass(shape, int(o)) / 2**20 for o in own], "o-", color=colour, label=f"one pass, D = {d}")
    ax.plot(own, [count.by_rows_and_keys(shape, int(o), int(o)) / 2**20 for o in own], "s--", color=colour,
            label=f"by rows, then by keys, D = {d}")  # fmt: skip
ax.set(xscale="log", yscale="log", xlabel="keys (and rows) a block", ylabel="MB", title="4096 tokens, one head")
ax.set_xticks(own, own)
ax.minorticks_off()
ax.legend()
plt.show()

# %% [markdown]
# ## Break it
#
# Two heads of 40 queries read one head of 72 keys. Whatever goes wrong, ask which of the three gradients shows it.

# %%
small, both = Tiles(32, 32, 32, warps=2), Tiles(32, 32, 32, warps=2, results=2)
shape = heads.Shape("float16", 1, 2, 1, 40, 72, 32)
q, do = data.q[:1, 2:4, 340:380], np.random.default_rng(0).standard_normal((1, 2, 40, 32)).astype(np.float16)
k, v = (x[:1, 2:3, 320:392] for x in (data.k, data.v))  # [1, 1, 72, 32]
o64, lse64 = attend(q, k, v)
o, lse = o64.astype(np.float16), lse64.astype(np.float32)
exact, low = reference.dense(q, k, v, do), reference.low_precision(q, k, v, o, do, lse)


def go(plan: Plan) -> tuple[np.ndarray, ...]:
    """dq, dk and dv by a plan on the emulator; they and what lies between kernels begin as NaN."""
    known = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "dlse": lse, "scale": np.float32(32**-0.5)}
    known |= {"causal": np.int32(0), "has_dlse": np.int32(0)}
    known |= {f"d{name}": np.full_like(x, np.nan) for name, x in (("q", q), ("k", k), ("v", v))}
    known |= {name: np.full(size, np.nan, np.float32) for name, size in plan.scratch.items()}
    for one in plan.launches:
        launch(one.kernel, one.grid, one.threads, [known[a] for a in one.args], shared=one.shared)
    return known["dq"], known["dk"], known["dv"]


def apart(broken_dq: str = "", broken: str = "", with_rows: bool = True) -> Plan:
    """Rows, dQ, and dK with dV, with a fault in one of them."""
    first = (rows.launch_rows(shape, base2=True),) if with_rows else ()
    return Plan((*first, launch_dq(shape, small, broken=broken_dq), *launch_dkdv(shape, both, broken=broken)),
                rows_scratch(shape))  # fmt: skip


def judge(name: str, plan: Plan) -> None:
    """Print which gradients are right."""
    verdicts = [
        f"d{x} {'within' if compare(*each).ok else 'ABOVE'}"
        for x, *each in zip("qkv", go(plan), exact, low, strict=True)
    ]
    print(f"{name}: {', '.join(verdicts)}")


judge("whole", apart())

# %% [markdown]
# ### Delta forgotten, delta too early
#
# **Predict.** Without $\Delta$ in the kernel by keys: which gradients are wrong? And if the first launch, that makes
# $\Delta$, is left out?

# %% tags=["break-it"]
judge("no delta by keys", apart(broken="delta"))
judge("no delta by rows", apart(broken_dq="delta"))
judge("delta is read before it is there", apart(with_rows=False))

# %% [markdown]
# dV needs none. Too early, all are wrong: the same kernel that makes $\Delta$ also says how to make P.
#
# ### A head of the group left out, a scale forgotten

# %% tags=["break-it"]
judge("first head of the group alone", apart(broken="group"))
judge("no scale by keys", apart(broken="scale"))

# %% [markdown]
# ### dS read before it is there
#
# In one pass the warps exchange dS through shared memory, as each makes dQ for rows that others have weighed.

# %% tags=["break-it"]
together = Tiles(32, 32, 32, warps=2, results=2, exchange=True)
try:
    go(plan_one_pass_with(shape, together, broken="exchange"))
except Fault as fault:
    print(fault)

# %% [markdown]
# ### Sums that were never cleared
#
# Scratch memory is full of NaN here. On a GPU it is full of whatever was there, and often that is zero.

# %% tags=["break-it"]
judge("never cleared", plan_one_pass_with(shape, together, broken="clear"))
judge("cleared", plan_one_pass_with(shape, together))

# %% [markdown]
# ## Exercises
#
# ### 1. Many parts, one gradient
#
# Split-KV decoding makes `parts` results $(o_r, \text{lse}_r)$ and merges them: with $\text{lse} = \ln \sum_r
# e^{\text{lse}_r}$ and $w_r = e^{\text{lse}_r - \text{lse}}$, $o = \sum_r w_r o_r$. Given the gradient of $o$, return
# those of all $o_r$ and all $\text{lse}_r$.


# %%
def merged_backward(o: np.ndarray, lse: np.ndarray, do: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``o [R, D]``, ``lse [R]``, ``do [D]`` -> gradients of o and lse, of their shapes."""
    # your code


# %% tags=["exercise"]
def merged_backward_is_right() -> bool:
    rng = np.random.default_rng(3)
    o, lse, do = rng.standard_normal((4, 6)), rng.standard_normal(4), rng.standard_normal(6)

    def value(o: np.ndarray, lse: np.ndarray) -> float:
        w = np.exp(lse - np.logaddexp.reduce(lse))
        return float(w @ o @ do)

    got_o, got_lse = merged_backward(o, lse, do)
    for r in range(4):
        step = 1e-6 * (np.arange(4) == r)
        if abs((value(o, lse + step) - value(o, lse - step)) / 2e-6 - got_lse[r]) > 1e-6:
            return False
        if abs((value(o + step[:, None], lse) - value(o - step[:, None], lse)) / 2e-6 - got_o[r].sum()) > 1e-6:
            return False
    return True


lesson.check("merged_backward", merged_backward_is_right, "The weights are a softmax of lse; it has a delta too.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def merged_backward(o: np.ndarray, lse: np.ndarray, do: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    w = np.exp(lse - np.logaddexp.reduce(lse))
    each = o @ do  # dP of this softmax
    return w[:, None] * do, w * (each - w @ each)


lesson.check("merged_backward", merged_backward_is_right)

# %% [markdown]
# ### 2. A kernel for the softmax between the products
#
# `p` and `dp` are $[M, N]$; make `ds`. One warp a row, `N` any number; lane $l$ takes columns $l, l + 32, \dots$ The
# sum over a row needs all lanes: `shfl_xor` five times gives it to each.


# %%
@kernel(threads=32)
def softmax_backward(p, dp, ds):
    """``p``, ``dp``, ``ds`` ``[M, N]`` float32; a block of one warp for each row."""
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    # your code


# %% tags=["exercise"]
def softmax_backward_is_right() -> bool:
    rng = np.random.default_rng(4)
    for n in (5, 32, 77):
        p, dp = reference.weights(rng.standard_normal((3, n))), rng.standard_normal((3, n))
        ds = np.full((3, n), np.nan, np.float32)
        launch(softmax_backward, 3, 32, (p.astype(np.float32), dp.astype(np.float32), ds))
        if not np.allclose(ds, p * (dp - (p * dp).sum(1, keepdims=True)), atol=1e-5):
            return False
    return True


lesson.check("softmax_backward", softmax_backward_is_right, "Two loops over the row; between them the five shuffles.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
@kernel(threads=32)
def softmax_backward(p, dp, ds):
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    delta = float32(0)
    for column in range(lane, p.shape[1], 32):
        delta += p[row, column] * dp[row, column]
    for step in range(5):
        delta += shfl_xor(delta, 1 << step)
    for column in range(lane, p.shape[1], 32):
        ds[row, column] = p[row, column] * (dp[row, column] - delta)


lesson.check("softmax_backward", softmax_backward_is_right)

# %% [markdown]
# ## Two machines, side by side
#
# Accumulators decide. A block that makes dK and dV for 128 keys of $D = 128$ holds two matrices of $128 \times 128$
# float32, and S and dP of a step.

# %%
pair = [machine_of("90"), NOTES]
kept = 2 * 128 * 128
lesson.table(
    ("", "NVIDIA sm_90", "the notes' machine"),
    [
        ("registers of a multiprocessor", *(m.registers for m in pair)),
        ("lanes of a warp", *(m.warp for m in pair)),
        ("dK and dV of 128 keys, D = 128: registers", *([kept] * 2)),
        ("share of all registers", *(f"{kept / m.registers:.0%}" for m in pair)),
        ("the same a thread, 256 threads", *([kept // 256] * 2)),
        ("shared memory, KB", *(m.shared // 1024 for m in pair)),
        ("K and V of 128 keys, D = 128, float16: KB", *([128 * 128 * 4 // 1024] * 2)),
    ],
)

# %% [markdown]
# The notes' machine has three times the registers and a quarter of the shared memory. Accumulators would fit three
# times there; K and V alone fill its shared memory, and Q and dO would have to come in stages or go straight to
# registers. Here it is the other way round: tiles lie in shared memory twice, and registers are what runs out.
#
# ## Limits
#
# - A gradient of gradients is not here.
# - Products use `mma.sync`, with operands that a warp loads itself. Hopper's `wgmma` would be quicker, as it was for
#   the forward.
# - Scores beyond $10^7$ whose products are not exact in float32 give weights with errors, as in the forward.
# - Counting bytes without a cache says who *asks* for what. What comes from memory is less.
# - On the emulator blocks run one after the other, so its atomics always add in the same order.
#
# ## What next
#
# With gradients a model can be trained: `docs/how-to/train.md` trains a small transformer with this forward and this
# backward, beside torch's, and shows both curves.

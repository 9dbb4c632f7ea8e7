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
# # 11. FlashMLA: one latent row for all heads
#
# A model that writes text keeps, for each token so far, what later tokens attend to. Multi-head latent attention keeps
# one row of 576 numbers for all of 128 heads. This lesson shows why that is enough, what it makes of attention, and
# how a kernel reads each row once and uses it twice.
#
# ## What you will be able to do
#
# - count the bytes a token costs in MHA, GQA and MLA, and say what absorption does to a projection;
# - tell from heads and query tokens whether memory or products decide;
# - read a page table, and cut ragged requests into parts of equal work;
# - share S and O among warps when O is too wide for one of them;
# - merge parts, empty ones too, and recognise a part that was merged twice.

# %%
import matplotlib.pyplot as plt
import numpy as np

from flashnumba import lesson, mla
from flashnumba.compare import compare
from flashnumba.ladder import find, measure
from flashnumba.machine.emulator import Fault, launch
from flashnumba.stages.flash_mla import attend, attend_codes, codec, combine, load, mma, panels, reference
from flashnumba.stages.flash_mla.schedule import schedule
from flashnumba.stages.flash_mla.sizes import MLATiles
from flashnumba.stages.flash_mla.steps import make_steps

lesson.style()
stage = find("flash_mla")
machine = lesson.machine()
print(f"kernels run on: {machine}")

# %% [markdown]
# ## The idea
#
# ### Bytes a token
#
# **Predict.** A layer with 128 heads of 128 columns, in 16 bits: how many bytes of keys and values does a token leave?
# And how many, if all heads share a row of 512 + 64?

# %%
sizes = panels.bytes_a_token()
lesson.table(
    ("cache", "bytes a token and layer", "of MHA", "a request of 32768 tokens, MB"),
    [(name, n, f"{n / sizes[panels.CACHES[0]]:.1%}", f"{n * 32768 / 2**20:.0f}") for name, n in sizes.items()],
)

# %% [markdown]
# ### Why one row does for all heads
#
# The row is $[c \mid r]$: a latent part $c$ of 512 numbers, and a rotated key $r$ of 64. A head makes its own key and
# value of it, $k_h = [c\,W^{UK}_h \mid r]$ and $v_h = c\,W^{UV}_h$. Made for all tokens, these are the 65536 bytes
# again. But a score only asks for
#
# $$q_h \cdot (c\,W^{UK}_h) = (q_h {W^{UK}_h}^T) \cdot c, \qquad
# \sum_j p_j\,(c_j W^{UV}_h) = \Big(\sum_j p_j c_j\Big) W^{UV}_h.$$
#
# The projection moves from the keys, of which there are many, to the query and the result, of which there is one. What
# is left is attention of 128 rows of queries to *one* head, whose keys are 576 wide and whose values are the first
# 512 columns of the same rows.

# %%
lesson.show_source(reference.absorbed)

# %% tags=["hide-input"]
rng = np.random.default_rng(0)
heads, tokens, latent, rope, wide = 4, 9, 24, 8, 12
q_nope, q_rope = rng.standard_normal((3, heads, wide)), rng.standard_normal((3, heads, rope))
c, r = rng.standard_normal((tokens, latent)), rng.standard_normal((tokens, rope))
w_uk, w_uv = (rng.standard_normal((heads, latent, wide)) for _ in range(2))
given = (q_nope, q_rope, c, r, w_uk, w_uv, (wide + rope) ** -0.5, True)
by_heads, by_rows = reference.definition(*given), reference.absorbed(*given)
print("o:  ", np.abs(by_heads[0] - by_rows[0]).max(), "  lse:", np.abs(by_heads[1] - by_rows[1]).max())

# %% [markdown]
# The scale stays that of the heads as they were defined, $(128 + 64)^{-1/2}$: nothing about a score has changed.
#
# ### Memory or products?
#
# Every byte of the cache meets all rows of queries, heads times tokens: $2 \cdot 576 + 2 \cdot 512$ operations a row,
# for 1152 bytes. **Predict.** At 4.25 TB/s and 404 TFLOP/s (`mma.sync`): from how many rows on do products decide?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12, 4))
panels.draw_bytes(axes[0])
panels.draw_roofline(axes[1])
plt.show()

# %% [markdown]
# About 1.9 operations a byte for each row, so from about 50 rows on for `mma.sync`, 85 for `wgmma`. 16 heads a GPU (128
# shared out over eight) are memory's; 128 heads, or a few tokens at a time as in speculative decoding, are the tensor
# cores'.
#
# ### Pages
#
# Requests grow token by token, and nobody knows how long they get. So the cache is a pool of pages of 64 tokens, and a
# table says which page is whose. Any order will do.

# %%
lengths = np.array([150, 64, 0, 200], np.int32)
pool = rng.permutation(12)
table = np.full((4, 4), -1, np.int32)
at = 0
for b, n in enumerate(lengths):
    count = -(-int(n) // 64)
    table[b, :count], at = pool[at : at + count], at + count
print(table)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(11, 2.2))
panels.draw_pages(ax, table, lengths, 12)
plt.show()

# %% [markdown]
# ### Parts of equal work
#
# A block for each request would leave most of a GPU waiting for the longest. Laid end to end, the pages are cut into as
# many parts as blocks run at a time. Beginning and ending a request costs about as much as five pages: they are
# counted.
#
# **Predict.** Sixteen blocks, one request of 12000 tokens and eleven short ones. How many parts get some of the long
# one?

# %%
ragged = np.array([900, 12000, 300, 64, 0, 2500, 700, 130, 1800, 1, 450, 3000], np.int32)
planned = schedule(ragged, 16)
print("parts of each request:", np.diff(planned.num_splits).tolist())

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(11, 4.2))
panels.draw_parts(ax, planned, ragged)
plt.show()

# %% [markdown]
# A request in several parts leaves a state $(m, l, O)$ in each, and a second kernel merges them as lesson 2 merged
# rows, several parts loaded at a time:

# %%
lesson.show_source(combine.make_combine, first="before = top", last="acc[i] += share")

# %% [markdown]
# ## The reference
#
# Naive, in float64: gather a request's rows from its pages, and attend.

# %%
lesson.show_source(reference.paged)

# %% [markdown]
# ### The seesaw
#
# O of 64 rows and 512 columns is half of a multiprocessor's registers, so there is one and not two to work on in turn.
# FlashMLA's kernel for Hopper has two warpgroups with half of its columns each, and two blocks of keys a step: each
# makes P of one block and lends it to the other. What the left one multiplied in units of its own maximum is brought to
# the right one's.

# %%
lesson.show_source(reference.seesaw, first="for at in", last="left")

# %%
q, k = rng.standard_normal((5, 48)), rng.standard_normal((300, 48))
expected = reference.attend(q[:, None], k, k[:, :32], 48**-0.5, reference.seen(5, 300, False))[0][:, 0]
print("seesaw:", np.abs(reference.seesaw(q, k, 32, 48**-0.5)[0] - expected).max())

# %% [markdown]
# ## The kernels
#
# Here a block has 16, 32 or 64 rows. S is cut among its warps by rows and keys; O, which is 512 wide, by columns; and P
# and the rows' maxima go from one to the other through shared memory:

# %%
lesson.show_source(attend.make_attend, first="for step in range(first, last)", last="here = next_of(here)")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, axes = plt.subplots(1, 2, figsize=(12, 2.8))
for ax, shown in zip(axes, (mma.tiles_for(16, "90a"), mma.tiles_for(64, "90a")), strict=True):
    rows_of_s = np.arange(shown.bm)[:, None] // (16 * shown.frags) * shown.key_parts
    of_s = rows_of_s + np.arange(shown.bn)[None] // shown.bk
    of_o = np.broadcast_to(np.arange(shown.dv) // shown.columns, (shown.bm, shown.dv))
    gap = np.full((shown.bm, 20), np.nan)
    ax.imshow(np.concatenate([of_s.repeat(2, 1), gap, of_o], 1), aspect="auto", cmap="tab10", vmin=0, vmax=9)
    ax.set_title(f"{shown.bm} rows, {shown.warps} warps: S (keys, twice as wide) and O (columns)", fontsize=10)
    ax.set(xlabel="one colour a warp", ylabel="row")
plt.show()

# %% [markdown]
# **Predict.** Which of these barriers could go if a warp had all keys of its rows, and all of their columns?
#
# The two inside: P and the maxima would stay where they are. The first one is the price of sharing a tile at all.
#
# ### One copy, two uses
#
# K is read by `ldmatrix` as rows, V by `ldmatrix.trans` from *the same bytes*:

# %%
small = MLATiles(16, 32, 2, slots=2, held=True, d=192, dv=128)
steps = make_steps(small, "float16")
print(lesson.show_source(steps.multiply_qk))
print(lesson.show_source(steps.multiply_pv))

# %% [markdown]
# The emulator counts what a launch reads. A small decode: two requests, five heads, parts of equal work, pages in any
# order.


# %%
def problem(lengths: list[int], heads: int, parts: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Arguments of the kernels by name, and outputs filled with NaN; what is behind a request's tokens is NaN too."""
    draw = np.random.default_rng(seed)
    counts = [-(-n // 64) for n in lengths]
    cache = draw.standard_normal((sum(counts) + 2, 64, small.d)).astype(np.float16)
    order = draw.permutation(sum(counts) + 2).astype(np.int32)
    pages = np.zeros((len(lengths), max(counts)), np.int32)
    for b, count in enumerate(counts):
        pages[b, :count], order = order[:count], order[count:]
        cache[pages[b, count - 1], (lengths[b] - 1) % 64 + 1 :] = np.nan
    planned, rows = schedule(np.array(lengths), parts), heads
    splits = int(planned.num_splits[-1])

    def empty(*shape: int, dtype: type = np.float32) -> np.ndarray:
        return np.full(shape, np.nan, dtype)

    return {
        "q": draw.standard_normal((len(lengths), 1, heads, small.d)).astype(np.float16), "cache": cache,
        "block_table": pages, "lengths": np.array(lengths, np.int32), "parts": planned.parts,
        "num_splits": planned.num_splits, "acc_parts": empty(splits, rows, small.dv), "m_parts": empty(splits, rows),
        "l_parts": empty(splits, rows), "o": empty(len(lengths), 1, heads, small.dv, dtype=np.float16),
        "lse": empty(len(lengths), heads, 1), "scale": np.float32(small.d**-0.5), "causal": np.int32(0),
    }  # fmt: skip


def run(known: dict[str, np.ndarray], broken: str = "", merging: str = "") -> object:
    """Both kernels on the emulator; the report of the first."""
    decode = mma.make_decode(small, "float16", broken=broken)
    args = [known[name] for name in mma.DECODE_ARGS]
    report = launch(decode, len(known["parts"]), small.threads, tuple(args), shared=small.shared)
    merge = combine.make_combine("float16", small.dv, broken=merging)
    args = [known[name] for name in combine.COMBINE_ARGS]
    launch(merge, known["o"].shape[0] * known["o"].shape[2], merge.threads, tuple(args))
    return report


def judged(known: dict[str, np.ndarray]) -> str:
    about = (known["q"], known["cache"], known["block_table"], known["lengths"], float(known["scale"]))
    exact, low = reference.paged(*about, dv=small.dv)[0], reference.rounded(*about, dv=small.dv)[0]
    return str(compare(known["o"], exact, low))


known = problem([130, 900], 5, 3)
report = run(known)
rows_read = sum(int(n) for n in known["lengths"])
print(judged(known))
print("read from global memory:", report.loaded, "bytes; the rows themselves:", rows_read * 2 * small.d)

# %% [markdown]
# And what the compiler makes of the kernels at the real size:

# %%
names = (
    "decode bfloat16 16 rows", "decode e4m3fn bfloat16 16 rows", "decode bfloat16 64 rows", "prefill bfloat16 64 rows",
)  # fmt: skip
found = {name: lesson.resources(f"flash_mla.{name}, for sm_90a") for name in names}
print("measured" if all(fresh for _, fresh in found.values()) else "no compiler here: from lessons/resources.json")
lesson.table(
    ("kernel, sm_90a", "threads", "registers a thread", "spilled bytes", "shared, KB"),
    [(name, r.threads, r.registers, r.spills, f"{r.shared / 1024:.0f}") for name, (r, _) in found.items()],
)

# %% [markdown]
# K and V as two arrays would be $192 + 128$ columns: two thirds more. At the real size reuse saves 47 %, $512 / 1088$.
#
# ### In eight bits
#
# 512 codes, a scale for each 128, and the rotated part as it is: 656 bytes. The codes are copied as they are. With many
# rows they become 16-bit numbers in shared memory, and the products know nothing of it:

# %%
lesson.show_source(load.make_convert, first="def convert", last="st_shared_v4(to + uint32(2 * dv)")

# %% [markdown]
# With few rows that alone would take longer than reading. There each warp converts what `ldmatrix` brings, and it has
# one block of 128 columns, of K as of V. What it multiplies has one scale a key: its summand of S is multiplied by that
# once, and so is P, in registers. **Predict.** S is now a sum over warps. How many barriers does a tile take?

# %%
lesson.show_source(attend_codes.make_attend_codes, first="while j < last", last="here, j = next_of(here)")

# %% [markdown]
# Two: every warp adds up all of S for itself, so neither maxima nor P go anywhere. And Q, of which a warp needs its
# block's columns, takes 36 registers instead of 144: three blocks fit a multiprocessor. On an H200, 16 heads and 16384
# tokens, e4m3 was 1.12 times as fast as 16 bits with S shared out by keys, and 1.31 times with S shared out by columns.
# The bytes were the same, 0.57 of those of 16 bits: what was won is fewer instructions and waits a tile.

# %%
rows = rng.standard_normal((1000, 576)).astype(np.float16)
lesson.table(
    ("format", "bytes a token", "largest error of a number", "rms error, % of the numbers' rms"),
    [
        (fmt, codec.quantize(rows, fmt).shape[1], float(np.abs(lost := codec.dequantize(codec.quantize(rows, fmt), fmt,
         rotated=np.float16) - rows).max()), float(100 * lost[:, :512].std() / rows[:, :512].astype(float).std()))
        for fmt in codec.FORMATS
    ],
)  # fmt: skip

# %% [markdown]
# ### As a user calls it
#
# The names and their order are FlashMLA's. `MLACache` keeps the pages; `plan` cuts the work, once for all layers.

# %%
pages = mla.MLACache(pages=8, requests=2, most_tokens=192, like=np.empty(0, np.float16))
pages.append(rng.standard_normal((2, 70, 576)).astype(np.float16))
out, lse = pages.decode(rng.standard_normal((2, 1, 16, 576)).astype(np.float16), softmax_scale=192**-0.5)
print(out.shape, lse.shape, pages.lengths.tolist())

# %% [markdown]
# ## On real data
#
# Eight heads of a trained model as one latent row: their keys and values are its 512 columns, two more keys the rest.

# %%
with lesson.timed(f"all on the {machine}"):
    results = [
        measure(stage, rung, case, machine)
        for case in stage.cases(machine, False)
        for rung in stage.rungs
        if rung.takes(case)
    ]
lesson.table(
    ("kernel", "machine", "problem", "largest error", "budget", "verdict"),
    [
        (r.rung.name, r.machine, f"{r.case.name}, {r.case.size}", r.comparison.error, r.comparison.budget, r.verdict)
        for r in results
    ],
)

# %%
stage.draw(results)

# %% [markdown]
# ## Who reads what
#
# **Predict.** 128 requests of 4096 tokens at 4.25 TB/s: how long does one layer's decoding take at least, in 16 bits
# and in 8?

# %%
for name in panels.CACHES[2:]:
    print(f"{name}: {128 * 4096 * sizes[name] / 4.25e12 * 1e6:.0f} us")
for size in (lesson.results("mla") or {}).get("sizes", []):
    print(f"\nmeasured, {size['batch']} x {size['n']}, {size['heads']} heads{', prefill' if size['prefill'] else ''}:")
    for m in size["measured"]:
        if m["seconds"]:
            share = f"{m['of_copy']:.2f} of a copy, " if m.get("of_copy") else ""
            print(f"  {m['name']:24} {m['seconds'] * 1e6:9.1f} us, {share}{m['flops_per_second'] / 1e12:.0f} TFLOP/s")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
figure, ax = plt.subplots(figsize=(8, 3.2))
rows_at = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
for name in panels.CACHES[2:]:
    reading = np.full(len(rows_at), 128 * 4096 * sizes[name] / 4.25e12)
    products = 128 * 4096 * rows_at * 2 * (576 + 512) / 404e12
    ax.plot(rows_at, np.maximum(reading, products) * 1e6, "o-", label=name)
ax.set(xscale="log", yscale="log", xlabel="heads times query tokens", ylabel="at least, us",
       title="128 requests of 4096 tokens: reading, then products")  # fmt: skip
ax.legend()
plt.show()

# %% [markdown]
# ## Break it
#
# **A stale page** (that of the tile before), **a part that is merged twice**, and **V read before the copy has
# landed**. **Predict.** Which of them does the emulator name, and which only the comparison?

# %% tags=["break-it"]
for broken, merging in (("page", ""), ("", "twice")):
    known = problem([130, 900], 5, 3)
    run(known, broken, merging)
    print(f"{broken or merging}: {judged(known)}")
try:
    run(problem([130, 900], 5, 3), "wait")
except Fault as fault:
    print(fault)

# %% [markdown]
# A page that is there is a page: nothing but the numbers tells that it is the wrong one. A part counted twice weighs
# twice, and the weights still add up to one.
#
# ## Exercises
#
# ### 1. Absorb
#
# `q_nope` is `[H, 128]` and `w_uk` `[H, 512, 128]`. Return the queries in latent space, `[H, 512]`.


# %%
def absorb(q_nope: np.ndarray, w_uk: np.ndarray) -> np.ndarray:
    """``[H, 512]``."""
    # your code


# %% tags=["exercise"]
def absorb_is_right() -> bool:
    draw = np.random.default_rng(1)
    q, w, c = draw.standard_normal((3, 6)), draw.standard_normal((3, 10, 6)), draw.standard_normal((7, 10))
    scores = np.einsum("hd,nc,hcd->hn", q, c, w)
    return bool(np.allclose(absorb(q, w) @ c.T, scores))


lesson.check("absorb", absorb_is_right, "Which index is summed? np.einsum says it in one line.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def absorb(q_nope: np.ndarray, w_uk: np.ndarray) -> np.ndarray:
    return np.einsum("hd,hcd->hc", q_nope, w_uk)


lesson.check("absorb", absorb_is_right)

# %% [markdown]
# ### 2. Merge two parts
#
# Each part has its O `[H, 512]`, divided already, and its LSE `[H]`; a part without tokens has LSE $-\infty$ and any O.
# Return (O, LSE) of both.


# %%
def merge_two(o_a, lse_a, o_b, lse_b):
    """(o ``[H, 512]``, lse ``[H]``)."""
    # your code


# %% tags=["exercise"]
def merge_two_is_right() -> bool:
    draw = np.random.default_rng(2)
    o, scores = draw.standard_normal((2, 3, 8)), np.array([[1.0, -np.inf, -np.inf], [900.0, 2.0, -np.inf]])
    got, lse = merge_two(o[0], scores[0], o[1], scores[1])
    wanted = reference.merge((o[:, None], scores[..., None]))
    return bool(np.allclose(got, wanted[0][0]) and np.array_equal(np.isinf(lse), [False, False, True]))


lesson.check("merge_two", merge_two_is_right, "Subtract the larger LSE before exp; where both are -inf, subtract 0.")


# %% jupyter={"source_hidden": true} tags=["hide-cell", "solution"]
def merge_two(o_a, lse_a, o_b, lse_b):
    top = np.maximum(lse_a, lse_b)
    origin = np.where(np.isneginf(top), 0, top)
    a, b = np.exp(lse_a - origin), np.exp(lse_b - origin)
    total = a + b
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.where(total == 0, 1, total))
    return (a[:, None] * o_a + b[:, None] * o_b) / np.where(total == 0, 1, total)[:, None], lse


lesson.check("merge_two", merge_two_is_right)

# %% [markdown]
# ## Two machines, side by side
#
# | | the notes' machine | here, sm_80 to sm_120 | FlashMLA on sm_90a |
# | --- | --- | --- | --- |
# | prefill | the notes: QK and PV cut, loads under both products | 64 rows a block, copies ahead | the seesaw |
# | decoding | the notes: many stages, KV reused | 2 to 3 tiles of K, V out of the same | TMA, nine barriers a tile |
# | 8 bits | the notes: e5m2, about 25 % faster than FP16 | e4m3 or e5m2, multiplied where they lie | e4m3, converted |
# | products | matrix instructions | `mma.sync` | `wgmma` |
#
# ## Limits
#
# - `mma.sync` reaches about 0.6 of what `wgmma` does on an H200, so with 128 heads the kernels here are that far from
#   FlashMLA's before anything else is counted.
# - Numbers are random, or a small model's; no weights of a model with latent attention are here.
# - One head of keys, 512 + 64 columns, pages of 64 tokens.
# - Sparse indices and sinks, which newer kernels have, are not here.
#
# ## What next
#
# This is the end of the ladder so far. The kernels for `wgmma` would take the same arguments.

"""What the groups of warps in a program of `frames` do: attend for whole tiles, for tokens left over, bring keys.

They share a ring of slots in shared memory, each with a block of keys and one of values of one head. `has_k` and
`has_v` tell that a slot was filled, `free` that all groups are through with it. Blocks are counted along the whole row;
block `begin` is the first of this program and goes into slot 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait


@gluon.jit
def soften(score, top, total, scale, limit, is_masked: gl.constexpr):
    """One block of scores: weights, by how much former sums shrink, the new maximum and sum of weights."""
    if is_masked:
        key = gl.arange(0, score.shape[1], layout=gl.SliceLayout(0, score.type.layout))
        score = gl.where(key[None, :] < limit, score, -1.0e30)
    higher = gl.maximum(top, gl.max(score, axis=1) * scale)
    weight = gl.exp2(score * scale - higher[:, None])
    shrink = gl.exp2(top - higher)
    return weight, shrink, higher, total * shrink + gl.sum(weight, axis=1)


@gluon.jit
def _queries(query, first, count, stride, layout: gl.constexpr):
    """[64, 64] of queries from `first` on, zeros beyond `count`."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    place = query + (first + row)[:, None] * stride + at[None, :]
    return gl.load(place, mask=(row < count)[:, None] & (at < 64)[None, :], other=0.0)


@gluon.jit
def _keep(mixed, top, total, mixed_out, top_out, total_out, first, mine, count, heads, is_whole: gl.constexpr):
    """Write a tile's weighted values, and its maxima and sums if others have their share in it."""
    layout: gl.constexpr = mixed.type.layout
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    made = mixed / gl.where(total > 0.0, total, 1.0)[:, None]
    made = gl.convert_layout(made.to(mixed_out.dtype.element_ty), wide)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, wide))
    line = mine + (first + row) * heads
    gl.store(mixed_out + line[:, None] * 64 + at[None, :], made, mask=(row < count)[:, None] & (at < 64)[None, :])
    if not is_whole:
        own = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        gl.store(top_out + mine + (first + own) * heads, top, mask=own < count)
        gl.store(total_out + mine + (first + own) * heads, total, mask=own < count)


@gluon.jit
def _walk(
    q, mixed, top, total, ring_k, ring_v, has_k, has_v, free, begin, first, last, scale, limit,
    stages: gl.constexpr, is_masked: gl.constexpr,
):  # fmt: skip
    """Blocks first to last, one thing after the other: another group multiplies meanwhile."""
    layout: gl.constexpr = mixed.type.layout
    keys: gl.constexpr = ring_k.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16])
    own: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zero = gl.zeros([64, keys], gl.float32, scores)
    for i in range(first, last):
        slot = (i - begin) % stages
        phase = (i - begin) // stages & 1
        mbarrier.wait(has_k.index(slot), phase)
        score = warpgroup_mma(q, ring_k.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        weight, shrink, top, total = soften(score, top, total, scale, limit - (i - first) * keys, is_masked)
        mixed = mixed * gl.convert_layout(shrink, gl.SliceLayout(1, layout))[:, None]
        taken = gl.convert_layout(weight.to(q.dtype), own)
        mbarrier.wait(has_v.index(slot), phase)
        mixed = warpgroup_mma(taken, ring_v.index(slot), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        mbarrier.arrive(free.index(slot), count=1)
    return mixed, top, total


@gluon.jit
def tokens_part(args, part: gl.constexpr, stages: gl.constexpr, is_whole: gl.constexpr):
    """What a group with tokens does: tile `part` through blocks begin to stop."""
    query, mixed_out, top_out, total_out, ring_k, ring_v, has_k, has_v, free, head, heads, stride = args[0]
    first, mine, count, begin, middle, stop, limit, scale = args[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    keys: gl.constexpr = ring_k.shape[1]
    scores: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16])
    line: gl.constexpr = gl.SliceLayout(1, scores)
    own: gl.constexpr = gl.SliceLayout(1, layout)
    first += part * 64
    count -= part * 64
    gdc_wait()
    q = _queries(query + head * 64, first, count, stride, gl.DotOperandLayout(0, scores, 2))
    mixed = gl.zeros([64, 64], gl.float32, layout)
    top = gl.full([64], -1.0e30, gl.float32, line)
    total = gl.zeros([64], gl.float32, line)
    mixed, top, total = _walk(
        q, mixed, top, total, ring_k, ring_v, has_k, has_v, free, begin, begin, middle, scale, limit, stages, False
    )
    mixed, top, total = _walk(
        q, mixed, top, total, ring_k, ring_v, has_k, has_v, free, begin, middle, stop, scale, limit, stages, True
    )
    top = gl.convert_layout(top, own)
    total = gl.convert_layout(total, own)
    _keep(mixed, top, total, mixed_out, top_out, total_out, first, mine, count, heads, is_whole)


@gluon.jit
def left_part(args, stages: gl.constexpr, is_whole: gl.constexpr):
    """What the group with the tokens left over does: keys, then lanes are the rows of its products.

    mine_q: queries [tokens, 64], mine_p: weights [tokens, keys] in shared memory.
    """
    query, mixed_out, top_out, total_out, ring_k, ring_v, has_k, has_v, free, head, heads, stride = args[0]
    mine_q = args[1]
    mine_p = args[2]
    first, mine, count, begin, middle, stop, limit, scale = args[3]
    some: gl.constexpr = mine_q.shape[0]
    keys: gl.constexpr = ring_k.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, some, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    column: gl.constexpr = gl.SliceLayout(0, layout)
    gdc_wait()
    token = gl.arange(0, some, layout=gl.SliceLayout(1, wide))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, wide))
    place = query + (first + token)[:, None] * stride + head * 64 + at[None, :]
    mine_q.store(gl.load(place, mask=(token < count)[:, None] & (at < 64)[None, :], other=0.0))
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros([keys, some], gl.float32, layout)
    mixed = gl.zeros([64, some], gl.float32, layout)
    # One sum for each place in a block and token: the places are summed at the end.
    sums = gl.zeros([keys, some], gl.float32, layout)
    top = gl.full([some], -1.0e30, gl.float32, column)
    key = gl.arange(0, keys, layout=gl.SliceLayout(1, layout))
    # Without tokens there are only slots to give back.
    busy = gl.where(count > 0, stop, begin)
    for i in range(begin, busy):
        slot = (i - begin) % stages
        phase = (i - begin) // stages & 1
        mbarrier.wait(has_k.index(slot), phase)
        score = warpgroup_mma(ring_k.index(slot), mine_q.permute((1, 0)), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        known = (i < middle) | (key < limit - (i - middle) * keys)
        score = gl.where(known[:, None], score, -1.0e30)
        higher = gl.maximum(top, gl.max(score, axis=0) * scale)
        weight = gl.exp2(score * scale - higher[None, :])
        shrink = gl.exp2(top - higher)
        top = higher
        sums = sums * shrink[None, :] + weight
        mixed = mixed * shrink[None, :]
        mine_p.store(gl.permute(weight.to(mine_p.dtype), (1, 0)))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(has_v.index(slot), phase)
        mixed = warpgroup_mma(ring_v.index(slot).permute((1, 0)), mine_p.permute((1, 0)), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=(mixed,))
        mbarrier.arrive(free.index(slot), count=1)
    for i in range(busy, stop):
        slot = (i - begin) % stages
        mbarrier.wait(has_v.index(slot), (i - begin) // stages & 1)
        mbarrier.arrive(free.index(slot), count=1)
    total = gl.sum(sums, axis=0)
    made = mixed / gl.where(total > 0.0, total, 1.0)[None, :]
    lane = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    own = gl.arange(0, some, layout=column)
    line = mine + (first + own) * heads
    into = mixed_out + line[None, :] * 64 + lane[:, None]
    gl.store(into, made.to(mixed_out.dtype.element_ty), mask=(own < count)[None, :] & (lane < 64)[:, None])
    if not is_whole:
        gl.store(top_out + line, top, mask=own < count)
        gl.store(total_out + line, total, mask=own < count)


@gluon.jit
def _bring(
    lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, first, last,
    page: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """Bring blocks first to last, which lie within pages."""
    per: gl.constexpr = page // ring_k.shape[1]
    number = gl.load(table + first // per, mask=first < last, other=0)
    for i in range(first, last):
        slot = (i - begin) % stages
        mbarrier.wait(free.index(slot), ((i - begin) // stages & 1) ^ 1)
        start = number * (2 * page) + (i % per) * ring_k.shape[1]
        mbarrier.expect(has_k.index(slot), lines.block_type.nbytes)
        tma.async_copy_global_to_shared(lines, [start, head * 64], has_k.index(slot), ring_k.index(slot))
        mbarrier.expect(has_v.index(slot), lines.block_type.nbytes)
        tma.async_copy_global_to_shared(lines, [start + page, head * 64], has_v.index(slot), ring_v.index(slot))
        number = gl.load(table + (i + 1) // per, mask=i + 1 < last, other=0)


@gluon.jit
def bring_part(args, page: gl.constexpr, stages: gl.constexpr):
    """What the group without tokens does: bring blocks into the ring as it gets free.

    Up to `middle` they lie within pages; those behind it are gathered, of what whole pages hold beyond whole blocks
    and of a last page that is not whole.
    """
    lines, pool, table, ring_k, ring_v, has_k, has_v, free, head, heads, begin = args[0]
    middle, stop, whole, limit, early = args[1]
    keys: gl.constexpr = ring_k.shape[1]
    per: gl.constexpr = page // keys
    rest: gl.constexpr = page % keys
    _bring(lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, begin, early, page, stages)
    gdc_wait()
    _bring(lines, table, ring_k, ring_v, has_k, has_v, free, head, begin, early, middle, page, stages)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.arange(0, keys, layout=gl.SliceLayout(1, layout))
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    for i in range(middle, stop):
        slot = (i - begin) % stages
        mbarrier.wait(free.index(slot), ((i - begin) // stages & 1) ^ 1)
        place = (i - middle) * keys + key + (middle - whole * per) * keys
        known = key < limit - (i - middle) * keys
        of = gl.zeros_like(place) + whole
        if rest > 0:
            of = gl.minimum(place // rest, whole)
        within = place - of * rest + gl.where(of < whole, per * keys, 0)
        line = gl.load(table + of, mask=known, other=0).to(gl.int64) * (2 * page) + within
        source = pool + line[:, None] * (heads * 64) + (head * 64 + at)[None, :]
        mask = known[:, None] & (at < 64)[None, :]
        async_copy.async_copy_global_to_shared(ring_k.index(slot), source, mask=mask)
        async_copy.async_copy_global_to_shared(ring_v.index(slot), source + page * heads * 64, mask=mask)
        async_copy.commit_group()
        async_copy.wait_group(0)
        # What threads wrote is read by the tensor cores: through the other way into shared memory.
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(has_k.index(slot), count=1)
        mbarrier.arrive(has_v.index(slot), count=1)

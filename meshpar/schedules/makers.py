"""Published pipeline schedules, as functions of the number of stages and microbatches."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from meshpar.schedules.ops import Block, StageOp
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.ticks import filled
from meshpar.sharding.errors import check_positive_int, near, problem


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards.

    Bubble: (p−1)(F+B+W). Activations: m·M. Huang et al., GPipe, arXiv 1811.06965.

    Symbols of all schedules: p is the number of stages, m of microbatches, and v of chunks per stage. F, B and W are
    the durations of the forward, the input gradient and the weight gradient on a stage. M is the size of a microbatch's
    activations on a stage. The bubble is the idle time between the first and the last op of a stage. Formulas are exact
    within the stated range, and `Schedule.simulate` computes all cases.

    Args:
      stages: number of stages, p.
      microbatches: number of microbatches, m.

    Returns:
      The validated schedule.

    Raises:
      MeshparError: an argument is not a positive integer.

    Example:
      >>> print(mp.pipeline.gpipe(stages=2, microbatches=2))
      stage 0  F0 F1 ·  ·  ·  B0 W0 B1 W1
      stage 1  ·  F0 F1 B0 W0 B1 W1 ·  ·
    """
    _check("gpipe", stages, microbatches)
    ops = [(i, 0) for i in range(microbatches)]
    return Schedule.from_order("gpipe", [_alternated(ops, ops, microbatches)] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Return 1F1B: a warm-up of p−1 forwards on the first stage, then alternating forwards and backwards.

    Bubble: (p−1)(F+B+W). Activations: min(p, m)·M. Narayanan et al., PipeDream-Flush, arXiv 2006.09503.

    Symbols, args, returns and raises as in `gpipe`.

    Example:
      >>> print(mp.pipeline.one_f_one_b(stages=2, microbatches=2))
      stage 0  F0 F1 ·  ·  B0 W0 ·  B1 W1
      stage 1  ·  F0 B0 W0 F1 B1 W1 ·  ·
    """
    _check("1f1b", stages, microbatches)
    rows = [
        _alternated([(i, 0) for i in range(microbatches)], [(i, 0) for i in range(microbatches)], stages - 1 - stage)
        for stage in range(stages)
    ]
    return Schedule.from_order("1f1b", rows)


def interleaved_1f1b(
    stages: int, microbatches: int, *, chunks: int = 2, spread_head: bool = False, split_backward: bool = False
) -> Schedule:
    """Return interleaved 1F1B: stage s runs chunks s, s+p, s+2p, ..., which shortens fill and drain.

    Bubble: (p−1)(F+B+W)/v. If m < p, it is longer by (p−m)(v−1)(F+B+W)/v. Activations: p·M·(1 + (p−1)/(p·v)) if m is a
    multiple of p and m > p. Microbatches pass through the chunks in groups of at least p. A group of g > p microbatches
    has the same bubble, and adds (v−1)(g−p)/v · M to the activations. Narayanan et al., arXiv 2104.04473.

    `spread_head` returns the table of `eager_1f1b(chunks=..., spread_head=True)`, which a loop without conditionals can
    run. Activations: (p + (2p−1)/v)·M if m is a multiple of p and m > 2p. `split_backward` as in `eager_1f1b`.

    `chunks` is the number of chunks per stage, v. Symbols, other args, returns and raises as in `gpipe`.

    Example:
      >>> print(mp.pipeline.interleaved_1f1b(stages=2, microbatches=2, chunks=2))
      stage 0  F0.0 F1.0 F0.1 F1.1 ·    ·    B0.1 W0.1 ·    B1.1 W1.1 B0.0 W0.0 B1.0 W1.0
      stage 1  ·    F0.0 F1.0 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 B0.0 W0.0 B1.0 W1.0 ·    ·
    """
    _check("interleaved-1f1b", stages, microbatches, chunks, spread_head=spread_head, split_backward=split_backward)
    if spread_head or split_backward:
        return _eager("interleaved-1f1b", stages, microbatches, chunks, spread_head, split_backward)
    groups = np.array_split(np.arange(microbatches), max(1, microbatches // stages))
    forward = [(int(i), chunk) for group in groups for chunk in range(chunks) for i in group]
    backward = [(int(i), chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    ahead = (chunks - 1) * len(groups[0])
    step = 1 if chunks == 1 else 2
    rows = [_alternated(forward, backward, ahead + step * (stages - 1 - stage)) for stage in range(stages)]
    return Schedule.from_order("interleaved-1f1b", rows, parts=_in_turn(stages, chunks))


def eager_1f1b(
    stages: int, microbatches: int, *, chunks: int = 1, spread_head: bool = False, split_backward: bool = False
) -> Schedule:
    """Return eager 1F1B: enough warm-up forwards that each stage runs a forward and a full backward per tick.

    In 1F1B, a stage runs a forward while the next stage runs a backward. If stages synchronize in every tick, they wait
    for the longest op. A step can then take 3(p−1+m) max(F, B, W). In eager 1F1B, all stages run the same ops in every
    tick between fill and drain, so synchronization is free.

    Bubble: (p−1)(F+B+W)/v, for any op durations. If m < p, it is longer by (p−m)(v−1)(F+B+W)/v. Activations:
    min(2p, m)·M. With v > 1, they are p(1 + 1/v)·M if m is a multiple of p and m > p. Zhuang et al., On Optimizing the
    Communication of Model Parallelism, arXiv 2211.05322; chunks: Narayanan et al., arXiv 2104.04473.

    With `spread_head`, the first backward of a group of p microbatches waits until all forwards of the group end. The
    stages can then share the embedding and the head of the group, and a loop without conditionals can run the
    schedule (see `meshpar.schedules.uniform`). The bubble is the same. Activations: min(3p−1, m)·M, and with v > 1
    (p + (2p−1)/v)·M if m is a multiple of p and m > 2p.

    `split_backward` requires `spread_head`. All stages then run W of a microbatch in the same tick, so that no W waits
    for another stage. Bubble: (p−1)(F+B)/v. Inputs of W of up to p microbatches of a chunk are kept.

    Symbols, args, returns and raises as in `interleaved_1f1b`.

    Example:
      >>> print(mp.pipeline.eager_1f1b(stages=2, microbatches=2))
      stage 0  F0 F1 ·      B0W0 B1W1
      stage 1  ·  F0 F1B0W0 B1W1 ·
    """
    _check("eager-1f1b", stages, microbatches, chunks, spread_head=spread_head, split_backward=split_backward)
    return _eager("eager-1f1b", stages, microbatches, chunks, spread_head, split_backward)


def _eager(name: str, stages: int, microbatches: int, chunks: int, spread_head: bool, split_backward: bool) -> Schedule:
    if split_backward and not spread_head:
        reason, fix = "W needs the ticks of the shared head", "set spread_head=True, too"
        raise problem(f"schedule `{name}`", "set split_backward=True", reason, fix, code="conflict")
    groups = np.array_split(np.arange(microbatches), max(1, microbatches // stages) if chunks > 1 else 1)
    # A microbatch needs p ticks to reach the last stage, and only then can it enter the next chunk.
    sizes = [max(len(group), stages) if chunks > 1 else len(group) for group in groups]
    starts = np.cumsum([0, *(chunks * size for size in sizes)])
    enters = np.concatenate([start + np.arange(len(group)) for start, group in zip(starts, groups, strict=False)])
    steps = np.repeat(sizes, [len(group) for group in groups])
    # Ticks in which a microbatch enters a chunk on the first stage, [microbatch, chunk].
    ticks = enters[:, None] + steps[:, None] * np.arange(chunks)
    # On the last stage, the first backward of a microbatch, or of a group, is in the tick after the last forward.
    shared = stages if spread_head else 1
    group_enters = enters[np.arange(microbatches) // shared * shared]
    first_backward = int((ticks[:, -1] + stages - group_enters).max())
    table = np.full((int(ticks.max()) + first_backward + stages, stages, 3, 2), -1, np.int32)
    for stage in range(stages):
        for chunk in range(chunks):
            forward, backward = ticks[:, chunk] + stage, ticks[:, chunk] + first_backward + stages - 1 - stage
            table[forward, stage, 0] = np.stack([np.arange(microbatches), np.full(microbatches, chunk)], -1)
            last = np.stack([np.arange(microbatches), np.full(microbatches, chunks - 1 - chunk)], -1)
            table[backward, stage, 1] = last
            # On the first stage, B of a microbatch is last.
            table[backward + stage * split_backward, stage, 2] = last
    joined = np.zeros(table.shape[:2], bool)
    parts = np.array(_in_turn(stages, chunks))
    return Schedule(name=name, microbatches=microbatches, table=table, parts=parts, joined=joined).validate()


def _in_turn(stages: int, chunks: int) -> list[list[int]]:
    """Return the parts of the stages, `[stage][chunk]`, if the stages take parts in turn."""
    return [[chunk * stages + stage for chunk in range(chunks)] for stage in range(stages)]


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Return ZB-H1: 1F1B with weight gradients deferred into idle time, within the memory of 1F1B.

    Bubble: (p−1)(F+B−W) if W ≤ F. If m < p, it is longer by (p−m)W. Activations: min(p, m)·M. Qi et al., Zero Bubble
    Pipeline Parallelism, arXiv 2401.10241.

    Symbols, args, returns and raises as in `gpipe`.

    Example:
      >>> print(mp.pipeline.zb_h1(stages=2, microbatches=2))
      stage 0  F0 F1 ·  B0 W0 B1 W1
      stage 1  ·  F0 B0 F1 B1 W0 W1
    """
    _check("zb-h1", stages, microbatches)
    return Schedule.from_order("zb-h1", _zero_bubble(stages, microbatches, stages))


def zb_h2(stages: int, microbatches: int, *, limit: int | None = None) -> Schedule:
    """Return ZB-H2: enough warm-up forwards that no stage is idle between the first and the last op.

    Bubble: (p−1)(F+B−2W). Activations: (2p−1)·M. Both formulas are for W ≤ F, W ≤ B and m ≥ 2p−1. With only
    k < 2p−1 microbatches, or memory for only k, the bubble is longer by (2p−1−k)W and the activations are k·M. Qi et
    al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241.

    `limit` is the maximum number of microbatches with saved activations on a stage. The default, 2p−1, leaves no bubble
    if F = B = W. The formulas are valid for limits of at least p; with a lower limit, stages wait for memory. Symbols,
    other args, returns and raises as in `gpipe`.

    Example:
      >>> print(mp.pipeline.zb_h2(stages=2, microbatches=3))
      stage 0  F0 F1 F2 B0 W0 B1 W1 B2 W2 ·
      stage 1  ·  F0 B0 F1 B1 F2 B2 W0 W1 W2
    """
    _check("zb-h2", stages, microbatches)
    if limit is not None:
        check_positive_int("schedule `zb-h2`", "the number of microbatches with saved activations", limit=limit)
    most = 2 * stages - 1 if limit is None else min(limit, 2 * stages - 1)
    return Schedule.from_order("zb-h2", _zero_bubble(stages, microbatches, min(most, max(microbatches, stages))))


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Return ZB-V: two chunks per stage, placed in a V, without a bubble and within the memory of 1F1B.

    Bubble for F = B = W: 0 if m ≥ 2p−1, (2p−1−m)·F/2 with fewer microbatches, and (4p−1−4m)·F/2 with fewer than 2p/3.
    Activations: min(p, m)·M. Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.

    Symbols, args, returns and raises as in `gpipe`.

    Example:
      >>> print(mp.pipeline.zb_v(stages=2, microbatches=2))
      stage 0  F0.0 F1.0 ·    F0.1 B0.1 F1.1 B1.1 B0.0 W0.1 B1.0 W1.1 W0.0 W1.0
      stage 1  ·    F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0 W0.1 W0.0 W1.1 W1.0
    """
    _check("zb-v", stages, microbatches)
    parts = _folded(stages)
    rows = [list(_v_order(stages, microbatches, stage)) for stage in range(stages)]
    order = filled(rows, np.array(parts), 2 * stages)
    return Schedule.from_order("zb-v", order, parts=parts)


def dualpipe(stages: int, microbatches: int) -> Schedule:
    """Return DualPipe: two copies of the model run in opposite directions, and F overlaps B of the opposite direction.

    Microbatches 0 to ⌈m/2⌉−1 go up the stages, the others down. Bubble: (p/2−1)(F&B + B − 3W) for even m ≥ 2p, and
    longer by F + B for odd m ≥ 2p. Activations: (p+1)·M, and two copies of the parameters. DeepSeek-AI, DeepSeek-V3,
    arXiv 2412.19437.

    As in the paper, B is a full backward here, with input and weight gradient. F&B is the duration of an overlapped
    pair. The formula assumes that F&B = F + B, that F is as long as the input gradient, and that W is not longer. With
    a longer input gradient or a shorter pair, the bubble is smaller. With a longer F or W, it is larger.

    Other symbols, args, returns and raises as in `gpipe`. The number of stages must be even.

    Example:
      >>> print(mp.pipeline.dualpipe(stages=2, microbatches=4))
      stage 0  F0.0 F2.1 F1.0 B2.1 W2.1 F3.1B0.0W0.0 B3.1 W3.1 B1.0 W1.0
      stage 1  F2.0 F0.1 F3.0 B0.1 W0.1 F1.1B2.0W2.0 B1.1 W1.1 B3.0 W3.0
    """
    _check("dualpipe", stages, microbatches)
    if stages % 2:
        reason = "the streams cross between the two middle stages, so the number of stages must be even"
        requested, fix = (
            f"run two streams through {stages} stages",
            f"use {stages - 1 or 2} or {stages + 1} stages, or `dualpipe-v`",
        )
        raise problem("schedule `dualpipe`", requested, reason, fix, code="indivisible")
    half = stages // 2
    up = (microbatches + 1) // 2
    streams = ([*range(up)], [*range(up, microbatches)])
    parts, rows = [], []
    for stage in range(stages):
        inward = min(stage, stages - 1 - stage)
        parts.append([inward, stages - 1 - inward])
        rows.append(list(_two_streams(half, inward, streams if stage < half else streams[::-1])))
    return Schedule.from_order("dualpipe", rows, parts=parts, microbatches=microbatches)


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """Return DualPipeV: DualPipe folded in the middle, with two chunks per stage and a single stream.

    On p stages, it is DualPipe for 2p stages with ops of half the duration. Bubble: (p−1)(F&B + B − 3W)/2 for any
    m ≥ 2p, with F, B and W as in `dualpipe`. Activations: (2p+1)·M/2. Qi et al.,
    https://hackmd.io/@ufotalent/r1lVXsa9Jg; DeepSeek-AI, DualPipe.

    Other symbols, args, returns and raises as in `gpipe`.

    Example:
      >>> mp.pipeline.dualpipe_v(stages=2, microbatches=4)
      Schedule('dualpipe-v', stages=2, microbatches=4, ticks=19)
    """
    _check("dualpipe-v", stages, microbatches)
    stream = [*range(microbatches)]
    rows = [list(_two_streams(stages, stage, (stream, stream))) for stage in range(stages)]
    return Schedule.from_order("dualpipe-v", rows, parts=_folded(stages), microbatches=microbatches)


SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved-1f1b": interleaved_1f1b,
    "eager-1f1b": eager_1f1b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
    "dualpipe-v": dualpipe_v,
}
"""Schedule functions by name: `(stages, microbatches, **options) -> Schedule`."""


def make(name: str, stages: int, microbatches: int, **options: int) -> Schedule:
    """Return the schedule with this name.

    Args:
      name: a key of `SCHEDULES`.
      stages: number of stages.
      microbatches: number of microbatches per step.
      **options: keyword arguments of the schedule, such as `chunks`.

    Returns:
      The validated schedule.

    Raises:
      MeshparError: the name or an option is unknown, or the schedule does not support these numbers.

    Example:
      >>> mp.pipeline.make("interleaved-1f1b", stages=4, microbatches=8, chunks=2)
      Schedule('interleaved-1f1b', stages=4, microbatches=8, ticks=57)
    """
    where = f"schedule `{name}`"
    if name not in SCHEDULES:
        raise problem(where, "create it", "no schedule has this name", near(str(name), SCHEDULES), code="unknown-name")
    choices = SCHEDULES[name].__kwdefaults__ or {}
    if unknown := sorted(set(options) - set(choices)):
        reason = f"its options are {', '.join(choices)}" if choices else "it has no options"
        raise problem(where, f"set `{unknown[0]}`", reason, f"remove `{unknown[0]}`", code="unknown-name")
    return SCHEDULES[name](stages, microbatches, **options)


MAX_SLOTS = 10**6
"""Maximum number of tick slots of a table. Larger tables take minutes to compute and gigabytes of memory."""


def _check(name: str, stages: int, microbatches: int, chunks: int = 1, **switches: bool) -> None:
    where = f"schedule `{name}`"
    for switch, value in switches.items():
        if not isinstance(value, bool):
            requested, reason = f"set {switch}={value!r}", "it must be True or False"
            raise problem(where, requested, reason, f"write {switch}=True", code="wrong-type")
    check_positive_int(where, "a size of the schedule", stages=stages, microbatches=microbatches, chunks=chunks)
    if (size := stages * (stages + microbatches) * chunks) > MAX_SLOTS:
        requested = f"run {microbatches} microbatches on {stages} stages with {chunks} chunks each"
        reason = f"stages x (stages + microbatches) x chunks is {size:,}, and the limit is {MAX_SLOTS:,}"
        raise problem(where, requested, reason, "use fewer stages, microbatches or chunks", code="out-of-range")


def _folded(stages: int) -> list[list[int]]:
    """Return the V placement: the first half of the model runs down the stages, the second half back up."""
    return [[stage, 2 * stages - 1 - stage] for stage in range(stages)]


def _alternated(forward: list[tuple[int, int]], backward: list[tuple[int, int]], ahead: int) -> list[Block]:
    """Return `ahead` forwards, then alternately forwards and full backwards. Both lists contain (microbatch, chunk)."""
    ahead = min(ahead, len(forward))
    row: list[Block] = [(StageOp("F", *op),) for op in forward[:ahead]]
    for number, op in enumerate(backward):
        row += [(StageOp("F", *next_op),) for next_op in forward[ahead + number : ahead + number + 1]]
        row.append((StageOp("B", *op), StageOp("W", *op)))
    return row


def _zero_bubble(stages: int, microbatches: int, limit: int) -> list[list[Block]]:
    """Return the rows of ZB-H1 and ZB-H2: W is deferred as far as `limit` saved microbatches per stage allow."""
    rows: list[list[Block]] = []
    for to_last in reversed(range(stages)):
        ahead = min(1 + to_last + min(max(limit - stages, 0), to_last), limit)
        late = limit - ahead
        row = [("F", i) for i in range(ahead)]
        for i in range(microbatches):
            row += [("B", i), ("W", i - late), ("F", i + ahead)]
        row += [("W", i) for i in range(microbatches - late, microbatches)]
        rows.append([(StageOp(kind, i),) for kind, i in row if 0 <= i < microbatches])
    return rows


def _v_order(stages: int, microbatches: int, stage: int) -> Iterator[StageOp]:
    """Yield the F and B of a ZB-V stage in order; the caller inserts W.

    The pattern needs at least 2p−1 microbatches. With fewer, the ops of the missing microbatches are skipped.
    """
    num_planned = max(microbatches, 2 * stages - 1)
    to_last = stages - 1 - stage
    plan = [("F", 0)] * (2 * to_last + 1) + [("F", 1), ("F", 0)] * stage + [("F", 1), ("B", 1)] * (to_last + 1)
    for i in range(num_planned - stages):
        plan += [("F", 0)] * (i < num_planned - stages - to_last) + [("B", 0), ("F", 1), ("B", 1)]
    plan += [("B", 0), ("B", 1)] * stage + [("B", 0)] * (to_last + 1)
    count: Counter[tuple[str, int]] = Counter()
    for kind, chunk in plan:
        i = count[kind, chunk]
        count[kind, chunk] += 1
        if i < microbatches:
            yield StageOp(kind, i, chunk)


def _two_streams(half: int, stage: int, streams: tuple[list[int], list[int]]) -> Iterator[Block]:
    """Yield the blocks of a DualPipe stage, in order.

    Chunk 0 runs stream 0 and chunk 1 runs stream 1. The pattern needs at least `2 * half` microbatches per stream. With
    fewer, the ops of the missing microbatches are skipped. `half` is the number of stages from the start of a stream to
    the middle, and `stage` is the distance from the start of stream 0.
    """
    num_planned = max(2 * half, *(len(stream) for stream in streams))
    to_middle = half - 1 - stage
    count: Counter[tuple[str, int]] = Counter()
    deferred: deque[StageOp] = deque()

    def ops(kinds: str, chunk: int) -> list[StageOp]:
        """Return the next F, B or full backward of a chunk; empty if all its microbatches are done."""
        i = count[kinds[0], chunk]
        count[kinds[0], chunk] += 1
        if i >= len(streams[chunk]):
            return []
        if kinds == "B":
            deferred.append(StageOp("W", streams[chunk][i], chunk))
        return [StageOp(kind, streams[chunk][i], chunk) for kind in kinds]

    def plan() -> Iterator[list[StageOp]]:
        for _ in range(2 * to_middle):
            yield ops("F", 0)
        for _ in range(stage + 1):
            yield ops("F", 0)
            yield ops("F", 1)
        for _ in range(to_middle):
            yield ops("B", 1)
            yield [deferred.popleft()] if deferred else []
            yield ops("F", 1)
        for i in range(num_planned - 2 * half + stage + 1):
            if i == 0 and to_middle == 0:  # On the middle stage, this B needs the result of the F before it.
                yield ops("F", 0)
                yield ops("BW", 1)
            else:
                yield ops("F", 0) + ops("BW", 1)
            yield ops("F", 1) + ops("BW", 0)
        for _ in range(to_middle):
            yield ops("BW", 1)
            yield ops("F", 1) + ops("BW", 0)
        # The second half of the drain defers its weight gradients.
        num_full = 2 * ((stage + 1) // 2) + (stage % 2 == 0)
        for number, chunk in enumerate([1, 0] * (stage + 1)):
            yield ops("BW" if number < num_full else "B", chunk)
        for _ in range(to_middle):
            yield [deferred.popleft()] if deferred else []
            yield ops("B", 0)
        yield from ([op] for op in deferred)

    yield from (tuple(block) for block in plan() if block)

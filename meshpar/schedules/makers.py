"""The schedules of the literature, each as the order of every stage's ops."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from meshpar.schedules.ops import Block, StageOp
from meshpar.schedules.schedule import Schedule
from meshpar.schedules.ticks import filled
from meshpar.sharding.errors import is_int, near, problem

# Below, p is the number of stages, m of microbatches, v of chunks; F, B and W the time of one stage's forward, gradient
# of the input and gradient of the weights; M a microbatch's activations on one stage. Bubbles are span bubbles, exact
# in the range that stands with each; for anything else there is `Schedule.simulate`.


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Bubble (p−1)(F+B+W), activations m·M. Huang et al., GPipe, arXiv 1811.06965.
    """
    _check("gpipe", stages, microbatches)
    row: list[Block] = [(StageOp("F", i),) for i in range(microbatches)]
    row += [_whole(i) for i in range(microbatches)]
    return Schedule.from_order("gpipe", [row] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """As few forwards ahead as keep the last stage busy, then one backward for each forward.

    Bubble (p−1)(F+B+W), activations min(p, m)·M. Narayanan et al., PipeDream-Flush, arXiv 2006.09503.
    """
    _check("1f1b", stages, microbatches)
    rows = [
        _alternated([(i, 0) for i in range(microbatches)], [(i, 0) for i in range(microbatches)], stages - 1 - stage)
        for stage in range(stages)
    ]
    return Schedule.from_order("1f1b", rows)


def interleaved_1f1b(stages: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` parts of the model on each stage, every p-th: shorter fill and drain, more messages.

    Bubble (p−1)(F+B+W)/v, and (p−m)(v−1)(F+B+W)/v more where m < p; activations p·M·(1 + (p−1)/(p·v)) where p divides m
    and is less. Microbatches pass chunk after chunk in groups of p or more, as equal as m allows; a group of g > p
    keeps the bubble and adds (v−1)(g−p)/v · M. Narayanan et al., arXiv 2104.04473.
    """
    _check("interleaved-1f1b", stages, microbatches, chunks)
    groups = np.array_split(np.arange(microbatches), max(1, microbatches // stages))
    forward = [(int(i), chunk) for group in groups for chunk in range(chunks) for i in group]
    backward = [(int(i), chunk) for group in groups for chunk in reversed(range(chunks)) for i in group]
    ahead = (chunks - 1) * len(groups[0])
    rows = [_alternated(forward, backward, ahead + 2 * (stages - 1 - stage)) for stage in range(stages)]
    if chunks == 1:
        rows = [_alternated(forward, backward, stages - 1 - stage) for stage in range(stages)]
    parts = [[chunk * stages + stage for chunk in range(chunks)] for stage in range(stages)]
    return Schedule.from_order("interleaved-1f1b", rows, parts=parts)


def eager_1f1b(stages: int, microbatches: int, *, chunks: int = 1) -> Schedule:
    """1F1B with as many forwards ahead as let every stage run one forward and one whole backward in every tick.

    In 1F1B one stage runs its forward while the next runs a backward, and stages that meet in every tick wait for the
    longest op: up to 3(p−1+m) max(F, B, W). Here the ticks between fill and drain are alike on all stages, and meeting
    costs nothing: bubble (p−1)(F+B+W)/v, whatever an op takes, and (p−m)(v−1)(F+B+W)/v more where m < p;
    activations min(2p, m)·M, or p(1 + 1/v)·M with v > 1 chunks a stage where p divides m and is less. Zhuang et al., On
    Optimizing the Communication of Model Parallelism, arXiv 2211.05322; with chunks Narayanan et al., arXiv 2104.04473.
    """
    _check("eager-1f1b", stages, microbatches, chunks)
    groups = np.array_split(np.arange(microbatches), max(1, microbatches // stages) if chunks > 1 else 1)
    # A microbatch is on the last stage p ticks after it was on the first: only then the next chunk has it.
    sizes = [max(len(group), stages) if chunks > 1 else len(group) for group in groups]
    # The tick of the first backward, on the last stage: the one after its forward there.
    turned = (chunks - 1) * sizes[0] + stages
    cells: list[list[list[tuple[str, int, int]]]] = [
        [[] for _ in range(stages)] for _ in range(turned + chunks * sum(sizes) + stages - 1)
    ]
    begin = 0
    for group, size in zip(groups, sizes, strict=True):
        for chunk in range(chunks):
            for at, i in enumerate(group.tolist()):
                for stage in range(stages):
                    cells[begin + chunk * size + at + stage][stage].append(("F", i, chunk))
                    backward = cells[turned + begin + chunk * size + at + stages - 1 - stage][stage]
                    backward += [("B", i, chunks - 1 - chunk), ("W", i, chunks - 1 - chunk)]
        begin += chunks * size
    while not any(cells[-1]):  # where a group is smaller than the room that it is given
        cells.pop()
    parts = [[chunk * stages + stage for chunk in range(chunks)] for stage in range(stages)]
    return Schedule.from_table(cells, parts=parts, microbatches=microbatches, name="eager-1f1b")


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with the weight gradients put off into what would be idle time, within 1F1B's memory.

    Bubble (p−1)(F+B−W) where W ≤ F, and (p−m)W more where m < p; activations min(p, m)·M. Qi et al., Zero Bubble
    Pipeline Parallelism, arXiv 2401.10241.
    """
    _check("zb-h1", stages, microbatches)
    return Schedule.from_order("zb-h1", _zero_bubble(stages, microbatches, stages))


def zb_h2(stages: int, microbatches: int, *, limit: int | None = None) -> Schedule:
    """Enough forwards ahead that no stage waits between its first op and its last.

    Bubble (p−1)(F+B−2W), activations (2p−1)·M, where W ≤ F, W ≤ B and m ≥ 2p−1. With memory for fewer, or fewer
    microbatches, k of either, (2p−1−k)W more, and activations k·M. Qi et al., Zero Bubble Pipeline Parallelism,
    arXiv 2401.10241.

    Args:
      stages: p.
      microbatches: m.
      limit: microbatches whose activations a stage may hold; default 2p−1, from which on F = B = W leaves no bubble.
        The form above is for p or more; with fewer, stages wait for memory.
    """
    _check("zb-h2", stages, microbatches)
    if limit is not None and not is_int(limit, 1):
        raise problem(
            "schedule `zb-h2`", f"hold {limit!r} microbatches' activations", "it is a whole number, at least 1",
            f"give a limit of 1 to {2 * stages - 1}",
        )  # fmt: skip
    most = 2 * stages - 1 if limit is None else min(limit, 2 * stages - 1)
    return Schedule.from_order("zb-h2", _zero_bubble(stages, microbatches, min(most, max(microbatches, stages))))


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Two chunks a stage, down the stages and back up: no bubble within 1F1B's memory.

    With F = B = W, bubble 0 where m ≥ 2p−1, (2p−1−m)·F/2 with fewer microbatches and (4p−1−4m)·F/2 with fewer than
    2p/3; activations min(p, m)·M. Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362.
    """
    _check("zb-v", stages, microbatches)
    parts = _folded(stages)
    rows = [list(_v_order(stages, microbatches, stage)) for stage in range(stages)]
    order = filled(rows, np.array(parts), 2 * stages)
    return Schedule.from_order("zb-v", order, parts=parts)


def dualpipe(stages: int, microbatches: int) -> Schedule:
    """Two streams in opposite directions, each through a copy of the model, so that F of one overlaps B of the other.

    Microbatches 0 to ⌈m/2⌉−1 go up the stages, the others down. p is even. Bubble (p/2−1)(F&B + B − 3W), B a whole
    backward and F&B = F + B an overlapped pair, for even m ≥ 2p where F takes as long as the gradient of the input and
    W no longer; F + B more for odd m ≥ 2p. A longer gradient of the input, or a shorter pair, leaves less than the form
    says; a longer F or W more. Activations (p+1)·M; parameters twice. DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437.
    """
    _check("dualpipe", stages, microbatches)
    if stages % 2:
        raise problem(
            "schedule `dualpipe`", f"run two streams through {stages} stages",
            "the streams cross between the two middle stages, so their number is even",
            f"take {stages - 1 or 2} or {stages + 1} stages, or `dualpipe-v`",
        )  # fmt: skip
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
    """DualPipe folded in the middle: two chunks a stage, one stream that goes down them and back up.

    On p stages it is DualPipe's schedule of 2p, each op half as long: bubble (p−1)(F&B + B − 3W)/2 for any m ≥ 2p, with
    F, B and W as there; activations (2p+1)·M/2. Qi et al., https://hackmd.io/@ufotalent/r1lVXsa9Jg; DeepSeek-AI,
    DualPipe.
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
"""By name: `(stages, microbatches, **options) -> Schedule`."""


def make(name: str, stages: int, microbatches: int, **options: int) -> Schedule:
    """A schedule by its name in `SCHEDULES`.

    Raises:
      ValueError: no schedule has this name, or it cannot be made for these numbers or options.
    """
    if name not in SCHEDULES:
        raise problem(f"schedule `{name}`", "make it", "there is none of this name", near(str(name), SCHEDULES))
    maker = SCHEDULES[name]
    known = set((maker.__kwdefaults__ or {}).keys())
    if unknown := sorted(set(options) - known):
        raise problem(
            f"schedule `{name}`",
            f"set `{unknown[0]}`",
            f"its options are {', '.join(f'`{option}`' for option in sorted(known))}" if known else "it has no options",
            f"leave `{unknown[0]}` out",
        )
    return maker(stages, microbatches, **options)


MOST_CELLS = 10**6
"""Beyond that a table takes minutes to make and gigabytes to hold."""


def _check(name: str, stages: int, microbatches: int, chunks: int = 1) -> None:
    for what, count in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not is_int(count, 1):
            exists = "it takes a whole number of them, at least 1"
            raise problem(f"schedule `{name}`", f"run with {count!r} {what}", exists, f"give {what} such as 4")
    if (size := stages * (stages + microbatches) * chunks) > MOST_CELLS:
        raise problem(
            f"schedule `{name}`",
            f"lay out {microbatches} microbatches on {stages} stages" + (f", {chunks} chunks each" * (chunks > 1)),
            f"p·(p+m) cells of each kind for every chunk are {size:,}, of which a table holds up to {MOST_CELLS:,}",
            "give fewer",
        )


def _whole(microbatch: int, chunk: int = 0) -> Block:
    return StageOp("B", microbatch, chunk), StageOp("W", microbatch, chunk)


def _folded(stages: int) -> list[list[int]]:
    """Two parts a stage, the model going down the stages and back up."""
    return [[stage, 2 * stages - 1 - stage] for stage in range(stages)]


def _alternated(forward: list[tuple[int, int]], backward: list[tuple[int, int]], ahead: int) -> list[Block]:
    """Some forwards ahead, then one forward and one whole backward in turn. Both lists are (microbatch, chunk)."""
    ahead = min(ahead, len(forward))
    row: list[Block] = [(StageOp("F", *what),) for what in forward[:ahead]]
    for number, what in enumerate(backward):
        row += [(StageOp("F", *next_),) for next_ in forward[ahead + number : ahead + number + 1]]
        row.append(_whole(*what))
    return row


def _zero_bubble(stages: int, microbatches: int, limit: int) -> list[list[Block]]:
    """Forwards ahead, then one F for each B, each W as late as `limit` microbatches in a stage's memory allow."""
    rows = []
    for stage in range(stages):
        to_last = stages - 1 - stage
        ahead = min(1 + to_last + min(max(limit - stages, 0), to_last), limit)
        late = limit - ahead
        row = [StageOp("F", i) for i in range(min(ahead, microbatches))]
        for i in range(microbatches):
            row.append(StageOp("B", i))
            row += [StageOp("W", i - late)] if i >= late else []
            row += [StageOp("F", i + ahead)] if i + ahead < microbatches else []
        row += [StageOp("W", i) for i in range(max(0, microbatches - late), microbatches)]
        blocks: list[Block] = [(op,) for op in row]
        rows.append(blocks)
    return rows


def _v_order(stages: int, microbatches: int, stage: int) -> Iterator[StageOp]:
    """ZB-V's order of F and B on one stage; W is to be put where there is room.

    Laid out for at least 2p−1 microbatches; of fewer, the ops of those that do not exist are left out.
    """
    laid_out = max(microbatches, 2 * stages - 1)
    to_last = stages - 1 - stage
    plan = [("F", 0)] * (2 * to_last + 1) + [("F", 1), ("F", 0)] * stage + [("F", 1), ("B", 1)] * (to_last + 1)
    for i in range(laid_out - stages):
        plan += [("F", 0)] * (i < laid_out - stages - to_last) + [("B", 0), ("F", 1), ("B", 1)]
    plan += [("B", 0), ("B", 1)] * stage + [("B", 0)] * (to_last + 1)
    count: Counter[tuple[str, int]] = Counter()
    for kind, chunk in plan:
        i = count[kind, chunk]
        count[kind, chunk] += 1
        if i < microbatches:
            yield StageOp(kind, i, chunk)


def _two_streams(half: int, stage: int, streams: tuple[list[int], list[int]]) -> Iterator[Block]:
    """DualPipe's order on the stage that is `stage` steps from where its stream 0 comes in, of `half` steps in all.

    Chunk 0 runs stream 0 and chunk 1 stream 1. Laid out for at least twice as many microbatches a stream as there are
    steps; of fewer, the ops of those that do not exist are left out.
    """
    laid_out = max(2 * half, *(len(stream) for stream in streams))
    to_middle = half - 1 - stage
    count: Counter[tuple[str, int]] = Counter()
    put_off: deque[StageOp] = deque()

    def ops(kinds: str, chunk: int) -> list[StageOp]:
        """The next microbatch's F, B alone, or whole backward on a chunk."""
        i = count[kinds[0], chunk]
        count[kinds[0], chunk] += 1
        if i >= len(streams[chunk]):
            return []
        found = [StageOp(kind, streams[chunk][i], chunk) for kind in kinds]
        put_off.extend(StageOp("W", streams[chunk][i], chunk) for _ in [0] if kinds == "B")
        return found

    def plan() -> Iterator[list[StageOp]]:
        for _ in range(2 * to_middle):
            yield ops("F", 0)
        for _ in range(stage + 1):
            yield ops("F", 0)
            yield ops("F", 1)
        for _ in range(to_middle):
            yield ops("B", 1)
            yield [put_off.popleft()] if put_off else []
            yield ops("F", 1)
        for i in range(laid_out - 2 * half + stage + 1):
            if i == 0 and to_middle == 0:  # the middle stage has this B's gradient only after its own F
                yield ops("F", 0)
                yield ops("BW", 1)
            else:
                yield ops("F", 0) + ops("BW", 1)
            yield ops("F", 1) + ops("BW", 0)
        for _ in range(to_middle):
            yield ops("BW", 1)
            yield ops("F", 1) + ops("BW", 0)
        # From halfway on, the drain puts its weight gradients off.
        drain = [1, 0] * (stage + 1)
        whole = 2 * ((stage + 1) // 2) + (stage % 2 == 0)
        for number, chunk in enumerate(drain):
            yield ops("BW" if number < whole else "B", chunk)
        for _ in range(to_middle):
            yield [put_off.popleft()] if put_off else []
            yield ops("B", 0)
        yield from ([op] for op in put_off)

    yield from (tuple(block) for block in plan() if block)

"""What a round costs on this machine, learnt from its own timings."""

from __future__ import annotations

import math
from collections import deque

Points = list[tuple[float, float]]  # (x, seconds), x increasing
Known = dict[int, tuple[float, float]]  # bucket -> (x, seconds)

WINDOW = 9  # samples a point remembers: the median ignores a hiccup and follows a growing context
TRUSTED = 3  # samples: the first of a shape is often a warm-up, and a bucket holds several shapes
ALIKE = 0.1  # of the median: a plain round that differs by no more says that nothing has changed
PLAUSIBLE = 1.25  # times what as many plain rounds would cost: a first sample below that was no warm-up
WARM_UP = 0.6  # plain rounds a drafted token: a first draft that took longer is taken for a warm-up
SURPRISE = 1.25  # times what other lengths promise: a first draft of its length that took longer is not believed yet
GENTLE_SLOPE = 0.1  # of a plain round per position and row: growth assumed beyond the first jump until measured
FIXED = 0.5  # of a plain round's time: what is assumed to be the same for fewer rows until they have been measured
ALONG = 32  # unread tokens that a draft takes in along with the last one, at next to no cost
READ_GUESS = 0.01  # plain rounds an unread token: what reading is assumed to cost a drafter until it was measured


class Samples:
    """Running median of one duration, and where on the axis it was measured."""

    __slots__ = ("seconds", "trusted", "values", "x")

    def __init__(self) -> None:
        self.values: deque[float] = deque(maxlen=WINDOW)
        self.seconds = math.inf
        self.x = 0.0
        self.trusted = False

    def add(self, x: float, seconds: float, believable: bool = False) -> None:
        """`believable`: good enough to be trusted without a second one."""
        self.values.append(seconds)
        self.x += (x - self.x) / len(self.values)
        # The lower median: of two samples the faster one, because what disturbs a timing only ever adds to it.
        self.seconds = sorted(self.values)[(len(self.values) - 1) // 2]
        self.trusted = self.trusted or believable or len(self.values) >= TRUSTED


class ScoreCost:
    """Seconds to score and verify, by rows and positions.

    Points lie on the axis x = positions / rows, in buckets a quarter octave wide, the same for every number
    of rows, so that a batch of 7 can borrow what a batch of 8 has taught.
    """

    def __init__(self) -> None:
        self._tables: dict[int, dict[int, Samples]] = {}  # rows -> bucket -> samples
        self._since_plain: dict[int, int] = {}  # rows -> rounds with drafts since plain ones
        self._cache: dict[tuple[int, int], list[float]] = {}
        self._points: dict[int, Points] = {}

    def add(self, rows: int, positions: int, seconds: float) -> None:
        table = self._tables.setdefault(_near(rows), {})
        known = positions > rows and self.knows_plain()
        bound = PLAUSIBLE * self.plain(rows) * positions / rows if known else 0.0
        spent = max(seconds, 1e-9)
        samples = table.setdefault(_bucket(rows, positions), Samples())
        samples.add(positions / rows, min(spent, bound) if known else spent, believable=spent <= bound)
        if positions > rows:
            self._since_plain[_near(rows)] = self.since_plain(rows) + 1
        elif abs(spent - samples.seconds) <= ALIKE * samples.seconds:  # else the median has yet to follow
            self._since_plain[_near(rows)] = 0
        self._cache.clear()
        self._points.clear()

    def plain(self, rows: int) -> float:
        """Seconds of a round without drafts."""
        return self.table(rows, 0)[0]

    def fixed(self, rows: int) -> float:
        """What of a plain round takes as long for fewer rows: by a line through the fewest that were measured.

        Differences of neighbouring numbers of rows are smaller than what contexts and hiccups change them by.
        """
        whole = self.plain(rows)
        known = (number for number, table in self._tables.items() if 0 in table and table[0].trusted)
        fewest = min(known, default=rows)
        if fewest >= _near(rows):  # no smaller batch than those that share this one's table
            return FIXED * whole
        return max(whole - (whole - min(self.plain(fewest), whole)) * rows / (rows - fewest), 0.0)

    def plain_alone(self, rows: int) -> float:
        """Seconds of a plain round of one row, by the same line."""
        fixed = self.fixed(rows)
        return fixed + (self.plain(rows) - fixed) / rows

    def knows_plain(self) -> bool:
        return any(0 in table and table[0].trusted for table in self._tables.values())

    def knows_plain_of(self, rows: int, within: float = 1.0) -> bool:
        """Whether rounds of so many rows, or of a number `within` a factor of it, were timed themselves: what others
        promise of them may be wrong by half."""
        mine = _near(rows)
        known = (other for other, table in self._tables.items() if 0 in table and table[0].trusted)
        return any(max(mine / other, other / mine) <= within for other in known)

    def since_plain(self, rows: int) -> int:
        """Rounds with drafts since so many rows had one without that took as long as those before it."""
        return self._since_plain.get(_near(rows), 0)

    def knows_drafts(self) -> bool:
        """Whether scoring more than one position a row has been measured: that jump cannot be guessed."""
        return any(bucket and samples.trusted for table in self._tables.values() for bucket, samples in table.items())

    def table(self, rows: int, extra: int) -> list[float]:
        """Seconds for 0, 1, ... up to `extra` drafted positions; shorter where that is far from what is known."""
        key = (rows, extra)
        if key not in self._cache:
            points = self.points(rows)
            reach = 3 * points[-1][0] if points else 1.0  # three times what is known, so lengths grow by steps
            furthest = min(extra, int((reach - 1) * rows))
            self._cache[key] = _read(points, [1 + m / rows for m in range(furthest + 1)], is_batch=rows > 1)
        return self._cache[key]

    def points(self, rows: int) -> Points:
        """Known points for a batch of `rows`, its own before its neighbours', increasing in both coordinates."""
        if rows not in self._points:
            measured = _trusted(self._tables.get(_near(rows), {}))
            borrowed = self._borrowed(rows, measured)
            self._points[rows] = _monotone(_believable(sorted((borrowed | measured).values())))
        return self._points[rows]

    def _borrowed(self, rows: int, measured: Known) -> Known:
        """The nearest other table that knows plain rounds, scaled to agree with `measured` where both know."""
        mine = _near(rows)
        others = [(other, _trusted(table)) for other, table in self._tables.items() if other != mine]
        useful = [(len(known) < 2, abs(math.log(other / mine)), other, known) for other, known in others if 0 in known]
        if not useful:
            return {}
        known = min(useful, key=lambda entry: entry[:3])[3]
        ratios = sorted(measured[bucket][1] / known[bucket][1] for bucket in measured.keys() & known.keys())
        scale = ratios[len(ratios) // 2] if ratios else 1.0
        return {bucket: (x, seconds * scale) for bucket, (x, seconds) in known.items()}

    def rows_known(self) -> list[int]:
        return sorted(self._tables)


class ReadCost:
    """Seconds in which a drafter takes in text that it has missed: a prompt, or what was decoded without it."""

    def __init__(self) -> None:
        self._a_token = Samples()

    def add(self, tokens: int, seconds: float, plain: float) -> None:
        """The first may have waited for a compiler: no more is believed than a drafter worth asking takes."""
        if tokens > ALONG:
            self._a_token.add(0.0, min(max(seconds, 0.0) / tokens, 4 * READ_GUESS * plain))

    def seconds(self, tokens: int, plain: float) -> float:
        """For so many unread tokens, where a plain round of one row takes `plain` seconds."""
        if tokens <= ALONG:
            return 0.0
        return tokens * (self._a_token.seconds if self._a_token.values else READ_GUESS * plain)


class DraftCost:
    """Seconds to draft, by the rows that are drafted for and the longest draft of the round."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[int, Samples]] = {}
        self._guessed: set[tuple[int, int]] = set()  # rows and lengths of which only a warm-up was seen
        self._doubted: set[tuple[int, int]] = set()  # rows and lengths whose first draft was a surprise

    def add(self, rows: int, longest: int, seconds: float, steady: bool, plain: float = math.inf) -> None:
        """`steady`: every drafting row also drafted in the round before, so no cache had to catch up.

        The first draft of all may have waited for a compiler, seconds for what takes milliseconds: beyond what a draft
        worth trying takes, in plain rounds of `plain` seconds, it is a guess until the next one. A length that looks
        dear is not drafted again, so that nothing would correct a first sample that was disturbed: it needs a second.
        """
        shape = _near(rows), longest
        if steady and self._is_doubtful(shape, seconds):
            self._doubted.add(shape)
            return
        samples = self._tables.setdefault(shape[0], {}).setdefault(longest, Samples())
        if (steady and not samples.trusted) or shape in self._guessed:
            samples.values.clear()
        self._guessed.discard(shape)
        if not samples.values and not steady and seconds > WARM_UP * plain * longest:
            self._guessed.add(shape)
            seconds = WARM_UP * plain * longest
        if steady or not samples.trusted:
            samples.add(longest, seconds, believable=steady)

    def _is_doubtful(self, shape: tuple[int, int], seconds: float) -> bool:
        """Whether the first steady draft of a length took much longer than others promise; once for each length.

        Where the first draft of all was slow already, its guess promises nothing: this may be a slow drafter.
        """
        rows, longest = shape
        known = self._tables.get(rows, {})
        if all((rows, length) in self._guessed for length in known):
            return False
        if shape in self._doubted or (longest in known and known[longest].trusted):
            return False
        return seconds > SURPRISE * self.table(rows, longest)[longest]

    @property
    def is_known(self) -> bool:
        """Whether anything was ever drafted."""
        return bool(self._tables)

    def table(self, rows: int, longest: int) -> list[float]:
        """Seconds for drafts of 0, 1, ..., `longest` tokens; length 0 means that the drafter is not asked."""
        mine = _near(rows)
        for other in sorted(self._tables, key=lambda other: abs(math.log(other / mine))):
            known = _trusted(self._tables[other]) or {k: (s.x, s.seconds) for k, s in self._tables[other].items()}
            return _line(_monotone(sorted(known.values())), longest)
        return [0.0] * (longest + 1)


def _line(points: Points, longest: int) -> list[float]:
    """Through the origin and the points, straight beyond the last."""
    points = [(0.0, 0.0), *(point for point in points if point[0] > 0)]
    out = [0.0]
    index = 0
    for k in range(1, longest + 1):
        while index < len(points) - 2 and points[index + 1][0] < k:
            index += 1
        (x0, y0), (x1, y1) = points[index], points[min(index + 1, len(points) - 1)]
        out.append(y0 + (y1 - y0) * (k - x0) / (x1 - x0) if x1 > x0 else y0)
    return out


def _read(points: Points, xs: list[float], is_batch: bool) -> list[float]:
    """Seconds at each of `xs`, which increase: one walk along the points."""
    if not points:
        return [0.0 for _ in xs]
    (last_x, last), slope, index = points[-1], _last_slope(points, is_batch), 0
    out = []
    for x in xs:
        while index < len(points) and points[index][0] < x:
            index += 1
        out.append(_segment(points, index, x) if index < len(points) else last + slope * (x - last_x))
    return out


def _segment(points: Points, index: int, x: float) -> float:
    """Straight up to point `index`, except that the jump from one position to several is half taken at once."""
    x1, y1 = points[index]
    if index == 0 or x == x1:
        return y1
    x0, y0 = points[index - 1]
    share = (x - x0) / (x1 - x0)
    return y0 + (y1 - y0) * ((1 + share) / 2 if x0 == 1.0 else share)


def _last_slope(points: Points, is_batch: bool) -> float:
    """Of several rows at least half of what positions have cost so far: a plain round of theirs has its jump behind it,
    and where many positions are more work than reading the weights, each costs about as much as the one before."""
    slope, (first_x, first), (last_x, last) = _slope_of_neighbours(points), points[0], points[-1]
    return max(slope, (last - first) / (last_x - first_x) / 2) if is_batch and last_x > first_x else slope


def _slope_of_neighbours(points: Points) -> float:
    last_x, last = points[-1]
    earlier = [point for point in points if 1.0 < point[0] <= last_x / 1.4]  # neighbours are too close for a slope
    if earlier:
        x, seconds = earlier[-1]
        return (last - seconds) / (last_x - x)
    gentle = GENTLE_SLOPE * points[0][1]
    # Neighbours, or plain rounds beside those in which few rows of a batch had drafts: half is neither jump nor noise.
    near = [point for point in points[:-1] if point[0] > 1.0 or last_x < 2]
    return max(gentle, (last - near[-1][1]) / (last_x - near[-1][0]) / 2) if near else gentle


def _believable(points: Points) -> Points:
    """Nothing costs much more than doing it in plain rounds: beyond that, warm-ups and hiccups came together."""
    plain = points[0][1] if points else 0.0
    return [(x, min(seconds, PLAUSIBLE * plain * x)) for x, seconds in points]


def _monotone(points: Points) -> Points:
    """More work never costs less: a point above a later one was disturbed, and takes the later one's value."""
    least = math.inf
    out: Points = []
    for x, seconds in reversed(points):
        least = min(least, seconds)
        if not out or x < out[-1][0]:
            out.append((x, least))
    return out[::-1]


def _trusted(table: dict[int, Samples]) -> Known:
    return {bucket: (samples.x, samples.seconds) for bucket, samples in table.items() if samples.trusted}


def _near(rows: int) -> int:
    """Batches of up to 8 rows are told apart, larger ones by quarter octaves."""
    return rows if rows <= 8 else round(2 ** (round(4 * math.log2(rows)) / 4))


def _bucket(rows: int, positions: int) -> int:
    return 0 if positions <= rows else max(1, round(4 * math.log2(positions / rows)))

"""How likely a drafted token is to be kept, by the evidence behind it, its place in the draft and its row."""

from __future__ import annotations

from collections.abc import Sequence

CLASSES = 256  # stronger evidence than this is not told apart; a chain gives each of its drafters 16 of them
MEMORY = 64.0  # trials a class remembers
PLACE_WEIGHT = 8.0  # trials after which a place in the draft counts as much as its class
FIRST_GUESS = 0.6  # for a class not seen before, with the weight of one trial
ROW_MEMORY = 16.0  # trials a row remembers: a repetitive passage is short
ROW_WEIGHT = 2.0  # kept and rejected tokens after which a row counts as much as its class
SOFTENED = 4.0  # what is left of a class's trials when it is tried again after a pause


class EvidenceClass:
    """Counts of one class, old ones fading."""

    __slots__ = ("chances", "hits", "place_hits", "place_trials", "trials")

    def __init__(self, places: int) -> None:
        self.hits = 0.0
        self.trials = 0.0
        self.place_hits = [0.0] * places
        self.place_trials = [0.0] * places
        self.chances: list[float] = []  # of each place where it is reached; empty when out of date

    def add(self, place: int, hit: bool) -> None:
        fade = 1 - 1 / MEMORY
        self.hits = self.hits * fade + hit
        self.trials = self.trials * fade + 1
        self.place_hits[place] = self.place_hits[place] * fade + hit
        self.place_trials[place] = self.place_trials[place] * fade + 1

    def soften(self) -> None:
        """Keep the rates and forget most of their weight."""
        self.hits, self.trials = _scaled(self.hits, self.trials)
        for place, (hits, trials) in enumerate(zip(self.place_hits, self.place_trials, strict=True)):
            self.place_hits[place], self.place_trials[place] = _scaled(hits, trials)


class Row:
    """How a request's draft tokens fared, beside what their classes promised."""

    __slots__ = ("expected", "hits", "trials")

    def __init__(self) -> None:
        self.hits = 0.0
        self.expected = 0.0  # hits promised
        self.trials = 0.0

    def add(self, expected: float, hit: bool) -> None:
        fade = 1 - 1 / ROW_MEMORY
        self.hits = self.hits * fade + hit
        self.expected = self.expected * fade + expected
        self.trials = self.trials * fade + 1

    @property
    def odds(self) -> float:
        """What to multiply the odds of a token by: above 1 where the row keeps more than others."""
        seen = (self.hits + ROW_WEIGHT) / (self.trials - self.hits + ROW_WEIGHT)
        promised = (self.expected + ROW_WEIGHT) / (self.trials - self.expected + ROW_WEIGHT)
        return seen / promised


class Acceptance:
    """Survival of draft tokens: shared by all requests per class, bent by each row's own luck."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._classes: dict[int, EvidenceClass] = {}
        self._rows: dict[int, Row] = {}  # by request id
        self._all = EvidenceClass(places)

    def survival(self, request: int, evidence: int, length: int) -> list[float]:
        """Chance that tokens 1, 2, ..., `length` of a draft are all kept."""
        row = self._rows.get(request)
        odds = row.odds if row else 1.0
        out = []
        survives = 1.0
        for chance in self._chances(evidence)[:length]:
            survives *= chance * odds / (chance * odds + 1 - chance)
            out.append(survives)
        return out

    def rate(self, evidence: int) -> float:
        """Chance that one token of this class is kept where it is reached."""
        known = self._classes.get(_clamp(evidence))
        hits, trials = (known.hits, known.trials) if known else (0.0, 0.0)
        return (hits + self._guess()) / (trials + 1)

    def observe(self, request: int, evidence: int, drafted: int, accepted: int, ended: bool) -> None:
        """Count one verified draft. What a row that ended left unkept was cut off, not rejected."""
        known = self._classes.setdefault(_clamp(evidence), EvidenceClass(self._places))
        chances = self._chances(evidence)
        row = self._rows.setdefault(request, Row())
        tried = min(accepted if ended else min(accepted + 1, drafted), self._places)
        for place in range(tried):
            hit = place < accepted
            row.add(chances[place], hit)
            known.add(place, hit)
            self._all.add(place, hit)
        for other in self._classes.values():
            other.chances = []

    def soften(self, request: int, evidence: int) -> None:
        """Before a trial after a pause: let the new result count for more than the old ones."""
        self._rows.pop(request, None)
        if known := self._classes.get(_clamp(evidence)):
            known.soften()
            known.chances = []

    def forget(self, request: int) -> None:
        self._rows.pop(request, None)

    def keep_only(self, requests: Sequence[int]) -> None:
        """Forget every other request."""
        self._rows = {request: self._rows[request] for request in requests if request in self._rows}

    @property
    def requests(self) -> int:
        return len(self._rows)

    def describe(self) -> dict[int, dict[str, object]]:
        return {
            evidence: {
                "rate": self.rate(evidence),
                "trials": known.trials,
                "survival": self.survival(-1, evidence, self._places),
            }
            for evidence, known in sorted(self._classes.items())
        }

    def _guess(self) -> float:
        """A new class is judged half by hope, half by the classes already seen."""
        weight = min(self._all.trials / 8, 1) / 2
        seen = self._all.hits / self._all.trials if self._all.trials else 0.0
        return (1 - weight) * FIRST_GUESS + weight * seen

    def _chances(self, evidence: int) -> list[float]:
        known = self._classes.get(_clamp(evidence)) or EvidenceClass(self._places)
        if not known.chances:
            prior = PLACE_WEIGHT * self.rate(evidence)
            places = zip(known.place_hits, known.place_trials, strict=True)
            rates = [(hits + prior) / (trials + PLACE_WEIGHT) for hits, trials in places]
            known.chances = [min(max(rate, 0.001), 0.995) for rate in rates]
        return known.chances


def _scaled(hits: float, trials: float) -> tuple[float, float]:
    return (hits, trials) if trials <= SOFTENED else (hits * SOFTENED / trials, SOFTENED)


def _clamp(evidence: int) -> int:
    return min(max(evidence, 0), CLASSES - 1)

"""How likely a drafted token is to be kept, by the evidence behind it, its place in the draft and its row."""

from __future__ import annotations

CLASSES = 256  # stronger evidence than this is not told apart; a chain gives each of its drafters 16 of them
MEMORY = 64.0  # trials a class remembers
PLACE_WEIGHT = 8.0  # trials after which a place in the draft counts as much as its class
FIRST_GUESS = 0.6  # for a class not seen before, with the weight of one trial
ROW_MEMORY = 16.0  # trials a row remembers: a repetitive passage is short
ROW_WEIGHT = 2.0  # kept and rejected tokens after which a row counts as much as its class
SOFTENED = 4.0  # what is left of a class's trials when it is tried again after a pause


class Rate:
    """Hits among trials, old ones fading."""

    __slots__ = ("hits", "trials")

    def __init__(self) -> None:
        self.hits = 0.0
        self.trials = 0.0

    def add(self, hit: bool, memory: float) -> None:
        fade = 1 - 1 / memory
        self.hits = self.hits * fade + hit
        self.trials = self.trials * fade + 1

    def soften(self) -> None:
        """Keep the rate and forget most of its weight."""
        if self.trials > SOFTENED:
            self.hits, self.trials = self.hits * SOFTENED / self.trials, SOFTENED


class EvidenceClass(Rate):
    """Draft tokens of one class, all together and by their place in the draft."""

    __slots__ = ("chances", "number", "places")

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = [Rate() for _ in range(places)]
        self.chances: list[float] = []  # of each place where it is reached
        self.number = -1  # of observations when they were computed

    def count(self, place: int, hit: bool) -> None:
        self.add(hit, MEMORY)
        self.places[place].add(hit, MEMORY)

    def soften_all(self) -> None:
        for rate in (self, *self.places):
            rate.soften()
        self.number = -1


class RowAcceptance(Rate):
    """How a request's draft tokens fared, beside what their classes promised."""

    __slots__ = ("expected",)

    def __init__(self) -> None:
        super().__init__()
        self.expected = 0.0  # hits promised

    def count(self, expected: float, hit: bool) -> None:
        self.add(hit, ROW_MEMORY)
        self.expected = self.expected * (1 - 1 / ROW_MEMORY) + expected

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
        self._rows: dict[int, RowAcceptance] = {}  # by request id
        self._all = Rate()
        self._unknown = EvidenceClass(places)
        self._number = 0  # of observations: each changes what is expected of all classes

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
        return self._rate_of(self._class_of(evidence))

    def trials(self, evidence: int) -> float:
        """Tokens of this class that were tried, old ones fading."""
        return self._class_of(evidence).trials

    def observe(self, request: int, evidence: int, drafted: int, accepted: int, ended: bool) -> None:
        """Count one verified draft. What a row that ended left unkept was cut off, not rejected."""
        if (known := self._classes.get(_clamp(evidence))) is None:
            known = self._classes[_clamp(evidence)] = EvidenceClass(self._places)
        row, prior = self._rows.setdefault(request, RowAcceptance()), PLACE_WEIGHT * self._rate_of(known)
        tried = min(accepted if ended else min(accepted + 1, drafted), self._places)
        for place in range(tried):
            hit = place < accepted
            row.count(_chance(known.places[place], prior), hit)
            known.count(place, hit)
            self._all.add(hit, MEMORY)
        self._number += 1

    def soften(self, request: int, evidence: int) -> None:
        """Before a trial after a pause: let the new result count for more than the old ones."""
        self._rows.pop(request, None)
        if known := self._classes.get(_clamp(evidence)):
            known.soften_all()

    def forget(self, request: int) -> None:
        self._rows.pop(request, None)

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

    def _class_of(self, evidence: int) -> EvidenceClass:
        return self._classes.get(_clamp(evidence), self._unknown)

    def _rate_of(self, known: Rate) -> float:
        return (known.hits + self._guess()) / (known.trials + 1)

    def _chances(self, evidence: int) -> list[float]:
        known = self._class_of(evidence)
        if known.number != self._number:
            prior = PLACE_WEIGHT * self._rate_of(known)
            known.chances, known.number = [_chance(place, prior) for place in known.places], self._number
        return known.chances


def _chance(place: Rate, prior: float) -> float:
    return min(max((place.hits + prior) / (place.trials + PLACE_WEIGHT), 0.001), 0.995)


def _clamp(evidence: int) -> int:
    return min(max(evidence, 0), CLASSES - 1)

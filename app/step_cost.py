"""What a step takes, told from what it runs: a straight line through the steps that were measured.

Pure arithmetic: no clock. `prefill_budget` has one line for decoding, one for a prompt's chunk.
"""

from __future__ import annotations

_NUM_SWEEPS = 4
_MOST_OFF = 1.6  # a step that took longer, or shorter, by this factor counts as by this factor
_GUESS_OFF = 8.0


class StepCost:
    """Seconds = the sum of coefficients x features, both none below 0.

    Least squares over the last `num_steps` steps or so, each error as a share of its step's
    seconds, for noise grows with them. The normal equations are solved by coordinate descent
    (Gauss-Seidel, held at 0 from below), from the last solution on: what recent steps say nothing
    about stays as it was.
    """

    def __init__(
        self, guess: tuple[float, ...], num_steps: int, fades: tuple[float, ...] = ()
    ) -> None:
        """Each coefficient fades by its factor with each step, unless the steps speak for it."""
        self._coefficients = list(guess)
        self._decay = 1 - 1 / num_steps
        self._fades = fades or (1.0,) * len(guess)
        size = len(guess)
        self._squares = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size
        self._num_learned = 0

    def of(self, features: tuple[float, ...]) -> float:
        """Seconds."""
        return sum(c * x for c, x in zip(self._coefficients, features, strict=True))

    def guess(self, features: tuple[float, ...], seconds: float) -> None:
        """Scales the guess to what a step takes, unless one has been measured."""
        if not self._num_learned:
            self._scale(seconds / self.of(features))

    def _scale(self, factor: float) -> None:
        self._coefficients = [factor * c for c in self._coefficients]

    def learn(self, features: tuple[float, ...], seconds: float, known: float = 0.0) -> None:
        """A step has taken `seconds`, of which `known` are somebody else's. The first step that is
        measured scales the guess; outliers are held within a factor of what was expected."""
        own = self.of(features)
        if not self._num_learned and own > 0:
            factor = (seconds - known) / own
            self._scale(min(_GUESS_OFF, max(1 / _GUESS_OFF, factor)))
            own = self.of(features)
        expected = own + known
        if expected <= 0:
            return
        self._num_learned += 1
        seconds = min(_MOST_OFF * expected, max(expected / _MOST_OFF, seconds))
        target = (seconds - known) / expected
        scaled = [x / expected for x in features]
        for i, x in enumerate(scaled):
            self._products[i] = self._decay * self._products[i] + x * target
            self._squares[i] = [
                self._decay * old + x * y for old, y in zip(self._squares[i], scaled, strict=True)
            ]
        self._solve()

    def _solve(self) -> None:
        found = self._coefficients
        found[:] = [fade * c for fade, c in zip(self._fades, found, strict=True)]
        for _ in range(_NUM_SWEEPS):
            for i, row in enumerate(self._squares):
                if row[i] > 0:
                    rest = sum(a * c for a, c in zip(row, found, strict=True)) - row[i] * found[i]
                    found[i] = max(0.0, (self._products[i] - rest) / row[i])

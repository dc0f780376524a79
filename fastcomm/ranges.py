"""What a number from a user may be: by an option, a parameter of a function, or a file.

A range is generous: it holds all that could be meant, and keeps sums and products of numbers
within what int64 and float64 hold.
"""

from dataclasses import dataclass

from fastcomm.errors import ConfigError

_LONGEST = 40  # characters of a value in a message


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, with both unless `is_open` leaves out the least."""

    least: float
    most: float
    is_open: bool = False

    def holds(self, value: object) -> bool:
        """Whether the value is a number of the range; NaN is in none."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return self.least <= value <= self.most and not (self.is_open and value == self.least)

    def check(self, value: object, where: str) -> None:
        """Raise `ConfigError`, which begins with `where`, for a value out of the range."""
        if not self.holds(value):
            text = shortened(value)
            found = repr(text) if isinstance(value, str) else text
            raise ConfigError(f"{where}: found {found}, wanted {self}")

    def __str__(self) -> str:
        if self.is_open:
            return f"a number above {self.least:.15g}, at most {self.most:.15g}"
        return f"a number from {self.least:.15g} to {self.most:.15g}"


def shortened(value: object) -> str:
    """Return a value as a message shows it: a number of thousands of digits is cut."""
    try:
        text = str(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


RANKS = Range(1, 1 << 20)  # ranks of a run, or GPUs of a cluster
FACTOR = Range(0, 1e6)
SPEED = Range(1e-6, 1e6)
DURATION_NS = Range(0, 1e15)
DELAY_MS = Range(-1e9, 1e9)
BANDWIDTH = Range(1, 1e15)  # bytes per second
PENALTY = Range(0, 1, is_open=True)
IMBALANCE = Range(1, 1e6)
REPLICAS = Range(1, 1e4)  # physical experts by logical ones
DTYPE_BYTES = Range(1, 16)
EFFICIENCY = Range(1e-6, 1)
START_S = Range(0, 1e3)  # start-up of a message
MOST_WORKERS = 1 << 12  # processes or threads of one machine
MOST_LISTED = 1 << 20  # numbers of a list such as 0-7,12
MOST_NUMBER = (1 << 53) - 1  # of a list; of an iteration

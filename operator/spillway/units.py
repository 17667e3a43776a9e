"""Parses Kubernetes quantities and formats numbers for people. Names of numbers end in their units: `_bytes`,
`_seconds`."""

from __future__ import annotations

import re
from fractions import Fraction

LARGEST_QUANTITY = 2**63 - 1
KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_SUFFIX = {
    "": Fraction(1),
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 10**3),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12),
    "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40),
    "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(([KMGTPE]i)|[numkMGTPE]|[eE][0-9]+)?$"
BYTES_PATTERN = QUANTITY_PATTERN.replace("num", "")
"""QUANTITY_PATTERN without the suffixes n, u and m, which mean fractions of a byte."""
POSITIVE_QUANTITY_PATTERN = (
    r"^([0-9]*[1-9][0-9]*(\.[0-9]+)?|[0-9]+\.[0-9]*[1-9][0-9]*)(([KMGTPE]i)|[numkMGTPE]|[eE][0-9]+)?$"
)
"""QUANTITY_PATTERN with at least one digit that is not 0."""
POSITIVE_BYTES_PATTERN = POSITIVE_QUANTITY_PATTERN.replace("num", "")
_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]+)?)(?:([KMGTPE]i|[numkMGTPE])|[eE]([0-9]{1,2}))?$")


def parse_quantity(text: str) -> int:
    """Bytes (or units) of a Kubernetes quantity: "24Gi" -> 25769803776, "1.5G" -> 1500000000; fractions round up.

    Raises ValueError with the allowed form when `text` is not a quantity or exceeds 2^63 - 1, as the API server would.
    """
    return _rounded_up(text, _exact(text))


def parse_bytes(text: str) -> int:
    """`parse_quantity` for bytes that a user writes. Raises ValueError also for suffixes like that of 64m, which is a
    fraction of a byte in Kubernetes; the user surely means 64Mi."""
    num_bytes = parse_quantity(text)
    if text[-1] in "num":
        raise ValueError(f"{text!r}: {text[-1]} is a fraction of a byte in Kubernetes; write for example {text[:-1]}Mi")
    return num_bytes


def parse_cores(text: str) -> float:
    """Cores of a Kubernetes quantity: "500m" -> 0.5; fractions of a thousandth of a core round up."""
    try:
        exact = _exact(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a valid number of cores: write for example 2 or 500m") from None
    return _rounded_up(text, 1000 * exact) / 1000


def _exact(text: str) -> Fraction:
    match = _QUANTITY.match(text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a valid quantity: write a number with Ki, Mi, Gi, Ti or k, M, G, T, for example 24Gi"
        )
    number, suffix, exponent = match.groups()
    scale = Fraction(10) ** int(exponent) if exponent else _SUFFIX[suffix or ""]
    return Fraction(number) * scale


def _rounded_up(text: str, value: Fraction) -> int:
    rounded = -(-value.numerator // value.denominator)
    if rounded > LARGEST_QUANTITY:
        raise ValueError(f"{text!r} is larger than a quantity can be (2^63 - 1)")
    return rounded


def format_bytes(num_bytes: float) -> str:
    """Three significant figures with a binary suffix: 25769803776 -> "24.0 GiB"."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
            return f"{sign}{size:.{digits}f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_quantity(num_bytes: int) -> str:
    """The shortest exact Kubernetes quantity of a byte count: 25769803776 -> "24Gi", 1000 -> "1000"."""
    for suffix, size in (("Ti", TIB), ("Gi", GIB), ("Mi", MIB), ("Ki", KIB)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{suffix}"
    return str(num_bytes)


def format_cores(cores: float) -> str:
    """2.0 -> "2", 0.5 -> "500m"."""
    return str(round(cores)) if cores == round(cores) else f"{round(cores * 1000)}m"


def format_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms", 75 -> "1m15s", 5025 -> "1h23m"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def format_rough_seconds(seconds: float) -> str:
    """Formats seconds predicted from catalog rates, of which only two digits are meaningful: 0.306 -> "310 ms", 7e-5 ->
    "under 1 ms"."""
    return "under 1 ms" if seconds < 1e-3 else format_seconds(float(f"{seconds:.2g}"))


def format_count(count: float) -> str:
    """Parameters and tokens in powers of ten: 6738415616 -> "6.74 B"."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def counted(count: int, thing: str, ending: str = "s") -> str:
    """1 -> "1 file", 2 -> "2 files"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}{ending}"

"""Quantities in, figures out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.units import (
    format_bytes,
    format_cores,
    format_count,
    format_quantity,
    format_rough_seconds,
    format_seconds,
    parse_bytes,
    parse_cores,
    parse_quantity,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24Gi", 24 * 2**30),
        ("0", 0),
        ("1.5G", 1_500_000_000),
        ("100m", 1),
        ("2e3", 2000),
        ("1E", 10**18),
        ("0.5Ki", 512),
        ("1.5", 2),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_a_kubernetes_quantity_is_its_bytes_rounded_up(text: str, expected: int) -> None:
    assert parse_quantity(text) == expected


@pytest.mark.parametrize("text", ["", "24GB", "24 Gi", "-1", "+1", "Gi", "1e", "1e999", "0x10", "1_000", "8Ei", "inf"])
def test_what_is_no_quantity_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity"):
        parse_quantity(text)


@given(st.integers(0, 2**63 - 1))
def test_format_quantity_is_exact(num_bytes: int) -> None:
    assert parse_quantity(format_quantity(num_bytes)) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (24 * 2**30, "24.0 GiB"), (-(2**20), "-1.00 MiB"),
     (5 * 2**50, "5120 TiB")],
)  # fmt: skip
def test_format_bytes_has_three_figures(num_bytes: int, expected: str) -> None:
    assert format_bytes(num_bytes) == expected


def test_rough_seconds_have_no_third_digit() -> None:
    shown = [format_rough_seconds(seconds) for seconds in (7.3e-5, 0.306, 1.35, 150.4)]
    assert shown == ["under 1 ms", "310 ms", "1.4 s", "2m30s"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(2e-6, "2 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (75, "1m15s"), (5025, "1h23m"), (180000, "2d02h")],
)
def test_format_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


def test_format_count() -> None:
    assert (format_count(6738415616), format_count(999)) == ("6.74 B", "999")


@pytest.mark.parametrize(
    ("text", "cores", "shown"),
    [("500m", 0.5, "500m"), ("2", 2.0, "2"), ("0.1", 0.1, "100m"), ("1u", 0.001, "1m"), ("0", 0.0, "0")],
)
def test_cores_are_thousandths_rounded_up(text: str, cores: float, shown: str) -> None:
    assert parse_cores(text) == cores
    assert format_cores(cores) == shown


@pytest.mark.parametrize("text", ["64m", "1u", "0n"])
def test_fractions_of_a_byte_are_no_bytes_that_a_user_means(text: str) -> None:
    assert parse_quantity(text) == bool(int(text[:-1])), "as the API server has it"
    with pytest.raises(ValueError, match=rf"'{text}': {text[-1]} is a fraction of a byte .* {text[:-1]}Mi$"):
        parse_bytes(text)
    assert parse_bytes("64Mi") == parse_quantity("64Mi")


@pytest.mark.parametrize("text", ["", "two", "-1", "1 core"])
def test_what_is_no_quantity_is_no_number_of_cores(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid number of cores: write for example 2 or 500m"):
        parse_cores(text)

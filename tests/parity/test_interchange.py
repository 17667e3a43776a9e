"""DeepSpeed and FSDP2 train on from our files as from their own: the same losses and the same states, bit for bit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from harness.places import IMPORTABLE

pytestmark = pytest.mark.ci

NUM_RANKS = 2
CASES = ("zero-1", "zero-2", "zero-3", "fsdp2", "fsdp2-flat")
CLAIMS = {"zero": 7, "fsdp2": 6}
"""how many each case makes, so that none is left out; ZeRO-3 has one more"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bool]]:
    directory = tmp_path_factory.mktemp("engines")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    where = {"WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "harness.interchange_engines", str(directory)],
            env=os.environ | IMPORTABLE | where | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * NUM_RANKS, said
    found: dict[str, dict[str, bool]] = json.loads((directory / "results.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_engine_trains_on_from_our_file_as_from_its_own(results: dict[str, dict[str, bool]], case: str) -> None:
    claims = results[case]
    assert len(claims) == CLAIMS[case.partition("-")[0]] + (case == "zero-3")
    assert [claim for claim, holds in claims.items() if not holds] == []


def test_every_case_is_looked_at(results: dict[str, dict[str, bool]]) -> None:
    assert tuple(results) == CASES

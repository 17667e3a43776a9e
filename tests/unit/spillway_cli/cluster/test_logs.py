"""`spillway logs` of a run directory; that of a cluster's job is in test_cluster_commands.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from spillway_cli.__main__ import run_app
from spillway_cli.cluster import logs as logs_command
from spillway_cli.record.directory import RunDirectory, exclusive


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Two attempts."""
    run = RunDirectory(tmp_path / "run")
    for epoch in (1, 2):
        run.attempt(epoch).mkdir(parents=True)
        (run.attempt(epoch) / "trainer.log").write_text(f"said by {epoch}\n")
    run.log.touch()
    return run


@pytest.mark.parametrize(
    ("words", "said"), [([], 2), (["--attempt", "1"], 1), (["-f"], 2), (["--attempt", "1", "-f"], 1)]
)
def test_log_of_a_run_directory_is_its_trainers(
    run: RunDirectory, words: list[str], said: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_app(["logs", str(run.path), *words]) == 0
    assert capfdbinary.readouterr().out == f"said by {said}\n".encode()


def test_followed_log_goes_on_through_attempts_to_the_end_of_the_run(
    run: RunDirectory, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = exclusive(run)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            with (run.attempt(2) / "trainer.log").open("a") as log:
                log.write("said later\n")
        elif len(pauses) == 2:
            (run.attempt(3)).mkdir()
            (run.attempt(3) / "trainer.log").write_text("said by 3\n")
        else:
            holding.__exit__(None, None, None)

    monkeypatch.setattr(logs_command.time, "sleep", pause)
    holding.__enter__()
    assert run_app(["logs", str(run.path), "-f"]) == 0
    assert capfdbinary.readouterr().out.decode() == "said by 2\nsaid later\nsaid by 3\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--attempt", "7"], "attempt 7 has no log; attempts with a log: 1, 2"),
        (["--rank-node", "1"], "--rank-node 1: "),
    ],
)
def test_log_that_is_not_there_is_a_sentence(
    run: RunDirectory, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["logs", str(run.path), *words]) == 64
    assert sentence in capsys.readouterr().err

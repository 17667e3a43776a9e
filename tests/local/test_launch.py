"""The launcher with real processes: signals, the order in which ranks end, output, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.patience import wait_until
from harness.places import TESTS
from spillway_trainer.launch import launcher as launch
from spillway_trainer.launch.ending import RankEnd

FAKE_RANK = TESTS / "fakes" / "fake_rank.py"
DRIVER = """
import sys
from spillway_trainer.launch import launcher as launch
launch.FOLLOW_SECONDS, launch.STOP_SECONDS, launch.POLL_SECONDS = 1.5, 0.5, 0.1
sys.exit(launch.main([sys.argv[1]], [sys.executable, sys.argv[2]]))
"""
PATIENCE_SECONDS = 120


class Launched:
    """A launcher with fake ranks that do what `script` says."""

    def __init__(self, directory: Path, script: dict[str, Any], driver: str = DRIVER, **job: Any) -> None:
        self.directory = directory
        self.message_path = directory / "termination.json"
        layout = {"name": "demo", "epoch": 1, "termination_message_path": str(self.message_path)}
        (directory / "job.json").write_text(json.dumps({**layout, "ranks_per_node": len(script), **job}))
        (directory / "script.json").write_text(json.dumps(script))
        self.process = subprocess.Popen(
            [sys.executable, "-c", driver, str(directory), str(FAKE_RANK)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(directory)},
        )  # fmt: skip

    def wait_for_ranks(self, *ranks: int) -> list[dict[str, Any]]:
        """Waits until the ranks have begun; returns the process id and environment of each."""
        paths = [self.directory / f"started-{rank}" for rank in ranks]
        wait_until(lambda: all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> tuple[int, dict[str, Any]]:
        """Waits for the launcher; returns its exit code and termination message."""
        self.out, self.err = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, json.loads(self.message_path.read_bytes())


def run(directory: Path, script: dict[str, Any], **job: Any) -> tuple[int, dict[str, Any]]:
    return Launched(directory, script, **job).end()


def said(code: int, reason: str, **more: Any) -> dict[str, Any]:
    return {"end": code, "say": {"v": 1, "reason": reason, "exitCode": code, **more}}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- ends -------------------------------------------------------------------------------------------------------------


def test_ranks_that_complete_end_the_pod_with_the_first_ranks_words(tmp_path: Path) -> None:
    script = {"0": {"wait": 1, **said(0, "Completed", step=7)}, "1": said(0, "Completed", step=8)}
    assert run(tmp_path, script) == (0, {"v": 1, "reason": "Completed", "exitCode": 0, "step": 7})


def test_a_single_rank_gets_a_launcher_too(tmp_path: Path) -> None:
    assert run(tmp_path, {"0": said(71, "NonFinite")}) == (71, {"v": 1, "reason": "NonFinite", "exitCode": 71})


def test_a_rank_killed_while_the_launcher_lives_ends_the_pod_and_says_so(tmp_path: Path) -> None:
    code, message = run(tmp_path, {"0": {"wait": "SIGTERM", "end": 75}, "1": {"end": "SIGKILL"}})
    assert code == 137
    assert (message["reason"], message["exitCode"], message["rank"]) == ("RankCrashed", 137, 1)
    assert "rank 1 was killed by SIGKILL (probably out of memory" in message["message"]


def test_the_ranks_that_are_left_get_time_and_sigterm_and_sigkill(tmp_path: Path) -> None:
    launched = Launched(tmp_path, {"0": {"wait": "for ever"}, "1": said(70, "DeviceOutOfMemory")})
    (stubborn,) = launched.wait_for_ranks(0)
    assert launched.end()[0] == 70
    assert not is_alive(stubborn["pid"])


def test_a_follower_that_ends_first_is_passed_over(tmp_path: Path) -> None:
    script = {"0": said(1, "RankCrashed", follower=True), "1": {"wait": 0, **said(73, "SpillIOError")}}
    assert run(tmp_path, script)[0] == 73


@pytest.mark.parametrize(
    ("why", "cause"), [("remote process exited", 1), ("CUDA error: unspecified launch failure", 0)]
)
def test_a_rank_that_torch_ends_because_it_waits_in_nccl_is_a_follower(tmp_path: Path, why: str, cause: int) -> None:
    words = f"[E1129 ProcessGroupNCCL.cpp:638] Aborting process on rank 0 due to error - {why}\nframe #1"
    _, message = run(tmp_path, {"0": {"print": words, "end": "SIGABRT"}, "1": {"wait": 0, "end": "SIGKILL"}})
    assert message["rank"] == cause


def test_when_all_are_followers_the_first_one_speaks(tmp_path: Path) -> None:
    script = {"0": {"wait": "for ever"}, "1": said(1, "RankCrashed", follower=True)}
    code, message = run(tmp_path, script)
    assert (code, message["follower"]) == (1, True)


def test_a_message_about_another_end_does_not_count(tmp_path: Path) -> None:
    """The rank reported that it had completed, and was killed while it cleaned up."""
    script = {"0": {"end": "SIGSEGV", "say": {"v": 1, "reason": "Completed", "exitCode": 0}}}
    code, message = run(tmp_path, script)
    assert (code, message["reason"], message["message"]) == (139, "RankCrashed", "rank 0 was killed by SIGSEGV")


def test_nothing_is_left_in_the_scratch_directory(tmp_path: Path) -> None:
    run(tmp_path, {"0": said(0, "Completed")})
    assert not list(tmp_path.glob("spillway-ranks-*"))


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_reaches_every_rank_as_sigterm(tmp_path: Path, number: signal.Signals) -> None:
    script = {str(rank): {"wait": "SIGTERM", **said(75, "Preempted")} for rank in range(3)}
    launched = Launched(tmp_path, script)
    launched.wait_for_ranks(0, 1, 2)
    launched.process.send_signal(number)
    assert launched.end() == (75, {"v": 1, "reason": "Preempted", "exitCode": 75})


def test_a_request_before_the_rank_can_listen_is_a_preemption(tmp_path: Path) -> None:
    launched = Launched(tmp_path, {"0": {"wait": "unready"}})
    launched.wait_for_ranks(0)
    launched.process.terminate()
    code, message = launched.end()
    assert (code, message["reason"], message["exitCode"]) == (75, "Preempted", 75)


def test_ranks_that_commit_after_a_preempted_one_are_left_in_peace(tmp_path: Path) -> None:
    script = {"0": {"wait": 1, **said(75, "Preempted", step=9)}, "1": said(75, "Preempted", step=8)}
    launched = Launched(tmp_path, script)
    launched.end()
    assert launched.process.returncode == 75
    assert "stopped" not in launched.out


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launched = Launched(tmp_path, {"0": {"wait": "for ever"}, "1": {"wait": "for ever"}})
    pids = [one["pid"] for one in launched.wait_for_ranks(0, 1)]
    launched.process.kill()
    launched.process.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_ranks_are_asked_to_stop_when_the_local_run_is_killed(tmp_path: Path) -> None:
    """In the chain spillway run -> trainer_process -> launcher -> ranks, only the pipe of standard input breaks."""
    layout = {"name": "d", "epoch": 1, "termination_message_path": str(tmp_path / "said"), "ranks_per_node": 2}
    (tmp_path / "job.json").write_text(json.dumps(layout))
    waits = {"wait": "SIGTERM", **said(75, "Preempted")}
    (tmp_path / "script.json").write_text(json.dumps({"0": waits, "1": waits}))
    (tmp_path / "launches_fakes.py").write_text(
        f"import sys\nfrom spillway_trainer.launch import launcher as launch\n"
        f"sys.exit(launch.main([sys.argv[1]], [sys.executable, {str(FAKE_RANK)!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "spillway_cli.run.trainer_process", "launches_fakes", str(tmp_path)],
        stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "started-1").exists() and (tmp_path / "started-0").exists())
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_SECONDS) == 75


def test_orphans_are_buried(tmp_path: Path) -> None:
    """As process 1, the launcher inherits every orphan of the pod; here it is made a subreaper, which has the same
    duty."""
    subreaper = "import ctypes\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
    launched = Launched(tmp_path, {"0": {"orphan": True, "wait": "unready"}}, driver=subreaper + DRIVER)
    (rank,) = launched.wait_for_ranks(0)
    wait_until(lambda: pids_of_children(launched.process.pid) == {rank["pid"]})
    launched.process.terminate()
    assert launched.end()[0] == 75


def pids_of_children(pid: int) -> set[int]:
    """Process ids of all children, including zombies."""
    return {int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


# --- ranks' environment and output ------------------------------------------------------------------------------------


def test_ranks_know_their_place_in_the_world(tmp_path: Path) -> None:
    launched = Launched(tmp_path, {"0": {}, "1": {}})
    first, second = (one["environment"] for one in launched.wait_for_ranks(0, 1))
    launched.process.communicate()
    wanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [second[name] for name in wanted] == ["1", "1", "2", "2", "0", "127.0.0.1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "0"
    assert first["SPILLWAY_TERMINATION_PATH"] != second["SPILLWAY_TERMINATION_PATH"]


def test_a_rank_keeps_the_launchers_locks_but_not_its_life_line(tmp_path: Path) -> None:
    """spillway run passes its directory's lock on, because no other run may start while a rank still writes."""
    lock = os.open(tmp_path, os.O_RDONLY)
    layout = {"name": "d", "epoch": 1, "termination_message_path": str(tmp_path / "said"), "ranks_per_node": 1}
    (tmp_path / "job.json").write_text(json.dumps(layout))
    code = "import os, sys; os.fstat(int(sys.argv[1])); sys.exit(os.readlink('/proc/self/fd/0') != os.devnull)"
    launcher = "import sys\nfrom spillway_trainer.launch.launcher import main\n"
    launcher += f"sys.exit(main([{str(tmp_path)!r}], [sys.executable, '-c', {code!r}, '{lock}']))"
    command = [sys.executable, "-c", launcher]
    assert subprocess.run(command, pass_fds=(lock,), stdin=subprocess.PIPE, check=False).returncode == 0
    os.close(lock)


def test_lines_of_several_ranks_carry_their_rank(tmp_path: Path) -> None:
    script = {"0": {"print": "one\ntwo"}, "1": {"print": "x" * 40_000, "end": 3}}
    launched = Launched(tmp_path, script)
    _, message = launched.end()
    lines = launched.out.splitlines()
    assert {"[rank 0] one", "[rank 0] two"} <= set(lines)
    assert [len(line) for line in lines if line.startswith("[rank 1] ")] == [16393, 16393, 7241]
    assert message["message"].startswith("rank 1 exited with code 3; last log line: x")


def script_launcher(folder: Path, command: Sequence[str], ranks: int = 1) -> list[str]:
    spill = folder / "spill"
    spill.mkdir()
    layout = {
        "name": "d", "epoch": 1, "termination_message_path": str(folder / "said"), "ranks_per_node": ranks,
        "spec": {"command": command}, "checkpoint_directory": str(folder / "kept"), "spill_directory": str(spill),
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(layout))
    return [sys.executable, "-P", "-m", "spillway_trainer.launch", str(folder)]


def script(folder: Path, *command: str, ranks: int = 1) -> tuple[int, str, dict[str, Any]]:
    """Runs a job with that command; returns its exit code, output and termination message."""
    ended = subprocess.run(script_launcher(folder, command, ranks), capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr, json.loads((folder / "said").read_text())


def test_a_script_gets_its_directories_and_its_rank(tmp_path: Path) -> None:
    shown = "$(RANK) of $(WORLD_SIZE) $(SPILLWAY_CHECKPOINT_DIRECTORY) $(SPILLWAY_SPILL_DIRECTORY) $(UNSET) $$(RANK)"
    code, output, message = script(
        tmp_path, "sh", "-c", f"echo '{shown}'; test -d $SPILLWAY_CHECKPOINT_DIRECTORY", ranks=2
    )
    assert (code, message["reason"]) == (0, "Completed")
    assert sorted(output.splitlines()) == [
        f"[rank {rank}] {rank} of 2 {tmp_path}/kept {tmp_path}/spill $(UNSET) $(RANK)" for rank in (0, 1)
    ]


def test_how_a_script_failed_is_the_last_line_that_it_printed(tmp_path: Path) -> None:
    code, output, message = script(tmp_path, "sh", "-c", "printf 'at 10\\rat 20\\nno such column' >&2; exit 3")
    assert (code, message["reason"]) == (3, "RankCrashed")
    assert message["message"] == "rank 0 exited with code 3; last log line: no such column"
    assert {"at 10", "at 20", "no such column"} == set(output.splitlines())


@pytest.mark.parametrize("after", ["exit 0", "exit 143", "exit 5"])
def test_a_script_that_ends_when_it_is_asked_to_is_run_again(tmp_path: Path, after: str) -> None:
    """This also holds behind a shell: the processes that it started are asked to stop, too, and may save."""
    saves = f"trap 'echo saved > {tmp_path}/saved; {after}' TERM; echo up; while :; do sleep 0.05; done"
    launcher = asked(tmp_path, f'sh -c "{saves}"; true')
    os.kill(launcher.pid, signal.SIGTERM)
    launcher.communicate()
    message = json.loads((tmp_path / "said").read_text())
    assert (launcher.returncode, message["reason"]) == (75, "Preempted")
    assert message["message"] == "rank 0 was stopped by SIGTERM"
    assert (tmp_path / "saved").exists()


def asked(folder: Path, shell: str) -> subprocess.Popen[str]:
    """Starts a launcher, and waits until its script has printed its first line."""
    launcher = subprocess.Popen(script_launcher(folder, ["sh", "-c", shell]), stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stdout.readline() == "up\n"
    return launcher


def test_a_rank_of_a_script_may_go_on_after_the_others() -> None:
    assert launch.patience([RankEnd(1, 0)]) == launch.COMMIT_SECONDS
    assert launch.patience([RankEnd(1, 0, is_script=True)]) == float("inf")


def test_a_program_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    code, _, message = script(tmp_path, "pyhton", "train.py")
    assert (code, message["reason"]) == (64, "UserError")
    assert "pyhton: cannot be started: No such file or directory; spec.command names it" in message["message"]


def test_lines_of_a_single_rank_are_as_it_prints_them(tmp_path: Path) -> None:
    launched = Launched(tmp_path, {"0": {"print": "step 1"}})
    launched.end()
    assert launched.out == "step 1\n"


def test_output_that_nobody_reads_does_not_stop_the_launcher(tmp_path: Path) -> None:
    launched = Launched(tmp_path, {"0": {"print": "x" * 500_000}, "1": {"wait": "SIGTERM", "end": 75}})
    wait_until((tmp_path / "started-1").exists)
    launched.process.terminate()
    assert launched.process.wait(PATIENCE_SECONDS) == 75


# --- rejections, metrics ----------------------------------------------------------------------------------------------


def test_a_metrics_port_in_use_is_rejected_before_any_rank_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        code, message = run(tmp_path, {"0": {}}, metrics_port=taken.getsockname()[1])
    assert (code, message["reason"]) == (64, "UserError")
    assert not (tmp_path / "started-0").exists()


def test_metrics_of_the_ranks_come_from_one_port(tmp_path: Path) -> None:
    (port,) = launch.free_ports(1)
    launched = Launched(tmp_path, {"0": {"wait": "unready"}, "1": {"wait": "unready"}}, metrics_port=port)
    ranks = launched.wait_for_ranks(0, 1)
    assert len({one["environment"]["SPILLWAY_METRICS_PORT"] for one in ranks}) == 2
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert 'spillway_rank_up{training_job="demo",rank="1"} 0\n' in text
    launched.process.terminate()
    launched.end()


# --- torchrun, memory -------------------------------------------------------------------------------------------------


def test_launcher_costs_a_twentieth_of_torchruns_agent() -> None:
    code = (
        "import spillway_trainer.launch.launcher, sys; sys.exit(any(m in sys.modules for m in ('torch', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    read = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    out = subprocess.run(
        [sys.executable, "-c", f"import spillway_trainer.launch.launcher\n{read}"], capture_output=True, check=True
    )
    assert int(out.stdout) < 27_000


AGENTS_OWN_VARIABLES = {
    "COLUMNS", "LINES", "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"
}  # fmt: skip
"""variables that only torchrun's agent sets: our trainer sets its threads itself, and the error file is torchrun's form
of a termination message"""


@pytest.mark.ci
def test_ranks_get_every_variable_that_torchrun_gives(tmp_path: Path) -> None:
    script = tmp_path / "prints_environment.py"
    script.write_text("import json, os\nprint('ENV' + json.dumps(dict(os.environ)))\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", str(script)]
    out = subprocess.run(torchrun, capture_output=True, text=True, check=True).stdout
    theirs = json.loads(next(line[3:] for line in out.splitlines() if line.startswith("ENV"))).keys()
    ours = launch.torchrun_variables(launch.LaunchSettings("demo", 1, "/dev/null"), 0, 0, 29500).keys()
    assert theirs - os.environ.keys() - ours - launch.DEFAULT_VARIABLES.keys() <= AGENTS_OWN_VARIABLES

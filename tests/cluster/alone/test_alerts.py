"""Faults on the test bed fire their alerts in a real Prometheus, and no other alert unless it is declared inhibited.
Then the runbook's commands run.

The alerts are FASTER than the chart's: all their durations are divided by it. The alert of a lost node is tested where
nodes are lost, in test_disruption.py.
"""

from __future__ import annotations

import copy
import datetime
import http.client
import os
import re
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from shutil import disk_usage

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness.installed import (
    FILL,
    LONG,
    ON_REAL_NODES,
    RELEASE,
    SYSTEM_NAMESPACE,
    TRAINERS,
    Document,
    Installed,
    OperatorImage,
    example,
    install,
    named,
)
from harness.page_commands import INHIBITED, SECTIONS, Shell, commands_in
from harness.patience import wait_until
from testbed.client import Bed
from testbed.errors import Failed
from testbed.layout import ADDRESS, PROMETHEUS, REPOSITORY
from testbed.processes import run

pytestmark = pytest.mark.full

FASTER = 20
CLOCK = "fast"
"""label of the faster alerts, because Prometheus also evaluates the chart's own"""
SECONDS = 180.0
ACCOUNT = "faulty"
"""another account than that of the other tests, because a test compares that account's rights with their use"""
NO_LARGE_FILES = """
import os, resource
for process in filter(str.isdecimal, os.listdir("/proc")):
    with open(f"/proc/{process}/cmdline", "rb") as file:
        if b"spillway_trainer" in file.read().split(bytes(1)):
            resource.prlimit(int(process), resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
"""
"""Python code that makes the kernel reject what the ranks of a pod write beyond the first MiB of a file"""
CHANGES_SOMETHING = ("kubectl edit", "kubectl cordon", "kubectl uncordon", "kubectl rollout", "kubectl delete")


def faster(text: str) -> str:
    """Divides a rule's duration, or an expression's durations and limits in seconds, by FASTER. Limits of 100 and more
    are taken as seconds."""
    in_seconds = {"s": 1, "m": 60, "h": 3600}

    def shorter(found: re.Match[str]) -> str:
        return f"{int(found[1]) * in_seconds[found[2]] // FASTER}s"

    text = re.sub(r"(?<![\w.])(\d+)([smh])\b", shorter, text)
    return re.sub(r"(?<=[<>=] )(\d{3,})\b", lambda found: str(int(found[1]) // FASTER), text)


@pytest.fixture(scope="module")
def fast(testbed: Bed) -> Iterator[Bed]:
    import alerts  # from charts/, which conftest adds to the path

    rules = copy.deepcopy(alerts.as_json())
    rules["groups"][0] |= {"name": "fast", "interval": "1s"}
    for rule in rules["groups"][0]["rules"]:
        rule |= {"expr": faster(rule["expr"]), "for": faster(rule["for"])}
        rule["labels"] |= {"clock": CLOCK}
    testbed.rules("fast", rules)
    yield testbed
    testbed.rules("fast", None)


def firing(bed: Bed, **labels: str) -> dict[str, Document]:
    """Name -> labels of each alert that fires and has these labels."""
    chosen = ",".join(f'{name}="{value}"' for name, value in {"clock": CLOCK, **labels}.items())
    found = bed.query(f'ALERTS{{alertstate="firing",{chosen}}}')
    return {one.labels["alertname"]: dict(one.labels) for one in found}


def fires(bed: Bed, name: str, beside: frozenset[str] = frozenset(), **labels: str) -> None:
    """Waits until alert `name` fires; asserts that no other alert with these labels does, except `beside` and those
    that the runbook mutes. Then runs the runbook's commands."""
    found: dict[str, Document] = {}

    def reached() -> bool:
        found.clear()
        found.update(firing(bed, **labels))
        return name in found

    wait_until(reached, why=lambda: f"{name} does not fire, only {found}", seconds=SECONDS, pause=0.5)
    muted = {silenced for one, silenced in INHIBITED if one in found}
    assert found.keys() - muted <= {name, *beside}, found
    run_the_runbook(bed, found[name])


def run_the_runbook(bed: Bed, alert: Document) -> None:
    """Asserts that every command in the alert's section succeeds, except those that change something or need other
    placeholders."""
    environment = {
        "KUBECONFIG": str(bed.kubeconfig), "HOME": str(bed.state.data),
        "PATH": os.pathsep.join(map(str, (REPOSITORY / ".venv" / "bin", bed.state.bin, "/usr/bin", "/bin"))),
    }  # fmt: skip
    words = {"-n spillway": f"-n {SYSTEM_NAMESPACE}", "spillway:spillway": f"{SYSTEM_NAMESPACE}:{ACCOUNT}"}
    words |= {"NAMESPACE": alert.get("namespace", "default"), "JOB": alert.get("training_job", "-")}
    asked = commands_in(SECTIONS[alert["alertname"]])
    answers_no = {command: (0, 1) for command in asked if command.startswith("kubectl auth can-i")}
    shell = Shell(bed.state.data, environment, words, answers_no)
    for command in asked:
        if not command.startswith(CHANGES_SOMETHING) and not {"NODE", "POD", "CLAIM"} & set(shlex.split(command)):
            print(f"\n$ {command}\n{shell.run(command)[-1500:]}")


def trains(spillway: Installed, namespace: str, job: Document) -> str:
    """Creates a job and waits until it trains; returns the name of one of its pods."""
    spillway.create(job)
    name = job["metadata"]["name"]
    spillway.until(lambda found: found["status"].get("progress", {}).get("step", 0) > 5, namespace, name)
    pod: str = spillway.children("pod", namespace, name)[-1]["metadata"]["name"]
    return pod


def test_a_rank_that_hangs(fast: Bed, spillway: Installed, namespace: str) -> None:
    """One rank of two hangs: the other waits for it, and its exporter reports since when."""
    fast.claim("two-pod", namespace)
    job = example("two-pod", namespace, training__steps=LONG)
    pod = trains(spillway, namespace, job)
    stop = TRAINERS.format(signal="SIGSTOP")
    fast.kubectl("exec", pod, "-n", namespace, "--", "python", "-c", stop)
    of_job = {"namespace": namespace, "training_job": job["metadata"]["name"]}
    fires(fast, "SpillwayRankSilent", **of_job)


def test_a_job_that_runs_out_of_memory_again(fast: Bed, spillway: Installed, namespace: str) -> None:
    job = named(example("one-pod", namespace, checkpoint__claim=None, training__steps=LONG), "filled")
    pod = trains(spillway, namespace, job)
    for attempt in (1, 2):
        # The kernel may kill the other processes before the rank; then the memory is filled again.
        while spillway.job(namespace, "filled")["status"]["attempts"]["total"] == attempt:
            with suppress(Failed):  # the other processes end with their container
                fast.kubectl("exec", pod, "-n", namespace, "--", "python", "-c", FILL)
        found = spillway.until(
            lambda found: "lastStepTime" in found["status"].get("progress", {}), namespace, "filled", SECONDS
        )
        assert len(found["status"]["escalations"]) == attempt
        pods = spillway.children("pod", namespace, "filled")
        (pod,) = (one["metadata"]["name"] for one in pods if f"-{attempt + 1}-0-" in one["metadata"]["name"])
    fires(fast, "SpillwayJobOutOfMemory", namespace=namespace, training_job="filled")


def test_a_checkpoint_volume_that_is_almost_full_and_then_rejects_writes(
    fast: Bed, spillway: Installed, namespace: str
) -> None:
    folder = fast.claim("one-pod", namespace)
    owner = folder.stat().st_uid
    run(["mount", "-t", "tmpfs", "-o", f"size=512m,uid={owner},gid={owner},mode=2775", "tmpfs", folder])
    try:
        job = named(example("one-pod", namespace, training__steps=LONG, checkpoint__claim="one-pod"), "saves")
        trains(spillway, namespace, job)
        spillway.until(lambda found: "checkpoint" in found["status"], namespace, "saves")
        of_job = {"namespace": namespace, "training_job": "saves"}
        run(["fallocate", "-l", str(disk_usage(folder).free - disk_usage(folder).total // 20), folder / "other"])
        fires(fast, "SpillwayCheckpointVolumeFull", **of_job)
        run(["mount", "-o", "remount,ro", folder])
        fires(fast, "SpillwayCheckpointNotWritten", frozenset({"SpillwayCheckpointVolumeFull"}), **of_job)
        fast.kubectl("delete", "trainingjobs.spillway.dev", "saves", "-n", namespace, "--timeout=120s")
        wait_until(lambda: not spillway.children("pod", namespace, "saves"), why=lambda: "its pod stays", pause=0.5)
    finally:
        run(["umount", "--lazy", folder])


def test_a_spill_drive_that_rejects_writes(fast: Bed, spillway: Installed, namespace: str) -> None:
    """The kernel rejects writes beyond the spill file's first MiB, as a failed drive does. The data stay in host
    memory, and the job continues."""
    job = example(
        "one-pod", namespace, checkpoint={"everySteps": LONG}, training__steps=LONG,
        memory__budget={"device": "34Mi", "host": "256Mi", "nvme": "512Mi"},
        memory__advanced={"activations": {"policy": "Nvme", "hostReserve": "128Mi"}},
    )  # fmt: skip
    pod = trains(spillway, namespace, job)
    fast.kubectl("exec", pod, "-n", namespace, "--", "python", "-c", NO_LARGE_FILES)
    name = job["metadata"]["name"]
    fires(fast, "SpillwaySpillDriveFailing", namespace=namespace, training_job=name)
    step = spillway.job(namespace, name)["status"]["progress"]["step"]
    found = spillway.until(lambda found: found["status"]["progress"]["step"] > step, namespace, name)
    assert found["status"]["attempts"]["total"] == 1


# --- the operator -----------------------------------------------------------------------------------------------------


def expired_certificate() -> dict[str, str]:
    """A certificate of the progress endpoint that expired yesterday."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "expired")])
    now = datetime.datetime.now(datetime.UTC)
    host = f"{RELEASE}.{SYSTEM_NAMESPACE}.svc"
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=9))
        .not_valid_after(now - datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return {"tls.crt": pem, "tls.key": secret, "ca.crt": pem}


@contextmanager
def proxied() -> Iterator[str]:
    """Yields the URL of a proxy of Prometheus, which is closed at the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            behind = http.client.HTTPConnection(PROMETHEUS.removeprefix("http://"), timeout=10)
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            kind = {"Content-Type": self.headers.get("Content-Type", "text/plain")}
            behind.request(self.command, self.path, sent, kind)
            answer = behind.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing, because nobody would read it."""

    server = ThreadingHTTPServer((ADDRESS, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{ADDRESS}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_an_operator_with_an_expired_certificate_without_metrics_and_without_a_right(
    fast: Bed, spillway: Installed, operator_image: OperatorImage, namespace: str
) -> None:
    before = frozenset(firing(fast))  # alerts of earlier tests
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "expired", "namespace": SYSTEM_NAMESPACE}}
    fast.apply({**secret, "type": "kubernetes.io/tls", "stringData": expired_certificate()})
    try:
        with proxied() as url:
            faulty = ("progress.tls.secretName=expired", f"prometheus.url={url}", f"serviceAccount.name={ACCOUNT}")
            install(fast, operator_image, (*ON_REAL_NODES, *faulty))
            fires(fast, "SpillwayCertificateExpired", before)
            wait_until(
                lambda: bool(fast.query("spillway_operator_metrics_age_seconds < 10")),
                why=lambda: "the operator read no metrics", seconds=SECONDS, pause=0.5,
            )  # fmt: skip
        fires(fast, "SpillwayPlacementMetricsStale", before | {"SpillwayCertificateExpired"})
        fast.kubectl("delete", "clusterrolebindings", "-l", f"app.kubernetes.io/instance={RELEASE}")
        spillway.create(named(example("one-pod", namespace, checkpoint__claim=None), "unseen"))
        before |= {"SpillwayCertificateExpired", "SpillwayPlacementMetricsStale"}
        fires(fast, "SpillwayOperatorForbidden", before)
    finally:
        install(fast, operator_image)
        fast.kubectl("delete", "secret", "expired", "-n", SYSTEM_NAMESPACE)

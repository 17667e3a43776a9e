"""A running test bed, as a test sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from . import api, bed, images
from .layout import PROMETHEUS, State
from .processes import end, recorded, run

POD_USER = 1000
MUTATING = frozenset({"create", "update", "patch", "delete", "deletecollection"})


@dataclass(frozen=True, slots=True)
class Request:
    """One answered request in the audit log."""

    verb: str
    group: str
    resource: str
    subresource: str
    namespace: str
    name: str
    user: str
    agent: str
    pod: str
    """that the user's token is bound to"""
    code: int
    at: str
    """when the API server received it: RFC 3339, microseconds"""
    allowed: bool
    """False: its user has no right to it"""

    @property
    def mutating(self) -> bool:
        return self.verb in MUTATING


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Bed:
    state: State

    @property
    def kubeconfig(self) -> Path:
        return self.state.kubeconfig

    def kubectl(self, *arguments: str | Path, stdin: str | None = None) -> str:
        """Its output; raises Failed with what it said when it fails."""
        return run([self.state.bin / "kubectl", "--kubeconfig", self.kubeconfig, *arguments], stdin=stdin)

    def get(self, *arguments: str) -> Any:
        """The JSON of `kubectl get`: one object, or a list with `items`."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self, *objects: Mapping[str, object]) -> None:
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--server-side", "-f", "-", stdin=document)

    def helm(self, *arguments: str | Path, program: str = "helm") -> str:
        """Its output; `program` is `helm` (4) or `helm3`. Raises Failed with what it said when it fails."""
        folder = self.state.data / "helm"
        folders = {name: str(folder) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
        environment = {"KUBECONFIG": str(self.kubeconfig), **folders}
        return run([self.state.bin / program, *arguments], environment=environment)

    def import_images(self, *files: Path) -> list[str]:
        return images.import_files(self.state, files)

    def audit_position(self) -> int:
        """Where the audit log ends now: pass it to `requests` later."""
        return self.state.audit_log.stat().st_size

    def requests(self, since: int = 0, user: str | None = None) -> list[Request]:
        """What was asked of the API server after `since`, by everybody or by one user, in the order of the answers."""
        wanted = (user or "").encode()
        with self.state.audit_log.open("rb") as log:
            log.seek(since)
            events = (json.loads(line) for line in log if line.endswith(b"\n") and wanted in line)
            complete = (event for event in events if event["stage"] == "ResponseComplete" and "objectRef" in event)
            return [found for found in map(_request, complete) if user in (None, found.user)]

    def query(self, expression: str) -> list[Sample]:
        """What Prometheus answers now to an expression whose result is a vector."""
        question = f"{PROMETHEUS}/api/v1/query?{urlencode({'query': expression})}"
        found = json.loads(api.fetch(question))["data"]["result"]
        return [Sample(series["metric"], float(series["value"][1])) for series in found]

    def inject(self, name: str, address: str, labels: Mapping[str, str]) -> None:
        """Have Prometheus scrape `address` too, its series under these labels (`node`: as that node's own)."""
        target = self.state.injected / f"{name}.json"
        unfinished = target.with_suffix(".new")
        unfinished.write_text(json.dumps([{"targets": [address], "labels": dict(labels)}]), encoding="utf-8")
        unfinished.rename(target)

    def rules(self, name: str, groups: Mapping[str, object] | None) -> None:
        """Have Prometheus evaluate these rules, too; None: no longer."""
        target = self.state.injected / f"{name}.rules"
        if groups is None:
            target.unlink()
        else:
            target.write_text(json.dumps(groups), encoding="utf-8")
        api.fetch(f"{PROMETHEUS}/-/reload", data=b"")

    def claim(self, name: str, namespace: str, access_modes: Sequence[str] = ("ReadWriteMany",)) -> Path:
        """Make a bound claim; the folder behind it, writable by the user that pods run as."""
        folder = self.state.volumes / namespace / name
        folder.mkdir(parents=True)
        folder.chmod(0o2775)
        # The kubelet does not give a host folder to a pod's fsGroup.
        run(["chown", f"{POD_USER}:{POD_USER}", folder])
        size, reference = {"storage": "10Gi"}, {"namespace": namespace, "name": name}
        volume = {
            "capacity": size,
            "accessModes": list(access_modes),
            "hostPath": {"path": str(folder)},
            "storageClassName": "",
            "claimRef": reference,
            "persistentVolumeReclaimPolicy": "Retain",
        }
        claim = {
            "accessModes": list(access_modes),
            "storageClassName": "",
            "volumeName": f"{namespace}-{name}",
            "resources": {"requests": size},
        }
        self.apply(
            _named("PersistentVolume", {"name": f"{namespace}-{name}"}, volume),
            _named("PersistentVolumeClaim", reference, claim),
        )
        return folder

    def container_process(self, namespace: str, pod: str, container: str = "") -> int:
        """Id, on this machine, of the first process of a container that runs; "" for the pod's only one."""
        found = api.read(self.state, f"/api/v1/namespaces/{namespace}/pods/{pod}") or {}
        statuses = found.get("status", {}).get("containerStatuses", ())
        identity = next(one["containerID"] for one in statuses if container in ("", one["name"])).rpartition("/")[2]
        listed = run(["ctr", "--address", self.state.containerd_socket, "--namespace", "k8s.io", "tasks", "list"])
        return next(int(words[1]) for words in map(str.split, listed.splitlines()) if words[0] == identity)

    def read(self, path: str) -> dict[str, Any]:
        """What the API server holds at `path`, quicker than kubectl; empty while there is nothing."""
        return api.read(self.state, path) or {}

    def kill(self, component: str) -> None:
        """kill -9 one of the bed's processes, as `testbed status` names it; `restart` brings it back."""
        end(self.state, recorded(self.state)[component])

    def restart(self, wanted: bed.Wanted) -> None:
        """Start what does not run."""
        bed.up(self.state, wanted)


def _named(kind: str, metadata: Mapping[str, str], spec: Mapping[str, object]) -> dict[str, object]:
    return {"apiVersion": "v1", "kind": kind, "metadata": dict(metadata), "spec": dict(spec)}


def _request(event: dict[str, Any]) -> Request:
    about = event["objectRef"]
    return Request(
        verb=event["verb"],
        group=about.get("apiGroup", ""),
        resource=about.get("resource", ""),
        subresource=about.get("subresource", ""),
        namespace=about.get("namespace", ""),
        name=about.get("name", ""),
        user=event["user"].get("username", ""),
        agent=event.get("userAgent", ""),
        pod="".join(event["user"].get("extra", {}).get("authentication.kubernetes.io/pod-name", ())),
        code=event.get("responseStatus", {}).get("code", 0),
        at=event["requestReceivedTimestamp"],
        allowed=event.get("annotations", {}).get("authorization.k8s.io/decision") != "forbid",
    )

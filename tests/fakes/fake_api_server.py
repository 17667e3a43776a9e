"""An API server with a few TrainingJobs, pods and events: it has the paths, status codes and bodies of a real one, over
HTTP."""

from __future__ import annotations

import copy
import http.server
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Object = dict[str, Any]
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: here
clusters: [{{name: fake, cluster: {{server: "{server}"}}}}]
users: [{{name: me, user: {{token: secret}}}}]
contexts:
- {{name: here, context: {{cluster: fake, user: me, namespace: team-a}}}}
- {{name: there, context: {{cluster: fake, user: me}}}}
"""


def rejection(code: int, reason: str, message: str, **details: Any) -> Object:
    return {
        "kind": "Status",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


@dataclass
class FakeApiServer:
    """Holds jobs by (namespace, name), and pods with their logs. Before each answer, it calls `before` with the
    path."""

    jobs: dict[tuple[str, str], Object] = field(default_factory=dict)
    pods: list[Object] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)
    """pod -> lines without time stamps; line number N gets second N as its time"""
    events: list[Object] = field(default_factory=list)
    objects: dict[str, Object] = field(default_factory=dict)
    """path -> answer to a GET, which precedes all others; "POST path", "PUT path", "DELETE path" -> answer to that
    method"""
    pages: dict[str, str] = field(default_factory=dict)
    """path -> text that a pod behind the API server's proxy answers"""
    forbidden: set[str] = field(default_factory=set)
    """rights that a SelfSubjectAccessReview denies: "create pods", "get pods/log", ..."""
    requests: list[tuple[str, str, dict[str, str], Object]] = field(default_factory=list)
    rejects: dict[str, Object] = field(default_factory=dict)
    """method -> Status with which every request of that method is answered"""
    breaks_logs_after: int | None = None
    """number of lines after which the connection of a log is cut, once"""
    before: Callable[[str], None] = lambda path: None
    server: http.server.ThreadingHTTPServer = field(init=False)

    def __post_init__(self) -> None:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.answer(self, {})

            def do_POST(self) -> None:
                fake.answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            do_PUT = do_POST

            def do_DELETE(self) -> None:
                fake.answer(self, {})

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def write_kubeconfig(self, path: Path) -> None:
        path.write_text(KUBECONFIG.format(server=f"http://127.0.0.1:{self.server.server_address[1]}"))

    def add_pod(self, name: str, job: str, attempt: int, node: int, phase: str, lines: list[str]) -> None:
        labels = {"spillway.dev/job": job, "spillway.dev/attempt": str(attempt)}
        labels["batch.kubernetes.io/job-completion-index"] = str(node)
        labels["app.kubernetes.io/managed-by"] = "spillway"
        metadata = {"name": name, "namespace": "team-a", "labels": labels}
        ports = [{"name": "metrics", "containerPort": 9400}]
        spec = {"nodeName": f"node-{node}", "containers": [{"name": "trainer", "ports": ports}]}
        self.pods.append({"metadata": metadata, "spec": spec, "status": {"phase": phase}})
        self.logs[name] = lines

    # --- answers ------------------------------------------------------------------------------------------------------

    def answer(self, handler: http.server.BaseHTTPRequestHandler, content: Object) -> None:
        url = urlsplit(handler.path)
        query = dict(parse_qsl(url.query))
        self.before(url.path)
        self.requests.append((handler.command, url.path, query, content))
        if handler.headers["Authorization"] != "Bearer secret":
            self.send(handler, rejection(401, "Unauthorized", "Unauthorized"))
        elif handler.command in self.rejects:
            self.send(handler, self.rejects[handler.command])
        elif url.path in self.pages:
            self.send_text(handler, self.pages[url.path])
        elif f"{handler.command} {url.path}" in self.objects:
            self.send(handler, self.objects[f"{handler.command} {url.path}"])
        elif url.path.endswith("/selfsubjectaccessreviews"):
            self.send(handler, {"status": {"allowed": asked_for(content) not in self.forbidden}, "code": 201})
        elif handler.command == "POST" and url.path.endswith("/pods"):
            self.send(handler, {**content, "code": 201})
        elif url.path.endswith("/log") and (name := url.path.split("/")[-2]) in self.logs:
            self.send_log(handler, name, query)
        elif handler.command == "POST":
            self.send(handler, self.create(url.path.split("/")[5], content, "dryRun" in query))
        else:
            self.send(handler, self.found(url.path, query))

    def found(self, path: str, query: dict[str, str]) -> Object:  # noqa: PLR0911 - one for each path
        if path in self.objects:
            return self.objects[path]
        match path.strip("/").split("/"):
            case ["apis", _, _, "trainingjobs"]:
                return {"items": list(self.jobs.values())}
            case ["apis", _, _, "namespaces", namespace, "trainingjobs"]:
                return {"items": [one for (place, _), one in self.jobs.items() if place == namespace]}
            case ["apis", _, _, "namespaces", namespace, "trainingjobs", name]:
                missing = rejection(404, "NotFound", f'trainingjobs "{name}" not found', name=name)
                return self.jobs.get((namespace, name), missing)
            case ["api", "v1", "namespaces", _, "events"]:
                return {"items": self.events}
            case ["api", "v1", "namespaces", _, "pods"]:
                return {"items": [pod for pod in self.pods if selected(pod, query["labelSelector"])]}
            case ["api", "v1", "pods"]:
                return {"items": [pod for pod in self.pods if selected(pod, query["labelSelector"])]}
            case ["api", "v1", "namespaces", _, "pods", *_]:
                return self.found_pod(path)
        return rejection(404, "NotFound", "the server could not find the requested resource")

    def found_pod(self, path: str) -> Object:
        name = path.split("/")[6]
        pods = [pod for pod in self.pods if pod["metadata"]["name"] == name]
        if path.endswith("/log"):
            waiting = f'container "trainer" in pod "{name}" is waiting to start: ContainerCreating'
            return rejection(400, "BadRequest", waiting)
        return pods[0] if pods else rejection(404, "NotFound", f'pods "{name}" not found', name=name)

    def create(self, namespace: str, content: Object, dry_run: bool) -> Object:
        name = content["metadata"]["name"]
        if (namespace, name) in self.jobs:
            return rejection(409, "AlreadyExists", f'trainingjobs "{name}" already exists', name=name)
        made = copy.deepcopy(content)
        made["metadata"] |= {"uid": "u-1", "creationTimestamp": "2026-11-21T12:00:00Z"}
        if not dry_run:
            self.jobs[namespace, name] = made
        return made | {"code": 201}

    def send(self, handler: http.server.BaseHTTPRequestHandler, content: Object) -> None:
        body = json.dumps({key: value for key, value in content.items() if key != "code" or "kind" in content}).encode()
        handler.send_response(content.get("code", 200))
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def send_text(self, handler: http.server.BaseHTTPRequestHandler, text: str) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(text.encode())))
        handler.end_headers()
        handler.wfile.write(text.encode())

    def send_log(self, handler: http.server.BaseHTTPRequestHandler, name: str, query: dict[str, str]) -> None:
        lines = [f"{stamp(number)} {line}\n".encode() for number, line in enumerate(self.logs[name])]
        wanted = [line for line in lines if line.split(b" ")[0].decode() >= query.get("sinceTime", "")]
        handler.send_response(200)
        handler.send_header("Content-Length", str(sum(map(len, wanted))))
        handler.end_headers()
        if self.breaks_logs_after is not None:
            wanted, self.breaks_logs_after = wanted[: self.breaks_logs_after], None
        handler.wfile.write(b"".join(wanted))


def asked_for(review: Object) -> str:
    """The right that a SelfSubjectAccessReview asks for, such as "get pods/log"."""
    asked = review["spec"]["resourceAttributes"]
    return f"{asked['verb']} {asked['resource']}" + (f"/{asked['subresource']}" if asked["subresource"] else "")


def stamp(number: int) -> str:
    return f"2026-11-21T12:00:{number:02d}.000000000Z"


def selected(pod: Object, selector: str) -> bool:
    wanted = dict(term.split("=", 1) for term in selector.split(","))
    return all(pod["metadata"]["labels"].get(key) == value for key, value in wanted.items())

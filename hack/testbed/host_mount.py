"""Containers that run this machine's own programs and this checkout's Python, without an image of gigabytes.

A second runtime of containerd, `host-mount`, starts from a specification that mounts /usr, the interpreter and a merged
view of the checkout's sources over its virtual environment, all read-only. The mounts belong to the runtime and not to
the pod, so a pod stays within Pod Security `restricted`. A MutatingAdmissionPolicy gives the runtime class to every pod
that uses the image, so that naming the image is enough.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from .docker_archive import Image
from .errors import Failed
from .layout import REPOSITORY, State, write_setting
from .processes import run

IMAGE = "local/hostroot:1"
RUNTIME_CLASS = "host-mount"
HERE = "/opt/spillway"
PACKAGES = f"{HERE}/packages"
"""sources over site-packages; no `.pth` file is read there, so an editable install's paths outside do not matter"""
INTERPRETER = f"{HERE}/bin/python"
SOURCES = ("operator", "trainer_image")
MERGED_USR = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
"""links into /usr on a distribution with a merged /usr; folders of their own elsewhere"""
SHARED_SETTINGS = ("/etc/alternatives", "/etc/ssl", "/etc/ld.so.cache")
COVERED = ("/tmp", "/work", "/spill", "/checkpoints", "/claims", "/dev", "/proc", "/sys", "/etc", "/var/run")  # noqa: S108
"""a pod mounts something of its own here, which would hide ours"""


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter and where its packages lie."""

    executable: Path
    prefix: Path
    packages: Path

    @staticmethod
    def of(environment: Path) -> Python | None:
        """That of a virtual environment; None when there is none."""
        interpreter = environment / "bin" / "python"
        if not interpreter.exists():
            return None
        question = "import json, sys, sysconfig; print(json.dumps([sys.base_prefix, sysconfig.get_path('purelib')]))"
        prefix, packages = json.loads(run([interpreter, "-c", question]))
        return Python(interpreter.resolve(), Path(prefix), Path(packages))


def python() -> Python | None:
    found = Python.of(REPOSITORY / ".venv")
    if found and found.prefix.is_relative_to("/usr"):
        return found
    if found and any(found.prefix.is_relative_to(path) for path in COVERED):
        raise Failed(
            f"the interpreter lies in {found.prefix}, where pods mount folders of their own; install it elsewhere"
        )
    return found


def image(found: Python | None) -> Image:
    """Empty but for mount points, links and the interpreter's name."""
    folders = dict.fromkeys(("usr", "etc", "opt", f"{HERE}/bin", PACKAGES, "root", "var", "proc", "sys", "dev"), 0o755)
    folders["tmp"] = 0o1777
    links = {name: os.readlink(f"/{name}") for name in MERGED_USR if Path(f"/{name}").is_symlink()}
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {"PATH": path}
    if found:
        links[INTERPRETER] = str(found.executable)
        environment = {"PATH": f"{HERE}/bin:{path}", "PYTHONPATH": PACKAGES, "PYTHONDONTWRITEBYTECODE": "1"}
    return Image(IMAGE, folders=folders, links=links, environment=environment)


def write_specification(state: State, found: Python | None) -> Path:
    """What containerd starts such a container from: its own default, and our mounts."""
    specification = json.loads(run(["ctr", "oci", "spec"]))
    specification["mounts"] += _mounts(found)
    return write_setting(state.settings / "host-mount.json", specification)


def _mounts(found: Python | None) -> list[dict[str, object]]:
    own = [f"/{name}" for name in MERGED_USR if Path(f"/{name}").is_dir() and not Path(f"/{name}").is_symlink()]
    shared = [path for path in SHARED_SETTINGS if Path(path).exists()]
    mounts = [_bind(path) for path in ("/usr", *own, *shared)]
    if not found:
        return mounts
    if not found.prefix.is_relative_to("/usr"):
        mounts.append(_bind(str(found.prefix)))
    layers = [*(str(REPOSITORY / name) for name in SOURCES), str(found.packages)]
    if any(set(":,") & set(layer) for layer in layers):
        raise Failed(f"{REPOSITORY}: a mount cannot name a path with ':' or ','; use another checkout")
    options = ["ro", "lowerdir=" + ":".join(layers)]
    mounts.append({"destination": PACKAGES, "type": "overlay", "source": "overlay", "options": options})
    return mounts


def _bind(path: str) -> dict[str, object]:
    return {"destination": path, "type": "bind", "source": path, "options": ["rbind", "ro", "nosuid", "nodev"]}


def manifests() -> list[dict[str, object]]:
    """The runtime class, and the policy that gives it to pods by their image."""
    name = "spillway-testbed-host-mount"
    uses_image = f"object.spec.containers.exists(container, container.image == '{IMAGE}')"
    patch = f"Object{{spec: Object.spec{{runtimeClassName: '{RUNTIME_CLASS}'}}}}"
    return [
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": RUNTIME_CLASS},
            "handler": RUNTIME_CLASS,
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicy",
            "metadata": {"name": name},
            "spec": {
                "matchConstraints": {
                    "resourceRules": [
                        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                    ]
                },
                "matchConditions": [
                    {"name": "image", "expression": uses_image},
                    {"name": "unset", "expression": "!has(object.spec.runtimeClassName)"},
                ],
                "failurePolicy": "Fail",
                "reinvocationPolicy": "Never",
                "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": patch}}],
            },
        },
        {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingAdmissionPolicyBinding",
            "metadata": {"name": name},
            "spec": {"policyName": name},
        },
    ]

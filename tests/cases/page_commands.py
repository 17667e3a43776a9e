"""Where each command of README.md, CONTRIBUTING.md, docs and examples runs: locally, on the test bed, or why
nowhere."""

from __future__ import annotations

from harness.depth import Depth

QUICK, CI, ALL = Depth.QUICK, Depth.CI, Depth.ALL

LOCAL = {
    ".venv/bin/spillway plan job.yaml --node cpu": QUICK,
    ".venv/bin/spillway run job.yaml --output runs/my-llama": QUICK,
    ".venv/bin/spillway top runs/my-llama": QUICK,
    ".venv/bin/spillway report runs/my-llama": QUICK,
    ".venv/bin/spillway logs -f runs/my-llama": QUICK,
    ".venv/bin/spillway ckpt ls runs/my-llama": QUICK,
    ".venv/bin/spillway ckpt export runs/my-llama --to exported": QUICK,
    ".venv/bin/spillway calibrate": ALL,
    ".venv/bin/spillway doctor": QUICK,
    ".venv/bin/spillway plan examples/llama-70b.yaml --node 8xh100": QUICK,
    "make demo": ALL,
    "spillway run examples/demo.yaml --output runs/demo": ALL,
    "spillway plan examples/gpu.yaml --node 4xa100-40": QUICK,
    "spillway plan examples/larger-than-device.yaml --node cpu": QUICK,
    "spillway run examples/larger-than-device.yaml --output runs/larger": ALL,
    "spillway plan examples/lion.yaml --node cpu": QUICK,
    "spillway run examples/lion.yaml --output runs/lion": ALL,
    "spillway plan examples/llama-70b.yaml --node 8xh100": CI,
    "spillway plan examples/lora.yaml --node cpu": CI,
    "spillway run examples/lora.yaml --output runs/lora": ALL,
    "spillway ckpt export runs/lora --to runs/lora/adapters": ALL,
    "spillway plan examples/narrow-moments.yaml --node cpu": QUICK,
    "spillway run examples/narrow-moments.yaml --output runs/narrow-moments": ALL,
    "spillway plan examples/search.yaml --node cpu": QUICK,
    "spillway run examples/search.yaml --output runs/search": CI,
    "spillway plan examples/shared-base.yaml --node cpu": CI,
    "spillway run examples/shared-base.yaml --output runs/shared-base": ALL,
    "spillway plan examples/sweep.yaml --node cpu": QUICK,
    "spillway run examples/sweep.yaml --output runs/sweep": ALL,
    "spillway plan examples/tiny-llama.yaml --node cpu": QUICK,
    "spillway run examples/tiny-llama.yaml --output runs/tiny-llama": ALL,
    "python examples/huggingface_trainer.py --output runs/trainer --steps 40": CI,
}
"""command that tests/local/test_page_commands.py runs in a copy of the tree -> lowest depth at which it runs"""

CLUSTER_PAGES = {
    "README.md": QUICK,
    "docs/install.md": CI,
    "docs/test-bed.md": CI,
    "examples/gpu.yaml": CI,
    "docs/scripts.md": CI,
    "docs/security.md": CI,
}
"""page, in the order in which tests/cluster/alone/test_page_commands.py runs their commands -> lowest depth"""

_INSTALL = "helm install spillway charts/spillway --namespace spillway --create-namespace"
_UPGRADE = "helm upgrade spillway charts/spillway --namespace spillway --reset-then-reuse-values"
_QUICK_IMAGE = (
    f"{_INSTALL} --set image.repository=local/hostroot,trainer.image.repository=local/hostroot "
    "--set-string image.tag=1,trainer.image.tag=1 --set prometheus.url=http://10.244.0.1:9090"
)
_TRAINER = "trainer.image.repository=REGISTRY/spillway-trainer"

CLUSTER = {
    f"{_INSTALL} --set image.repository=REGISTRY/spillway-operator,{_TRAINER}",
    f"{_INSTALL} --set image.repository=REGISTRY/spillway-operator --set {_TRAINER}",
    _QUICK_IMAGE,
    f"{_INSTALL} --set crds.enabled=false,userRoles.enabled=false,nodeReader.enabled=false,progress.enabled=false "
    "--set 'watchNamespaces={team-a}'",
    f"{_UPGRADE} --set 'networkPolicies.trainerNamespaces={{team-a}}'",
    f"{_UPGRADE} --set image.digest=sha256:...,trainer.image.digest=sha256:...",
    _UPGRADE,
    "helm uninstall spillway --namespace spillway",
    "kubectl --namespace spillway rollout status deployment/spillway",
    "mkdir -p /var/tmp/spillway-two-pod && chown 1000:1000 /var/tmp/spillway-two-pod",
    "kubectl apply -f examples/two-pod-claim.yaml -f examples/two-pod.yaml",
    "kubectl wait --for=condition=Complete trainingjob/two-pod --timeout=5m",
    "kubectl get tjob",
    "spillway status two-pod",
    "kubectl apply -f examples/one-pod.yaml",
    "kubectl get trainingjobs --watch",
    "kubectl wait --for=condition=Complete trainingjob/one-pod --timeout=5m",
    "kubectl apply -f examples/gpu.yaml",
    "kubectl create configmap script --from-file=train.py=examples/huggingface_trainer.py",
    "kubectl apply -f examples/two-pod-claim.yaml -f examples/script.yaml",
    "kubectl get tjob script --watch",
    "make env",
    "make cluster-up ARGS=--prometheus",
    'make cluster-up ARGS="--fake-nodes 4 --fake-gpus 4 --prometheus --kueue"',
    "make cluster-status",
    "export KUBECONFIG=/tmp/spillway-testbed/kubeconfig PATH=/tmp/spillway-testbed/bin:$PATH",
}

_ENGINE = "needs a container engine; `make images` and tests/cluster build from the same Dockerfiles"
_REGISTRY = "needs a registry"
_PACKAGES = "fetches packages of gigabytes from an index"
_KIND = "needs kind, which needs a container engine"
_RIVAL = "installs its rivals from a package index, and takes minutes; `make bench` runs it"
_GPU = "needs a GPU; tests/local/test_gpu_session.py runs it on a fake one"

ELSEWHERE = {
    "make test": "is what runs this",
    "python3 -m venv .venv": _PACKAGES,
    ".venv/bin/pip install '.[trainer]'": _PACKAGES,
    ".venv/bin/spillway --version": _PACKAGES,
    ".venv/bin/python benchmarks/cpu_adam.py": _RIVAL,
    "SPILLWAY_FORCE_ISA=avx2 .venv/bin/python benchmarks/cpu_adam.py": _RIVAL,
    "python3 hack/gpu_session.py --output build/gpu --wheels wheels": _GPU,
    "python3 benchmarks/gpu_optimizer_offload.py --output build/gpu --wheels wheels": _GPU,
    "python3 -m pip download --only-binary=:all: --python-version 3.12 --dest wheels pydantic": _PACKAGES,
    "docker build -f operator/Dockerfile -t REGISTRY/spillway-operator:0.1.0 .": _ENGINE,
    "docker build -f trainer_image/Dockerfile -t REGISTRY/spillway-trainer:0.1.0 .": _ENGINE,
    "docker build --secret id=ca,src=/etc/ssl/certs/ca-certificates.crt --secret id=pip,src=pip.conf "
    "--secret id=uv,src=uv.toml ...": _ENGINE,
    "docker push REGISTRY/spillway-operator:0.1.0": _REGISTRY,
    "docker push REGISTRY/spillway-trainer:0.1.0": _REGISTRY,
    "kind create cluster": _KIND,
    "kind load docker-image REGISTRY/spillway-operator:0.1.0 REGISTRY/spillway-trainer:0.1.0": _KIND,
    "docker exec kind-control-plane sh -c 'mkdir -p /var/tmp/spillway-two-pod && chown 1000:1000 "
    "/var/tmp/spillway-two-pod'": _KIND,
    "kind create cluster --name spillway --image kindest/node:v1.36.3": _KIND,
    "kind load image-archive ARCHIVE --name spillway": _KIND,
    f"{_INSTALL} --set image.repository=local/spillway-operator,trainer.image.repository=local/spillway-trainer "
    "--set-string image.tag=TAG,trainer.image.tag=TAG": _KIND,
    "make images": "builds for half an hour, 6 GB; tests/cluster builds the operator's image the same way",
    "make cluster-down": "would end the bed that the tests share; its fixture ends it so, and looks at the machine",
    "python examples/huggingface_spilling.py gpt2 book.txt --spill /mnt/nvme --steps 100": "downloads from the hub",
}
"""command -> why no test runs it"""

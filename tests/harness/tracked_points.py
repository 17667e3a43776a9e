"""Reads back what trackers have stored, mostly with their own readers, and runs an MLflow server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

Curve = list[tuple[int, float]]
"""(step, value) pairs in the order of steps. A step that was logged twice appears twice."""
BLOCK, HEADER = 32768, 7
"""bytes of a block of W&B's files, and of the header before their first record"""


def tensorboard_curves(directory: Path) -> dict[str, Curve]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    accumulator = EventAccumulator(str(directory), size_guidance={SCALARS: 0}).Reload()
    return {
        name: sorted((one.step, one.value) for one in accumulator.Scalars(name))
        for name in accumulator.Tags()["scalars"]
    }


def wandb_records(directory: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for path in sorted(directory.glob("wandb/*run-*/run-*.wandb")):
        for content in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            yield record


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """The records of a W&B file, which is a log in LevelDB's format: blocks with records that are whole (1) or in parts
    (2, 3 ..., 4)."""
    at, whole = HEADER, b""
    while at + 7 <= len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        if kind == 0:
            return
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def wandb_curves(directory: Path) -> dict[str, Curve]:
    """The curves as W&B's server would show them: it ignores a row whose number it already has."""
    found, last = dict[str, Curve](), -1
    for record in wandb_records(directory):
        row = {"/".join(one.nested_key) or one.key: json.loads(one.value_json) for one in record.history.item}
        if record.WhichOneof("record_type") != "history" or row["_step"] <= last:
            continue
        last = row["_step"]
        for name in row.keys() - {"step", "_step", "_runtime", "_timestamp"}:
            found.setdefault(name, []).append((row["step"], row[name]))
    return {name: sorted(curve) for name, curve in found.items()}


@contextmanager
def mlflow_server(directory: Path, port: int = 0) -> Iterator[str]:
    """An MLflow server on 127.0.0.1 with a database; yields its address."""
    from werkzeug.serving import make_server

    settings = {
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{directory}/mlflow.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(directory / "artifacts"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with patch.dict(os.environ, settings):
        from mlflow.server import app, handlers

        handlers._tracking_store = None  # forget the store of an earlier server in this process
        server = make_server("127.0.0.1", port, app, threaded=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def mlflow_runs(uri: str, experiment: str) -> dict[str, Any]:
    """Name -> run of an experiment; asserts that no name is there twice."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    runs = client.search_runs([found.experiment_id])
    assert len({run.info.run_name for run in runs}) == len(runs)
    return {run.info.run_name: run for run in runs}


def mlflow_curves(uri: str, run: Any) -> dict[str, Curve]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return {
        name: sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
    }

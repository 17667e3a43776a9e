"""A job that starts where another ended, trains by epochs, and stops early."""

from __future__ import annotations

import pytest

from harness.installed import Installed, changed, example, named
from testbed.layout import REPOSITORY

pytestmark = pytest.mark.ci
SECONDS = 240.0
TEXT_BYTES = 100_000


def test_a_job_starts_from_another_and_stops_early(spillway: Installed, namespace: str) -> None:
    folder = spillway.bed.claim("runs", namespace)
    (folder / "text").mkdir()
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs").glob("*.md")))
    (folder / "text" / "pages.md").write_text(pages[:TEXT_BYTES], encoding="utf-8")

    first = example("one-pod", namespace, training__steps=8, checkpoint__claim="runs", checkpoint__subPath="first")
    first = changed(first, namespace, data={"text": {"claim": "runs", "subPath": "text"}})
    spillway.create(named(first, "first"))
    spillway.wait(namespace, "first", "Complete", SECONDS)

    second = example(
        "one-pod", namespace, training__steps=None, training__epochs=3,
        training__earlyStopping={"patience": 1, "minDelta": "100"}, checkpoint__claim="runs",
        checkpoint__subPath="second", checkpoint__from={"claim": "runs", "subPath": "first"}, checkpoint__keepBest=True,
    )  # fmt: skip
    data = {"text": {"claim": "runs", "subPath": "text"}, "evaluation": {"fraction": "0.1", "everySteps": 1}}
    second = changed(second, namespace, data=data)
    spillway.create(named(second, "second"))
    job = spillway.wait(namespace, "second", "Complete", SECONDS)
    said = spillway.condition(namespace, "second", "Complete")["message"]
    print(f"\n{said}")
    assert [job["status"]["progress"][name] for name in ("step", "steps", "display")] == [2, 2, "100%"]
    assert "2 steps in 1 attempt; stopped early at step 2 of " in said
    tokenizers = [file.read_bytes() for file in folder.rglob("corpus*/tokenizer.json")]
    assert len(tokenizers) == 2 and tokenizers[0] == tokenizers[1]

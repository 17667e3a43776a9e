"""Rules of the house that no other tool checks."""

from __future__ import annotations

from harness.places import ROOT


def test_operator_folder_is_no_package() -> None:
    """With an `__init__.py` it would shadow the standard library's `operator` and the interpreter would not start."""
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_test_lives_under_the_operator_folder() -> None:
    """pytest would register the folder itself as the module `operator`."""
    assert not [*(ROOT / "operator").rglob("test_*.py"), *(ROOT / "operator").rglob("conftest.py")]


def test_cuda_streams_and_events_live_in_lanes_only() -> None:
    sources = [path for path in (ROOT / "trainer_image").rglob("*.py") if path.parent.name != "tiers"]
    assert not [path for path in sources if "torch.cuda" in path.read_text(encoding="utf-8")]


def test_one_file_knows_torch_distributed() -> None:
    sources = [path for path in (ROOT / "trainer_image").rglob("*.py") if path.name != "distributed.py"]
    assert not [path for path in sources if "torch.distributed" in path.read_text(encoding="utf-8")]


def test_step_loop_and_models_never_see_the_plan() -> None:
    """They must run any plan without looking at it: assemble.py alone branches on it."""
    for name in ("trainer.py", "models/transformer.py", "segments.py"):
        text = (ROOT / "trainer_image" / "spillway_trainer" / name).read_text(encoding="utf-8")
        assert "spillway.plan" not in text, name

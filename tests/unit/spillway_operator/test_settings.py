"""The operator's environment: every wrong value is one sentence, and the documented table is the truth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.places import ROOT
from spillway import metrics
from spillway.errors import UserError
from spillway_operator.settings import Settings, load_settings, variable

PAGE = ROOT / "docs/operator.md"


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(variable(name), raising=False)
    monkeypatch.setenv("SPILLWAY_TRAINER_IMAGE", "trainer:1")


def test_only_the_trainers_image_must_be_said() -> None:
    settings = load_settings()
    assert settings.trainer_image == "trainer:1"
    assert settings.namespaces == ()
    assert (settings.workers, settings.relist_seconds, settings.health_port) == (16, 180.0, 8080)


def test_namespaces_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_NAMESPACES", "team-a, team-b,")
    assert load_settings().namespaces == ("team-a", "team-b")


def test_an_empty_variable_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_WORKERS", "")
    assert load_settings().workers == 16


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("SPILLWAY_TRAINER_IMAGE", "", "SPILLWAY_TRAINER_IMAGE is not set: Trainer image"),
        ("SPILLWAY_WORKERS", "many", "SPILLWAY_WORKERS = 'many': input should be a valid integer"),
        ("SPILLWAY_WORKERS", "0", "SPILLWAY_WORKERS = '0': input should be greater than or equal to 1"),
        ("SPILLWAY_IMAGE_PULL_POLICY", "Sometimes", "SPILLWAY_IMAGE_PULL_POLICY = 'Sometimes'"),
        ("SPILLWAY_PROMETHEUS_URL", "prometheus:9090", "write a full URL"),
        ("SPILLWAY_PROMETHEUS_MATCHERS", 'cluster="a",b', "b is not a label matcher; write cluster"),
        ("SPILLWAY_PROMETHEUS_TOKEN_FILE", "/nonexistent", "no such file; mount the Secret"),
        ("SPILLWAY_PROMETHEUS_CA_FILE", __file__, "cannot be read as certificates"),
        ("SPILLWAY_NODE_EXPORTERS", "app=x", "SPILLWAY_NODE_EXPORTERS needs SPILLWAY_POD_NAMESPACE, which is not set"),
        ("SPILLWAY_PROGRESS_URL", "http://operator/progress", "must begin with https://"),
        ("SPILLWAY_PROGRESS_URL", "https://operator/progress", "SPILLWAY_PROGRESS_URL needs SPILLWAY_TLS_DIRECTORY"),
        ("SPILLWAY_LEASE_NAME", "spillway", "SPILLWAY_LEASE_NAME needs SPILLWAY_POD_NAMESPACE, which is not set"),
        ("SPILLWAY_PROGRESS_SERVICE", "spillway", "SPILLWAY_PROGRESS_SERVICE needs SPILLWAY_LEASE_NAME"),
        ("SPILLWAY_POD_IP", "spillway", "SPILLWAY_POD_IP = 'spillway': must be an IPv4 or IPv6 address"),
        ("SPILLWAY_LOG_LEVEL", "LOUD", "SPILLWAY_LOG_LEVEL = 'LOUD'"),
        ("SPILLWAY_HEALTH_PORT", "70000", "SPILLWAY_HEALTH_PORT = '70000'"),
    ],
)
def test_a_wrong_value_is_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        load_settings()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_wrong_values_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILLWAY_WORKERS", "many")
    monkeypatch.setenv("SPILLWAY_LOG_LEVEL", "LOUD")
    with pytest.raises(UserError) as caught:
        load_settings()
    assert len(str(caught.value).splitlines()) == 2


def test_a_certificate_directory_must_hold_all_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPILLWAY_PROGRESS_URL", "https://operator/progress")
    monkeypatch.setenv("SPILLWAY_TLS_DIRECTORY", str(tmp_path))
    (tmp_path / "tls.crt").touch()
    with pytest.raises(UserError, match=r"file tls\.key is missing"):
        load_settings()


def test_the_command_line_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/of/the/environment")
    assert load_settings().kubeconfig == "/of/the/environment"
    assert load_settings({"KUBECONFIG": "/given"}).kubeconfig == "/given"


def test_the_page_lists_every_setting_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE))
    for name, field in Settings.model_fields.items():
        assert variable(name) in rows, f"docs/operator.md has no row for {variable(name)}"
        default = (
            "required" if field.is_required() else f"`{field.default}`" if field.default not in ("", (), None) else ""
        )
        assert rows.pop(variable(name)) == default, variable(name)
    assert [row for row in rows if row.isupper()] == []


def test_the_page_lists_every_metric() -> None:
    listed = set(re.findall(r"`(spillway_operator_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert listed == {metric.name for metric in metrics.OPERATOR}

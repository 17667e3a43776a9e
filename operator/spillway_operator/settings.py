"""Settings from the environment (SPILLWAY_*), typed and validated (docs/operator.md)."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from spillway.errors import UserError

PREFIX = "SPILLWAY_"
CERTIFICATE, PRIVATE_KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
"""files of tlsDirectory, as in a Secret of type kubernetes.io/tls"""

Port = Annotated[int, Field(ge=0, le=65535)]
Url = Annotated[str, Field(max_length=2048)]


class Settings(BaseSettings):
    """One value per variable; an empty string is the default."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True)

    trainer_image: str = Field(min_length=1, description="Image of the trainer, for jobs that name none.")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="Pull policy of the trainer's image."
    )
    namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="Namespaces to serve, separated by commas; empty = all."
    )
    kubeconfig: str = Field(
        default="",
        validation_alias="KUBECONFIG",
        description="Kubeconfig for development; empty = the pod's ServiceAccount.",
    )
    prometheus_url: Url = Field(
        default="", description="Prometheus to ask for live memory; empty = none, plans come from capacities."
    )
    metrics_interval_seconds: float = Field(
        default=15.0, ge=1.0, le=3600.0, description="Seconds between two readings of the metrics."
    )
    node_reader: bool = Field(
        default=False,
        description="The operator may list nodes and NodeProfiles; without it plans come from the catalog.",
    )
    progress_url: Url = Field(
        default="",
        description="Where pods post progress: https://SERVICE.NAMESPACE.svc:PORT/progress; empty = nowhere.",
    )
    progress_port: Port = Field(default=8443, description="Port of the progress endpoint (HTTPS); 0 = any free one.")
    tls_directory: Path | None = Field(
        default=None,
        description=f"Directory with {CERTIFICATE}, {PRIVATE_KEY} and {AUTHORITY} of the progress endpoint.",
    )
    lease_name: str = Field(
        default="", description="Lease that the operator must hold to work, for several of them; empty = it is alone."
    )
    pod_namespace: str = Field(default="", description="Namespace of the operator's pod, and of its Lease.")
    pod_uid: str = Field(default="", description="UID of the operator's pod: who it is among several.")
    pod_ip: str = Field(default="", description="Address of the operator's pod.")
    progress_service: str = Field(
        default="", description="Service whose address is the operator that leads; empty = it follows no leader."
    )
    health_port: Port = Field(
        default=8080, description="Port of /healthz, /readyz and /metrics (HTTP); 0 = any free one."
    )
    workers: int = Field(default=16, ge=1, le=256, description="TrainingJobs that are worked on at the same time.")
    relist_seconds: float = Field(
        default=180.0,
        ge=1.0,
        le=3600.0,
        description="Seconds between two complete lists that check what the watches said.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severe log line."
    )

    @field_validator("namespaces", mode="before")
    @classmethod
    def _split(cls, given: object) -> object:
        return tuple(name.strip() for name in given.split(",") if name.strip()) if isinstance(given, str) else given

    @field_validator("prometheus_url", "progress_url")
    @classmethod
    def _is_url(cls, given: str) -> str:
        if given and (urlsplit(given).scheme not in ("http", "https") or not urlsplit(given).hostname):
            raise ValueError("write a whole URL, such as http://prometheus.monitoring.svc:9090")
        return given.rstrip("/")

    @field_validator("progress_url")
    @classmethod
    def _is_https(cls, given: str) -> str:
        if given and urlsplit(given).scheme != "https":
            raise ValueError("must begin with https://, because pods send their token there")
        return given

    @model_validator(mode="after")
    def _certificate_is_there(self) -> Self:
        if not self.progress_url:
            return self
        if self.tls_directory is None:
            raise ValueError(f"{PREFIX}PROGRESS_URL needs {PREFIX}TLS_DIRECTORY: mount the Secret with its certificate")
        for name in (CERTIFICATE, PRIVATE_KEY, AUTHORITY):
            if not (self.tls_directory / name).is_file():
                raise ValueError(f"{PREFIX}TLS_DIRECTORY = {self.tls_directory}: has no file {name}")
        return self

    @model_validator(mode="after")
    def _one_of_several_is_known(self) -> Self:
        needs = {
            "lease_name": ("pod_namespace", "pod_uid"),
            "progress_service": ("lease_name", "pod_ip", "progress_url"),
        }
        for field, needed in needs.items():
            for missing in (name for name in needed if getattr(self, field) and not getattr(self, name)):
                raise ValueError(f"{variable(field)} needs {variable(missing)}, which is not set")
        return self

    @field_validator("pod_ip")
    @classmethod
    def _is_address(cls, given: str) -> str:
        if given:
            try:
                ip_address(given)
            except ValueError:
                raise ValueError("must be an IPv4 or IPv6 address") from None
        return given


def variable(field: str) -> str:
    """The environment variable of a field of Settings: relist_seconds -> SPILLWAY_RELIST_SECONDS."""
    alias = Settings.model_fields[field].validation_alias
    return alias if isinstance(alias, str) else PREFIX + field.upper()


def load_settings(given: Mapping[str, Any] | None = None) -> Settings:
    """Settings from the environment; `given` (by field name or alias) goes before it.

    Raises UserError with one sentence per wrong value.
    """
    try:
        return Settings(**(given or {}))
    except ValidationError as error:
        raise UserError("\n".join(_sentence(problem) for problem in error.errors())) from None


def _sentence(problem: Any) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    field = str(problem["loc"][0])
    name = variable(field) if field in Settings.model_fields else PREFIX + field.upper()
    if problem["type"] == "missing":
        return f"{name} is not set: {Settings.model_fields[field].description}"
    return f"{name} = {problem['input']!r}: {message[:1].lower()}{message[1:]}"

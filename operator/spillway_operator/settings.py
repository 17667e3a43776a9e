"""Settings of the operator, from environment variables (SPILLWAY_*), typed and checked (docs/operator.md)."""

from __future__ import annotations

import re
import ssl
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
"""File names in tls_directory, as in a Secret of type kubernetes.io/tls."""

MATCHER = re.compile(r'[a-zA-Z_]\w*(=|!=|=~|!~)"([^"\\]|\\.)*"')
"""A label matcher of PromQL; its value has no comma, because commas separate matchers here."""

Port = Annotated[int, Field(ge=0, le=65535)]
Url = Annotated[str, Field(max_length=2048)]


class Settings(BaseSettings):
    """One field per variable; an empty variable means the default."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True)

    trainer_image: str = Field(min_length=1, description="Trainer image for jobs without spec.pod.image.")
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
        default="", description="Prometheus for live memory figures; empty = none, node exporters are scraped."
    )
    prometheus_matchers: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Label matchers that are added to every Prometheus query, separated by commas, such as "
        'cluster="a".',
    )
    prometheus_token_file: Path | None = Field(
        default=None, description="File with the bearer token for Prometheus, read for each request."
    )
    prometheus_ca_file: Path | None = Field(
        default=None, description="Certificate authorities for Prometheus instead of the system's (PEM)."
    )
    node_exporters: str = Field(
        default="",
        description="Labels of the node exporters' pods in the operator's namespace, as a selector; empty = none run.",
    )
    metrics_interval_seconds: float = Field(
        default=15.0, ge=1.0, le=3600.0, description="Seconds between two readings of the metrics."
    )
    node_reader: bool = Field(
        default=False,
        description="Whether the operator has permission to list nodes and NodeProfiles and to read the "
        "OperatorConfig. If not, plans use the hardware catalog.",
    )
    progress_url: Url = Field(
        default="",
        description="URL for progress posts: https://SERVICE.NAMESPACE.svc:PORT/progress; empty = no progress.",
    )
    progress_port: Port = Field(default=8443, description="Port of the progress endpoint (HTTPS); 0 = any free one.")
    tls_directory: Path | None = Field(
        default=None,
        description=f"Directory with {CERTIFICATE}, {PRIVATE_KEY} and {AUTHORITY} of the progress endpoint.",
    )
    lease_name: str = Field(
        default="", description="Lease for leader election among several operators; empty = only one operator."
    )
    pod_namespace: str = Field(default="", description="Namespace of the operator's pod, and of its Lease.")
    pod_uid: str = Field(default="", description="UID of the operator's pod: its identity in leader election.")
    pod_ip: str = Field(default="", description="Address of the operator's pod.")
    progress_service: str = Field(
        default="", description="Progress Service that points to the leader; empty = not managed by the operator."
    )
    health_port: Port = Field(
        default=8080, description="Port of /healthz, /readyz and /metrics (HTTP); 0 = any free one."
    )
    workers: int = Field(default=16, ge=1, le=256, description="TrainingJobs that are processed at the same time.")
    relist_seconds: float = Field(
        default=180.0,
        ge=1.0,
        le=3600.0,
        description="Seconds between complete lists that verify the watches.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Lowest level that is logged."
    )

    @field_validator("namespaces", "prometheus_matchers", mode="before")
    @classmethod
    def _split(cls, given: object) -> object:
        return tuple(name.strip() for name in given.split(",") if name.strip()) if isinstance(given, str) else given

    @field_validator("prometheus_url", "progress_url")
    @classmethod
    def _is_url(cls, given: str) -> str:
        if given and (urlsplit(given).scheme not in ("http", "https") or not urlsplit(given).hostname):
            raise ValueError("write a full URL, such as http://prometheus.monitoring.svc:9090")
        return given.rstrip("/")

    @field_validator("prometheus_matchers")
    @classmethod
    def _are_matchers(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if wrong := [matcher for matcher in given if not MATCHER.fullmatch(matcher)]:
            raise ValueError(f'{wrong[0]} is not a label matcher; write cluster="a", or with !=, =~ or !~')
        return given

    @field_validator("prometheus_token_file", "prometheus_ca_file")
    @classmethod
    def _is_file(cls, given: Path | None) -> Path | None:
        if given is not None and not given.is_file():
            raise ValueError("no such file; mount the Secret or ConfigMap that contains the file")
        return given

    @field_validator("prometheus_ca_file")
    @classmethod
    def _has_certificates(cls, given: Path | None) -> Path | None:
        try:
            ssl.create_default_context(cafile=given)
        except ssl.SSLError as error:
            raise ValueError(f"cannot be read as certificates ({error}); write them as PEM") from None
        return given

    @field_validator("progress_url")
    @classmethod
    def _is_https(cls, given: str) -> str:
        if given and urlsplit(given).scheme != "https":
            raise ValueError("must begin with https://, because pods send their tokens to this URL")
        return given

    @model_validator(mode="after")
    def _certificate_is_there(self) -> Self:
        if not self.progress_url:
            return self
        if self.tls_directory is None:
            raise ValueError(
                f"{PREFIX}PROGRESS_URL needs {PREFIX}TLS_DIRECTORY, which is not set; name the directory where the "
                "Secret with the certificate is mounted"
            )
        for name in (CERTIFICATE, PRIVATE_KEY, AUTHORITY):
            if not (self.tls_directory / name).is_file():
                raise ValueError(f"{PREFIX}TLS_DIRECTORY = {self.tls_directory}: file {name} is missing")
        return self

    @model_validator(mode="after")
    def _one_of_several_is_known(self) -> Self:
        needs = {
            "node_exporters": ("pod_namespace",),
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
    """Settings from the environment; `given` (by field name or alias) takes precedence.

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

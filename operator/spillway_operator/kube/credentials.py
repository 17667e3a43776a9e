"""Credentials for the API server: address, certificates and token, found by the Kubernetes client library's loaders.

A ServiceAccount's token is renewed on disk while the process runs; the library's hook reads it again every minute.
"""

from __future__ import annotations

import base64
import json
import ssl
from dataclasses import dataclass
from typing import Any

from kubernetes.client.configuration import Configuration
from kubernetes.config import ConfigException
from kubernetes.config.incluster_config import load_incluster_config
from kubernetes.config.kube_config import load_kube_config

from spillway.errors import UserError


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials for one cluster."""

    configuration: Any
    """A kubernetes.client.Configuration."""

    @property
    def server(self) -> str:
        return str(self.configuration.host).rstrip("/")

    @property
    def token(self) -> str:
        """The current bearer token; empty with a client certificate."""
        found = self.configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return str(found).split(" ", 1)[-1].strip() if found else ""

    @property
    def authority(self) -> str | None:
        """File with the trusted certificates."""
        return self.configuration.ssl_ca_cert or None

    @property
    def client_certificate(self) -> tuple[str, str] | None:
        """Files with the certificate and its key."""
        found = self.configuration.cert_file, self.configuration.key_file
        return found if all(found) else None

    @property
    def account(self) -> dict[str, str] | None:
        """The token's ServiceAccount as an ownerReference; None if it has none. The token is our own, so its signature
        is not verified."""
        try:
            payload = self.token.split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
            account = claims["kubernetes.io"]["serviceaccount"]
            return {"apiVersion": "v1", "kind": "ServiceAccount", "name": account["name"], "uid": account["uid"]}
        except (IndexError, ValueError, KeyError, TypeError):
            return None

    def ssl_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.authority)
        if not self.configuration.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_certificate is not None:
            context.load_cert_chain(*self.client_certificate)
        return context


def load_credentials(kubeconfig: str) -> Credentials:
    """Credentials from the file, or if empty from the pod's ServiceAccount. Raises UserError if there are none."""
    configuration = Configuration()
    try:
        if kubeconfig:
            load_kube_config(kubeconfig, client_configuration=configuration, persist_config=False)  # type: ignore[no-untyped-call]
        else:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        wanted = f"kubeconfig {kubeconfig}" if kubeconfig else "the pod's ServiceAccount"
        raise UserError(
            f"{wanted}: {error}; run the operator in a pod, or give a kubeconfig (--kubeconfig, KUBECONFIG)"
        ) from error
    return Credentials(configuration)

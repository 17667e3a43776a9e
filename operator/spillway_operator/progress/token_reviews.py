"""TokenReviews: finds the TrainingJob and attempt that a bearer token belongs to.

    token -> TokenReview (audience) -> pod name and uid -> pod -> its Job's uid -> TrainingJob and attempt

The API server certifies the token's pod; from there everything is found by uid, never by label. Results are cached for
a minute, rejections shorter, so that most posts cost no request. A token that was accepted before is checked again with
a single request, outside the rate limit for unknown tokens; until the answer arrives, the last result is used."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from spillway.api.progress import TOKEN_AUDIENCE

from ..decide.observed import AttemptObject
from ..kube.api_client import PODS, TOKEN_REVIEWS, ApiClient, NotFound
from ..kube.store import Key, Store, controller

ACCEPTED_SECONDS = 60.0
REJECTED_SECONDS = 10.0
RENEWAL_SECONDS = 10.0
"""How long an accepted token stays accepted while it is checked again."""
MOST_CACHED = 8192
REVIEWS_PER_SECOND = 50.0
"""Rate limit for checks of unknown tokens, which protects the API server."""
POD_NAME, POD_UID = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/pod-uid"
ACCOUNT = "system:serviceaccount:"

V = TypeVar("V")


class Unauthenticated(Exception):
    """No token, or one for another audience."""


class Forbidden(Exception):
    """A valid token that does not belong to an attempt of a TrainingJob."""


class TooManyReviews(Exception):
    """More unknown tokens than may be checked per second."""


@dataclass(frozen=True, slots=True)
class PodIdentity:
    """A pod as certified by the API server."""

    namespace: str
    name: str
    uid: str
    job_uid: str
    """Uid of the Job that controls it."""


@dataclass(frozen=True, slots=True)
class Sender:
    key: Key
    job_uid: str
    """Uid of the TrainingJob."""
    attempt: int
    """The pod's attempt."""
    present_attempt: int
    """The current attempt, as known by the operator."""


class Cache(Generic[V]):
    """A bounded cache; the oldest entry is removed first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[bytes, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, now: float) -> V | None:
        known = self._entries.get(key)
        return known[1] if known is not None and now < known[0] else None

    def last(self, key: bytes) -> V | None:
        """The entry, even if it has expired."""
        known = self._entries.get(key)
        return known[1] if known is not None else None

    def put(self, key: bytes, value: V, expiry: float) -> None:
        self._entries[key] = (expiry, value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)


class TokenReviews:
    def __init__(self, client: ApiClient, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._store = store
        self._clock = clock
        self._cache: Cache[PodIdentity | Unauthenticated | Forbidden] = Cache(MOST_CACHED)
        self._allowance, self._allowance_time = REVIEWS_PER_SECOND, clock()

    async def sender(self, token: str) -> Sender:
        """The token's job and attempt. Raises Unauthenticated, Forbidden, TooManyReviews, or ApiError if the API server
        does not answer."""
        pod = await self._pod(token)
        attempt = self._store.attempts.by_uid(pod.job_uid)
        job = None if attempt is None else self._store.jobs.get((attempt.namespace, attempt.owner_name))
        if attempt is None or job is None or attempt.owner_uid != job.uid or attempt.namespace != pod.namespace:
            raise Forbidden(f"pod {pod.namespace}/{pod.name} does not belong to an attempt of a TrainingJob")
        return Sender(job.key, job.uid, attempt.attempt, _present(self._store.attempts_of(job.key), job.uid))

    async def _pod(self, token: str) -> PodIdentity:
        digest, now = hashlib.sha256(token.encode()).digest(), self._clock()
        known = self._cache.get(digest, now)
        if known is None:
            last = self._cache.last(digest)
            if isinstance(last, PodIdentity):
                self._cache.put(digest, last, now + RENEWAL_SECONDS)
            else:
                self._take_allowance(now)
            try:
                known = await self._review(token)
            except (Unauthenticated, Forbidden) as rejection:
                known = rejection
            lasts = ACCEPTED_SECONDS if isinstance(known, PodIdentity) else REJECTED_SECONDS
            self._cache.put(digest, known, self._clock() + lasts)
        if isinstance(known, PodIdentity):
            return known
        raise type(known)(str(known))

    async def _review(self, token: str) -> PodIdentity:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [TOKEN_AUDIENCE]},
        }
        status = (await self._client.create(TOKEN_REVIEWS, "", body)).get("status") or {}
        if not status.get("authenticated") or TOKEN_AUDIENCE not in (status.get("audiences") or ()):
            raise Unauthenticated(
                f"the token is not valid for audience {TOKEN_AUDIENCE}: use the one mounted into the trainer's pod"
            )
        user = status.get("user") or {}
        extra = user.get("extra") or {}
        account, names, uids = str(user.get("username", "")), extra.get(POD_NAME) or [], extra.get(POD_UID) or []
        if not account.startswith(ACCOUNT) or len(names) != 1 or len(uids) != 1:
            raise Forbidden("the token is not bound to a pod: use the one mounted into the trainer's pod")
        namespace = account.removeprefix(ACCOUNT).split(":")[0]
        return await self._bound_pod(namespace, str(names[0]), str(uids[0]))

    async def _bound_pod(self, namespace: str, name: str, uid: str) -> PodIdentity:
        if all(attempt.namespace != namespace for attempt in self._store.attempts):
            # Pods in namespaces that are not served may not be read, and that rejection would look like an outage.
            raise Forbidden(f"pod {namespace}/{name} does not belong to an attempt of a TrainingJob")
        try:
            metadata = (await self._client.get(PODS, namespace, name))["metadata"]
        except NotFound:
            raise Forbidden(f"pod {namespace}/{name} does not exist") from None
        owner: Mapping[str, Any] = controller(metadata)
        if metadata.get("uid") != uid or owner.get("kind") != "Job":
            raise Forbidden(f"pod {namespace}/{name} does not belong to an attempt of a TrainingJob")
        return PodIdentity(namespace, name, uid, str(owner.get("uid", "")))

    def _take_allowance(self, now: float) -> None:
        gained = (now - self._allowance_time) * REVIEWS_PER_SECOND
        self._allowance, self._allowance_time = min(REVIEWS_PER_SECOND, self._allowance + gained), now
        if self._allowance < 1.0:
            raise TooManyReviews("too many requests with tokens that are not checked yet; try again in a second")
        self._allowance -= 1.0


def _present(attempts: tuple[AttemptObject, ...], job_uid: str) -> int:
    return max((found.attempt for found in attempts if found.owner_uid == job_uid), default=0)

"""The operator's process: connects its parts, starts them in order, and ends when one of them ends.

    credentials -> client -> Lease -> progress endpoint, store + queue -> first complete list -> watches -> workers

A standby operator only answers probes and reads the Lease: anything else that it knew would be out of date when it
becomes the leader. Workers start after the first complete list, so that no decision is based on partial data. If a
background task ends, the process ends, because a half-dead operator would still look alive.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import signal
import time
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from spillway import metrics
from spillway.api.limits import GROUP, VERSION
from spillway.metrics import Metric

from .decide.case import is_corrected
from .decide.observed import OperatorFacts
from .decide.service_levels import fleet_of
from .exporter import OperatorExporter, Values
from .health import LONGEST_LAG_SECONDS, HealthServer, LoopLag
from .kube.api_client import TRAINING_JOBS, ApiClient, ApiError
from .kube.apply import Applier
from .kube.audit import Audit
from .kube.credentials import load_credentials
from .kube.events import EventPoster
from .kube.handlers import KOPF_SECONDS, watch
from .kube.key_queue import KeyQueue
from .kube.lease import Election, LeaseLost
from .kube.store import Key, Store
from .kube.watched import watched_kinds
from .log import is_not_found
from .measured.cluster import Cluster
from .measured.memory_profiles import MemoryProfiles
from .measured.metrics_source import Access, MetricsSource
from .measured.operator_config import OperatorConfig
from .measured.reservations import Reservations
from .measured.scrape_targets import ScrapeTargets
from .observe import Observer
from .plan_service import PlanService
from .progress.address import ProgressAddress
from .progress.endpoint import Certificate, ProgressEndpoint
from .progress.outbox import ProgressOutbox
from .progress.token_reviews import TokenReviews
from .settings import Settings
from .worker import JobCallbacks, Worker

logger = logging.getLogger(__name__)

ENDING_SECONDS = 10.0
"""Time for looks in progress to finish their writes."""
RETRY_SECONDS = 5.0
"""Interval between tries to list everything at the start."""


class Operator:
    """The operator; `run` returns the exit code."""

    def __init__(self, settings: Settings) -> None:
        """Raises UserError for unusable settings."""
        self._settings = settings
        self._namespaces = settings.namespaces or ("",)
        self._credentials = load_credentials(settings.kubeconfig)
        self._certificate = None if settings.tls_directory is None else Certificate(settings.tls_directory)
        self._stop = asyncio.Event()
        self._listed = asyncio.Event()
        self._kopf_ready = asyncio.Event()

        self._exporter = OperatorExporter()
        self._lag = LoopLag()
        self._store = Store()
        self._kinds = watched_kinds(self._store)
        self._queue: KeyQueue[Key] = KeyQueue()
        self._lease_client = ApiClient(self._credentials, self._exporter.request)
        self._election = self._elects()
        seconds_left = _for_ever if self._election is None else self._election.seconds_left
        self._seconds_left = seconds_left
        self._client = ApiClient(self._credentials, self._exporter.request, seconds_left)
        self._audit = Audit(self._client, self._kinds, self._namespaces, self._queue.add, self._exporter)
        self._metrics = live_metrics(settings, self._client)
        self._reservations = Reservations(settings.metrics_interval_seconds)
        self._config = OperatorConfig(self._client, settings.node_reader, self._look_at_all)
        self._cluster = Cluster(self._client, self._metrics, self._reservations, settings.node_reader, self._config)
        self._events = EventPoster(self._client, self._exporter.event)
        self._outbox = ProgressOutbox()
        self._profiles = MemoryProfiles(self._client, self._cluster.profile_written)
        self._progress = ProgressEndpoint(
            TokenReviews(self._client, self._store),
            self._outbox,
            self._queue.add,
            self._profiles.reported,
            self._exporter.progress,
            knows_attempts=self._listed.is_set,
            is_corrected=self._is_corrected,
        )
        self._address = self._published()
        self._applier = Applier(self._client, self._store)
        observer = Observer(
            self._client, self._store, self._cluster, self._reservations, self._facts, progress=self._progress
        )
        self._plans = PlanService(self._queue.add, self._exporter.plan)
        self._worker = Worker(
            self._queue,
            observer,
            self._applier,
            self._outbox,
            self._events,
            self._exporter,
            self._plans,
            JobCallbacks(self._forget, self._profiles.ran_out),
        )

    async def run(self) -> int:
        """Runs until SIGTERM (returns 0), or until a background task ends (returns 1)."""
        self._take_signals()
        async with self._client, self._lease_client:
            health = await HealthServer(self._exporter, self._problem, self._not_ready).serve(
                self._settings.health_port
            )
            self._exporter.collect_from(self._gauges)
            election = [asyncio.create_task(self._election.run(), name="lease")] if self._election is not None else []
            tasks = [asyncio.create_task(self._lag.run(), name="loop lag")]
            if self._certificate is not None:
                tasks.append(asyncio.create_task(self._certificate.run(), name="certificate"))
            progress = None
            try:
                if self._election is not None:
                    code = await self._supervise([*election, *tasks], self._election.leads)
                    if code is not None:
                        return code
                if self._certificate is not None and self._settings.progress_url:
                    progress = await self._progress.serve(self._settings.progress_port, self._certificate.context)
                tasks += self._start()
                return await self._supervise([*election, *tasks]) or 0
            finally:
                await self._end(election, tasks, progress)
                await health.cleanup()

    def _start(self) -> list[asyncio.Task[Any]]:
        """Starts our tasks before kopf, which at its end cancels all tasks that started after it."""
        running: dict[str, Coroutine[Any, Any, None]] = {
            "events": self._events.run(),
            "plans": self._plans.run(),
            "progress": self._progress.flush(),
            "operator config": self._config.run(),
            "memory profiles": self._profiles.run(),
            "complete lists": self._after_first_list(self._audit.run(self._settings.relist_seconds)),
        }
        if self._metrics.is_configured:
            running["metrics"] = self._metrics.run()
        if self._address is not None:
            running["progress address"] = self._after_first_list(self._address.run())
        running |= {f"worker {n}": self._after_first_list(self._worker.run()) for n in range(self._settings.workers)}
        running["watches"] = self._list_and_watch()
        return [asyncio.create_task(work, name=name) for name, work in running.items()]

    async def _supervise(self, tasks: list[asyncio.Task[Any]], reached: asyncio.Event | None = None) -> int | None:
        """Waits; returns the exit code, or None once `reached` is set."""
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        on_the_way = asyncio.create_task((reached or asyncio.Event()).wait(), name="reached")
        ended, _ = await asyncio.wait([stopped, on_the_way, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        on_the_way.cancel()
        if stopped in ended:
            logger.info("stopping: work in progress ends within %g s", ENDING_SECONDS)
            return 0
        if ended == {on_the_way}:
            return None
        for task in ended - {on_the_way}:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, LeaseLost):
                logger.critical("this pod is no longer the leader, so the process ends: %s", error)
                continue
            if is_not_found(error):
                logger.critical(
                    "the API server no longer serves a watched kind: install the CRD %s.%s again (docs/install.md); "
                    "the process ends: %s",
                    TRAINING_JOBS.plural, GROUP, error,
                )  # fmt: skip
                continue
            logger.critical(
                "task %s ended, so the process ends: %s", task.get_name(), error or "cancelled", exc_info=error
            )
        return 1

    async def _end(
        self, election: list[asyncio.Task[Any]], tasks: list[asyncio.Task[Any]], progress: web.AppRunner | None
    ) -> None:
        """Lets looks in progress finish without starting new ones, then releases the Lease before slower cleanup."""
        deadline = time.monotonic() + ENDING_SECONDS
        self._queue.close()
        while self._queue.num_working and self._seconds_left() > 0 and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._address is not None and progress is not None and self._seconds_left() > 0:
            await self._address.withdraw()
        if progress is not None:
            await progress.cleanup()
        if self._election is not None:
            election[0].cancel()
            await asyncio.wait(election)
            await self._election.release()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=KOPF_SECONDS)

    def _elects(self) -> Election | None:
        """The leader election; None for a single operator."""
        given = self._settings
        if not given.lease_name:
            return None
        owner = self._credentials.account
        return Election(self._lease_client, given.pod_namespace, given.lease_name, given.pod_uid, owner)

    def _published(self) -> ProgressAddress | None:
        given = self._settings
        if not given.progress_service:
            return None
        return ProgressAddress(
            self._client, given.pod_namespace, given.progress_service, given.pod_ip, given.progress_port
        )

    async def _list_and_watch(self) -> None:
        """Lists everything, then watches: kopf would not find a kind that is installed after its start."""
        while not await self._list_everything():
            await asyncio.sleep(RETRY_SECONDS)
        kopf_ready = asyncio.create_task(self._after_kopf_is_ready(), name="start")
        try:
            await watch(self._kinds, self._credentials, self._namespaces, self._queue.add, self._kopf_ready)
        finally:
            kopf_ready.cancel()

    async def _list_everything(self) -> bool:
        try:
            if not await self._kind_is_served():
                logger.error("the API server does not serve TrainingJobs (%s/%s): install the CRDs", GROUP, VERSION)
                return False
            await self._config.load()
            await self._audit.first()
        except ApiError as error:
            logger.error("the first complete list failed; retry in %g s: %s", RETRY_SECONDS, error)
            return False
        logger.info("%d TrainingJobs and %d attempts found", len(self._store.jobs), len(self._store.attempts))
        return True

    async def _kind_is_served(self) -> bool:
        """Whether TrainingJobs are served, also according to the discovery documents that kopf uses, which may lag."""
        groups = (await self._client.read("/apis")).get("groups") or ()
        if GROUP not in {group.get("name") for group in groups}:
            return False
        found = (await self._client.read(TRAINING_JOBS.prefix)).get("resources") or ()
        return TRAINING_JOBS.plural in {resource.get("name") for resource in found}

    async def _after_kopf_is_ready(self) -> None:
        await self._kopf_ready.wait()
        self._take_signals()  # kopf took them
        gc.collect()
        gc.freeze()  # objects from the start are permanent: the collector can skip them
        self._listed.set()

    async def _after_first_list(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await self._listed.wait()
        except asyncio.CancelledError:
            work.close()
            raise
        await work

    def _take_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    def _is_corrected(self, key: Key) -> bool:
        job = self._store.jobs.get(key)
        return job is not None and is_corrected(json.loads(job.spec))

    def _facts(self) -> OperatorFacts:
        return OperatorFacts(
            trainer_image=self._settings.trainer_image,
            image_pull_policy=self._settings.image_pull_policy,
            progress_url=self._settings.progress_url,
            progress_ca="" if self._certificate is None else self._certificate.authority,
        )

    def _look_at_all(self) -> None:
        for job in self._store.jobs:
            self._queue.add(job.key)

    def _forget(self, key: Key) -> None:
        for part in (self._config, self._queue, self._reservations, self._progress, self._profiles, self._applier):
            part.forget(key)

    @property
    def _leads(self) -> bool:
        return self._election is None or self._election.leads.is_set()

    def _not_ready(self) -> str:
        """Why the process is not ready. A standby is ready: otherwise a rollout would never finish."""
        if self._election is not None and not self._leads:
            return "" if self._election.has_looked else "the Lease has not been read yet"
        return "" if self._listed.is_set() else "the first complete list is not finished"

    def _problem(self) -> str:
        """Why the process should be restarted; "" if it is healthy."""
        if self._audit.watch_is_dead:
            return "the watch misses changes that complete lists show"
        if self._lag.longest > LONGEST_LAG_SECONDS:
            return f"the event loop was blocked for {self._lag.longest:.0f} s"
        return ""

    def _gauges(self) -> dict[Metric, Values]:
        """The values at the moment of a scrape; values that are not known are left out."""
        now, listed = time.monotonic(), self._audit.last_time
        values = {
            metrics.OPERATOR_LEADER: int(self._leads),
            metrics.OPERATOR_QUEUE_DEPTH: len(self._queue),
            metrics.OPERATOR_LOOP_LAG: self._lag.longest,
            metrics.OPERATOR_PLANNING_QUEUE: len(self._plans),
            metrics.OPERATOR_PLANNING_AGE: self._plans.oldest_seconds,
            metrics.OPERATOR_LIST_AGE: None if listed is None else now - listed,
            metrics.OPERATOR_METRICS_AGE: self._metrics.snapshot(now).age_seconds,
            metrics.OPERATOR_CERTIFICATE_EXPIRY: None if self._certificate is None else self._certificate.expiry,
        }
        return {
            **{metric: {(): value} for metric, value in values.items() if value is not None},
            metrics.OPERATOR_WATCH_LAG: {(kind.plural,): kind.table.lag_seconds for kind in self._kinds},
            metrics.OPERATOR_NODE_AVOIDED: {(node,): 1 for node in self._cluster.avoided_nodes},
            **fleet_of(self._store.jobs, time.time()),
        }


def live_metrics(settings: Settings, client: ApiClient) -> MetricsSource:
    """Reads from Prometheus if there is one, else from our node exporters, if the operator may list the nodes that
    their figures belong to."""
    prometheus = Access(
        settings.prometheus_url,
        settings.prometheus_matchers,
        settings.prometheus_token_file,
        settings.prometheus_ca_file,
    )
    asks_exporters = settings.node_exporters and settings.node_reader
    targets = ScrapeTargets(client, settings.pod_namespace, settings.node_exporters) if asks_exporters else None
    return MetricsSource(prometheus, settings.metrics_interval_seconds, targets)


def _for_ever() -> float:
    return math.inf

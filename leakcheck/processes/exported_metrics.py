"""What a watched server holds, as metrics: for Prometheus, which asks for them, and for whom OTLP's variables name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from lowtide.leakcheck.growth.quantities import QUANTITIES, HeldSource, Quantity
from lowtide.probes.host.process_files import name_of

if TYPE_CHECKING:
    from threading import Thread

    from lowtide.reports.schema import Finding


class ExportedMetrics:
    """Serves the metrics of some processes, while the block lasts; they are read when somebody asks.

    Args:
        source: where it is read what they hold.
        requests: gives how many requests were answered, and how many failed.
        rates: gives what has grown last, each with the bytes of a second.
        page: gives the page that is served beside the metrics, as `/`.
        port: where Prometheus finds them, on this machine alone; 0 for a free one; None for nowhere.
        sends: whether they are sent to whom the variables of OTLP name.

    Attributes:
        port: that port; None for nowhere.

    Raises:
        OSError: the port is in use.
    """

    def __init__(
        self,
        source: HeldSource,
        requests: Callable[[], tuple[int, int]],
        rates: Callable[[], Collection[tuple[Finding, float]]],
        page: Callable[[], str],
        port: int | None,
        *,
        sends: bool,
    ) -> None:
        self._source, self._requests, self._rates = source, requests, rates
        self.port = port
        self._server: WSGIServer | None = None
        self._thread: Thread | None = None
        readers: list[MetricReader] = []
        if port is not None:
            readers.append(self._serve(port, page))
        if sends:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            readers.append(PeriodicExportingMetricReader(OTLPMetricExporter()))
        self._provider = MeterProvider(readers, resource=Resource.create({"service.name": "lowtide"}))
        self._make()

    def _serve(self, port: int, page: Callable[[], str]) -> MetricReader:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=registry)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        self.port = self._server.server_port
        metrics = self._server.get_app()
        assert metrics is not None

        def page_or_metrics(environment: dict[str, Any], start: Any) -> Iterable[bytes]:
            if environment["PATH_INFO"] != "/":
                return metrics(environment, start)
            # By any port: it may be forwarded.
            if environment.get("HTTP_HOST", "").partition(":")[0] not in ("127.0.0.1", "localhost"):
                # A page of another site that has its name lead here would read what this one says.
                start("421 Misdirected Request", [("Content-Type", "text/plain")])
                return [f"open http://127.0.0.1:{self.port}/\n".encode()]
            start("200 OK", [("Content-Type", "text/html; charset=utf-8"), ("Cache-Control", "no-store")])
            return [page().encode()]

        self._server.set_app(page_or_metrics)
        return reader

    def __enter__(self) -> ExportedMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._provider.shutdown()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _make(self) -> None:
        meter = self._provider.get_meter("lowtide")
        for quantity in QUANTITIES.values():
            name, unit, said = quantity.metric
            if name:
                held = partial(self._held, quantity)
                meter.create_observable_up_down_counter(name, [held], unit=unit, description=said)
        meter.create_observable_counter(
            "lowtide.requests", [self._of_requests], unit="{request}", description="Requests, by how they ended."
        )
        meter.create_observable_gauge(
            "lowtide.growth.rate", [self._growing], unit="By/s", description="What grows, by who holds it."
        )

    def _held(self, quantity: Quantity, _: CallbackOptions) -> Iterator[Observation]:
        for pid, device, amount in quantity.read(self._source):
            card = {"hw.id": device, "hw.type": "gpu"} if device else {}
            yield Observation(amount, {**_process(pid), **card})

    def _of_requests(self, _: CallbackOptions) -> Iterable[Observation]:
        answered, failed = self._requests()
        return Observation(answered, {"outcome": "answered"}), Observation(failed, {"outcome": "failed"})

    def _growing(self, _: CallbackOptions) -> Iterator[Observation]:
        for finding, rate in self._rates():
            process = {} if finding.process is None else _process(finding.process.pid)
            holder = {"lowtide.resource": finding.resource, "lowtide.holder": finding.holder or "unknown"}
            yield Observation(rate, {**process, **holder})


def _process(pid: int) -> dict[str, str | int]:
    return {"process.pid": pid, "process.executable.name": name_of(pid)}

"""h2o's metrics in a server's `/metrics`.

vLLM forwards the metrics of a KV connector from its workers to the process that answers `/metrics`
only if the config of that process names the connector. h2o's connector is set when an engine
starts, in another process. Therefore each process that holds pages writes its metrics to a file, at
most a few seconds after a step. A collector of prometheus_client in the server's first process
reads the files on request. That process passes the folder to the others in an environment variable.
Without an entry `h2o` in the config there are no files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import secrets
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize  # runs at the exit of this process, never of a fork
from pathlib import Path
from typing import Any

from h2o.vllm.page_store import PageStore
from h2o.vllm.worker_prompts import WorkerPrompts

FOLDER = "H2O_VLLM_METRICS"
"""The environment variable that names the folder of the metrics files"""

SECONDS = 5.0
"""Longest delay from a step to its metrics"""

GAUGES = {
    "h2o:request_bytes": "KV bytes per request in the layers of this rank",
    "h2o:requests_that_fit": "Requests that fit in memory at the same time",
    "h2o:share_held": "Share of all attention that went to keys that are still kept, 0 to 1",
    "h2o:stored_prompts": "Stored prompts and prefixes, with which later requests can begin",
    "h2o:stored_prompt_bytes": "Bytes of stored prompts, in pages that no request has at present",
}
COUNTERS = {
    "h2o:evicted_keys": "Keys evicted, over all layers and heads of this rank",
    "h2o:forked_requests": "Requests that began with a stored prompt",
    "h2o:forked_tokens": "Tokens that these requests did not have to prefill",
}


LABELS = ("model_name", "engine", "rank")
"""Labels of a process's metrics: served model, data parallel rank, tensor parallel rank"""


class Collector:
    """Reads the metrics that the processes of a server have written to a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterator[Any]:
        """Yield the metrics with their labels, for prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        left = []
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):  # its process may just be ending
                left.append(json.loads(file.read_text()))
        families = [(GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)]
        for family, names in families:
            for name, what in names.items():
                metric = family(name, what, labels=LABELS)
                for labels, numbers in left:
                    if numbers.get(name) is not None:
                        metric.add_metric(labels, numbers[name])
                if metric.samples:
                    yield metric


@functools.cache
def publish() -> None:
    """Make this process report the metrics of all processes that it starts."""
    if multiprocessing.parent_process() is not None:
        return
    from prometheus_client import REGISTRY

    folder = Path(tempfile.gettempdir(), f"h2o-metrics-{secrets.token_hex(8)}")
    os.environ[FOLDER] = str(folder)
    Finalize(None, _remove, (folder,), exitpriority=-1)  # runs after the child processes have ended
    REGISTRY.register(Collector(folder))


def _remove(folder: Path) -> None:
    """Remove the folder. A meter of this process that is still waiting to write will not write."""
    os.environ.pop(FOLDER, None)
    shutil.rmtree(folder, ignore_errors=True)


class Meter:
    """Writes the metrics of a process that holds pages."""

    def __init__(
        self,
        labels: tuple[str, str, str],
        request_bytes: int,
        requests: int,
        stores: Callable[[], list[PageStore]],
        worker_prompts: WorkerPrompts,
    ) -> None:
        """
        Args:
            labels: values of `LABELS`.
            stores: returns the stores of the layers that have pages by now.
        """
        self.labels = labels
        self.fixed = {"h2o:request_bytes": request_bytes, "h2o:requests_that_fit": requests}
        self.stores, self.worker_prompts = stores, worker_prompts
        self._waits = False
        self._lock = threading.Lock()

    @property
    def file(self) -> Path | None:
        """The file for the metrics, or None if nobody reads them."""
        folder = os.environ.get(FOLDER)
        return Path(folder, "{1}-{2}.json".format(*self.labels)) if folder else None

    def schedule_write(self) -> None:
        """Schedule a write of the metrics, which will include the steps until then."""
        if self._waits or self.file is None:
            return
        self._waits = True
        timer = threading.Timer(SECONDS, self.write)
        timer.daemon = True
        timer.start()

    def write(self) -> None:
        """Write the metrics now. An error in writing is only a warning."""
        self._waits = False
        if (file := self.file) is None:
            return
        written = file.with_suffix(".new")
        try:
            with self._lock:
                file.parent.mkdir(mode=0o700, exist_ok=True)
                written.write_text(json.dumps([self.labels, self.numbers()]))
                written.replace(file)
        except OSError as error:
            warnings.warn(f"h2o: /metrics is incomplete: {error}", RuntimeWarning, stacklevel=2)

    def numbers(self) -> dict[str, float | None]:
        evictions = [store.eviction() for store in self.stores()]
        lost, kept = (sum(getattr(x, name) for x in evictions) for name in ("lost", "kept"))
        prompts = self.worker_prompts
        pages = len(prompts.stored) * self.fixed["h2o:request_bytes"]
        return {
            **self.fixed,
            "h2o:evicted_keys": sum(x.keys for x in evictions),
            "h2o:share_held": kept / (kept + lost) if kept else None,
            "h2o:stored_prompts": len(prompts.stored),
            "h2o:stored_prompt_bytes": pages + prompts.outputs_bytes(),
            "h2o:forked_requests": prompts.requests,
            "h2o:forked_tokens": prompts.tokens,
        }

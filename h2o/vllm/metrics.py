"""The numbers of h2o in a server's `/metrics`.

vLLM carries numbers of a KV connector from its workers to the process that answers `/metrics` only
where the config of that process names the connector, and h2o's is named when an engine starts, in
a process of its own. So each process that holds pages leaves its numbers in a file, seconds after a
step at the latest, and a collector of prometheus_client in the server's first process, which names
the folder to the others by their environment, reads them when asked. Where the config has no entry
`h2o` there is no file.
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
from multiprocessing.util import Finalize  # at the exit of this process, never of a fork
from pathlib import Path
from typing import Any, NamedTuple

from h2o.vllm.forks import Forks
from h2o.vllm.page_store import PageStore

FOLDER = "H2O_VLLM_METRICS"
"""The variable of the environment that names the folder of the numbers."""

SECONDS = 5.0
"""From a step to its numbers, at most."""

GAUGES = {
    "h2o:request_bytes": "KV bytes that a request takes in the layers of this rank",
    "h2o:requests_that_fit": "Requests that have room at once",
    "h2o:share_held": "Share of the attention paid that went to keys which are still kept, 0 to 1",
    "h2o:stored_prompts": "Prompts and prefixes that requests to come can begin with",
    "h2o:stored_prompt_bytes": "Bytes of these, in pages that no request has at the moment",
}
COUNTERS = {
    "h2o:evicted_keys": "Keys evicted, over all layers and heads of this rank",
    "h2o:forked_requests": "Requests that began with a stored prompt",
    "h2o:forked_tokens": "Tokens that these did not have to read",
}


class Place(NamedTuple):
    """The labels of a process' numbers."""

    model_name: str
    engine: str
    """data parallel rank"""
    rank: str
    """tensor parallel rank"""


class Collector:
    """Reads what the processes of a server have left in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collect(self) -> Iterator[Any]:
        """The metrics with their labels, for prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        left = []
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError):  # of a process that is just ending
                left.append(json.loads(file.read_text()))
        families = [(GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)]
        for family, names in families:
            for name, what in names.items():
                metric = family(name, what, labels=Place._fields)
                for place, numbers in left:
                    if numbers.get(name) is not None:
                        metric.add_metric(place, numbers[name])
                if metric.samples:
                    yield metric


@functools.cache
def publish() -> None:
    """Has this process answer with the numbers of all those that it starts."""
    if multiprocessing.parent_process() is not None:
        return
    from prometheus_client import REGISTRY

    folder = Path(tempfile.gettempdir(), f"h2o-metrics-{secrets.token_hex(8)}")
    os.environ[FOLDER] = str(folder)
    Finalize(None, _remove, (folder,), exitpriority=-1)  # after the processes that it has started
    REGISTRY.register(Collector(folder))


def _remove(folder: Path) -> None:
    """For good: a meter of this process may still wait to write."""
    os.environ.pop(FOLDER, None)
    shutil.rmtree(folder, ignore_errors=True)


class Meter:
    """Leaves the numbers of a process that holds pages."""

    def __init__(
        self,
        place: Place,
        request_bytes: int,
        requests: int,
        stores: Callable[[], list[PageStore]],
        forks: Forks,
    ) -> None:
        """`stores` asks for the pages of the layers that have some by now."""
        self.place = place
        self.fixed = {"h2o:request_bytes": request_bytes, "h2o:requests_that_fit": requests}
        self.stores, self.forks = stores, forks
        self._waits = False
        self._lock = threading.Lock()

    @property
    def file(self) -> Path | None:
        """Where the numbers go; None: nobody reads them."""
        folder = os.environ.get(FOLDER)
        return Path(folder, f"{self.place.engine}-{self.place.rank}.json") if folder else None

    def stepped(self) -> None:
        """Write the numbers in a moment, together with those of the steps until then."""
        if self._waits or self.file is None:
            return
        self._waits = True
        timer = threading.Timer(SECONDS, self.write)
        timer.daemon = True
        timer.start()

    def write(self) -> None:
        """Writes them now. A folder that takes none costs the numbers only: a warning."""
        self._waits = False
        if (file := self.file) is None:
            return
        written = file.with_suffix(".new")
        try:
            with self._lock:
                file.parent.mkdir(mode=0o700, exist_ok=True)
                written.write_text(json.dumps([self.place, self.numbers()]))
                written.replace(file)
        except OSError as error:
            warnings.warn(f"h2o: /metrics lacks numbers: {error}", RuntimeWarning, stacklevel=2)

    def numbers(self) -> dict[str, float | None]:
        evictions = [store.eviction() for store in self.stores()]
        lost, kept = (sum(getattr(x, name) for x in evictions) for name in ("lost", "kept"))
        forks = self.forks
        pages = len(forks.stored) * self.fixed["h2o:request_bytes"]
        return {
            **self.fixed,
            "h2o:evicted_keys": sum(x.keys for x in evictions),
            "h2o:share_held": kept / (kept + lost) if kept else None,
            "h2o:stored_prompts": len(forks.stored),
            "h2o:stored_prompt_bytes": pages + forks.outputs_bytes(),
            "h2o:forked_requests": forks.requests,
            "h2o:forked_tokens": forks.tokens,
        }

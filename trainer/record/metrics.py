# SPDX-License-Identifier: Apache-2.0
"""Numbers for Prometheus, all of them here: `isthmus_…`, units in their names.

Rules: an own registry, nothing global; counters end in `_total`, sizes in `_bytes`, durations in `_seconds`; no label
that grows with time (no step, no round). Must not know where the numbers come from, nor who asks (metrics_server.py).
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

_ROUND_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """The numbers of one peer; set them from any thread.

    Call `.set()` on gauges, `.inc()` on counters, `.observe()` on histograms.
    """

    def __init__(self, *, run_id: str, peer_id: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        Info("isthmus_peer", "Which peer of which run this is.", registry=self.registry).info(
            {"run_id": run_id, "peer_id": peer_id}
        )
        # Progress.
        self.outer_step = self._gauge("outer_step", "Committed exchanges.")
        self.inner_steps = self._counter("inner_steps_total", "Local optimizer steps of this start.")
        self.tokens = self._counter("tokens_total", "Tokens that this peer has trained on since its start.")
        self.train_loss = self._gauge("train_loss", "Mean loss of the last outer step, in nats a token.")
        self.validation_loss = self._gauge("validation_loss", "Loss on held-out text, in nats a token.")
        self.goodput_ratio = self._gauge("goodput_ratio", "Share of the time since the start spent in inner steps.")
        # Membership.
        self.epoch = self._gauge("epoch", "Number of the view.")
        self.world_size = self._gauge("world_size", "Members of the view.")
        self.is_member = self._gauge("is_member", "1 as a member, 0 while learning or alone.")
        self.evictions = self._counter("evictions_total", "How often this peer was put out of a view.")
        self.lies = self._counter("lies_total", "Members overruled or put out for what they said; of the coordinator.")
        # Exchanges.
        self.commits = self._counter("commits_total", "Rounds of this peer that were committed.")
        self.aborts = self._counter("aborts_total", "Rounds of this peer that were tried again in another view.")
        self.round_seconds = self._histogram("round_seconds", "From the first byte of a round to its commit.")
        self.exchange_seconds = self._histogram("exchange_seconds", "The all-reduce of a round alone.")
        self.sent_bytes = self._counter("sent_bytes_total", "Bytes sent to other peers.")
        self.received_bytes = self._counter("received_bytes_total", "Bytes received from other peers.")
        self.state_bytes = self._counter("state_served_bytes_total", "Bytes of state sent to learners.")
        self.refused_connections = Counter(
            "isthmus_refused_connections_total",
            "Connections that were not let in, by reason.",
            ["reason"],
            registry=self.registry,
        )
        # Workers.
        self.worker_deaths = self._counter("worker_deaths_total", "Workers replaced because one died.")
        self.worker_hangs = self._counter("worker_hangs_total", "Workers replaced because one gave no answer.")
        # Disk.
        self.checkpoints = self._counter("checkpoints_total", "Checkpoints written.")
        self.checkpoint_failures = self._counter("checkpoint_failures_total", "Checkpoints not written. Alarm on it.")
        self.checkpoint_seconds = self._histogram("checkpoint_seconds", "Writing one checkpoint.")
        self.events_lost = self._counter("events_lost_total", "Lines that events.jsonl had no room for.")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"isthmus_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"isthmus_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"isthmus_{name}", text, registry=self.registry, buckets=_ROUND_BUCKETS_S)

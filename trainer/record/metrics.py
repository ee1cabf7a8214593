# SPDX-License-Identifier: Apache-2.0
"""Numbers for Prometheus, all of them here: `isthmus_…`, units in their names, read from the figures when asked for.

Rules: an own registry, nothing global; counters end in `_total`, sizes in `_bytes`, durations in `_seconds`; no label
that grows with time (no step, no round). Must not know where the figures come from, nor who asks (metrics_server.py).
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from isthmus.elastic.observation import Lied, RoundAborted
from isthmus.trainer.record.events import Checkpoint, CheckpointFailed, Evaluate, WorkerDied, WorkerHung
from isthmus.trainer.record.figures import BUCKETS_S, Figures


def _of_step(name: str) -> Callable[[Figures], float | None]:
    """A figure of the newest inner step."""
    return lambda now: None if now.step is None else getattr(now.step, name)


def _of_exchange(name: str) -> Callable[[Figures], float | None]:
    """A figure of the newest exchange."""
    return lambda now: None if now.exchange is None else getattr(now.exchange, name)


_GAUGES: dict[str, tuple[str, Callable[[Figures], float | None]]] = {
    "outer_step": ("Committed exchanges.", lambda now: now.outer_step),
    "train_loss": ("Mean loss of the last outer step, in nats a token.", lambda now: now.round_loss),
    "validation_loss": ("Loss on held-out text, in nats a token.", lambda now: now.validation_loss),
    "validation_bits_per_byte": ("The same in bits a byte of text.", lambda now: now.validation_bits_per_byte),
    "validation_tokens": ("That the run had trained on then.", lambda now: now.validation_tokens),
    "goodput_ratio": ("Share of the time since the start spent in inner steps.", lambda now: now.goodput),
    "epoch": ("Number of the view.", lambda now: now.epoch),
    "world_size": ("Members of the view.", lambda now: len(now.members)),
    "step_seconds": ("The newest inner step, as the workers tell of it.", _of_step("seconds")),
    "step_data_seconds": ("Of it, waiting for text.", _of_step("data_seconds")),
    "step_passes_seconds": ("Of it, forward and backward.", _of_step("passes_seconds")),
    "step_clip_seconds": ("Of it, the gradient's norm and scaling.", _of_step("clip_seconds")),
    "step_update_seconds": ("Of it, the inner optimizer.", _of_step("update_seconds")),
    "step_tokens_per_second": ("Tokens of it by its seconds.", _of_step("tokens_per_s")),
    "last_exchange_seconds": ("The newest all-reduce.", _of_exchange("seconds")),
    "last_exchange_predicted_seconds": ("What the cost model had expected for it.", _of_exchange("predicted_s")),
    "mfu_ratio": ("Share of the devices' peak that it reached.", _of_step("mfu")),
    "is_member": ("1 as a member, 0 while learning or alone.", lambda now: now.is_member),
}
_COUNTERS: dict[str, tuple[str, Callable[[Figures], float]]] = {
    "inner_steps": ("Local optimizer steps of this start.", lambda now: now.num_inner_steps),
    "tokens": ("Tokens that this peer has trained on since its start.", lambda now: now.tokens),
    "evictions": ("How often this peer was put out of a view.", lambda now: now.evictions),
    "lies": ("Members overruled or put out for what they said; of the coordinator.", lambda now: now.times(Lied)),
    "commits": ("Rounds of this peer that were committed.", lambda now: now.num_commits),
    "aborts": ("Rounds of this peer that were tried again in another view.", lambda now: now.times(RoundAborted)),
    "sent_bytes": ("Bytes sent to other peers.", lambda now: now.sent_bytes),
    "received_bytes": ("Bytes received from other peers.", lambda now: now.received_bytes),
    "state_served_bytes": ("Bytes of state sent to learners.", lambda now: now.state_served_bytes),
    "worker_deaths": ("Workers replaced because one died.", lambda now: now.times(WorkerDied)),
    "worker_hangs": ("Workers replaced because one gave no answer.", lambda now: now.times(WorkerHung)),
    "checkpoints": ("Checkpoints written.", lambda now: now.times(Checkpoint)),
    "checkpoint_failures": ("Checkpoints not written. Alarm on it.", lambda now: now.times(CheckpointFailed)),
    "evaluations": ("Evaluations that were this peer's turn.", lambda now: now.times(Evaluate)),
    "evaluation_seconds": ("What they took of the workers' time.", lambda now: now.evaluation_s),
    "evaluation_held_seconds": ("For how long training stood still for them.", lambda now: now.evaluation_held_s),
    "events_lost": ("Lines that events.jsonl had no room for.", lambda now: now.events_lost),
}
_HISTOGRAMS = {
    "round_seconds": "From the moment when a round's payload was handed in to its commit.",
    "wait_seconds": "For how long the workers stood still for an outer step.",
    "exchange_seconds": "The all-reduce of a round alone.",
    "checkpoint_seconds": "Writing one checkpoint.",
}


class Metrics(Collector):
    """The numbers of one peer, to be asked for from any thread.

    Args:
        figures: as they are now.
    """

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All families; one whose number is not known yet has no sample."""
        now = self._figures()
        me = {"run_id": now.run_id, "peer_id": now.peer_id}
        yield InfoMetricFamily("isthmus_peer", "Which peer of which run this is.", me)
        for name, (text, gauge) in _GAUGES.items():
            yield GaugeMetricFamily(f"isthmus_{name}", text, gauge(now))
        for name, (text, counter) in _COUNTERS.items():
            yield CounterMetricFamily(f"isthmus_{name}", text, counter(now))
        for name, text in _HISTOGRAMS.items():
            durations = getattr(now, name)
            buckets = zip((*map(str, map(float, BUCKETS_S)), "+Inf"), accumulate(durations.counts), strict=True)
            yield HistogramMetricFamily(f"isthmus_{name}", text, list(buckets), durations.total_s)
        family = "isthmus_refused_connections"
        refused = CounterMetricFamily(family, "Connections that were not let in, by reason.", labels=["reason"])
        for reason, number in now.refused.items():
            refused.add_metric([reason], number)
        yield refused

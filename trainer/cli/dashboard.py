# SPDX-License-Identifier: Apache-2.0
"""The page that `isthmus top` shows: a peer's status, asked for each second, as a terminal can draw it.

All of it is of `isthmus.status/1`, so that it works on any peer and any coordinator. Rules: a question that is not
answered in time does not end the page, it is told there; the page asks and never orders. Must not know how a status
travels.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import DataTable, Footer, ProgressBar, Sparkline, Static

from isthmus.trainer.config.quantities import rounded_nbytes
from isthmus.trainer.errors import NobodyReachable, NothingRuns
from isthmus.trainer.record.status import PeerStatus, Status, count, exchange_of, figure, path_to
from isthmus.trainer.record.summary import format_duration

LOOK_S: Final = 1.0
_WAITS_SHOWN: Final = 120
_COLUMNS: Final = ("peer", "state", "link", "ms")

Look = Callable[[], tuple[Status, Sequence[PeerStatus]]]
"""Asks the daemon; blocks until it answers. Raises as `ControlClient.status` does."""


class Dashboard(App[None]):
    """See the module.

    Args:
        look: asks for what is shown.
        look_s: seconds between two questions.
    """

    TITLE = "isthmus top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit"), Binding("ctrl+c", "quit", show=False)]
    CSS = """
    Screen { padding: 0 1; }
    #head { height: auto; }
    #notice { height: auto; color: $warning; display: none; }
    #notice.told { display: block; }
    #progress { height: 1; width: 1fr; }
    #progress Bar { width: 1fr; }
    #panels { height: 1fr; margin-top: 1; }
    .panel { border: round $primary; padding: 0 1; border-title-color: $accent; }
    #left { width: 7fr; }
    #loss, #waits { height: 1fr; }
    #loss Sparkline { height: 1fr; }
    #waits Sparkline { height: 1fr; }
    #peers { width: 9fr; }
    #peers DataTable { height: 1fr; background: transparent; }
    #loss-text, #waits-text, #peers-text { height: auto; }
    """

    def __init__(self, look: Look, *, look_s: float = LOOK_S) -> None:
        super().__init__()
        self._look = look
        self._look_s = look_s
        self._waits: deque[float] = deque(maxlen=_WAITS_SHOWN)
        self._round_shown = -1
        self.num_looks = 0
        """Questions that were answered, or whose failure was told."""

    def compose(self) -> ComposeResult:
        """The page without a figure."""
        yield Static("asking the peer …", id="head")
        yield ProgressBar(id="progress", show_eta=False)
        yield Static(id="notice")
        with Horizontal(id="panels"):
            with Vertical(id="left"):
                with Vertical(id="loss", classes="panel") as loss:
                    loss.border_title = "loss"
                    yield Sparkline([], id="loss-curve")
                    yield Static(id="loss-text")
                with Vertical(id="waits", classes="panel") as waits:
                    waits.border_title = "waits"
                    yield Sparkline([], id="waits-curve")
                    yield Static(id="waits-text")
            with Vertical(id="peers", classes="panel") as peers:
                peers.border_title = "peers and links"
                yield DataTable(cursor_type="none", zebra_stripes=True)
                yield Static(id="peers-text")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to ask."""
        self.query_one(DataTable).add_columns(*_COLUMNS)
        self._follow()

    @work(exclusive=True)
    async def _follow(self) -> None:
        """Ask once a second until the page is closed, or the peer has ended."""
        while True:
            answer = await asyncio.to_thread(self._answer)
            if not self.is_running:
                return  # the page was closed meanwhile, and has no parts any more
            if isinstance(answer, NothingRuns):
                self._tell(f"{answer}; q ends this page")
                return
            if isinstance(answer, NobodyReachable):
                self._tell(f"{answer}")
            else:
                self._tell("")
                self.show(*answer)
            await asyncio.sleep(self._look_s)

    def _answer(self) -> tuple[Status, Sequence[PeerStatus]] | NobodyReachable:
        """What the peer says, or why it does not."""
        try:
            return self._look()
        except NobodyReachable as silence:
            return silence

    def _tell(self, sentence: str) -> None:
        notice = self.query_one("#notice", Static)
        notice.update(Text(sentence))
        notice.set_class(bool(sentence), "told")
        self.num_looks += bool(sentence)

    def show(self, status: Status, peers: Sequence[PeerStatus]) -> None:
        """Draw a status, and the peers of the run as far as they are known."""
        self.query_one("#head", Static).update(head_of(status))
        self.query_one(ProgressBar).update(total=status.total_outer_steps or None, progress=status.outer_step)
        self.query_one("#loss-curve", Sparkline).data = [loss for _, loss in status.losses]
        self.query_one("#loss-text", Static).update(losses_of(status))
        last = status.last_round
        if last is not None and last.outer_step != self._round_shown:
            self._round_shown = last.outer_step
            self._waits.append(last.wait_seconds)
        self.query_one("#waits-curve", Sparkline).data = list(self._waits)
        self.query_one("#waits-text", Static).update(waits_of(status))
        table = self.query_one(DataTable)
        table.clear()
        for row in rows_of(status, peers):
            table.add_row(*row)
        self.query_one("#peers-text", Static).update(traffic_of(status))
        self.num_looks += 1


# --------------------------------------------------------------------------------------------------------- in words


def head_of(status: Status) -> Text:
    """Which peer of which run, and how far it is."""
    left = "" if status.seconds_left is None else f", about {format_duration(status.seconds_left)} left"
    inner = ""
    if status.inner_steps_per_round:
        inner = f", inner step {status.inner_step} of {status.inner_steps_per_round}"
    first = Text.assemble(
        (status.run_id, "bold"),
        f"  peer {status.peer_id[:8]}  ",
        (status.phase, "bold green"),
        f"  view {status.epoch}",
    )
    up = format_duration(status.uptime_s)
    return first.append(f"\nouter step {status.outer_step} of {status.total_outer_steps}{inner}, up {up}{left}")


def losses_of(status: Status) -> str:
    """Training and held-out loss."""
    lines = []
    if status.losses:
        (first, _), (last, _) = status.losses[0], status.losses[-1]
        values = [loss for _, loss in status.losses]
        lines.append(f"{max(values):.4f} to {min(values):.4f} at outer steps {first} to {last}")
    lines.append(f"training {figure(status.train_loss, '.4f')} nats a token")
    if status.validation_outer_step is None:
        lines.append("held out: not judged here yet")
    else:
        lines.append(
            f"held out {figure(status.validation_loss, '.4f')}, {figure(status.validation_bits_per_byte, '.4f')} bits "
            f"a byte at outer step {status.validation_outer_step}"
        )
    lines.append(f"{status.tokens:,} tokens, {figure(status.tokens_per_s, ',.0f')} a second")
    return "\n".join(lines)


def waits_of(status: Status) -> str:
    """The last round, and what all of them left for training."""
    last = status.last_round
    if last is None:
        return "no round yet"
    return (
        f"last round {last.seconds:.2f} s with {count(last.num_members, 'peer')}: waited {last.wait_seconds:.2f} s, "
        f"{exchange_of(last)}, {rounded_nbytes(last.bytes)}\n"
        f"goodput {figure(status.goodput, '.1%')}"
    )


def traffic_of(status: Status) -> str:
    """What has gone over the links, and what the coordinator knows."""
    lines = [f"sent {rounded_nbytes(status.sent_bytes)}, received {rounded_nbytes(status.received_bytes)}"]
    if (now := status.coordination) is not None:
        lines.append(
            f"round {now.outer_step + 1}: {len(now.voted)} of {count(now.num_members, 'vote')}, "
            f"{count(now.num_learners, 'learner')}, {now.num_late} late"
        )
    if status.checkpoint_outer_step is not None:
        lines.append(f"checkpoint at outer step {status.checkpoint_outer_step}")
    return "\n".join(lines)


def rows_of(status: Status, peers: Sequence[PeerStatus]) -> list[tuple[str, str, str, str]]:
    """A row for each peer, members first: id, state, link, round trip in ms."""
    states = {peer.peer_id: peer.state for peer in peers}
    rows = []
    for member in status.members:
        notes = [note for note, holds in (("this", member.is_me), ("coordinator", member.is_coordinator)) if holds]
        state = states.pop(member.peer_id, "member")
        trip = "" if member.round_trip_ms is None else f"{member.round_trip_ms:.1f}"
        link = "" if member.is_me else path_to(member, with_round_trip=False)
        rows.append((member.peer_id[:8], ", ".join((state, *notes)), link, trip))
    others = {peer.peer_id: peer for peer in peers}
    rows += [(peer_id[:8], state, others[peer_id].address or "", "") for peer_id, state in states.items()]
    return rows

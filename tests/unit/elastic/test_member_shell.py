# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from isthmus.collective.core.types import Member
from isthmus.collective.errors import NonFiniteInput, PeerUnreachable
from isthmus.collective.transport import FrameType, HelloReply, Listener, Purpose
from isthmus.elastic.core.events import RoundReady
from isthmus.elastic.core.records import CommitRecord, ViewRecord
from isthmus.elastic.errors import JournalUnwritable, RoundMissed, RunFinished
from isthmus.elastic.journal.journal import Journal
from isthmus.elastic.observation import BecameLearner, CatchUpEnded, CoordinatorConnected, CoordinatorLost, RoundStaged
from isthmus.elastic.shell import whereabouts
from tests.unit.elastic.harness import RUN_ID, DonorPeer, listening, peer_id, until
from tests.unit.elastic.peers import CoordinatorHost, audit, running


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.sqlite"


def _records(path):
    journal = Journal(path, run_id=RUN_ID)
    try:
        return journal.replay()
    finally:
        journal.close()


async def test_one_peer_founds_the_run_and_commits_alone(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        peer = run.peer(1)
        run.start(peer)
        await run.reach(5)
        assert [held.outer_step for held in peer.commits] == [1, 2, 3, 4, 5]
    assert audit(_records(path), [peer]) == 5


async def test_three_peers_end_with_the_same_bits_and_every_contribution_once(path, hasher):
    async with running(CoordinatorHost(path, min_peers=3), hasher) as run:
        run.start(*(run.peer(number) for number in (1, 2, 3)))
        await run.reach(20)
        peers = list(run.peers)
    assert audit(_records(path), peers) == 20
    assert len({peer.replica.held() for peer in peers}) == 1
    commits = [record for record in _records(path) if isinstance(record, CommitRecord)]
    assert all(len(commit.contributions) == 3 for commit in commits[1:])


async def test_peer_that_joins_a_running_run_catches_up_and_takes_part(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        run.start(run.peer(1), run.peer(2))
        await run.reach(6)
        late = run.peer(3)
        run.start(late)
        await run.admit(late)
        newest = late.step
        peers = list(run.peers)
    assert audit(_records(path), peers) == newest > 6
    last = [record for record in _records(path) if isinstance(record, CommitRecord)][-1]
    assert len(last.contributions) == 3
    assert any(isinstance(event, CatchUpEnded) and event.outer_step is not None for event in late.observed)


async def test_members_commit_while_a_learner_is_on_its_way(path, hasher):
    """The learner's transfer stands still in the middle; nobody waits for it, and it arrives in the end."""
    async with running(CoordinatorHost(path), hasher) as run:
        run.start(run.peer(1), run.peer(2))
        await run.reach(3)
        late, gate = run.peer(3), asyncio.Event()
        restore = late.replica.finish_restore

        async def held_up(manifest):
            await gate.wait()
            return await restore(manifest)

        late.replica.finish_restore = held_up
        run.start(late)
        await until(lambda: late.replica.num_restores > 0)
        run.peers.remove(late)
        await run.reach(30)
        run.peers.append(late)
        gate.set()
        await run.admit(late)
        newest, peers = late.step, list(run.peers)
    assert audit(_records(path), peers) == newest > 30


async def test_killed_member_is_dropped_and_the_others_commit_the_same_payload(path, hasher):
    async with running(CoordinatorHost(path, min_peers=1), hasher) as run:
        peers = [run.peer(number) for number in (1, 2, 3)]
        step = await run.gather(*peers)
        await run.kill(peers[2])
        await run.reach(step + 5)
    records = _records(path)
    assert audit(records, peers[:2]) == step + 5
    assert peers[0].lost == peers[1].lost == []  # their inner work survived (I6)
    newest = [record for record in records if isinstance(record, ViewRecord)][-1]
    assert [member.peer_id for member in newest.view.members] == [peer_id(1), peer_id(2)]


async def test_peer_killed_in_the_middle_of_the_exchange_costs_the_others_nothing(path, hasher):
    async with running(CoordinatorHost(path, min_peers=2), hasher) as run:
        peers = [run.peer(number) for number in (1, 2, 3)]
        step = await run.gather(*peers)
        for peer in peers[:2]:
            await peer.allow(step + 1)  # they stand in the exchange and wait for the third
        await until(lambda: len(run.rendezvous.newest_room()) == 2)
        await run.kill(peers[2])
        await run.reach(step + 1)
    assert audit(_records(path), peers[:2]) == step + 1
    assert [peer.runner.num_aborted for peer in peers[:2]] == [1, 1]
    assert peers[0].lost == peers[1].lost == []


async def test_peer_that_started_again_comes_back_as_a_learner(path, hasher):
    async with running(CoordinatorHost(path, min_peers=2), hasher) as run:
        peers = [run.peer(1), run.peer(2)]
        run.start(*peers)
        await run.reach(3)
        await run.kill(peers[1])
        again = run.peer(2, incarnation=2)
        run.start(again)
        await run.reach(8)
        assert again.commits
    assert audit(_records(path), [peers[0], again]) == 8


async def test_peer_that_comes_back_with_its_state_replays_the_rest(path, hasher):
    async with running(CoordinatorHost(path, min_peers=1), hasher) as run:
        peers = [run.peer(1), run.peer(2)]
        step = await run.gather(*peers)
        await run.kill(peers[1])
        await run.reach(step + 3)
        again = run.peer(2, incarnation=2)
        again.replica, before = peers[1].replica, peers[1].replica.num_restores
        again.runner.replica = again.replica
        run.start(again)
        await run.admit(again)
        newest = again.step
    assert audit(_records(path), [peers[0], again]) == newest > step + 3
    assert step + 1 in again.replica.replayed
    assert again.replica.num_restores == before


async def test_leaving_peer_commits_its_last_round_and_ends_with_20(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        peers = [run.peer(1), run.peer(2)]
        step = await run.gather(*peers)
        peers[1].membership.leave()
        await run.allow(step + 1)
        await until(lambda: peers[1].finish is not None)
        assert peers[1].finish.code == 20
        run.peers.remove(peers[1])
        await run.reach(step + 3)
    assert audit(_records(path), [peers[0]]) == step + 3
    assert peers[1].step == step + 1
    with pytest.raises(RunFinished):
        await peers[1].membership.activated()


async def test_leaving_at_once_does_not_wait_for_a_commit(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        peers = [run.peer(1), run.peer(2)]
        step = await run.gather(*peers)
        peers[1].membership.leave(now=True)
        await until(lambda: peers[1].finish is not None)
        assert (peers[1].finish.code, peers[1].step) == (20, step)
        run.peers.remove(peers[1])
        await run.reach(step + 2)
    assert audit(_records(path), [peers[0]]) == step + 2


async def test_everybody_ends_with_0_after_the_final_commit(path, hasher):
    host = CoordinatorHost(path, outer_steps=6, min_peers=2)
    async with running(host, hasher) as run:
        peers = [run.peer(number) for number in (1, 2)]
        run.start(*peers)
        await run.allow(100)
        await until(lambda: all(peer.finish is not None for peer in peers))
        async with asyncio.timeout(5):
            await host.shell.until_finished()
        assert host.shell.status().finished
    assert [peer.finish.code for peer in peers] == [0, 0]
    assert [peer.commits[-1].outer_step for peer in peers] == [6, 6]
    assert audit(_records(path), peers) == 6


async def test_peer_with_another_result_is_put_out_and_comes_back_with_the_right_bits(path, hasher):
    async with running(CoordinatorHost(path, min_peers=2), hasher) as run:
        peers = [run.peer(number) for number in (1, 2, 3)]
        step = await run.gather(*peers)
        peers[1].runner.spoil = 1
        await run.allow(step + 1)
        await until(lambda: len(peers[1].lost) == 1)
        await run.admit(peers[1])
        newest = peers[1].step
    assert audit(_records(path), peers) == newest > step + 1
    assert any(isinstance(event, BecameLearner) for event in peers[1].observed)


async def test_coordinator_restarts_and_the_members_stay_members(path, hasher):
    host = CoordinatorHost(path)
    async with running(host, hasher) as run:
        peers = [run.peer(number) for number in (1, 2, 3)]
        step = await run.gather(*peers)
        epoch = host.shell.status().view.epoch
        await host.stop()
        await run.allow(step + 1)  # training and the exchange need no coordinator; the commit does
        await until(lambda: all(peer.runner.is_staged for peer in peers))
        assert {peer.step for peer in peers} == {step}
        await host.start(run.tasks)
        await run.reach(step + 6)
        assert host.shell.status().view.epoch == epoch
    assert audit(_records(path), peers) == step + 6
    assert [peer.lost for peer in peers] == [[], [], []]
    assert all(sum(isinstance(event, CoordinatorConnected) for event in peer.observed) == 2 for peer in peers)


async def test_coordinator_that_crashed_between_journal_and_word_repeats_the_commit(path, hasher):
    """The commit is on disk, nobody has heard of it, and the process is gone: no step may be lost or made twice."""
    host = CoordinatorHost(path, min_peers=2)
    async with running(host, hasher) as run:
        peers = [run.peer(number) for number in (1, 2)]
        step = await run.gather(*peers)
        append = host.journal.append

        def die_after_the_commit(record):
            slot = append(record)
            if isinstance(record, CommitRecord):
                raise JournalUnwritable(path, "killed")
            return slot

        host.journal.append = die_after_the_commit
        await run.allow(step + 1)
        await until(lambda: host.shell._stopped)
        assert {peer.step for peer in peers} == {step}
        await host.stop()
        await host.start(run.tasks)
        await run.reach(step + 1)
        assert all(peer.commits[-1].outer_step == step + 1 for peer in peers)
        await run.reach(step + 4)
    assert audit(_records(path), peers) == step + 4
    assert [peer.lost for peer in peers] == [[], []]


async def test_nobody_at_first_contact_ends_with_4_and_a_cure(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        peer = run.peer(1)
        peer.coordinators = ["127.0.0.1:1", "127.0.0.1:2"]
        peer.first_contact_timeout_s = 0.3
        run.start(peer)
        await until(lambda: peer.finish is not None)
    assert peer.finish.code == 4
    assert "127.0.0.1:1" in peer.finish.reason
    assert "127.0.0.1:2" in peer.finish.reason
    assert "check that" in peer.finish.reason


async def test_coordinator_is_found_behind_addresses_that_do_not_answer(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        peer = run.peer(1)
        peer.coordinators = ["127.0.0.1:1", *peer.coordinators]
        run.start(peer)
        await run.reach(2)


async def test_other_run_manifest_ends_with_5(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        peer = run.peer(1)
        peer.manifest_digest = b"o" * 32
        run.start(peer)
        await until(lambda: peer.finish is not None)
        assert peer.finish.code == 5
        with pytest.raises(RunFinished) as caught:
            await peer.membership.take_leases(1)
        assert caught.value.code == 5


async def test_refusal_in_the_handshake_ends_with_its_code(path, hasher):
    def refuse(_hello):
        return HelloReply(accepted=False, code=5, reason="the ticket has expired", peer_id=peer_id(9), incarnation=1)

    listener = Listener("127.0.0.1:0", accept=refuse, routes={}, bulk=lambda sock, hello: None)
    await listener.start()
    async with running(CoordinatorHost(path), hasher) as run:
        peer = run.peer(1)
        peer.coordinators = [listener.address]
        run.start(peer)
        await until(lambda: peer.finish is not None)
    await listener.close()
    assert (peer.finish.code, peer.finish.reason) == (5, "the ticket has expired")


async def test_coordinator_that_speaks_nonsense_is_dialled_again_without_a_storm(path, hasher):
    dialled = []

    async def babble(channel):
        dialled.append(channel.hello.ref)
        await channel.send(FrameType.CONTROL, b"\xc1", timeout_s=1.0)
        await channel.receive(timeout_s=5.0)
        await asyncio.sleep(5)

    async with running(CoordinatorHost(path), hasher) as run, listening(9, {Purpose.CONTROL: babble}) as listener:
        peer = run.peer(1)
        peer.coordinators = [listener.address]
        run.start(peer)
        await asyncio.sleep(0.6)
        assert 2 <= len(dialled) <= 6
        assert any(isinstance(event, CoordinatorLost) for event in peer.observed)


async def test_model_that_does_not_fit_the_run_ends_with_5(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        await run.gather(run.peer(1))
        misfit = run.peer(2)
        misfit.replica.numel += 1
        run.start(misfit)
        await until(lambda: misfit.finish is not None)
        assert misfit.finish.code == 5
        assert "does not fit" in misfit.finish.reason
        run.peers.remove(misfit)
        await run.reach(run.peers[0].step + 2)


async def test_payload_that_is_not_finite_ends_with_8_and_the_others_go_on(path, hasher):
    async with running(CoordinatorHost(path, min_peers=1), hasher) as run:
        peers = [run.peer(1), run.peer(2)]
        step = await run.gather(*peers)

        async def spoiled(*_args):
            raise NonFiniteInput(17)

        peers[1].runner.exchange = spoiled
        await run.allow(step + 1)
        await until(lambda: peers[1].finish is not None)
        assert peers[1].finish.code == 8
        run.peers.remove(peers[1])
        await run.rendezvous.kill(peers[1].me)
        await run.reach(step + 3)
    assert audit(_records(path), peers[:1]) == step + 3


async def test_bug_in_the_runner_ends_the_run_with_its_story(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        peer = run.peer(1)

        async def broken(*_args):
            raise ZeroDivisionError("a bug")

        peer.runner.exchange = broken
        await peer.allow(1)
        with pytest.raises(ExceptionGroup) as caught:
            await peer.run()
    assert caught.group_contains(ZeroDivisionError)


async def test_heartbeats_go_on_while_an_installation_takes_long(path, hasher):
    """Longer than the heartbeat timeout: the peer must neither be dropped nor lose its round."""
    host = CoordinatorHost(path, min_peers=2, heartbeat_timeout_s=0.6)
    async with running(host, hasher) as run:
        peers = [run.peer(1), run.peer(2)]
        step = await run.gather(*peers)
        epoch = host.shell.status().view.epoch
        install = peers[1].runner.install_staged

        async def slowly(key, held, *, final):
            await asyncio.sleep(1.5)
            await install(key, held, final=final)

        peers[1].runner.install_staged = slowly
        await run.allow(step + 1)
        await until(lambda: all(peer.step == step + 1 for peer in peers))
        assert host.shell.status().view.epoch == epoch
    assert [peer.lost for peer in peers] == [[], []]


async def test_payload_of_an_older_step_belongs_to_the_next_round(path, hasher):
    async with running(CoordinatorHost(path), hasher) as run:
        peer = run.peer(1)
        step = await run.gather(peer)
        ready = RoundReady(outer_step=step - 1, fragment=0, weight=1.0, num_tokens=1, consumed=())
        with pytest.raises(RoundMissed, match=f"outer step {step - 1}"):
            await peer.membership.commit_round(ready)


async def test_stopped_membership_answers_whoever_waits(path, hasher):
    async with running(CoordinatorHost(path, min_peers=2), hasher) as run:
        peer = run.peer(1)
        run.start(peer)
        await until(lambda: peer.is_active)
        await peer.allow(5)
        await until(lambda: any(isinstance(event, RoundStaged) for event in peer.observed))
        membership = peer.membership
        await run.kill(peer)
        with pytest.raises(RunFinished):
            await membership.activated()


async def test_whoever_answers_at_a_donors_address_must_be_the_donor(path, hasher):
    """The port was given to another process meanwhile: its state is not taken."""
    async with running(CoordinatorHost(path), hasher) as run:
        step = await run.gather(run.peer(1))
        stranger = DonorPeer.at_step(5, hasher, 0, numel=200)
        learner = run.peer(2)
        run.start(learner)
        await until(lambda: learner.membership is not None)
        async with stranger.serving() as member:
            pretended = Member(peer_id(1), 1, member.address)
            with pytest.raises(PeerUnreachable, match="answers there"):
                await learner.membership._dial_donor(pretended)
        assert stranger.replica.num_pins == 0
        assert step >= 1


async def test_peer_whose_address_changes_says_so_at_the_next_look_and_stays_a_member(path, hasher, monkeypatch):
    monkeypatch.setattr(whereabouts, "LOOK_S", 0.05)
    places, seen = ["first:1"], []

    def locate(seen_from):
        seen.append(seen_from)
        return places[-1]

    async with running(CoordinatorHost(path), hasher) as run:
        peer = run.peer(1)
        peer.locate = locate
        run.start(peer)
        await run.reach(2)
        assert run.host.shell.status().addresses == {peer.me: "first:1"}
        places.append("second:1")
        await until(lambda: run.host.shell.status().addresses == {peer.me: "second:1"})
        await run.reach(4)
        assert peer.lost == []
        assert sum(isinstance(event, CoordinatorConnected) for event in peer.observed) == 1
    assert seen[0] == "127.0.0.1", "the coordinator said in its first answer whence it saw the peer come"
    assert set(seen[1:]) == {None}

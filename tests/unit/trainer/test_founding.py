# SPDX-License-Identifier: Apache-2.0
"""A founder's folder: a new run, the same run again, or a new lineage from a checkpoint."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.collective.transport.certificates import certificate_to_bytes
from isthmus.elastic.core.messages import IndexRange
from isthmus.trainer.checkpoint.checkpoint import FOLDER_NAME, CheckpointMeta, CheckpointStore
from isthmus.trainer.config.manifest import manifest_of
from isthmus.trainer.config.settings import Config
from isthmus.trainer.config.sources import Override, load_config
from isthmus.trainer.contact.admission import authority_of
from isthmus.trainer.contact.identity import PeerFolder
from isthmus.trainer.contact.ticket import decode_ticket, make_ticket
from isthmus.trainer.data.corpus import Corpus
from isthmus.trainer.errors import CheckpointCorrupted, ConfigError, EnvironmentFault, IntegrityError, RunComplete
from isthmus.trainer.files import MEMBERSHIP_NAME
from isthmus.trainer.run.founding import (
    JOURNAL_NAME,
    STANDBY_TICKET_NAME,
    Founded,
    MembershipKept,
    found_or_go_on,
    recall_membership,
    recall_terms,
    recall_text,
    remember_membership,
    remember_terms,
    save_standby_ticket,
    stand_by,
    take_over,
)

TEXT = np.zeros(8, dtype=np.uint8)
CORPUS = Corpus.of(TEXT, TEXT, "a text")
OTHER_TEXT = Corpus.of(TEXT, TEXT[1:], "another text")
CONFIG = Config()
OTHER_CONFIG = load_config(overrides=[Override("inner.batch_size", "3", "--inner.batch_size")]).config


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PeerFolder]:
    with PeerFolder(tmp_path / "peer") as folder:
        yield folder


def found(folder: PeerFolder, config: Config = CONFIG, corpus: Corpus = CORPUS, resume: Path | None = None) -> Founded:
    return found_or_go_on(folder, config, corpus.digest, resume)


def start(folder: PeerFolder, config: Config = CONFIG, resume: Path | None = None) -> Founded:
    """A start that got as far as a coordinator's: terms kept, a journal there."""
    founded = found(folder, config, resume=resume)
    (folder.path / JOURNAL_NAME).write_bytes(founded.run.run_id.encode())
    remember_terms(folder, founded.terms, "127.0.0.1:1234", began_with=founded.began_with)
    return founded


def save_checkpoints(folder: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(folder / FOLDER_NAME, keep=10)
    for step in steps:
        meta = CheckpointMeta(
            run_id="old",
            outer_step=step,
            digest=bytes(32),
            run_manifest=b"{}",
            next_index=9,
            returned=(IndexRange(1, 2),),
        )
        store.save(meta, {"anchor": torch.full((4,), float(step))})
    return store


def test_a_new_folder_gets_a_new_run(folder: PeerFolder) -> None:
    founded = found(folder)
    assert founded.run.run_id.startswith(CONFIG.run.name)
    assert founded.terms.run_id == founded.run.run_id
    assert founded.terms.manifest == manifest_of(CONFIG)
    assert founded.terms.data_digest == CORPUS.digest
    assert (founded.address, founded.checkpoint) == (None, None)


def test_keys_are_the_same_at_every_start_and_none_is_another_or_the_secret_itself(tmp_path: Path) -> None:
    with PeerFolder(tmp_path / "one") as one, PeerFolder(tmp_path / "other") as other:
        first, again, another = found(one), found(one), found(other)
    assert again.terms.authorities == first.terms.authorities
    keys = {key for run in (first, another) for key in (run.run.secret, *run.terms.authorities)}
    assert len(keys) == 4


def test_the_same_folder_goes_on_with_its_run_and_its_address(folder: PeerFolder) -> None:
    first = start(folder)
    again = found(folder)
    assert again.run == first.run
    assert again.terms == first.terms
    assert again.address == "127.0.0.1:1234"


def test_a_standby_remembers_the_run_it_stands_by_for(folder: PeerFolder, tmp_path: Path) -> None:
    terms, secret = found(folder).terms, found(folder).run.secret
    with PeerFolder(tmp_path / "standby") as beside:
        assert recall_terms(beside, terms.run_id) is None
        ready = stand_by(beside, terms, secret)
        assert (ready.run.secret, ready.terms, ready.address, ready.checkpoint) == (secret, terms, None, None)
        assert recall_terms(beside, terms.run_id) == terms
        with pytest.raises(ConfigError, match="holds the run"):
            recall_terms(beside, "another-run")
        assert os.stat(beside.path / "run.json").st_mode & 0o077 == 0


def test_the_ticket_for_standbys_is_for_this_user_alone_and_has_the_secret(folder: PeerFolder) -> None:
    run = found(folder).run
    ticket = make_ticket(
        ticket_id=b"ticket 1", secret=run.secret, run_id=run.run_id, addresses=["127.0.0.1:1"], expires_at_s=1
    )
    save_standby_ticket(folder, ticket, run.secret)
    path = folder.path / STANDBY_TICKET_NAME
    assert os.stat(path).st_mode & 0o077 == 0
    assert decode_ticket(path.read_text()).secret == run.secret


def test_what_is_kept_is_for_this_user_alone(folder: PeerFolder) -> None:
    start(folder)
    for name in ("run.json", "terms.json"):
        assert os.stat(folder.path / name).st_mode & 0o077 == 0
    assert found(folder).run.secret not in (folder.path / "terms.json").read_bytes()


@pytest.mark.parametrize(
    ("config", "corpus", "named"), [(OTHER_CONFIG, CORPUS, "inner.batch_size"), (CONFIG, OTHER_TEXT, "the text")]
)
def test_going_on_with_other_settings_is_refused_and_names_them(
    folder: PeerFolder, config: Config, corpus: Corpus, named: str
) -> None:
    start(folder)
    with pytest.raises(ConfigError, match=named) as refused:
        found(folder, config, corpus)
    assert "--resume" in refused.value.cure


def test_resuming_from_another_peers_folder_takes_its_newest_checkpoint(folder: PeerFolder, tmp_path: Path) -> None:
    save_checkpoints(tmp_path / "elsewhere", 10, 20)
    founded = found(folder, resume=tmp_path / "elsewhere")
    assert founded.checkpoint is not None
    assert founded.checkpoint.meta.outer_step == 20
    assert founded.checkpoint.meta.returned == (IndexRange(1, 2),)


def test_resuming_in_the_same_folder_is_a_new_run_and_puts_the_old_one_aside(folder: PeerFolder) -> None:
    old = start(folder)
    save_checkpoints(folder.path, 10)
    (folder.path / "journal-0001.sqlite").write_text("an archive of it")
    new = found(folder, OTHER_CONFIG, resume=folder.path)
    assert (folder.path / "lineage-1" / "journal-0001.sqlite").read_text() == "an archive of it"
    assert not (folder.path / "journal-0001.sqlite").exists()
    assert new.run.run_id != old.run.run_id
    assert new.run.secret != old.run.secret
    assert new.address is None
    assert not (folder.path / JOURNAL_NAME).exists()
    assert (folder.path / "lineage-1" / JOURNAL_NAME).read_bytes() == old.run.run_id.encode()
    assert (folder.path / "lineage-1" / "run.json").exists()


def test_the_same_command_again_goes_on_with_what_it_began_from_elsewhere(folder: PeerFolder, tmp_path: Path) -> None:
    elsewhere = save_checkpoints(tmp_path / "elsewhere", 10)
    begun = start(folder, resume=elsewhere.path_of(10))
    save_checkpoints(folder.path, 10, 20)
    for _ in range(2):
        again = start(folder, resume=elsewhere.path_of(10))
        assert (again.run, again.address) == (begun.run, "127.0.0.1:1234")
        assert again.checkpoint is not None
        assert again.checkpoint.meta.outer_step == 20
    assert start(folder).run == begun.run, "with the same settings and without --resume too"
    assert start(folder, resume=elsewhere.path_of(10)).run == begun.run
    assert not (folder.path / "lineage-1").exists()


def test_the_same_command_again_goes_on_with_what_it_resumed_in_its_own_folder(folder: PeerFolder) -> None:
    first = start(folder)
    store = save_checkpoints(folder.path, 10)
    begun = start(folder, resume=folder.path)
    assert begun.run != first.run
    assert start(folder, resume=folder.path).run == begun.run, "before it has a checkpoint of its own"
    meta = CheckpointMeta(run_id=begun.run.run_id, outer_step=20, digest=bytes(32), run_manifest=b"{}", next_index=0)
    store.save(meta, {"anchor": torch.zeros(4)})
    again = start(folder, resume=folder.path)
    assert again.run == begun.run, "and after"
    assert again.checkpoint is not None
    assert again.checkpoint.meta.outer_step == 20
    assert start(folder, resume=store.path_of(20)).run != begun.run, "one that is named is another beginning"


def test_another_checkpoint_from_elsewhere_or_other_settings_begin_anew(folder: PeerFolder, tmp_path: Path) -> None:
    elsewhere = save_checkpoints(tmp_path / "elsewhere", 10, 12)
    begun = start(folder, resume=elsewhere.path_of(10))
    other = start(folder, resume=elsewhere.path_of(12))
    third = found(folder, OTHER_CONFIG, resume=elsewhere.path_of(12))
    assert len({begun.run.run_id, other.run.run_id, third.run.run_id}) == 3


def test_a_complete_run_is_not_resumed_and_stays_where_it_is_unless_more_steps_are_wanted(folder: PeerFolder) -> None:
    end = CONFIG.run.outer_steps
    before = start(folder)
    save_checkpoints(folder.path, end)
    with pytest.raises(RunComplete, match=f"is complete at outer step {end} of {end}") as complete:
        found(folder, resume=folder.path)
    assert complete.value.exit_code == 0
    assert f"--run.outer_steps {2 * end}" in complete.value.cure
    assert not (folder.path / "lineage-1").exists()

    more = load_config(overrides=[Override("run.outer_steps", str(end + 1), "--run.outer_steps")]).config
    assert found(folder, more, resume=folder.path).run.run_id != before.run.run_id


def test_certificates_of_the_old_lineage_go_aside_with_it(folder: PeerFolder) -> None:
    """Those of another run would be refused at every start."""
    start(folder)
    save_checkpoints(folder.path, 10)
    (folder.path / "certificates").write_bytes(b"of the old run")
    found(folder, OTHER_CONFIG, resume=folder.path)
    assert not (folder.path / "certificates").exists()
    assert (folder.path / "lineage-1" / "certificates").exists()


def test_checkpoints_newer_than_the_one_resumed_go_aside_with_their_lineage(folder: PeerFolder) -> None:
    start(folder)
    store = save_checkpoints(folder.path, 10, 20, 30)
    founded = found(folder, resume=store.path_of(10))
    assert founded.checkpoint is not None
    assert founded.checkpoint.meta.outer_step == 10
    assert store.steps() == (10,)
    assert CheckpointStore(folder.path / "lineage-1" / FOLDER_NAME, keep=1).steps() == (20, 30)
    # Otherwise they would count as the newest ones, and those of this lineage would be pruned in their favour.
    CheckpointStore(folder.path / FOLDER_NAME, keep=2).save(
        CheckpointMeta(run_id="new", outer_step=11, digest=bytes(32), run_manifest=b"{}", next_index=0),
        {"anchor": torch.zeros(4)},
    )
    assert store.steps() == (10, 11)
    assert start(folder, resume=folder.path).checkpoint.meta.outer_step == 11


def test_another_runs_checkpoints_are_no_state_of_a_run_that_is_founded_beside_them(folder: PeerFolder) -> None:
    store = save_checkpoints(folder.path, 100)
    assert start(folder).checkpoint is None
    assert found(folder).checkpoint is None, "nor at the second start"
    assert store.steps() == ()
    assert CheckpointStore(folder.path / "lineage-1" / FOLDER_NAME, keep=1).steps() == (100,)
    with pytest.raises(ConfigError, match=r"holds no checkpoint; those that were put aside are in .*/lineage-1, or"):
        found(folder, resume=folder.path)


def test_every_lineage_is_kept(folder: PeerFolder) -> None:
    runs = [start(folder).run.run_id]
    save_checkpoints(folder.path, 10)
    for steps in range(CONFIG.run.outer_steps + 1, CONFIG.run.outer_steps + 4):  # the same settings would go on
        more = load_config(overrides=[Override("run.outer_steps", str(steps), "--run.outer_steps")]).config
        runs.append(start(folder, more, resume=folder.path).run.run_id)
    kept = [(folder.path / f"lineage-{number}" / JOURNAL_NAME).read_text() for number in (1, 2, 3)]
    assert [*kept, (folder.path / JOURNAL_NAME).read_text()] == runs
    assert len(set(runs)) == 4


def test_an_archive_that_was_cut_short_is_gone_on_with(folder: PeerFolder) -> None:
    old = start(folder)
    save_checkpoints(folder.path, 10)
    (folder.path / "lineage-1").mkdir()
    (folder.path / JOURNAL_NAME).rename(folder.path / "lineage-1" / JOURNAL_NAME)
    new = found(folder, resume=folder.path)
    assert new.run.run_id != old.run.run_id
    assert (folder.path / "lineage-2" / "run.json").exists()
    assert not (folder.path / "terms.json").exists()


def test_a_checkpoint_that_is_damaged_leaves_the_folder_as_it_was(folder: PeerFolder) -> None:
    old = start(folder)
    store = save_checkpoints(folder.path, 10)
    (store.path_of(10) / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointCorrupted):
        found(folder, resume=folder.path)
    assert found(folder).run == old.run


def test_damaged_terms_are_told_with_a_cure(folder: PeerFolder) -> None:
    start(folder)
    (folder.path / "terms.json").write_bytes(b"{")
    with pytest.raises(IntegrityError, match=r"terms\.json is damaged"):
        found(folder)


def test_a_folder_that_cannot_be_written_is_this_machines_fault(folder: PeerFolder) -> None:
    founded = start(folder)
    (folder.path / "terms.json").unlink()
    (folder.path / "terms.json").mkdir()
    with pytest.raises(EnvironmentFault, match="cannot be used"):
        remember_terms(folder, founded.terms, "127.0.0.1:1")
    with pytest.raises(EnvironmentFault, match="cannot be used"):
        found(folder)


# ------------------------------------------------------------------------ a lost journal, a lost folder


def test_terms_without_a_journal_had_one(folder: PeerFolder) -> None:
    assert not found(folder).has_lost_its_journal
    start(folder)
    assert not found(folder).has_lost_its_journal
    (folder.path / JOURNAL_NAME).unlink()
    assert found(folder).has_lost_its_journal


def test_coordinators_own_folder_is_taken_over_as_it_is(folder: PeerFolder) -> None:
    before = start(folder)
    assert take_over(folder) == before.terms.manifest
    assert found(folder).run == before.run
    assert found(folder).terms == before.terms


def test_folder_of_a_peer_is_taken_over_with_the_keys_that_the_members_know(folder: PeerFolder, tmp_path: Path) -> None:
    lost = start(folder)
    with PeerFolder(tmp_path / "member") as member:
        remember_membership(member, lost.terms, ["127.0.0.1:1234"])
        for _ in range(2):  # a second time, as after a start that was cut short
            assert take_over(member) == lost.terms.manifest
        again = found(member)
        old, new = again.terms.authorities
        assert lost.terms.authorities == (old,), "whose certificates the members have"
        assert new == certificate_to_bytes(authority_of(again.run).certificate), "who lets others in"
        assert again.address == "127.0.0.1:1234"
        assert again.run.run_id == lost.run.run_id
        assert again.run.secret != lost.run.secret, "the secret that tickets are made with is lost"
        assert again.has_lost_its_journal
        remember_terms(member, again.terms, "127.0.0.1:4321")
        assert found(member).terms == again.terms, "and at every later start"


def test_what_a_peer_remembers_is_for_this_user_alone_and_founds_nothing(folder: PeerFolder, tmp_path: Path) -> None:
    lost = start(folder)
    with PeerFolder(tmp_path / "member") as member:
        remember_membership(member, lost.terms, ["127.0.0.1:1234"])
        assert os.stat(member.path / MEMBERSHIP_NAME).st_mode & 0o077 == 0
        assert found(member).run.run_id != lost.run.run_id, "without --rebuild it is a folder like any other"


def test_a_founder_knows_the_text_of_the_run_that_it_goes_on_with_and_of_no_other(
    folder: PeerFolder, tmp_path: Path
) -> None:
    assert recall_text(folder.path, CONFIG, is_resumed=True) is None
    founded = start(folder)
    assert recall_text(folder.path, CONFIG, is_resumed=False) == CORPUS.digest
    other_data = load_config(overrides=[Override("data.limit", "3MB", "--data.limit")]).config
    assert recall_text(folder.path, other_data, is_resumed=False) is None, "it is to have another text"
    # A peer's folder: a new run in it has a text of its own, one that goes on from its checkpoint has not.
    with PeerFolder(tmp_path / "member") as member:
        remember_membership(member, founded.terms, ["127.0.0.1:1234"])
        assert recall_text(member.path, CONFIG, is_resumed=False) is None
        assert recall_text(member.path, CONFIG, is_resumed=True) == CORPUS.digest


def test_folder_that_knows_of_no_run_cannot_be_taken_over(folder: PeerFolder) -> None:
    with pytest.raises(ConfigError, match="knows of no run") as refused:
        take_over(folder)
    assert "--dir" in refused.value.cure


def test_terms_of_an_older_version_which_knew_one_key_more_are_read(folder: PeerFolder) -> None:
    founded = start(folder)
    remember_membership(folder, founded.terms, ["127.0.0.1:1234"])
    path = folder.path / MEMBERSHIP_NAME
    saved = msgspec.json.decode(path.read_bytes())
    saved["keys"]["seal_key"] = "AAAA"
    path.write_bytes(msgspec.json.encode(saved))
    kept = recall_membership(folder.path)
    assert kept is not None
    assert kept.terms == founded.terms


def test_a_peer_remembers_where_all_coordinators_of_its_run_may_be(folder: PeerFolder, tmp_path: Path) -> None:
    terms = start(folder).terms
    with PeerFolder(tmp_path / "member") as member:
        assert recall_membership(member.path) is None
        remember_membership(member, terms, ["127.0.0.1:1", "127.0.0.1:2"])
        kept = recall_membership(member.path)
    assert kept == MembershipKept(terms, ("127.0.0.1:1", "127.0.0.1:2"))

# SPDX-License-Identifier: Apache-2.0
"""Memory of two processes: what is offered, and what is taken."""

import errno
import os

import msgspec
import pytest

from isthmus.collective.transport.shared_memory import NUM_SLOTS, SLOT_NBYTES, Offer, make_offering, take_offer
from tests.unit.collective.conftest import num_descriptors, num_mapped

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="anonymous files are Linux's")


def test_an_offer_that_is_not_what_it_says_is_not_taken(tmp_path):
    import fcntl

    offering = make_offering()
    offer = offering.offer
    before = num_descriptors()
    file, name = offer.file

    def is_taken(**more):
        return take_offer(msgspec.structs.replace(offer, **more)) is not None

    assert not is_taken(file=(file, "/memfd:isthmus-" + "0" * 32 + " (deleted)"))
    assert not is_taken(pid=2**31 - 1)
    assert not is_taken(file=(99_999, name))
    assert not is_taken(hears=(offer.hears[0], "pipe:[1]"))
    assert not is_taken(rings=(99_999, offer.rings[1]))
    assert not is_taken(rings=offer.file)
    with (tmp_path / "file").open("w+b") as other:
        other.truncate(NUM_SLOTS * SLOT_NBYTES * 2)
        assert not is_taken(file=(other.fileno(), name))
        assert not is_taken(file=(other.fileno(), other.name))
    for nbytes, seals in ((NUM_SLOTS * SLOT_NBYTES * 2, 0), (4096, fcntl.F_SEAL_SHRINK)):
        descriptor = os.memfd_create(name[len("/memfd:") : -len(" (deleted)")], os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        assert not is_taken(file=(descriptor, name))
        os.close(descriptor)
    assert num_descriptors() == before
    taken = take_offer(offer)
    assert taken is not None
    for memory in (taken, offering.memory):
        memory.close()
    offering.close()
    assert num_mapped() == 0
    assert num_descriptors() == before - 6  # the file, its mapping, four ends of pipes


def test_memory_of_another_user_is_not_taken(monkeypatch):
    """Who can open it may still not be trusted with it: root opens everybody's."""
    offering = make_offering()
    before = num_descriptors()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert take_offer(offering.offer) is None
    assert num_descriptors() == before
    monkeypatch.undo()
    taken = take_offer(offering.offer)
    assert taken is not None
    for memory in (taken, offering.memory):
        memory.close()
    offering.close()


@pytest.mark.parametrize(
    "words",
    [
        {"file": (3, "/etc/passwd")},
        {"file": (3, "/memfd:isthmus-0 (deleted)")},
        {"hears": (3, "socket:[17]")},
        {"rings": (-1, "pipe:[17]")},
    ],
)
def test_an_offer_of_anything_else_is_no_valid_hello(words):
    offer = {"pid": 7, "file": (3, f"/memfd:isthmus-{'a' * 32} (deleted)"), "hears": (4, "pipe:[1]")}
    offer |= {"rings": (5, "pipe:[2]")}
    msgspec.convert(offer, Offer)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(offer | words, Offer)


def test_an_offering_that_fails_half_way_leaves_nothing_open(monkeypatch):
    def refuses(*_):
        raise OSError(errno.EMFILE, "too many open files")

    before = num_descriptors()
    monkeypatch.setattr(os, "pipe2", refuses)
    assert make_offering() is None
    assert num_descriptors() == before


def test_a_system_without_such_files_offers_nothing(monkeypatch):
    def refuses(*_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refuses)
    assert make_offering() is None

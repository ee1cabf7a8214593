# SPDX-License-Identifier: Apache-2.0
"""What many tests of catching up need."""

from collections.abc import Iterator

import pytest

from isthmus.elastic.state.digest import Hasher
from tests.unit.elastic.harness import CHUNK_NBYTES


@pytest.fixture
def hasher() -> Iterator[Hasher]:
    """Hashes small chunks, as the harness's donors do."""
    hasher = Hasher(num_threads=2, chunk_nbytes=CHUNK_NBYTES)
    yield hasher
    hasher.close()

# SPDX-License-Identifier: Apache-2.0
"""Any split of any table loses nothing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.optim import FragmentTable

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=12)


@settings(deadline=None)  # machines are slow at times; pytest bounds the whole
@given(shapes=shapes, data=st.data())
def test_gathering_and_scattering_every_fragment_restores_the_vector(shapes, data):
    table = FragmentTable.from_named_shapes([(f"t{i}", shape) for i, shape in enumerate(shapes)])
    names = [spec.name for spec in table.specs]
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)))
    fragments = [
        table.fragment(index, [name for name, group in zip(names, groups, strict=True) if group == wanted])
        for index, wanted in enumerate(sorted(set(groups)))
    ]
    table.check_partition(fragments)
    assert sum(fragment.numel for fragment in fragments) == table.numel
    flat = torch.arange(table.numel, dtype=torch.float32)
    restored = torch.full_like(flat, -1.0)
    for fragment in fragments:
        buffer = fragment.gather(flat, out=torch.empty(fragment.numel))
        for name, view in fragment.views(buffer).items():
            assert torch.equal(view, table.view(flat, name))
        assert sum(place.stop - place.start for place in fragment.ranges) == fragment.numel
        fragment.scatter(buffer, out=restored)
    assert torch.equal(restored, flat)

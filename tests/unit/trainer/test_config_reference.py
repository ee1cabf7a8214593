# SPDX-License-Identifier: Apache-2.0
"""The page about all keys has each of them, and is the one that is committed."""

import re
from pathlib import Path

from isthmus.trainer.config.keys import KNOWN_KEYS
from isthmus.trainer.config.methods import methods
from isthmus.trainer.config.reference import as_reference
from isthmus.trainer.config.show import as_template

PAGE = Path(__file__).parents[3] / "trainer" / "CONFIG.md"


def test_the_committed_page_is_up_to_date() -> None:
    assert PAGE.read_text() == as_reference(), "write it anew: isthmus config reference > trainer/CONFIG.md"


def test_every_key_stands_there_once_with_a_meaning() -> None:
    keys: dict[str, list[str]] = {}
    for line in as_reference().splitlines():
        if (heading := re.fullmatch(r"##+ \[(.+?)\](.*)", line)) is not None:
            table, part = heading.groups()
        elif (row := re.fullmatch(r"\| `(\w+)` \| (?:`.+`.*|must be given) \| (.+\.) \|", line)) is not None:
            keys.setdefault(part, []).append(f"{table}.{row[1]}")
    methods_keys = {f' with `type = "{method}"`': told.settings for method, told in methods().items()}
    assert sorted({key for part in keys.values() for key in part}) == sorted(KNOWN_KEYS)
    assert len(set(keys[""])) == len(keys.pop(""))
    assert keys == {part: [f"outer.{one.name}" for one in told] for part, told in methods_keys.items() if told}


def test_what_only_some_types_have_and_what_differs_between_them_is_told() -> None:
    page = as_reference()
    assert '| `decay_steps` | `"none"` | ' in page
    assert "Only with inner.schedule.type wsd. |" in page
    assert "`[0.9, 0.99]` (adamw, muon), `[0.9, 0.9999]` (adopt)" in page


def test_the_words_that_a_key_takes_are_told() -> None:
    assert "One of raw, bf16, int8, e3m0, twobit. |" in as_reference()
    template = " ".join(as_template().replace("\n#", "").split())
    assert "One of raw, bf16, int8, e3m0, twobit. codec =" in template
    assert "One of auto, on, off. tls =" in template

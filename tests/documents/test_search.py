# SPDX-License-Identifier: Apache-2.0
"""The site's search finds what people type.

Sphinx ranks a glossary's term that is the query first, and then pages with its words in
their titles. A term's entry links to the page that has more.
"""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ENTRY = re.compile(r"((?:^\S.*\n)+)((?:^  .*\n)+)", re.MULTILINE)
# What people type -> the page that they want.
QUERIES = {
    "SFT": "guides/fine-tune-from-nothing.md",
    "LoRA": "guides/fine-tuning.md",
    "DPO": "guides/preference-tuning.md",
    "GRPO": "guides/reward-tuning.md",
    "RLHF": "guides/reward-tuning.md",
    "Hugging Face": "guides/pretrained-weights.md",
    "OOM": "guides/memory.md",
    "out of memory": "guides/memory.md",
    "NCCL": "guides/train-on-many-devices.md",
    "FSDP": "guides/memory.md",
    "ZeRO": "guides/memory.md",
    "MFU": "guides/report.md",
    "Slurm": "guides/launch.md",
    "mixed precision": "guides/memory.md",
    "bf16": "guides/memory.md",
    "checkpoint": "guides/checkpoints.md",
}


@pytest.mark.parametrize("query", QUERIES)
def test_the_glossary_leads_from_what_people_type_to_its_page(query):
    entries = ENTRY.findall((DOCS / "glossary.md").read_text())
    (text,) = [text for terms, text in entries if query in terms.splitlines()]
    assert re.search(rf"\]\({re.escape(QUERIES[query])}[#)]", text)


def test_resume_is_in_the_title_of_the_page_about_checkpoints():
    title, _, text = (DOCS / "guides/checkpoints.md").read_text().partition("\n")
    assert "resume" in title
    assert "checkpoint" in text


def test_pages_for_contributors_are_left_out():
    assert '"contributing/"' in (DOCS / "conf.py").read_text()

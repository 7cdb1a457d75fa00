# SPDX-License-Identifier: Apache-2.0
"""Train two small runs, one of which is resumed, and photograph their reports.

    python docs/_ext/report_pictures.py docs/_generated

Needs a browser, so that ``make docs-browser`` runs it, and ``make docs`` shows what it
left. ``browse.py`` says which browser is taken.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from browse import start
from playwright.sync_api import sync_playwright

PICTURES = ("report-resumed.png", "report-compared.png")

_RUN = (
    *("training.steps=40", "training.sequence_length=32", "training.log_every=5"),
    *("training.validate_every=10", "training.validation_sequences=16"),
    *("training.sample_length=20", "training.checkpoint_every=20"),
    *("model.mesh_shape=[[2,2],[pp,fsdp]]", "training.gradient_accumulation_steps=2"),
    *("data=synthetic", "training.micro_batch_size=2"),
)


def tessera(folder: Path, *words: str) -> None:
    """Call the command in a folder."""
    command = [sys.executable, "-m", "tessera", *words]
    subprocess.run(command, cwd=folder, check=True, timeout=600)


def main(output: Path) -> None:
    """Write the pictures."""
    output.mkdir(exist_ok=True)
    with TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        resumed = [*_RUN, "hydra.run.dir=first", "training.resume=auto"]
        tessera(folder, "train", *resumed, "training.steps=20")
        tessera(folder, "train", *resumed)
        faster = ["optimizer.learning_rate=0.01", "hydra.run.dir=second"]
        tessera(folder, "train", *_RUN, *faster)
        tessera(folder, "report", "first", "second", "--output=both.html")
        browser = start(playwright)
        reports = (folder / "first/report.html", folder / "both.html")
        for report, picture in zip(reports, PICTURES, strict=True):
            page = browser.new_page(viewport={"width": 1100, "height": 1900})
            page.goto(report.as_uri())
            page.wait_for_selector("html[data-drawn]")
            page.screenshot(path=output / picture)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

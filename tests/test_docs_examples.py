"""What a page shows is what runs: the Python blocks of how-to pages, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashnumba.machine.instruction import REGISTRY

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to"
PAGES = {
    "add-an-instruction": "", "add-a-kernel": "", "attention": "", "mla": "", "timeline": "", "pytorch": "torch",
    "sla": "torch",
    "cupy-jax": "jax",
}  # fmt: skip
"""Pages, and the library that each asks for beyond the package's own."""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def registry() -> object:
    """What a page declares is gone afterwards."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, registry: object, capsys: pytest.CaptureFixture[str]) -> None:
    if PAGES[page]:
        pytest.importorskip(PAGES[page])
    path = HOW_TO / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == text.count("```python") >= 3
    scope: dict[str, object] = {"__name__": f"docs.{page.replace('-', '_')}"}
    for block in blocks:
        # Blank lines keep the page's line numbers in tracebacks.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(source, str(path), "exec"), scope)
    printed = capsys.readouterr().out.splitlines()
    shown = [line.split("# ", 1)[1] for block in blocks for line in block[1].splitlines() if "print(" in line]
    assert printed == shown

"""What the documents say holds: links lead somewhere, named files and commands exist, Python blocks run,
and the list of invariants is the list in the code."""

from __future__ import annotations

import functools
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
INVARIANT = re.compile(r"(?<![\w.-])([A-Z][1-9])(?![\w.-])")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def read(path: Path) -> str:
    return path.read_text("utf-8")


def document_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_fences(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Headings as the usual renderers link them: lower case, no punctuation, hyphens for blanks."""
    headings = re.findall(r"^#+ (.+)$", without_fences(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=document_id)
def test_links_lead_somewhere(document: Path) -> None:
    text = read(document)
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(text)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), f"{document_id(document)} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(read(path)), (
            f"{document_id(document)}: no heading for {target}"
        )


@pytest.mark.parametrize("document", DOCUMENTS, ids=document_id)
def test_named_files_exist(document: Path) -> None:
    """A path in backticks or in a command that begins with one of our folders is a file or a folder."""
    pattern = r"(?<![\w/.-])((?:radixkv|tests|docs|bench|examples|scripts|\.ci)/[\w./*-]*[\w*/])"
    for name in re.findall(pattern, read(document)):
        assert any(ROOT.glob(name.rstrip("/"))), f"{document_id(document)} names {name}, which does not exist"


@pytest.mark.parametrize("document", DOCUMENTS, ids=document_id)
def test_options_in_commands_exist(document: Path) -> None:
    """Each ``--option`` that a shell block gives to one of bench/*.py is in that program's help."""
    for language, block in FENCE.findall(read(document)):
        if language not in ("sh", "bash", "console"):
            continue
        for program, arguments in re.findall(r"(bench/\w+\.py)((?:\\\n|[^\n])*)", block):
            options = set(re.findall(r"--[\w-]+", arguments.partition("#")[0]))
            shown = subprocess.run(
                [sys.executable, program, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
            ).stdout
            missing = {option for option in options if not re.search(rf"{option}(?![\w-])", shown)}
            assert not missing, f"{document_id(document)}: {program} has no {sorted(missing)}"


def python_blocks() -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        blocks = [block for language, block in FENCE.findall(read(document)) if language == "python"]
        if blocks:
            yield document_id(document), "\n".join(blocks)


@pytest.mark.parametrize(("document", "program"), list(python_blocks()))
def test_python_blocks_run(document: str, program: str) -> None:
    """All blocks of a document run as one program, in a process of its own, as a reader would run them."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"the Python in {document} fails:\n{done.stderr}"


@functools.cache
def names_in_code() -> dict[str, set[str]]:
    """Invariant name to the files whose docstrings, comments or messages say it."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "radixkv").rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(read(path)).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)):
                for name in INVARIANT.findall(token.string):
                    found.setdefault(name, set()).add(document_id(path))
    return found


def invariants_in_document() -> dict[str, str]:
    """Name to the section about it: ``### P1 ...`` up to the next heading."""
    text = read(ROOT / "docs" / "invariants.md")
    sections = re.findall(r"^### ([A-Z]\d)\b(.*?)(?=^#|\Z)", text, re.M | re.S)
    assert len({name for name, _ in sections}) == len(sections), "a name stands twice in docs/invariants.md"
    return dict(sections)


def test_invariants_of_the_document_are_those_of_the_code() -> None:
    documented, coded = set(invariants_in_document()), set(names_in_code())
    assert not documented - coded, f"only in docs/invariants.md: {sorted(documented - coded)}"
    assert not coded - documented, f"only in the code: {sorted(coded - documented)}"


@pytest.mark.parametrize("name", sorted(invariants_in_document()))
def test_invariant_is_named_where_the_document_says(name: str) -> None:
    section = invariants_in_document()[name]
    files = re.findall(r"`(radixkv/[\w/]+\.py)`", section)
    assert files, f"docs/invariants.md does not say where {name} is kept"
    missing = set(files) - names_in_code()[name]
    assert not missing, f"docs/invariants.md says that {name} stands in {sorted(missing)}; it does not"

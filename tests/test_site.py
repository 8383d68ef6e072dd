"""Builds the web site of the pages by `make docs`."""

import html
import os
import pathlib
import re
import shutil
import subprocess

import pytest
from markdown_it import MarkdownIt

from tests.conftest import ROOT

DOCS = ROOT / "docs"
ENVIRONMENT = ROOT / ".venv/docs"
FOLDERS = ("benchmarks", "common", "docker", "docs", "efficientdet", "examples", "tests", "tools", "yolov4")
REPOSITORY = "https://example.org/owner/name"
# File of the repository -> page of the site.
PAGES = {"README.md": "index.md"}
PAGES |= {f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "CHANGELOG", "SECURITY")}
PAGES |= {f"docs/{path}": str(path) for path in (p.relative_to(DOCS) for p in DOCS.rglob("*.md"))}


def build(directory: pathlib.Path, repository: str = REPOSITORY) -> subprocess.CompletedProcess:
    """Builds the site of the project in `directory`, in its folder build/site."""
    if not (ENVIRONMENT / ".ready").exists():
        pytest.skip("no MkDocs: make docs")
    environment = os.environ | {"REPOSITORY_URL": repository}
    # A copied pyproject.toml is newer than the environment.
    command = ("make", "docs", f"DOCS={ENVIRONMENT}", "--old-file=pyproject.toml")
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> pathlib.Path:
    """A copy of the pages and of the sources that they name."""
    directory = tmp_path_factory.mktemp("project")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.*"), ROOT / "LICENSE", ROOT / "Makefile"):
        if path.is_file():
            shutil.copy(path, directory)
    return directory


def words(page: str) -> list[str]:
    """Returns the words of a page's HTML. Headings' links and titles of code blocks are left out."""
    page = re.sub(r'<a class="headerlink".*?</a>|<span class="filename">.*?</span>', "", page)
    page = re.sub(r"</?(p|li|td|th|tr|pre|h\d|div|br|table|ul|ol)\b[^>]*>", " ", page)
    return html.unescape(re.sub(r"<[^>]+>", "", page)).split()


def structure(page: str) -> dict[str, int]:
    """Returns how many lists, tables and so on a page's HTML has."""
    names = ("li", "ul", "ol", "pre", "table", "td", "em", "strong", "h2", "h3", "img", "code")
    return {name: len(re.findall(f"<{name}[ >]", page)) for name in names}


def test_every_page_is_in_the_navigation_of_the_site():
    navigation = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(navigation) == sorted([*PAGES.values(), "tutorial.md"])


@pytest.mark.slow
def test_site_has_readme_notebook_api_links_to_the_sources_and_the_text_of_each_page(project):
    result = build(project)
    assert result.returncode == 0, result.stderr[-4000:]
    site = project / "build" / "site"
    home = (site / "index.html").read_text()
    assert 'src="detections.jpg"' in home
    assert 'href="benchmarks/#cost-by-model-size"' in home
    assert 'href="tutorial/"' in home
    assert (site / "tutorial_files" / "1.png").read_bytes().startswith(b"\x89PNG")
    assert "bytes; the image is" in (site / "tutorial" / "index.html").read_text()
    assert 'id="efficientdet.detector.load"' in (site / "api" / "index.html").read_text()
    assert (
        f'href="{REPOSITORY}/blob/main/docker/slurm.sh"' in (site / "distributed" / "index.html").read_text()
    )
    assert (
        f'href="{REPOSITORY}/tree/main/examples/preprocessing"'
        in (site / "examples" / "index.html").read_text()
    )
    for path, page in PAGES.items():  # GitHub reads CommonMark with tables; MkDocs reads another Markdown
        expected = MarkdownIt("commonmark").enable("table").render((project / path).read_text())
        page = page.removesuffix(".md").removesuffix("index")
        (article,) = re.findall("<article.*</article>", (site / page / "index.html").read_text(), re.DOTALL)
        if path != "docs/api.md":  # the site adds docstrings
            assert words(article) == words(expected), path
            assert structure(article) == structure(expected), path


@pytest.mark.slow
def test_site_without_address_of_the_repository_names_sources_without_link(project):
    result = build(project, repository="")
    assert result.returncode == 0, result.stderr[-4000:]
    page = (project / "build" / "site" / "distributed" / "index.html").read_text()
    assert "slurm.sh" in page
    assert not re.search(r'href="[^"]*slurm\.sh"', page)


@pytest.mark.slow
def test_site_with_broken_links_is_not_built_and_each_is_named(project):
    page = project / "docs" / "copy_this.md"
    original = page.read_text()
    targets = ("data.md#no-such-heading", "#nor-this", "no_such_page.md", "../docker/no_such_file")
    page.write_text(original + "".join(f"\n[link]({target})\n" for target in targets))
    try:
        result = build(project)
    finally:
        page.write_text(original)
    assert result.returncode != 0
    for target in targets:
        assert f"'{target}'" in result.stderr

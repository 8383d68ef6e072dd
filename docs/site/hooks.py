"""Hooks of MkDocs (mkdocs.yml): the site has the pages that GitHub shows, README.md and notebooks included.

The pages are written for GitHub. These hooks turn what MkDocs reads differently: links to files outside
docs/, code blocks with words after the language (```bash needs: a GPU), and what belongs to an item of a
list: there GitHub takes two or three spaces, Python-Markdown only four.
"""

import base64
import json
import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
BRANCH = "main"
# Pages outside docs/: path in the repository -> path among the pages of the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_FENCE = re.compile(r" *(?P<marks>```+)(?P<language>\w*) *(?P<title>.*)")
# A code block, which stays as it is, or a link.
_LINK = re.compile(
    r"^ *(?P<marks>```+).*?^ *(?P=marks)$|\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
_ITEM = re.compile(r" {1,3}([*+-] |\d+\. |```)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README.md and the other pages of the root, and replaces notebooks by pages."""
    for path, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(notebook)
        name = notebook.src_uri.removesuffix(".ipynb")
        text, images = page_of_notebook(json.loads(notebook.content_string), posixpath.basename(name))
        files.append(File.generated(config, f"{name}.md", content=text))
        for image, content in images.items():
            uri = posixpath.join(posixpath.dirname(name), image)
            files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Returns the page in the Markdown of MkDocs."""
    uri = page.file.src_uri
    paths = {target: path for path, target in ROOT_PAGES.items()}
    path = paths.get(uri, f"docs/{uri}")
    lines: list[str] = []
    fence, shift = "", 0  # of the code block around the line: its marks, and by how much to indent it more
    for line in markdown.splitlines():
        if fence:
            line = " " * shift + line if line else line
        elif _ITEM.match(line) or (re.match(" {1,3}[^ ]", line) and not lines[-1]):
            shift = 4 - (len(line) - len(line.lstrip()))
            line = "    " + line.lstrip()
        else:
            shift = 0
        match = _FENCE.fullmatch(line)
        if match and not fence:
            fence = match["marks"]
            title = match["title"].replace('"', "'")
            line = line[: match.start("title")].rstrip() + (f' title="{title}"' if title else "")
        elif match and not match["language"] and match["marks"].startswith(fence):
            fence = ""
        lines.append(line)
    return _LINK.sub(lambda link: _site_link(link, path, uri, config.repo_url), "\n".join(lines))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Marks names of flags for style.css. Browsers would break a line after the hyphens of --name."""
    return re.sub(r"<code>(?=--[^<\s]{1,36}</code>)", '<code class="flag">', html)


def _site_link(link: re.Match, path: str, uri: str, repo_url: str | None) -> str:
    """Returns a link of the page `path`, which is `uri` on the site, with the target that it has on the site.

    Targets that exist nowhere stay. MkDocs then warns about them.
    """
    if link["marks"]:
        return link[0]
    file, separator, anchor = link["target"].partition("#")
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
    if not file or re.match(r"\w+:", file) or not (ROOT / target).exists():
        return link[0]
    if target in ROOT_PAGES or target.startswith("docs/"):
        target = ROOT_PAGES.get(target, target.removeprefix("docs/"))
        target = re.sub(r"\.ipynb$", ".md", target)
        target = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"[{link['text']}]({target}{separator}{anchor})"
    if repo_url:
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"[{link['text']}]({repo_url.rstrip('/')}/{kind}/{BRANCH}/{target}{separator}{anchor})"
    text = link["text"]
    if posixpath.basename(target) not in text:
        return f"{text} (`{target}`)"
    return text if re.search(r"[\s`]", text) else f"`{text}`"


def page_of_notebook(notebook: dict, name: str) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook's cells and stored outputs as Markdown, and its pictures by path. Runs nothing."""
    parts, images = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                path = f"{name}_files/{len(images) + 1}.png"
                images[path] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![Output of the cell above]({path})")
    return "\n\n".join(parts), images

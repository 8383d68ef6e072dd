"""Lists the files of a directory tree. Nothing is left out silently.

    tree = list_tree("my/images")
    tree.images                         # sorted paths of the images
    tree.report(issues)                 # names what is not read, and why

Hidden files and the files that systems and tools add are skipped. A link to a folder is followed, unless its
target is in the tree, contains the tree, or is the target of another link.
"""

import dataclasses
import os
import unicodedata

from common.args import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from common.data.check.issues import Issues

# Names, in lower case, that are not data. Names that begin with a dot are hidden and not listed here.
SYSTEM_NAMES = (
    *("thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),  # Windows
    *("__macosx", "icon\r"),  # macOS, and its zip files
    *("@eadir", "#recycle", "#snapshot", "@recycle", "@tmp"),  # network storage of Synology and QNAP
    *("lost+found", "__pycache__"),
)
# Images that no reader here decodes. The last two rows are raw formats of cameras.
UNSUPPORTED_SUFFIXES = (
    *(".gif", ".apng", ".avif", ".heic", ".heif", ".hif", ".mpo", ".dib", ".jxl", ".jxr", ".j2k", ".j2c"),
    *(".jpf", ".jpx", ".pgm", ".ppm", ".pbm", ".pnm", ".pam", ".tga", ".ico", ".psd", ".svg", ".exr", ".hdr"),
    *(".3fr", ".arw", ".cr2", ".cr3", ".crw", ".dcr", ".dng", ".erf", ".iiq", ".kdc", ".mrw", ".nef", ".nrw"),
    *(".orf", ".pef", ".raf", ".raw", ".rw2", ".rwl", ".sr2", ".srf", ".srw", ".x3f"),
)


def is_hidden(name: str) -> bool:
    """Whether a file or folder is hidden, or one that a system adds, such as `@eaDir`."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def spelling(path: str) -> str:
    """Returns a path in which upper and lower case, and Unicode's normal forms, do not differ.

    macOS stores a letter and its accent as two characters.
    """
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def difference(path: str, other: str) -> str:
    """Returns in what two paths with the same `spelling` differ, and what to do about it."""
    is_same_case = unicodedata.normalize("NFC", path) == unicodedata.normalize("NFC", other)
    how = "another Unicode normal form" if is_same_case else "other upper and lower case"
    return f"in {how}: rename one of the two"


@dataclasses.dataclass
class Tree:
    """The files below a directory, as paths that begin with the directory.

    Attributes:
        files: all files that are not hidden, sorted.
        hidden: hidden files and folders, and those of systems.
        links: links to folders that were not followed.
        folders: folders that were not read, because only the files of the directory were asked for.
    """

    files: list[str] = dataclasses.field(default_factory=list)
    hidden: list[str] = dataclasses.field(default_factory=list)
    links: list[str] = dataclasses.field(default_factory=list)
    folders: list[str] = dataclasses.field(default_factory=list)

    def with_suffix(self, *suffixes: str) -> list[str]:
        """Returns the files whose suffix is one of `suffixes`, which are in lower case; any case matches."""
        return [file for file in self.files if os.path.splitext(file)[1].lower() in suffixes]

    @property
    def images(self) -> list[str]:
        return self.with_suffix(*IMAGE_SUFFIXES)

    @property
    def unsupported(self) -> list[str]:
        """Images and videos that cannot be read as images."""
        return sorted([*self.unsupported_images, *self.videos])

    @property
    def unsupported_images(self) -> list[str]:
        return self.with_suffix(*UNSUPPORTED_SUFFIXES)

    @property
    def videos(self) -> list[str]:
        return self.with_suffix(*VIDEO_SUFFIXES)

    def report(self, issues: Issues) -> None:
        """Adds what is skipped, except `unsupported`, to `issues`."""
        issues.add_each("file-hidden", self.hidden, repr)
        issues.add_each("link-skipped", self.links, repr)
        issues.add_each("folder-skipped", self.folders, repr)


def list_tree(directory: str, *, recursive: bool = True) -> Tree:
    """Lists the files of a directory and, if `recursive`, of its folders. Raises OSError."""
    tree, root = Tree(), os.path.realpath(directory)
    visited = {root}

    def visit(folder: str) -> None:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if is_hidden(entry.name):
                    tree.hidden.append(entry.path)
                elif not os.path.isdir(entry.path):
                    tree.files.append(entry.path)
                elif not recursive:
                    tree.folders.append(entry.path)
                else:
                    enter(entry)

    def enter(folder: os.DirEntry) -> None:
        target = os.path.realpath(folder)
        shared = os.path.commonpath([root, target])
        is_same_tree = folder.is_symlink() and shared in (root, target)
        if is_same_tree or target in visited:
            tree.links.append(folder.path)
        else:
            visited.add(target)
            visit(folder.path)

    visit(directory)
    tree.files.sort()
    return tree

import os

import pytest

from common.data.check.issues import Issues
from common.data.image_files import list_tree


@pytest.fixture
def set_dir(tmp_path):
    """The directory `set` with b.jpg and a/c.PNG, beside the directory `other` with d.jpg."""
    for name in ("set/b.jpg", "set/a/c.PNG", "other/d.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path / "set"


def relative(paths, directory):
    return [os.path.relpath(path, directory) for path in paths]


def images_of(directory):
    return relative(list_tree(str(directory)).images, directory)


def test_tree_has_the_images_of_all_folders_whatever_the_case_of_their_suffix(set_dir):
    for name in ("a/e.jfif", "a/f.jpe", "a/notes.txt", "z.jpg.part"):
        (set_dir / name).touch()
    assert images_of(set_dir) == ["a/c.PNG", "a/e.jfif", "a/f.jpe", "b.jpg"]
    assert relative(list_tree(str(set_dir)).with_suffix(".txt"), set_dir) == ["a/notes.txt"]


HIDDEN = (  # macOS, Jupyter, GNOME, Synology, QNAP, Windows
    *(".DS_Store", "._b.jpg", "__MACOSX/b.jpg", ".ipynb_checkpoints/b-checkpoint.jpg", ".thumbnails/b.jpg"),
    *("@eaDir/b.jpg/SYNOFILE_THUMB_XL.jpg", "#recycle/b.jpg", "@Recycle/b.jpg", "Thumbs.db", "desktop.ini"),
    *("$RECYCLE.BIN/b.jpg", "lost+found/b.jpg"),
)


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_files_and_those_of_systems_are_skipped_and_named(set_dir, name):
    (set_dir / "a" / name).parent.mkdir(parents=True, exist_ok=True)
    (set_dir / "a" / name).touch()
    tree, issues = list_tree(str(set_dir)), Issues("")
    assert relative(tree.files, set_dir) == ["a/c.PNG", "b.jpg"]
    tree.report(issues)
    assert issues["file-hidden"].offenders == [repr(f"{set_dir}/a/{name.split('/')[0]}")]


def test_tree_in_a_hidden_directory_is_read(set_dir):
    set_dir.rename(set_dir.parent / ".cache")
    assert images_of(set_dir.parent / ".cache") == ["a/c.PNG", "b.jpg"]


def test_link_to_a_folder_outside_the_tree_is_followed_once(set_dir):
    for name in ("a/link", "second"):
        (set_dir / name).symlink_to(set_dir.parent / "other")
    (set_dir / "link.jpg").symlink_to(set_dir.parent / "other" / "d.jpg")
    assert images_of(set_dir) == ["a/c.PNG", "a/link/d.jpg", "b.jpg", "link.jpg"]
    issues = Issues("")
    list_tree(str(set_dir)).report(issues)
    assert issues["link-skipped"].offenders == [repr(f"{set_dir}/second")]


@pytest.mark.parametrize("target", [".", "..", "a", "../other/back"])
def test_link_into_the_tree_or_above_it_is_named_and_makes_no_circle(set_dir, target):
    (set_dir.parent / "other" / "back").symlink_to(set_dir)
    (set_dir / "link").symlink_to(target)
    tree = list_tree(str(set_dir))
    assert relative(tree.images, set_dir) == ["a/c.PNG", "b.jpg"]
    assert relative(tree.links, set_dir) == ["link"]


def test_links_to_nothing_or_to_themselves_are_files_that_the_image_check_reports(set_dir):
    (set_dir / "gone.jpg").symlink_to("nothing")
    (set_dir / "self.jpg").symlink_to("self.jpg")
    assert images_of(set_dir) == ["a/c.PNG", "b.jpg", "gone.jpg", "self.jpg"]


def test_images_in_formats_that_are_not_read_and_videos_are_unsupported(set_dir):
    names = [f"a/x.{suffix}" for suffix in ("CR2", "avif", "dib", "gif", "heic", "mp4", "mpo", "nef")]
    for name in names:
        (set_dir / name).touch()
    assert relative(list_tree(str(set_dir)).unsupported, set_dir) == names


def test_tree_that_is_not_recursive_names_its_folders(set_dir):
    tree = list_tree(str(set_dir), recursive=False)
    assert relative(tree.files, set_dir) == ["b.jpg"] and relative(tree.folders, set_dir) == ["a"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_folder_that_cannot_be_read_is_an_error(set_dir):
    (set_dir / "a").chmod(0)
    with pytest.raises(PermissionError):
        list_tree(str(set_dir))

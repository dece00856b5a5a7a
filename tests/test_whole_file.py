"""A file is replaced as a whole or not at all."""

import resource

import pytest

from hybrid.whole_file import write_whole


def test_what_stood_there_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "result.json"
    for content in (b"{}", "é", b""):
        write_whole(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_takes_no_more_leaves_what_stood_there_and_is_told_by_the_files_own_name(tmp_path):
    """A limit on the size of files stands for a full disk: both refuse a write in the middle."""
    path = tmp_path / "result.json"
    write_whole(path, "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=f"'{path}'"):
            write_whole(path, bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_who_reads_an_open_file_reads_on_in_what_it_opened(tmp_path):
    path = tmp_path / "result.json"
    write_whole(path, "before")
    with path.open() as reading:
        write_whole(path, "after")
        assert reading.read() == "before"
    assert path.read_text() == "after"

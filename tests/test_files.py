"""Files: a reader never meets half of one, whatever happens to the writer."""

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tiny import one_line

from linvit.files import WriteError, is_whole, replacing, resource, sha256_of, write_sealed, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["metrics.json", "checkpoint.pt", "fig2.png", "weights.safetensors", "no_suffix"])
def test_a_file_appears_whole_when_the_block_ends(tmp_path, name):
    path = tmp_path / "new" / "folders" / name
    with replacing(path) as temporary:
        assert not path.exists()
        temporary.write_text("half")
        assert not path.exists()
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert names(path.parent) == [name]


@pytest.mark.parametrize("name", ["metrics.json", "checkpoint.pt", "fig2.png"])
def test_the_temporary_file_is_hidden_beside_the_real_one_and_keeps_its_suffix(tmp_path, name):
    with replacing(tmp_path / name) as temporary:
        temporary.touch()
        assert temporary.parent == tmp_path  # a rename across file systems would not be atomic
        assert temporary.name != name
        assert temporary.name.startswith(".")
        assert temporary.suffix == Path(name).suffix  # matplotlib chooses a format by it, timm a reader


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_the_old_file_and_no_temporary_one(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_a_block_that_writes_nothing_is_an_error_not_an_empty_file(tmp_path):
    with pytest.raises(WriteError, match="No such file"), replacing(tmp_path / "a.json"):
        pass
    assert names(tmp_path) == []


def test_two_files_of_one_folder_do_not_share_a_temporary_one(tmp_path):
    with replacing(tmp_path / "a.png") as one, replacing(tmp_path / "a.pdf") as two, replacing(tmp_path / "b.png") as b:
        assert len({one, two, b}) == 3
        for temporary in (one, two, b):
            temporary.write_text(temporary.suffix)
    assert {name: (tmp_path / name).read_text() for name in names(tmp_path)} == {
        "a.pdf": ".pdf",
        "a.png": ".png",
        "b.png": ".png",
    }


def test_a_writer_killed_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    code = f"""
import os, signal
from linvit.files import replacing
with replacing({str(path)!r}) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    assert all(name.startswith(".") for name in set(names(tmp_path)) - {"a.json"})
    write_text(path, "new")
    assert names(tmp_path) == ["a.json"]  # what the killed one had written is gone, too
    assert path.read_text() == "new"


def test_only_what_dead_processes_of_this_machine_left_for_a_file_is_swept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    here = socket.gethostname()
    swept = {f".a.{here}.{dead.pid}.json", f".a.{here}.{dead.pid}.json.6f1.partial"}
    kept = {f".a.{here}.{os.getppid()}.json", f".a.elsewhere.{dead.pid}.json", f".b.{here}.{dead.pid}.json", ".a.json"}
    for name in swept | kept:
        (tmp_path / name).touch()
    write_text(tmp_path / "a.json", "new")
    assert set(names(tmp_path)) == kept | {"a.json"}


def test_a_number_that_no_process_can_have_is_a_dead_ones(tmp_path):
    (tmp_path / f".a.{socket.gethostname()}.{10**20}.json").touch()
    write_text(tmp_path / "a.json", "new")
    assert names(tmp_path) == ["a.json"]


def test_what_cannot_be_written_is_told_by_its_own_name(tmp_path):
    with pytest.raises(WriteError) as told, replacing(tmp_path / "a.json"):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert one_line(told.value) == f"{tmp_path}/a.json: cannot be written (Disk quota exceeded)"
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"file/b\.json: cannot be written \((File exists|Not a directory)\)"):
        write_text(tmp_path / "file/b.json", "text")


def test_what_fails_to_be_read_meanwhile_is_told_as_it_is(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError, match=r"absent\.png"), replacing(tmp_path / "out/a.json"):
        (tmp_path / "absent.png").read_bytes()
    with pytest.raises(OSError, match="truncated"), replacing(tmp_path / "out/a.json"):
        raise OSError("image file is truncated")


def test_the_content_is_on_disk_before_the_name_points_to_it(tmp_path, monkeypatch):
    """A power cut after the rename must not leave an empty file under the real name."""
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda self, to: (events.append("rename"), replace(self, to))[1])
    write_text(tmp_path / "a", "x")
    assert events == ["fsync", "rename"]


def test_text_is_written_as_utf_8(tmp_path):
    write_text(tmp_path / "a.md", "81.4 ± 0.2 λ")
    assert (tmp_path / "a.md").read_bytes() == "81.4 ± 0.2 λ".encode()


@pytest.mark.parametrize("content", [b"", b"a", bytes(range(256)) * 5000])
def test_a_checksum_is_that_of_the_whole_content(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_json_tells_whether_its_values_were_changed(tmp_path):
    path = tmp_path / "found.json"
    write_sealed(path, {"b": [1.5, None], "a": {"text": "\N{EN DASH}"}})
    text = path.read_text()
    assert is_whole(text.encode())
    assert is_whole(json.dumps(json.loads(text)).encode()), "the layout is no value"
    assert not is_whole(text.replace("1.5", "1.25").encode())
    assert is_whole(b'{"a": 1}'), "what has no checksum is believed"


def test_a_checksum_of_sorted_values_as_earlier_versions_wrote_it_is_one(tmp_path):
    content = {"b": [1.5, None], "a": "\N{EN DASH}"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    text = json.dumps({**content, "sha256": digest}, indent=1) + "\n"
    assert is_whole(text.encode())
    assert not is_whole(text.replace("1.5", "1.25").encode())


@pytest.mark.parametrize(
    "content", [{}, {"a": {}}, {"a": 'x",\n "sha256": "y'}, {"a": float("nan")}, {"a": {"sha256": 1}}]
)
def test_a_bit_of_a_file_with_a_checksum_that_flips_changes_no_value(tmp_path, content):
    write_sealed(tmp_path / "found.json", content)
    text = (tmp_path / "found.json").read_bytes()
    assert is_whole(text)
    for place in range(len(text)):
        changed = text[:place] + bytes([text[place] ^ 1]) + text[place + 1 :]
        with suppress(ValueError):  # no JSON any more
            found = json.loads(changed)
            assert not is_whole(changed) or "sha256" not in found or repr(found) == repr(json.loads(text))
    assert not is_whole(text.replace(b'"\n}\n', b'0"\n}\n'))


def test_a_resource_is_a_path_or_a_file_inside_a_package(tmp_path):
    (tmp_path / "a.txt").write_text("here")
    assert resource(str(tmp_path / "a.txt")).read_text() == "here"
    assert resource("linvit.embedded:LICENSE.fashion-mnist").is_file()
    assert not resource("linvit.embedded:nosuch").is_file()
    assert not resource("nosuch.txt").is_file()


@pytest.mark.parametrize("path", ["linvit.embeded:fashion_mnist.npz", "nosuch.package:a.npz", "/data/a:b.npz"])
def test_a_resource_in_no_package_is_not_found_rather_than_a_crash(path):
    assert not resource(path).is_file()


def test_a_path_with_a_colon_is_still_a_path(tmp_path):
    (tmp_path / "run:1").mkdir()
    (tmp_path / "run:1" / "a.txt").write_text("here")
    assert resource(str(tmp_path / "run:1" / "a.txt")).read_text() == "here"

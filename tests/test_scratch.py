"""Temporary folders: gone with their process at the latest at the next start, and never while it lives."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echo_p2p.net.scratch import scratch_folder, sweep

HOLDER = (
    "import sys; from pathlib import Path; from echo_p2p.net.scratch import scratch_folder\n"
    "with scratch_folder(root=Path(sys.argv[1])) as scratch: print(scratch.path, flush=True); sys.stdin.read()\n"
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no locks that fall with their process")


def holder(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder, and the folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    process.communicate(timeout=60)


def test_a_folder_goes_with_its_context(tmp_path: Path) -> None:
    with scratch_folder(root=tmp_path) as scratch:
        assert scratch.path.stat().st_mode & 0o777 == 0o700
        (scratch.path / "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    living, its = holder(tmp_path)
    dead, left = holder(tmp_path)
    end(dead, signal.SIGKILL)
    (left / "socket").touch()
    with scratch_folder(root=tmp_path) as ours:
        assert sweep(tmp_path) == 1
        assert sorted(tmp_path.iterdir()) == sorted([its, ours.path])
    end(living, signal.SIGKILL)
    assert sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_which_somebody_lives_stays(tmp_path: Path) -> None:
    dead, left = holder(tmp_path)
    end(dead, signal.SIGKILL)
    (left / "trainer").mkdir()
    living, its = holder(left / "trainer")
    (left / "trainer" / "lock").symlink_to(its / "lock")
    assert sweep(tmp_path) == 0  # a link is opened by nobody
    (left / "trainer" / "lock").unlink()
    os.link(its / "lock", left / "trainer" / "lock")  # as the home of a node has
    assert sweep(tmp_path) == 0
    end(living, signal.SIGKILL)
    assert sweep(tmp_path) == 1


def test_what_is_not_ours_or_is_kept_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "echo-of-somebody").mkdir()
    (tmp_path / "echo-file").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / "echo-link").symlink_to(elsewhere)
    with scratch_folder(root=tmp_path) as scratch:
        scratch.keep()
        assert sweep(tmp_path) == 0
    assert scratch.path.is_dir()
    assert sweep(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == 5

import os
import threading
from pathlib import Path

import pytest

from echo_p2p.errors import WeightsError
from echo_p2p.net.blobs import blob_hash
from echo_p2p.weights.store import Store


def blob_file(folder: Path, hash: bytes) -> Path:
    return folder / hash.hex()[:2] / hash.hex()


def test_a_blob_is_found_under_its_hash_also_after_reopening(tmp_path: Path) -> None:
    hash = Store(tmp_path, 1000).put(b"weights")
    assert hash == blob_hash(b"weights")
    store = Store(tmp_path, 1000)
    assert store.get(hash) == b"weights"
    assert hash in store
    assert store.size_bytes == 7
    assert store.get(bytes(32)) is None


def test_putting_a_blob_twice_takes_its_room_once(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    assert store.put(b"x" * 600) == store.put(b"x" * 600)
    assert (len(store), store.size_bytes) == (1, 600)


def test_a_blob_gone_bad_is_absent_and_can_be_put_again(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    hash = store.put(b"weights")
    blob_file(tmp_path, hash).write_bytes(b"weighty")
    assert store.get(hash) is None
    assert hash not in store
    assert not blob_file(tmp_path, hash).exists()
    store.put(b"weights")
    assert store.get(hash) == b"weights"


def test_a_deleted_file_is_absent(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    hash = store.put(b"weights")
    blob_file(tmp_path, hash).unlink()
    assert store.get(hash) is None
    assert store.size_bytes == 0


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path, 300)
    first, second, third = (store.put(bytes([n]) * 100) for n in range(3))
    store.get(first)
    fourth = store.put(bytes([9]) * 100)
    assert [hash in store for hash in (first, second, third, fourth)] == [True, False, True, True]
    assert store.size_bytes == 300


def test_pinned_blobs_stay_and_a_store_full_of_them_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path, 300)
    first, second = store.put(b"a" * 100), store.put(b"b" * 100)
    store.pin("mine", [first])
    store.pin("yours", [first, second])
    store.put(b"c" * 100)
    store.put(b"d" * 100)
    assert first in store
    assert second in store
    with pytest.raises(WeightsError, match="more room"):
        store.put(b"e" * 101)
    store.unpin("yours")
    store.put(b"e" * 200)
    assert first in store
    assert second not in store


def test_order_of_use_outlives_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path, 300)
    hashes = [store.put(bytes([n]) * 100) for n in range(3)]
    for age, hash in zip((2, 9, 5), hashes, strict=True):
        os.utime(blob_file(tmp_path, hash), (1_700_000_000 - age, 1_700_000_000 - age))
    store = Store(tmp_path, 300)
    store.put(b"n" * 100)
    assert [hash in store for hash in hashes] == [True, False, True]


def test_a_write_cut_short_leaves_nothing(tmp_path: Path) -> None:
    Store(tmp_path, 1000)
    (tmp_path / "arriving" / "half").write_bytes(b"wei")
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "notes.txt").write_bytes(b"not a blob")
    store = Store(tmp_path, 1000)
    assert len(store) == 0
    assert list((tmp_path / "arriving").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    hash = blob_hash(b"weights")
    blob_file(tmp_path, hash).mkdir(parents=True)
    with pytest.raises(WeightsError, match="disk space"):
        store.put(b"weights")
    assert list((tmp_path / "arriving").iterdir()) == []
    assert hash not in store


def test_a_blob_that_went_bad_is_written_again_when_it_is_put_again(tmp_path: Path) -> None:
    store = Store(tmp_path, 1 << 20)
    hash = store.put(b"good" * 100)
    (tmp_path / hash.hex()[:2] / hash.hex()).write_bytes(b"bad!" * 100)
    assert store.put(b"good" * 100) == hash
    assert store.get(hash) == b"good" * 100
    assert store.size_bytes == 400


def test_puts_at_once_stay_within_the_bound_and_keep_what_is_pinned(tmp_path: Path) -> None:
    store = Store(tmp_path, 10_000)
    blobs = [bytes([number]) * 900 for number in range(60)]
    kept = [store.put(blob) for blob in blobs[:3]]
    store.pin("mine", kept)
    over = []

    def put(blob: bytes) -> None:
        store.put(blob)
        over.append(store.size_bytes > store.max_bytes)

    threads = [
        threading.Thread(target=lambda some: [put(blob) for blob in some], args=(blobs[n::4],)) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(over) == 60
    assert not any(over)
    assert all(store.get(hash) for hash in kept)
    assert sum(path.stat().st_size for path in tmp_path.glob("??/*")) == store.size_bytes

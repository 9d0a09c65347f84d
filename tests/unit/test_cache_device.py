"""What a device believes of cache files: the rows THR of the threat model, on real files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec.structs import replace

from nnburst.cache import device_cache, trust_store
from nnburst.cache.container import CODE_SIZE, HEADER_SIZE, Header
from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.cache.trust_store import MasterKey, TrustStore
from support.caches import DATA, EPOCH, FINGERPRINT, MODEL, NEXT_EPOCH, OTHER, TOKEN, Rig, contents
from support.processes import run_python
from support.waiting import PATIENCE, meanwhile, together

R = CacheReason


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(tmp_path, encrypt=request.param)


def test_what_was_saved_is_loaded(rig: Rig) -> None:
    result = rig.save(fingerprint=FINGERPRINT)
    assert (result.saved, result.reason) == (True, R.SAVED)
    entry = rig.load(fingerprint=FINGERPRINT)
    assert contents(entry) == (MODEL, DATA)
    assert entry.generation == result.generation
    assert result.nbytes == sum(len(data) for data in rig.snapshot().values())


def test_empty_payloads_and_payloads_of_many_chunks(tmp_path: Path) -> None:
    rig = Rig(tmp_path, model_files=2, data_files=1)
    big = os.urandom((3 << 20) + 5)
    with rig.files() as fds:
        assert rig.cache.save(TOKEN, (b"", big), (b"x",), *fds).saved
    assert contents(rig.load()) == ((b"", big), (b"x",))


def test_REQ_CACHE_004_THR_18_offsets_and_old_contents_of_files_do_not_matter(rig: Rig) -> None:
    for kind, i in (("model", 0), ("model", 1), ("data", 0)):
        rig.path(kind, i).write_bytes(b"z" * 50_000)
    with rig.files() as fds:
        for fd in (*fds[0], *fds[1]):
            os.lseek(fd, 7, os.SEEK_SET)
        assert rig.cache.save(TOKEN, MODEL, DATA, *fds).saved
        assert all(os.lseek(fd, 0, os.SEEK_CUR) == 7 for fd in (*fds[0], *fds[1]))
        assert contents(rig.cache.load(TOKEN, *fds)) == (MODEL, DATA)
        assert all(os.lseek(fd, 0, os.SEEK_CUR) == 7 for fd in (*fds[0], *fds[1]))


FILES = [("model", 0), ("model", 1), ("data", 0)]
every_file = pytest.mark.parametrize(("kind", "index"), FILES)


@every_file
@pytest.mark.parametrize("where", ["magic", "state", "token", "generation", "epoch", "payload", "end"])
def test_REQ_CACHE_014_016_THR_01_02_changed_byte(rig: Rig, kind: str, index: int, where: str) -> None:
    rig.save()
    raw = rig.bytes_of(kind, index)
    at = {"magic": 0, "state": 10, "token": 41, "generation": 75, "epoch": 90, "payload": HEADER_SIZE, "end": -1}[where]
    raw[at] ^= 1
    rig.path(kind, index).write_bytes(raw)
    assert rig.refusal() in (R.BAD_MAC, R.DIRTY, R.OTHER_ENTRY, R.BAD_EPOCH, R.ROLLED_BACK)


@every_file
@pytest.mark.parametrize("change", [-1, 1, -40, 4096, None])
def test_REQ_CACHE_015_017_THR_03_22_shorter_longer_or_empty_file(
    rig: Rig, kind: str, index: int, change: int | None
) -> None:
    rig.save()
    path = rig.path(kind, index)
    os.truncate(path, 0 if change is None else path.stat().st_size + change)
    assert rig.refusal() is (R.DIRTY if change is None else R.BAD_LENGTH)  # a save that was cut off leaves it empty


def test_REQ_CACHE_011_012_THR_04_10_11_files_are_rewritten_and_truncated_meanwhile(rig: Rig) -> None:
    """Whoever writes at the same time gets a rejection or the right contents, never a third thing; both do happen."""
    rig.save(OTHER, "b")
    foreign = list(rig.snapshot("b").values())
    generator = random.Random(1)

    def disturb() -> None:
        time.sleep(generator.random() * 0.01)
        for (kind, i), raw in zip(FILES, foreign, strict=True):
            with open(rig.path(kind, i), "r+b") as file:
                if generator.random() < 0.3:
                    file.truncate(generator.randrange(len(raw)))
                file.seek(generator.randrange(len(raw)))
                file.write(raw[: generator.randrange(len(raw))])

    rig.save()
    accepted, refused, deadline = 0, 0, time.monotonic() + PATIENCE
    with meanwhile(disturb):
        while accepted < 10 or refused < 10:
            assert time.monotonic() < deadline, (accepted, refused)
            rig.save()
            try:
                assert contents(rig.load()) == (MODEL, DATA)
                accepted += 1
            except CacheRejected:
                refused += 1
    rig.save()
    assert contents(rig.load()) == (MODEL, DATA)


def test_REQ_CACHE_013_THR_05_files_of_another_token(rig: Rig) -> None:
    rig.save()
    rig.save(OTHER, "b")
    assert rig.refusal(TOKEN, "b") is R.OTHER_ENTRY
    for kind, i in FILES:  # one after the other: a mixture
        rig.path(kind, i).write_bytes(rig.bytes_of(kind, i, "b"))
        assert rig.refusal() in (R.OTHER_ENTRY, R.ROLLED_BACK, R.BAD_MAC)


@pytest.mark.parametrize(("one", "other"), [(FILES[0], FILES[1]), (FILES[0], FILES[2])])
def test_THR_05_files_in_each_others_places(rig: Rig, one: tuple[str, int], other: tuple[str, int]) -> None:
    rig.save()
    a, b = rig.bytes_of(*one), rig.bytes_of(*other)
    rig.path(*one).write_bytes(b)
    rig.path(*other).write_bytes(a)
    assert rig.refusal() is R.BAD_MAC


@every_file
def test_THR_06_07_older_files(rig: Rig, kind: str, index: int) -> None:
    rig.save()
    old = rig.snapshot()
    rig.save()
    new = rig.snapshot()
    rig.path(kind, index).write_bytes(old[rig.path(kind, index)])
    assert rig.refusal() is R.ROLLED_BACK
    for path, raw in old.items():
        path.write_bytes(raw)
    assert rig.refusal() is R.ROLLED_BACK
    for path, raw in new.items():
        path.write_bytes(raw)
    assert contents(rig.load()) == (MODEL, DATA)


def test_THR_07_staged_generation_counts_for_ten_minutes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.save(name="a")
    result = rig.save(name="b", staged=True)
    assert contents(rig.load(name="a")) == contents(rig.load(name="b"))  # not confirmed: both count
    later = time.time() + 601
    with monkeypatch.context() as m:
        m.setattr(trust_store.time, "time", lambda: later)
        assert rig.refusal(name="b") is R.ROLLED_BACK
        assert contents(rig.load(name="a")) == (MODEL, DATA)
    assert rig.cache.confirm(TOKEN, result.generation)
    assert contents(rig.load(name="b")) == (MODEL, DATA)
    assert rig.refusal(name="a") is R.ROLLED_BACK
    assert not rig.cache.confirm(TOKEN, bytes(16))


def test_THR_09_another_build_of_the_device(rig: Rig) -> None:
    rig.save()
    rig.cache = rig.device_cache(epoch=NEXT_EPOCH)
    assert rig.refusal() is R.NO_ROW
    rig.save(name="b")
    rig.cache = rig.device_cache(epoch=EPOCH)  # a downgrade brings nothing back
    assert rig.refusal() is R.NO_ROW
    assert rig.refusal(name="b") is R.NO_ROW


def test_THR_12_token_that_was_used_for_another_model(rig: Rig) -> None:
    rig.save(fingerprint=FINGERPRINT)
    assert rig.refusal(fingerprint=b"q" * 32) is R.OTHER_MODEL
    assert contents(rig.load()) == (MODEL, DATA)  # nobody said what is expected


def test_REQ_CACHE_010_THR_16_descriptors_that_are_no_plain_files(rig: Rig, tmp_path: Path) -> None:
    rig.save()
    path = rig.path("model", 0)
    os.mkfifo(tmp_path / "fifo")
    left, right = socket.socketpair()
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    bad = {
        "directory": os.open(tmp_path, os.O_RDONLY),
        "fifo": os.open(tmp_path / "fifo", os.O_RDWR),
        "socket": left.fileno(),
        "sealed": sealed,
        "device": os.open("/dev/null", os.O_RDWR),
        "path only": os.open(path, os.O_PATH),
        "append": os.open(path, os.O_RDWR | os.O_APPEND),
        "read only": os.open(path, os.O_RDONLY),
        "write only": os.open(path, os.O_WRONLY),
        "closed": 987654,
    }
    before = rig.snapshot()
    with rig.files() as (models, data):
        for what, fd in bad.items():
            for place in range(3):
                fds = [*models, *data]
                fds[place] = fd
                with pytest.raises(CacheRejected) as error:
                    rig.cache.load(TOKEN, fds[:2], fds[2:])
                assert error.value.reason is R.BAD_FD, what
                result = rig.cache.save(TOKEN, MODEL, DATA, fds[:2], fds[2:])
                assert (result.saved, result.reason) == (False, R.BAD_FD), what
        assert rig.snapshot() == before  # nothing was written, not even to the good ones
        assert contents(rig.cache.load(TOKEN, models, data)) == (MODEL, DATA)
    right.close()
    left.close()
    for what, fd in bad.items():
        if what not in ("socket", "closed"):
            os.close(fd)


def test_THR_17_21_huge_sparse_file(tmp_path: Path) -> None:
    rig = Rig(tmp_path, most_bytes=100_000)
    assert rig.save().saved
    os.truncate(rig.path("data", 0), 1 << 40)
    assert rig.refusal() is R.TOO_BIG
    with rig.files() as fds:
        assert rig.cache.save(TOKEN, MODEL, (bytes(200_000),), *fds).reason is R.TOO_BIG


@pytest.mark.parametrize("what", ["store", "key", "both"])
def test_THR_24_deleted_store_or_key_makes_everything_miss(rig: Rig, tmp_path: Path, what: str) -> None:
    rig.save()
    if what in ("store", "both"):
        shutil.rmtree(tmp_path / "state" / "trust")
    if what in ("key", "both"):
        (tmp_path / "state" / "key").unlink()
    assert rig.refusal() is R.NO_ROW
    assert rig.save().saved
    assert contents(rig.load()) == (MODEL, DATA)


def test_THR_24_state_directory_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(CacheRejected) as error:
        TrustStore(tmp_path / "open")
    assert error.value.reason is R.NO_STORE
    TrustStore(tmp_path / "mine")
    for spoil in (lambda key: key.chmod(0o644), lambda key: key.write_bytes(b"short"), lambda key: _link(key)):
        key = tmp_path / "mine" / "key"
        key.unlink(missing_ok=True)
        key.write_bytes(bytes(32))
        key.chmod(0o600)
        spoil(key)
        with pytest.raises(CacheRejected):
            TrustStore(tmp_path / "mine")


def _link(key: Path) -> None:
    key.rename(key.with_name("elsewhere"))
    key.symlink_to(key.with_name("elsewhere"))


def test_THR_25_28_codes_are_compared_in_constant_time_and_nothing_is_unpickled() -> None:
    source = "".join(p.read_text() for p in Path(device_cache.__file__).parent.glob("*.py"))
    assert "compare_digest" in source
    assert not any(word in source for word in ("import pickle", "import marshal", "import shelve", "eval(", "exec("))


def test_key_is_private_and_stays(tmp_path: Path) -> None:
    first = TrustStore(tmp_path / "state")
    key = tmp_path / "state" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    second = TrustStore(tmp_path / "state")
    assert first.key.id == second.key.id
    assert first.key.derive("mac", b"s") != first.key.derive("row", b"s") != first.key.derive("mac", b"t")


# ---- saves that do not end ------------------------------------------------------------------------------------------

STEPS = ["digests", "stored", "truncated", "dirty", "payload", "complete", "written"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_THR_20_error_at_a_step_of_a_save(rig: Rig, step: str, number: int) -> None:
    def fail(at: str) -> None:
        if at == step:
            raise OSError(number, os.strerror(number))

    rig.hook = fail
    result = rig.save()
    assert not result.saved
    assert result.reason is (R.IO_ERROR if number == errno.EIO else R.DISK_FULL)
    assert step in ("digests", "written") or rig.refusal() in (R.NO_ROW, R.DIRTY)
    rig.hook = lambda at: None
    assert rig.save().saved
    assert contents(rig.load()) == (MODEL, DATA)


def in_process_of_its_own(rig: Rig, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that has the rig."""
    begin = f"""
import os, resource, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from support.caches import Rig
rig = Rig(Path({str(rig.directory)!r}), encrypt={rig.encrypt})
"""
    return run_python("-c", begin + textwrap.dedent(script))


def test_THR_20_file_that_may_not_grow(rig: Rig) -> None:
    """A real refusal of the kernel: a limit on the size of files."""
    script = """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        with rig.files() as fds:
            result = rig.cache.save(bytes(32), (b"a", b"b"), (bytes(1 << 20),), *fds)
        print(result.saved, result.reason.value)
    """
    done = in_process_of_its_own(rig, script)
    assert done.stdout.split() == ["False", "DISK_FULL"], done.stdout + done.stderr
    assert rig.refusal() is R.NO_ROW


@pytest.mark.parametrize("earlier", [False, True], ids=["first save", "save over an entry"])
@pytest.mark.parametrize("step", STEPS)
def test_THR_22_killed_at_a_step_of_a_save(rig: Rig, step: str, earlier: bool) -> None:
    if earlier:
        rig.save()
    kill = f"rig.hook = lambda step: step == {step!r} and os.kill(os.getpid(), signal.SIGKILL)\nrig.save()"
    done = in_process_of_its_own(rig, kill)
    assert done.returncode == -signal.SIGKILL, done.stderr
    try:
        entry = rig.load()
    except CacheRejected as error:
        assert step != "written"
        assert error.reason in (R.NO_ROW, R.DIRTY, R.ROLLED_BACK, R.MISSING, R.BAD_LENGTH)
    else:
        assert contents(entry) == (MODEL, DATA)
        assert step == "written" or (earlier and step == "digests")
    assert rig.save().saved
    assert contents(rig.load()) == (MODEL, DATA)


# ---- tampering ------------------------------------------------------------------------------------------------------


FIELDS = {
    "magic": 8, "version": 2, "state": 2, "kind": 2, "index": 2, "count": 2, "cipher": 2, "header length": 4,
    "payload length": 8, "stored length": 8, "token": 32, "generation": 16, "epoch": 32, "fingerprint": 32, "salt": 32,
    "key id": 8, "digest": 32,
}  # fmt: skip
"""Bytes of each field of a header, in order."""
OTHERWISE = ("payload", "code", "many bytes", "cut", "added", "another file", "part of another", "salts of all")
"""Other ways to tamper."""


def tampered(good: list[bytes], others: list[bytes], way: str, generator: random.Random) -> list[bytes]:
    """Return the files of an entry, one or all of them changed, so that at least one differs from what was saved."""
    files = list(map(bytearray, good))
    while list(map(bytes, files)) == good:
        which = generator.randrange(len(files))
        raw = files[which]
        places, end = {}, 0
        for field, size in FIELDS.items():
            places[field], end = range(end, end + size), end + size
        assert end == HEADER_SIZE
        places |= {"payload": range(end, len(raw) - CODE_SIZE), "code": range(len(raw) - CODE_SIZE, len(raw))}
        if way in places:
            raw[generator.choice(places[way])] ^= 1 << generator.randrange(8)
        elif way == "many bytes":
            for _ in range(generator.randrange(1, 40)):
                raw[generator.randrange(len(raw))] = generator.randrange(256)
        elif way == "cut":
            del raw[generator.randrange(len(raw)) :]
        elif way == "added":
            raw += generator.randbytes(generator.randrange(1, 300))
        elif way == "another file":
            files[which] = bytearray(generator.choice((*others, *good)))
        elif way == "part of another":
            at, length = generator.randrange(len(raw)), generator.randrange(1, 200)
            source = generator.choice((*others, *good))
            raw[at : at + length] = source[at : at + length]
        else:
            salt = generator.randbytes(32)
            for raw in files:
                raw[places["salt"].start : places["salt"].stop] = salt
    return list(map(bytes, files))


@pytest.mark.parametrize("times", [40, pytest.param(400, marks=pytest.mark.soak)])
def test_THR_01_to_07_random_tampering_is_never_accepted(rig: Rig, times: int) -> None:
    """1,000, or 10,000, changes of real files of three generations, as often in each field and each other way."""
    rig.save()
    others = list(rig.snapshot().values())
    rig.save(OTHER, "b")
    others += [bytes(rig.bytes_of(kind, i, "b")) for kind, i in FILES]
    rig.save()
    good = [bytes(rig.bytes_of(kind, i)) for kind, i in FILES]
    generator = random.Random(20)
    refused: Counter[str] = Counter()
    with rig.files() as fds:

        def write(files: list[bytes]) -> None:
            for fd, new in zip((*fds[0], *fds[1]), files, strict=True):
                os.pwrite(fd, new, 0)
                os.ftruncate(fd, len(new))

        for way in (*FIELDS, *OTHERWISE):
            for _ in range(times):
                write(tampered(good, others, way, generator))
                with pytest.raises(CacheRejected):
                    rig.cache.load(TOKEN, *fds)
                refused[way] += 1
        write(good)
        assert contents(rig.cache.load(TOKEN, *fds)) == (MODEL, DATA)
    assert refused == dict.fromkeys((*FIELDS, *OTHERWISE), times)
    assert refused.total() >= 1000


def test_file_is_one_call_of_the_cipher_with_a_nonce_for_each(rig: Rig) -> None:
    """The payload and the code are those of one call over all bytes, which is how the standard defines it."""
    size = (1 << 18) + 5  # more than one chunk, and no multiple of a block
    blobs = os.urandom(size), b""
    with rig.files() as fds:
        assert rig.cache.save(TOKEN, blobs, (blobs[0],), *fds).saved
    keys, nonces = set(), set()
    for (kind, i), blob in zip(FILES, (*blobs, blobs[0]), strict=True):
        raw = bytes(rig.bytes_of(kind, i))
        header = Header.decode(raw, len(raw))
        key = rig.store.key.derive("gcm" if rig.encrypt else "gmac", header.salt)
        nonce = bytes([header.kind, 0, header.index]) + bytes(9)
        assert (header.kind, header.index, header.encrypted) == (1 if kind == "model" else 2, i, rig.encrypt)
        if rig.encrypt:
            assert raw[HEADER_SIZE:] == AESGCM(key).encrypt(nonce, blob, raw[:HEADER_SIZE])
        else:
            assert raw[HEADER_SIZE:-CODE_SIZE] == blob
            assert raw[-CODE_SIZE:] == AESGCM(key).encrypt(nonce, b"", raw[:-CODE_SIZE])
        assert header.digest == hashlib.sha256(blob).digest()
        keys.add(key)
        nonces.add(nonce)
    assert (len(keys), len(nonces)) == (1, 3)
    rig.save()
    raw = bytes(rig.bytes_of("model", 0))
    assert Header.decode(raw, len(raw)).salt != header.salt


def test_nothing_of_an_encrypted_payload_is_in_its_file(tmp_path: Path) -> None:
    rig = Rig(tmp_path, encrypt=True)
    rig.save()
    assert all(blob[:8] not in raw for blob in (*MODEL, *DATA) for raw in rig.snapshot().values())


def other_kind(rig: Rig) -> Rig:
    """A client of the same service and directory that asks for the other kind of entry."""
    other = Rig(rig.directory, encrypt=not rig.encrypt)
    other.store = rig.store
    other.cache = other.device_cache()
    return other


def test_entry_of_the_other_kind_is_a_miss_and_is_replaced(rig: Rig) -> None:
    rig.save()
    rig.save(OTHER, "b")
    other = other_kind(rig)
    assert other.refusal() is R.OTHER_CIPHER
    assert contents(rig.load()) == (MODEL, DATA)
    assert other.save().saved
    assert contents(other.load()) == (MODEL, DATA)
    assert rig.refusal() is R.OTHER_CIPHER
    assert contents(rig.load(OTHER, "b")) == (MODEL, DATA)  # kinds may stand beside each other


def test_files_that_say_they_are_of_the_other_kind_are_a_miss(rig: Rig) -> None:
    rig.save()
    other = other_kind(rig)
    for kind, i in reversed(FILES):  # one after the other says that it is of the other kind
        raw = rig.bytes_of(kind, i)
        raw[18] = not rig.encrypt
        rig.path(kind, i).write_bytes(raw)
        assert rig.refusal() is R.OTHER_CIPHER
    assert other.refusal() is R.BAD_MAC  # asked for what they pretend to be


def test_wrong_key_opens_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.save()
    key = MasterKey(bytes(32))
    monkeypatch.setattr(TrustStore, "key", key)
    assert rig.refusal() is R.KEY_CHANGED
    key.id = Header.decode(bytes(raw := rig.bytes_of("model", 0)), len(raw)).key_id
    assert rig.refusal() is R.BAD_MAC


def test_digest_that_was_recorded_is_the_one_in_the_file(rig: Rig) -> None:
    generation = rig.save().generation
    (record,) = rig.store.records(TOKEN, "test-device")
    assert record.generation == generation
    changed = {
        R.BAD_DIGEST: (*record.files[:2], (record.files[2][0], bytes(32))),
        R.BAD_LENGTH: (*record.files[:2], (record.files[2][0] + 1, record.files[2][1])),
        R.BAD_MAC: record.files[:2],
    }
    for reason, files in changed.items():
        rig.store.put(TOKEN, "test-device", replace(record, files=files))
        assert rig.refusal() is reason
    rig.store.put(TOKEN, "test-device", record)
    assert contents(rig.load()) == (MODEL, DATA)


def test_many_threads_on_one_cache(tmp_path: Path) -> None:
    rig = Rig(tmp_path)

    def work(n: int) -> None:
        token = bytes([n]) * 32
        for _ in range(15):
            assert rig.save(token, f"t{n}").saved
            assert contents(rig.load(token, f"t{n}")) == (MODEL, DATA)

    together(6, work)


def test_THR_17_limit_of_an_entry_counts_all_its_files(rig: Rig) -> None:
    """Each file alone is small enough."""
    nbytes = rig.save().nbytes
    with rig.files() as fds:
        assert contents(rig.device_cache(most_bytes=nbytes).load(TOKEN, *fds)) == (MODEL, DATA)
        with pytest.raises(CacheRejected) as error:
            rig.device_cache(most_bytes=nbytes - 1).load(TOKEN, *fds)
        assert error.value.reason is R.TOO_BIG

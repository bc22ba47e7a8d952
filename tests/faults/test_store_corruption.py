"""Files of records and incidents that were changed on the disk: absent, never an error, never something else."""

import contextlib
import functools
import grp
import os
import random
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import msgspec
import planted_records
import pytest
from store_children import FORK, SECONDS, forked

from portattn import CompileRecord, files
from portattn.compile import record_store
from portattn.compile.record_store import CompileStore
from portattn.errors import DataError
from portattn.tools import run_log
from portattn.tools.run_log import RunLog

KEYS = ("a" * 32, "b" * 32, "c" * 32)
DAMAGES = 2_000
STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")


def record(key: str, reason: str = "PassManager::run failed — in π") -> CompileRecord:
    return planted_records.record(key, reason=reason, facts={"spills": 0, "mix_mode": "mix"})


incident = functools.partial(planted_records.incident, log="line\n" * 30, environment={"TRITON_X": "1"},
    specialisation={"types": {"q": "*fp16"}})  # fmt: skip


def damaged(data: bytes, others: list[bytes], chance: random.Random) -> bytes | None:
    place, kind = chance.randrange(len(data)), chance.randrange(8)
    if kind == 0:
        return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + chance.randbytes(chance.randrange(1, 9)) + data[place:]
    if kind == 3:
        return data[:place] + data[place + chance.randrange(1, 9) :]
    if kind == 4:
        return data[:place] + bytes(min(chance.randrange(1, 600), len(data) - place)) + data[place + 600 :]
    if kind == 5:
        return chance.choice(others)
    if kind == 6:
        return chance.choice([b"[" * 200_000, b'{"a":' * 100_000, b"\xff" * 40, b"", b"null", b"9" * 5_000])
    return None


def test_damaged_verdicts_and_incidents_are_absent_or_what_was_put(tmp_path: Path) -> None:
    chance, kept = random.Random(20261122), CompileStore(tmp_path)
    put = {key: record(key) for key in KEYS}
    for one in put.values():
        kept.put(one)
    kept.add_incident(incident("20261121-x"))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    assert len(files) == 4
    absent = 0
    for _ in range(DAMAGES):
        path, data = chance.choice(sorted(files.items()))
        made = damaged(data, [other for at, other in files.items() if at != path], chance)
        path.unlink()
        path.mkdir() if made is None else path.write_bytes(made)
        fresh = CompileStore(tmp_path)
        if path.parent.name == "records":
            found = fresh.get(path.stem)
            assert found in (None, put[path.stem])
            assert sum(fresh.count()) == len(KEYS)
        else:
            found = fresh.incident(path.stem)
            assert found in (None, incident("20261121-x"))
            assert list(fresh.incidents()) == ([] if found is None else [found])
        absent += found is None
        path.rmdir() if made is None else path.unlink()
        path.write_bytes(data)
    # Two bytes of space around the envelope say nothing; everything else is found.
    assert absent > 0.99 * DAMAGES
    assert [CompileStore(tmp_path).get(key) for key in KEYS] == list(put.values())


def test_a_file_under_another_key_is_absent(tmp_path: Path) -> None:
    kept = CompileStore(tmp_path)
    kept.put(record(KEYS[0]))
    shutil.copy(tmp_path / "records" / f"{KEYS[0]}.json", tmp_path / "records" / f"{KEYS[1]}.json")
    kept.add_incident(incident("one"))
    (tmp_path / "incidents" / "one.json").rename(tmp_path / "incidents" / "two.json")
    fresh = CompileStore(tmp_path)
    assert (fresh.get(KEYS[0]), fresh.get(KEYS[1]), fresh.incident("two")) == (record(KEYS[0]), None, None)
    assert (list(fresh.incidents()), fresh.count()) == ([], (1, 1))


def test_one_kind_is_not_read_as_another() -> None:
    data = record_store.seal("record", "k", record("k"))
    assert record_store.unseal(data, "record", "k", CompileRecord) == record("k")
    assert record_store.unseal(data, "incident", "k", CompileRecord) is None
    assert record_store.unseal(data, "record", "l", CompileRecord) is None
    assert record_store.unseal(data.replace(b'"format":2', b'"format":3'), "record", "k", CompileRecord) is None


@pytest.mark.parametrize("old", [b'{"key":"%s","passed":true}', b'{"format":1,"kind":"record","key":"%s"}'])
def test_another_formats_file_is_absent_and_replaced(tmp_path: Path, old: bytes) -> None:
    path = tmp_path / "records" / f"{KEYS[0]}.json"
    path.parent.mkdir()
    path.write_bytes(old % KEYS[0].encode())
    kept = CompileStore(tmp_path)
    assert kept.get(KEYS[0]) is None
    kept.put(record(KEYS[0]))
    assert CompileStore(tmp_path).get(KEYS[0]) == record(KEYS[0])


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    os.mkfifo(tmp_path / "records" / f"{KEYS[0]}.json")
    assert CompileStore(tmp_path).get(KEYS[0]) is None


@pytest.mark.parametrize("name", ["../../../etc/passwd", "x\0y", "x" * 5_000, "", "a/b"])
def test_names_that_no_file_has(tmp_path: Path, name: str) -> None:
    kept = CompileStore(tmp_path)
    assert (kept.incident(name), kept.get(name)) == (None, None)


def test_text_that_is_no_unicode_is_kept_with_replacements(tmp_path: Path) -> None:
    """As in a variable's bytes that are no UTF-8, which Python reads as lone surrogates."""
    CompileStore(tmp_path).put(record(KEYS[0], reason="at \udcff"))
    assert CompileStore(tmp_path).get(KEYS[0]).reason == "at ?"


@needs_root
@pytest.mark.parametrize(("owner", "mode", "why"), [
    ((STRANGER, STRANGER), 0o644, f"belongs to user {STRANGER} (mode 0644), and this process is user 0's"),
    ((0, STRANGER), 0o664, "may be written by others (mode 0664)"),
    ((0, 0), 0o664, "may be written by others (mode 0664)"),
    ((0, 0), 0o666, "may be written by others (mode 0666)"),
])  # fmt: skip
def test_what_another_user_sealed_is_not_believed(tmp_path, monkeypatch, owner, mode, why):
    """A record keeps every process from a kernel, or lets one run; an incident is compiled again."""
    monkeypatch.setattr(record_store, "_distrusted", set())
    kept = CompileStore(tmp_path)
    for key in KEYS:
        kept.put(record(key))
        kept.add_incident(incident(key))
    for path in tmp_path.rglob("*.json"):
        os.chown(path, *owner)
        path.chmod(mode)
    fresh = CompileStore(tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert ([fresh.get(key) for key in KEYS], list(fresh.incidents())) == ([None] * len(KEYS), [])
    texts = [str(one.message) for one in said]
    assert len(texts) == 2, "one of records, one of incidents"
    assert all(why in text and "chown" in text for text in texts)
    fresh.put(record(KEYS[0]))
    assert CompileStore(tmp_path).get(KEYS[0]) == record(KEYS[0]), "it is replaced by this user's own"


@pytest.mark.parametrize(
    ("accounts", "groups", "members", "trusted"),
    [
        ("me:x:{uid}:4242:::\n", "me:x:4242:\n", [], True),
        ("me:x:{uid}:4242:::\n", "me:x:4242:me\n", ["me"], True),
        ("me:x:{uid}:4242:::\nbob:x:777:4242:::\n", "me:x:4242:\n", [], False),  # the primary group of another user
        ("me:x:{uid}:4242:::\n", "me:x:4242:\nstaff:x:4242:bob\n", [], False),  # two names of one group
        ("me:x:{uid}:4242:::\n", "me:x:4242:\n", ["bob"], False),
        ("me:x:{uid}:100:::\n", "me:x:4242:\n", [], False),
        ("bob:x:777:4242:::\n", "me:x:4242:\n", [], False),  # this user is a directory service's
        ("me:x:{uid}:0:::\n", "me:x:0:\n", [], False),  # containers run any user in group 0
    ],
)
def test_a_private_group_may_write(tmp_path: Path, monkeypatch, accounts, groups, members, trusted: bool) -> None:
    """Debian and RHEL give each user such a group and a umask of 0002: files made so are the user's own."""
    (tmp_path / "passwd").write_text("# comment\n" + accounts.format(uid=os.geteuid()))
    (tmp_path / "group").write_text(groups)
    monkeypatch.setattr(files, "_ACCOUNTS", tmp_path / "passwd")
    monkeypatch.setattr(files, "_GROUPS", tmp_path / "group")
    gid = int(groups.split(":")[2])
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group(("me", "x", number, members)))
    files._is_private.cache_clear()
    seen = os.stat_result((0o100664, 1, 1, 1, os.geteuid(), gid, 0, 0, 0, 0))
    try:
        with contextlib.nullcontext() if trusted else pytest.raises(files.UntrustedPath, match="mode 0664"):
            files.check_owner(seen, "record", "file", private_group=True)
    finally:
        files._is_private.cache_clear()


def test_a_trees_links_are_checked_except_the_one_to_the_running_python(tmp_path: Path, monkeypatch) -> None:
    tree, python = tmp_path / "tree", tmp_path / "python"
    tree.mkdir()
    python.touch()
    (tree / "python").symlink_to(python)
    (tree / "circle").symlink_to(".")
    (tree / "missing").symlink_to("/nowhere/at/all")
    files.check_tree(tree)
    python.chmod(0o777)
    with pytest.raises(files.UntrustedPath, match="/python may be written by others"):
        files.check_tree(tree)
    monkeypatch.setattr(sys, "executable", str(python))
    files.check_tree(tree)


def test_a_record_is_its_owners_under_any_umask(tmp_path: Path) -> None:
    umask = os.umask(0o002)
    try:
        CompileStore(tmp_path).put(record(KEYS[0]))
    finally:
        os.umask(umask)
    assert CompileStore(tmp_path).get(KEYS[0]) == record(KEYS[0])
    assert (tmp_path / "records" / f"{KEYS[0]}.json").stat().st_mode & 0o777 == 0o644


READERS_SECONDS = 4.0


def _write_forever(folder: Path) -> None:
    kept = CompileStore(folder)
    for turn in range(10**9):
        kept.put(record(KEYS[turn % 3], reason=f"{turn} " * 4_000))


def _read(folder: Path, key: str) -> bool:
    found = CompileStore(folder).get(key)
    if found is None:
        return False
    assert (found.key, len(set(found.reason.split()))) == (key, 1)
    return True


def test_writers_that_are_killed(tmp_path: Path) -> None:
    chance = random.Random(7)
    end, kills, seen = time.monotonic() + READERS_SECONDS, 0, 0
    while time.monotonic() < end or kills < 10:
        writer = FORK.Process(target=_write_forever, args=(tmp_path,))
        writer.start()
        dies = time.monotonic() + chance.uniform(0.01, 0.15)
        while time.monotonic() < dies:
            seen += sum(_read(tmp_path, key) for key in KEYS)
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(SECONDS)
        kills += 1
        seen += sum(_read(tmp_path, key) for key in KEYS)
    assert seen
    # The key is not locked for those who come after.
    with CompileStore(tmp_path).lock(KEYS[0], SECONDS):
        CompileStore(tmp_path).put(record(KEYS[0]))
    assert CompileStore(tmp_path).get(KEYS[0]) == record(KEYS[0])


def _hold(folder: Path, ready: object) -> None:
    with CompileStore(folder).lock(KEYS[0], SECONDS):
        ready.set()  # type: ignore[attr-defined]
        time.sleep(SECONDS)


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    ready = FORK.Event()
    holder = FORK.Process(target=_hold, args=(tmp_path, ready))
    holder.start()
    assert ready.wait(SECONDS)
    holder.kill()
    holder.join(SECONDS)
    begun = time.monotonic()
    with CompileStore(tmp_path).lock(KEYS[0], SECONDS):
        assert time.monotonic() - begun < SECONDS / 2, "it was waited for to the end"


def _work(folder: Path, number: int, turns: int) -> int:
    kept, chance = CompileStore(folder), random.Random(number)
    for turn in range(turns):
        key = chance.choice(KEYS)
        with kept.lock(key, SECONDS):
            kept.put(record(key, reason=f"{number}-{turn} " * 300))
        assert _read(folder, key)
    return turns


def test_sixteen_processes_on_one_folder(tmp_path: Path) -> None:
    """All of them write and read; a 17th, which only reads, never sees half a record."""
    with FORK.Pool(16) as pool:
        under_way = pool.starmap_async(_work, [(tmp_path, number, 12) for number in range(16)])
        read = 0
        while not under_way.ready():
            read += sum(_read(tmp_path, key) for key in KEYS)
        assert under_way.get(SECONDS) == [12] * 16
    assert read
    assert all(_read(tmp_path, key) for key in KEYS)
    left = [path.name for path in (tmp_path / "records").iterdir()]
    assert sorted(left) == sorted(f"{key}.json" for key in KEYS)


def _locks_again(folder: Path) -> bool:
    with CompileStore(folder).lock(KEYS[1], SECONDS):
        return CompileStore(folder).get(KEYS[1]) is None


def test_a_process_that_is_forked_under_a_lock_takes_its_own(tmp_path: Path) -> None:
    with CompileStore(tmp_path).lock(KEYS[0], SECONDS):
        assert forked(_locks_again, tmp_path)


class Line(msgspec.Struct, frozen=True):
    name: str
    figures: tuple[float, ...] = ()


LINES = [Line(name=f"case {n} – π", figures=(1.5 * n, 0.25)) for n in range(5)]


def decoded(data: bytes, resumed: bool = True) -> list[Line]:
    return [msgspec.json.decode(line, type=Line) for _, line in run_log.lines(Path("x.jsonl"), data, resumed)]


def test_lines_come_back_as_they_were_and_are_json(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.touch()
    with RunLog(path, tmp_path / ".lock", op="bench", option="--out", shown=tmp_path) as file:
        for line in LINES:
            file.append(line)
    data = path.read_bytes()
    assert (data, decoded(data)) == (b"".join(map(run_log.encode_record, LINES)), LINES)
    assert decoded(data[:-1]) == LINES[:-1], "a line without an end is left out"
    assert [msgspec.json.decode(line, type=Line) for line in data.splitlines()] == LINES, "other readers see no more"
    assert set(msgspec.json.decode(data.splitlines()[0])) == {"name", "figures", "sum"}


def test_a_changed_line_is_found(tmp_path: Path) -> None:
    chance, data = random.Random(5), b"".join(map(run_log.encode_record, LINES))
    found = 0
    for _ in range(2_000):
        at, kind = chance.randrange(len(data)), chance.randrange(3)
        bit = bytes([data[at] ^ 1 << chance.randrange(8)])
        changed = data[:at] + (bit + data[at + 1 :], data[at + 1 :], chance.randbytes(3) + data[at:])[kind]
        try:
            lines = decoded(changed)
        except DataError:
            found += 1
            continue
        # The last line's end is gone, or a byte was inserted after it: what is left was written.
        assert lines == LINES[: len(lines)]
        assert len(lines) >= 4
    assert found > 1_900


def test_lines_of_an_older_release_are_shown_and_not_gone_on_with() -> None:
    data = b"".join(msgspec.json.encode(line) + b"\n" for line in LINES)
    assert decoded(data, resumed=False) == LINES
    with pytest.raises(DataError, match="an older portattn wrote it"):
        decoded(data)

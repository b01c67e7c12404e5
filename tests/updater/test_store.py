"""The memory of a replica: sizes at their boundaries, the words of slots, and headers changed one field at a time."""
import gc
import hashlib
import json
import math
import mmap
import os
import struct
import zlib

import pytest
import torch

from updater.errors import ReplicaError
from updater.store import Array, Store, lock, plan_arrays

#: The header as docs/understand/updater.md tells it: magic, format, slots, size, bytes of JSON, first slot, stride, a
#: word of padding, hash of the JSON; its CRC-32 at byte 120, the slots' words from byte 128 on, the JSON at 4096.
HEADER = struct.Struct("<8sIIQQQQI4x32s")
FIELDS = ("magic", "format", "slots", "size", "length", "first", "stride", "padding", "digest")


def arrays(*wanted):
    return json.loads(json.dumps([vars(array) for array in plan_arrays(list(wanted))[0]]))


def a_layout(slots=2, **changes):
    return {
        "slots": slots, "constants": arrays(("k", "fixed", "int64", (3,))),
        "arrays": arrays(("w", "p", "float32", (5,)), ("", "steps", "float32", (1,))), **changes,
    }


@pytest.fixture
def path(shm):
    """A file of two slots, of which the second holds version 7."""
    store = Store.create(a_layout(), shm / "replica")
    store.tensors(None)["k", "fixed"].copy_(torch.tensor([1, 2, 3]))
    store.set_slot_header(1, 2, 7)
    store.publish_file()
    store.close()
    return shm / "replica"


def refusal(path, how=Store.read):
    with pytest.raises(ReplicaError) as caught:
        how(path)
    return str(caught.value)


# -- where arrays lie --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "taken"), [(0, 0), (1, 64), (16, 64), (17, 128), (32, 128), (33, 192)])
def test_arrays_begin_on_cache_lines(count, taken):
    planned, size = plan_arrays([("a", "p", "float32", (count,)), ("b", "low", "bfloat16", (2, 3))])
    assert planned == [Array("a", "p", "float32", (count,), 0), Array("b", "low", "bfloat16", (2, 3), taken)]
    assert [array.nbytes for array in planned] == [4 * count, 12] and size == taken + 64


def test_nothing_wanted_takes_nothing_and_a_scalar_a_line():
    assert plan_arrays([]) == ([], 0)
    assert plan_arrays([("s", "fixed", "float64", ())]) == ([Array("s", "fixed", "float64", (), 0)], 64)


def padded(layout, length):
    """The layout with a note that makes its JSON so many bytes long."""
    layout = {**layout, "note": ""}
    return {**layout, "note": "x" * (length - len(json.dumps(layout, sort_keys=True)))}


@pytest.mark.parametrize(
    ("text", "constants", "slot", "first", "size"),
    [
        (4096, 0, 4096, 8192, 16384), (4097, 0, 4096, 12288, 20480), (4095, 64, 4096, 12288, 20480),
        (4096, 4096, 4096, 12288, 20480), (4096, 4160, 4096, 16384, 24576), (4096, 0, 4160, 8192, 24576),
        (8192, 0, 64, 12288, 20480),
    ],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_sizes_at_the_boundaries_of_pages(shm, text, constants, slot, first, size, in_file):
    """JSON, constants and each slot begin on a page; what fills its pages to the last byte takes no more."""
    wanted = {
        "slots": 2, "constants": arrays(("k", "fixed", "uint8", (constants,))) if constants else [],
        "arrays": arrays(("w", "p", "uint8", (slot,))),
    }
    wanted = padded(wanted, text)
    store = Store.create(wanted, shm / "replica" if in_file else None)
    assert len(store.memory) == size and store.slots == 2
    head = dict(zip(FIELDS, HEADER.unpack(store.memory[:88]), strict=True))
    assert (head["magic"], head["format"], head["slots"]) == (b"FCREPLIC", 2, 2)
    assert (head["size"], head["length"], head["first"], head["stride"]) == (size, text, first, (size - first) // 2)
    assert json.loads(store.memory[4096 : 4096 + text]) == wanted
    for slot_index in range(2):  # every byte of every array can be written, and none is another's
        store.tensors(slot_index)["w", "p"].fill_(slot_index + 1)
    if constants:
        store.tensors(None)["k", "fixed"].fill_(3)
    assert [store.slot_header(i) for i in range(2)] == [(0, 0), (0, 0)]
    assert hashlib.sha256(store.memory[4096 : 4096 + text]).digest() == head["digest"]
    if in_file:
        store.publish_file()
        again = Store.read(shm / "replica")
        assert [int(again.tensors(i)["w", "p"].sum()) for i in range(2)] == [slot, 2 * slot]
        assert not constants or int(again.tensors(None)["k", "fixed"].sum()) == 3 * constants


def test_tensors_lie_over_the_memory_of_their_slot(path):
    store = Store.attach(path)
    for slot in range(2):
        store.tensors(slot)["w", "p"].copy_(torch.arange(5.0) + slot)
    assert store.tensors(0)["w", "p"].tolist() == [0, 1, 2, 3, 4]
    assert store.tensors(1)["w", "p"].tolist() == [1, 2, 3, 4, 5]
    assert store.tensors(None)["k", "fixed"].tolist() == [1, 2, 3]
    assert {**store.tensors(0)}.keys() == {("w", "p"), ("", "steps")} and store.tensors(None).keys() == {("k", "fixed")}


def test_empty_and_scalar_tensors_keep_their_shape():
    store = Store.create(a_layout(arrays=arrays(("e", "p", "float16", (0, 4)), ("s", "p", "bfloat16", ()))), None)
    assert store.tensors(1)["e", "p"].shape == (0, 4) and store.tensors(1)["s", "p"].shape == ()
    assert (store.tensors(1)["e", "p"].dtype, store.tensors(1)["s", "p"].dtype) == (torch.float16, torch.bfloat16)


# -- words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "step", "word"),
    [(0, 0, 0x00_A5_00), (1, 0, 0x00_A4_01), (2, 1, 0x01_A6_02), (2, 0x0102, 0x0102_A4_02),
     (2, 0x8000_0000_0001, 0x8000_0000_0001_26_02), (2, (1 << 48) - 1, 0xFFFF_FFFF_FFFF_A7_02)],
)
def test_a_word_is_state_check_and_step_in_eight_bytes(state, step, word):
    store = Store.create(a_layout(), None)
    store.set_slot_header(1, state, step)
    assert store.memory[192:200] == word.to_bytes(8, "little") and store.slot_header(1) == (state, step)
    assert store.memory[128:136] == (0xA500).to_bytes(8, "little"), "of the other slot"


def test_every_changed_bit_of_a_word_is_seen():
    store = Store.create(a_layout(), None)
    store.set_slot_header(0, 2, 0x1234)
    whole = store.memory[128:136]
    for bit in range(64):
        store.memory[128:136] = (int.from_bytes(whole, "little") ^ 1 << bit).to_bytes(8, "little")
        assert store.slot_header(0) is None
    for state in (3, 255):  # no state, though its check fits
        store.memory[128:136] = ((state ^ 0xA5) << 8 | state).to_bytes(8, "little")
        assert store.slot_header(0) is None


def test_complete_versions_and_the_newest():
    store = Store.create(a_layout(4), None)
    assert (store.complete(), store.newest()) == ({}, None)
    for slot, (state, step) in enumerate([(2, 5), (1, 9), (2, 6), (0, 0)]):
        store.set_slot_header(slot, state, step)
    assert (store.complete(), store.newest()) == ({5: 0, 6: 2}, 2)
    store.set_slot_header(1, 2, 4)
    assert store.newest() == 2
    store.memory[128 + 128] ^= 1  # a damaged word is no version
    assert store.complete() == {5: 0, 4: 1} and store.newest() == 0
    store.set_slot_header(0, 2, 0)
    store.set_slot_header(1, 1, 0)
    assert store.newest() == 0, "slot 0 and step 0 are a slot and a step"


# -- files that are refused --------------------------------------------------------------------------------


def changed(path, **fields):
    """The file with these header fields and a CRC that fits them."""
    data = bytearray(path.read_bytes())
    head = dict(zip(FIELDS, HEADER.unpack(data[:88]), strict=True)) | fields
    data[:88] = HEADER.pack(*head.values())
    data[120:124] = zlib.crc32(data[:88]).to_bytes(4, "little")
    path.write_bytes(data)


def header(path):
    return dict(zip(FIELDS, HEADER.unpack(path.read_bytes()[:88]), strict=True))


WHY = {
    "magic": [(b"FCREPLIX", "another kind of file")],
    "format": [(1, "format 1, this is 2"), (3, "format 3, this is 2")],
    "slots": [(1, "16384 bytes do not fit the header's 16384"), (5, "16384 bytes do not fit the header's 16384"),
              (3, "16384 bytes do not fit the header's 16384")],
    "size": [(16383, "16384 bytes do not fit the header's 16383"),
             (16385, "16384 bytes do not fit the header's 16385")],
    "length": [(4097, "16384 bytes do not fit the header's 16384"), (10, "the layout's hash does not fit")],
    "first": [(8193, "16384 bytes do not fit the header's 16384"), (4200, "16384 bytes do not fit the header's 16384"),
              (1 << 63, "16384 bytes do not fit the header's 16384")],
    "stride": [(4097, "16384 bytes do not fit the header's 16384"), (127, "the layout is none of ours")],
    "digest": [(bytes(32), "the layout's hash does not fit")],
}


@pytest.mark.parametrize("how", [Store.read, Store.attach])
@pytest.mark.parametrize(("field", "value", "why"), [(f, v, w) for f, cases in WHY.items() for v, w in cases])
def test_a_header_with_one_field_changed(shm, how, field, value, why):
    """The CRC fits each time: what is refused is the field's own meaning."""
    layout = a_layout()
    layout["constants"] = []
    store = Store.create(layout, shm / "replica")
    store.publish_file()
    store.close()
    path = shm / "replica"
    assert (header(path)["size"], header(path)["first"], header(path)["stride"]) == (16384, 8192, 4096)
    changed(path)
    how(path).close()
    changed(path, **{field: value})
    assert refusal(path, how) == f"{path}: not a replica that can be used: {why}"


def test_each_byte_of_the_header_that_a_writer_did_not_finish(path):
    """The first bytes of the file, up to the CRC, each changed alone: refused by whatever sees it first."""
    whole = path.read_bytes()
    for at in [*range(88), *range(120, 124)]:
        data = bytearray(whole)
        data[at] ^= 0x40
        path.write_bytes(data)
        why = "another kind of file" if at < 8 else "format" if at < 12 else "the header is damaged"
        assert f"{path}: not a replica that can be used: {why}" in refusal(path)


@pytest.mark.parametrize("cut", [0, 79, 4096, 8191])
def test_a_file_that_is_too_short_for_any_layout(path, cut):
    os.truncate(path, cut)
    assert refusal(path) == f"{path}: not a replica that can be used: {cut} bytes are too few"


def test_a_file_that_is_cut_or_grown_later(path):
    size = path.stat().st_size
    for other in (8192, size - 4096, size - 1, size + 1, size + 4096):
        os.truncate(path, other)
        assert refusal(path) == f"{path}: not a replica that can be used: {other} bytes do not fit the header's {size}"
        os.truncate(path, size)


def with_layout(path, change):
    """The file with a layout of the same length, changed, and a hash that fits it."""
    data = bytearray(path.read_bytes())
    head = header(path)
    layout = json.loads(data[4096 : 4096 + head["length"]])
    change(layout)
    text = json.dumps(layout).encode()
    data[4096 : 4096 + len(text)] = text
    path.write_bytes(data)
    changed(path, length=len(text), digest=hashlib.sha256(text).digest())


@pytest.mark.parametrize(
    ("change", "sound"),
    [
        (lambda d: None, True),
        (lambda d: d.update(slots=3), False), (lambda d: d.pop("slots"), False),
        (lambda d: d.pop("constants"), False), (lambda d: d.update(constants=None), False),
        (lambda d: d.update(arrays=[1]), False), (lambda d: d["arrays"][0].pop("name"), False),
        (lambda d: d["arrays"][0].pop("role"), False), (lambda d: d["arrays"][0].update(shape=["x"]), False),
        (lambda d: d["arrays"][0].update(dtype="load"), False), (lambda d: d["arrays"][0].update(offset="x"), False),
        (lambda d: d["arrays"][0].update(offset=-1), False), (lambda d: d["arrays"][1].update(offset=-64), False),
        (lambda d: d["arrays"][1].update(offset=4096 - 64), True),
        (lambda d: d["arrays"][1].update(offset=4096 - 63), False),
        (lambda d: d["arrays"][1].update(offset=1 << 40), False),
        (lambda d: d["arrays"][0].update(offset=math.inf), False),
        (lambda d: d["constants"][0].update(shape=[1 << 30]), False),
        (lambda d: d["constants"][0].update(offset=-4097), False),
        (lambda d: d["constants"][0].update(offset=-64), False),
        (lambda d: d["constants"][0].update(shape=[512]), True),
        (lambda d: d["constants"][0].update(shape=[513]), False),
        (lambda d: d.update(constants=[], arrays=[]), True),
    ],
)
def test_a_layout_that_does_not_fit_the_file(path, change, sound):
    with_layout(path, change)
    for how in (Store.read, Store.attach):
        if sound:
            how(path).close()
        else:
            assert refusal(path, how) == f"{path}: not a replica that can be used: the layout is none of ours"


@pytest.mark.parametrize("text", [b"", b"no JSON", b"[]", b"7", b"\xff", b"[" * 3000])
def test_a_layout_that_is_not_json_or_not_an_object(path, text):
    data = bytearray(path.read_bytes())
    data[4096 : 4096 + len(text)] = text
    path.write_bytes(data)
    changed(path, length=len(text), digest=hashlib.sha256(text).digest())
    assert refusal(path) == f"{path}: not a replica that can be used: the layout is none of ours"


@pytest.mark.parametrize("slot", [0, 1])
def test_a_word_that_was_never_written(path, slot):
    data = bytearray(path.read_bytes())
    data[128 + 64 * slot] ^= 1
    path.write_bytes(data)
    for how in (Store.read, Store.attach):
        assert refusal(path, how) == f"{path}: not a replica that can be used: the header of slot {slot} is damaged"


def open_descriptors():
    """After what a caught error holds is gone: a mapping keeps a descriptor."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_what_is_refused_is_let_go_of(path):
    opened = open_descriptors()
    changed(path, format=1)
    for how in (Store.read, Store.attach):
        refusal(path, how)
    assert open_descriptors() == opened


# -- making a file -----------------------------------------------------------------------------------------


def test_a_file_has_no_name_before_it_is_given_one(shm):
    store = Store.create(a_layout(), shm / "replica")
    assert not list(shm.iterdir())
    store.publish_file()
    assert [p.name for p in shm.iterdir()] == ["replica"]
    assert (shm / "replica").stat().st_mode & 0o777 == 0o600
    assert (shm / "replica").stat().st_size == len(store.memory) == (shm / "replica").stat().st_blocks * 512
    opened = open_descriptors()
    with pytest.raises(ReplicaError) as caught:
        store.publish_file()
    assert str(caught.value) == f"{shm}/replica: already there; attach to it or remove it"
    assert open_descriptors() == opened


def test_memory_without_a_file_needs_no_name():
    store = Store.create(a_layout(), None)
    store.publish_file()
    store.lock_writer(None)
    assert store.lock_slot(0) and store.lock_slot(0)
    store.unlock_slot(0)
    store.close()
    store.close()


def test_a_name_that_is_taken_is_refused_before_and_after_the_memory_is_made(shm):
    first, second = (Store.create(a_layout(), shm / "replica") for _ in range(2))
    first.publish_file()
    for call in (second.publish_file, lambda: Store.create(a_layout(), shm / "replica")):
        with pytest.raises(ReplicaError) as caught:
            call()
        assert str(caught.value) == f"{shm}/replica: already there; attach to it or remove it"


def test_a_folder_that_is_not_there(shm):
    with pytest.raises(ReplicaError) as caught:
        Store.create(a_layout(), shm / "no" / "replica")
    assert str(caught.value) == f"{shm}/no/replica: cannot be created: No such file or directory"
    (shm / "gone").mkdir()
    store = Store.create(a_layout(), shm / "gone" / "replica")
    (shm / "gone").rmdir()
    with pytest.raises(ReplicaError) as caught:
        store.publish_file()
    assert str(caught.value) == f"{shm}/gone/replica: cannot be created: No such file or directory"


# -- who may write and who pins ----------------------------------------------------------------------------


def test_a_file_may_be_asked_whose_it_is_and_a_link_is_not_followed_then(path):
    asked = []

    def whose(found, why=""):
        asked.append(found.st_ino)
        return why

    link = path.with_name("link")
    link.symlink_to(path)
    Store.read(link).close()
    Store.read(path, whose).close()
    assert asked == [path.stat().st_ino]
    for where, how in ((link, whose), (path, lambda found: whose(found, "not mine"))):
        with pytest.raises(ReplicaError, match="not mine" if where == path else "cannot be opened"):
            Store.read(where, how)
    assert len(asked) == 2, "of a link nothing is asked"


def test_one_writer_at_a_time_and_any_number_of_readers(path):
    writer, readers = Store.attach(path), [Store.read(path) for _ in range(2)]
    opened = open_descriptors()
    assert refusal(path, Store.attach) == f"{path}: another process is writing to this replica"
    assert open_descriptors() == opened
    pins = [reader.pin(slot) for reader in readers for slot in (0, 1)]
    assert None not in pins
    writer.close()
    Store.attach(path).close()
    for fd in pins:
        os.close(fd)


def test_a_slot_is_pinned_or_built_and_not_both(path):
    writer, reader = Store.attach(path), Store.read(path)
    pin = reader.pin(1)
    assert not writer.lock_slot(1) and writer.lock_slot(0), "the pin of a slot is of that slot alone"
    opened = open_descriptors()
    assert reader.pin(0) is None and open_descriptors() == opened
    os.close(pin)
    assert writer.lock_slot(1) and reader.pin(1) is None
    writer.unlock_slot(1)
    os.close(reader.pin(1))
    assert reader.pin(0) is None
    writer.close()  # with it go its locks
    os.close(reader.pin(0))


def test_locks_are_of_one_byte_without_waiting(path):
    one, other = (os.open(path, os.O_RDWR) for _ in range(2))
    try:
        assert lock(one, 5, 1) and not lock(other, 5, 1) and not lock(other, 5, 0)  # F_WRLCK is 1, F_RDLCK 0
        assert lock(other, 4, 1) and lock(other, 6, 1)
        assert lock(one, 5, 2) and lock(other, 5, 0)  # F_UNLCK
    finally:
        os.close(one)
        os.close(other)
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock(one, 5, 0)


def test_a_reader_cannot_write(path):
    store = Store.read(path)
    with pytest.raises(TypeError, match="readonly"):
        store.memory[0] = 0
    with pytest.raises(ValueError):
        store.set_slot_header(0, 2, 1)
    assert isinstance(store.memory, mmap.mmap)


def test_what_was_mapped_stays_after_closing(path):
    store = Store.attach(path)
    opened = open_descriptors()
    tensor = store.tensors(None)["k", "fixed"]
    store.close()
    assert open_descriptors() == opened - 2 and tensor.tolist() == [1, 2, 3]
    store.close()
    assert open_descriptors() == opened - 2

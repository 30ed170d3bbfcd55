"""The byte layout of blocks: what is written is what is read, and any other bytes are refused."""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate, pairwise
from zlib import crc32

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from qflow.errors import CorruptionError
from qflow.message import Message, Record, is_logged, is_plain
from qflow.storage import blocks, encoding
from qflow.storage.blocks import BlockKey, Reference
from qflow.storage.contents import Content
from qflow.storage.encoding import Messages
from qflow.storage.spill.singles import Singles

KEY = BlockKey(table=3, owner=70_000, lane=5, first=2**40)
WHERE = "test file"

bodies = st.binary(max_size=60)
plain_or_message: st.SearchStrategy[Record] = st.one_of(
    bodies,
    st.builds(Message, bodies, st.sampled_from([b"", b'{"a":1}', b'{"name":"value"}']), st.booleans()),
    st.builds(Reference, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)),
)
keys = st.builds(
    BlockKey, st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 2**64 - 2**33)
)


def as_message(record: Record) -> Message:
    return record if isinstance(record, Message) else Message(record)


some_records = st.lists(plain_or_message, min_size=1, max_size=20)
topic_names = st.sampled_from(["a", "a/b", "é/ü", "/", "x" * 70]) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8
)


def topics_for(data: st.DataObject, records: list[Record]) -> list[str] | None:
    """Draw a topic for each record, or none at all."""
    return data.draw(st.none() | st.lists(topic_names, min_size=len(records), max_size=len(records)))


@given(keys, some_records, st.integers(0, 2**64 - 1), st.integers(0, 2**63), st.data())
def test_decode_returns_what_encode_was_given(key, records, previous, time_ms, data):
    """Records, headers, flags, gaps, times and the header's fields survive a round trip, whichever columns are used."""
    gaps = data.draw(st.none() | st.lists(st.integers(1, 1000), min_size=len(records), max_size=len(records)))
    times = data.draw(st.none() | st.lists(st.integers(0, 2**32 - 1), min_size=len(records), max_size=len(records)))
    offsets = None if gaps is None else [end - 1 for end in accumulate(gaps)]

    topics = topics_for(data, records)

    encoded = encoding.encode(
        key, records, previous=previous, time_ms=time_ms, offsets=offsets, times=times, topics=topics
    )
    block = blocks.decode(encoded, key, where=WHERE)

    assert [as_message(record) for record in block.records] == [as_message(record) for record in records]
    assert list(map(type, block.records)) == list(map(type, records))
    assert blocks.references(encoded, key, where=WHERE) == [one for one in records if type(one) is Reference]
    assert list(block.offsets) == (offsets or list(range(len(records))))
    assert list(block.times_ms) == [time_ms + delta for delta in times or [0] * len(records)]
    assert (block.first, block.header.previous, block.header.time_ms) == (key.first, previous, time_ms)
    assert block.end == key.first + (offsets[-1] + 1 if offsets else len(records))
    assert block.header == blocks.read_header(encoded, where=WHERE)
    assert block.header.total_bytes(encoded) == len(encoded)
    assert [block.names[number] for number in block.topics] == (topics or [])
    assert block.names == list(dict.fromkeys(topics or [])) == blocks.read_names(encoded, where=WHERE)


@given(keys, plain_or_message)
@example(KEY, b"")
def test_singles_write_the_same_bytes_as_encode(key, record):
    """The short cut for blocks of one writes the same format, in one piece or framed, and reads it back."""
    singles = Singles(key.table, key.owner, key.lane)
    encoded = singles.encode(key.first, record)
    assert encoded == encoding.encode(key, [record])
    assert as_message(singles.decode(encoded, key.first, WHERE)) == as_message(record)
    if type(record) is bytes:
        assert len(encoded) == len(record) + blocks.SINGLE_BYTES
        head, tail = singles.frame(key.first, record)
        assert head + record + tail == encoded
        assert singles.unframe(head, record, tail, key.first, WHERE) == record


SAMPLES = {
    "one": encoding.encode(KEY, [b"a body of one message"]),
    "empty": encoding.encode(KEY, [b""]),
    "many": encoding.encode(KEY, [b"first", b"", b"third"], previous=KEY.first - 1, time_ms=1_700_000_000_000),
    "columns": encoding.encode(
        KEY, [Message(b"x", b'{"a":1}'), Message(b"yz", b"", logged=False)], offsets=[0, 7], times=[0, 9]
    ),
    "reference": encoding.encode(KEY, [b"plain", Reference(2**40, 5_000), Message(b"x", b'{"a":1}')]),
    "topics": encoding.encode(KEY, [b"one", b"two", b"three"], topics=["a/b", "é", "a/b"]),
}  # fmt: skip


def single_decoder(data: bytes) -> object:
    return Singles(KEY.table, KEY.owner, KEY.lane).decode(data, KEY.first, WHERE)


def unframing_decoder(data: bytes) -> object:
    cut = blocks.SINGLE_HEAD_BYTES
    end = max(cut, len(data) - 8)
    return Singles(KEY.table, KEY.owner, KEY.lane).unframe(data[:cut], data[cut:end], data[end:], KEY.first, WHERE)


def block_decoder(data: bytes) -> object:
    return blocks.decode(data, KEY, where=WHERE)


def reference_decoder(data: bytes) -> object:
    """Find references: refuses what `decode` refuses, where there are any."""
    found = blocks.references(data, KEY, where=WHERE)
    return found or block_decoder(data)


DECODERS = [reference_decoder, block_decoder, single_decoder, unframing_decoder]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_every_flipped_bit_is_detected(sample, decoder):
    """A single bit that is not as written makes any block unreadable, wherever it is."""
    for position in range(len(sample) * 8):
        damaged = bytearray(sample)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptionError, match=WHERE):
            decoder(bytes(damaged))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_every_truncation_is_detected(sample, decoder):
    """A block cut short at any byte is refused."""
    for length in range(len(sample)):
        with pytest.raises(CorruptionError, match=WHERE):
            decoder(sample[:length])


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("more", [b"\0", b"\0" * 100, b"x", SAMPLES["one"]], ids=["zero", "zeros", "letter", "block"])
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_bytes_after_the_block_are_detected(sample, more, decoder):
    """A block with anything behind it is refused."""
    with pytest.raises(CorruptionError, match=WHERE):
        decoder(sample + more)


@pytest.mark.parametrize("flip", range(blocks.HEADER_BYTES))
def test_a_damaged_header_is_detected_without_the_rest(flip):
    """The header has its own checksum, so count and span can be trusted before the payload is read."""
    damaged = bytearray(SAMPLES["many"][: blocks.HEADER_BYTES])
    damaged[flip] ^= 0x10
    with pytest.raises(CorruptionError, match=WHERE):
        blocks.read_header(damaged, where=WHERE)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("field", BlockKey._fields)
def test_a_block_under_another_key_is_detected(sample, field):
    """A whole, undamaged block of another table, owner, lane or sequence is refused."""
    wrong = KEY._replace(**{field: getattr(KEY, field) ^ 1})
    with pytest.raises(CorruptionError, match=WHERE):
        blocks.decode(sample, wrong, where=WHERE)
    singles = Singles(wrong.table, wrong.owner, wrong.lane)
    with pytest.raises(CorruptionError, match=WHERE):
        singles.decode(sample, wrong.first, WHERE)


def test_a_block_of_several_is_not_a_block_of_one():
    """A spill file that holds two messages is damaged, not half read."""
    with pytest.raises(CorruptionError, match="holds 3 messages"):
        single_decoder(SAMPLES["many"])


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_a_reference_says_where_its_record_is_and_how_long(number, size):
    """It is told from a message that is not logged by its first byte, wherever records are sorted by that."""
    reference = Reference(number, size)
    assert (reference.number, reference.size) == (number, size)
    assert Reference.unpack(bytes(reference)) == reference
    assert is_logged(reference)


def test_a_kind_of_record_of_a_later_version_is_refused():
    """A block whose kinds column holds another number is not guessed at, though its checksums are right."""
    block = bytearray(encoding.encode(KEY, [Message(b"x", b'{"a":1}')]))
    start = blocks.HEADER_BYTES + 4
    block[start] = 3
    seed = crc32(block[: start + 4])
    block[-8:] = xxh3_64_digest(block[start + 4 : -8], seed)
    with pytest.raises(CorruptionError, match="not a block this version can read"):
        block_decoder(bytes(block))


def test_no_key_means_no_key_check():
    """The inspector may decode a block without knowing where it should be."""
    assert blocks.decode(SAMPLES["one"], None, where=WHERE).header.key == KEY


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_never_crash(data):
    """Bytes that were never a block raise CorruptionError and nothing else."""
    for decoder in DECODERS:
        with pytest.raises(CorruptionError, match=WHERE):
            decoder(data)


@pytest.mark.parametrize("decoder", DECODERS)
def test_bytes_with_a_right_checksum_are_not_a_block_by_that(decoder):
    """Foreign bytes that happen to end with the right checksum are refused at any length."""
    for length in range(200):
        data = bytes(length)
        checksum = xxh3_64_digest(data[blocks.SINGLE_HEAD_BYTES :], crc32(data[: blocks.SINGLE_HEAD_BYTES]))
        with pytest.raises(CorruptionError, match=WHERE):
            decoder(data + checksum)


sizes = st.one_of(st.integers(0, 300), st.integers(0, 2 * encoding.MAX_BYTES), st.just(0))


@settings(deadline=None)
@given(st.lists(sizes, max_size=60) | st.tuples(st.integers(0, 100), st.integers(1, 4096)).map(lambda t: [t[0]] * t[1]))
@example([50] * 1024)
def test_split_covers_everything_within_the_bounds(message_sizes):
    """The pieces are all messages in order, each within both bounds with every column used, or a single message."""
    pieces = encoding.split(message_sizes)
    assert [index for piece in pieces for index in range(piece.start, piece.stop)] == list(range(len(message_sizes)))
    for piece in pieces:
        count = piece.stop - piece.start
        assert 1 <= count <= encoding.MAX_MESSAGES
        if count > 1:
            records = [bytes(size) for size in message_sizes[piece]]
            large = [index for index, record in enumerate(records) if len(record) > 5]
            for index in large[:1]:
                records[index] = Message(records[index][5:])
            block = encoding.encode(KEY, records, offsets=range(count), times=[0] * count)
            assert len(block) <= encoding.MAX_BYTES


@given(st.lists(sizes, min_size=1, max_size=60))
def test_split_does_not_cut_more_than_needed(message_sizes):
    """Two neighbouring pieces would not have fitted together."""
    pieces = encoding.split(message_sizes)
    for one, two in pairwise(pieces):
        first_of_next = [*message_sizes[one], message_sizes[two.start]]
        assert sum(first_of_next) + 20 * len(first_of_next) > encoding.MAX_BYTES - blocks.SINGLE_BYTES


@given(st.lists(plain_or_message, min_size=1, max_size=6), some_records, st.data())
def test_growing_a_block_is_decoding_and_encoding_it(records, more, data):
    """The short cut in bytes gives what the long way gives, or nothing; always something for dense records."""
    times = data.draw(st.none() | st.lists(st.integers(0, 99), min_size=len(records), max_size=len(records)))
    offsets = data.draw(st.none() | st.just(list(range(1, len(records) + 1))))
    gap = data.draw(st.sampled_from([0, 0, 0, 1]))
    settled = data.draw(st.integers(0, len(records)))
    late_ms = data.draw(st.integers(-1, 2**32))
    old = encoding.encode(KEY, records, previous=7, time_ms=1000, offsets=offsets, times=times)
    first = KEY.first + len(records) + gap
    topics, more_topics = topics_for(data, records), topics_for(data, more)
    if topics is not None:
        old = encoding.encode(KEY, records, previous=7, time_ms=1000, offsets=offsets, times=times, topics=topics)

    grown = encoding.grow(
        old,
        KEY,
        first,
        Messages(more, list(map(len, more)), is_plain(more), more_topics),
        settled=settled,
        time_ms=1000 + late_ms,
    )

    mixed = (topics is None) != (more_topics is None)
    if offsets is not None or gap or not 0 <= late_ms < 2**32 or mixed:
        assert grown is None
        return
    block = blocks.decode(old, KEY, where=WHERE)
    kept = [b""] * settled + block.records[settled:]
    both = [*(times or [0] * len(records)), *[late_ms] * len(more)]
    both_topics = None if topics is None or more_topics is None else topics + more_topics
    whole = encoding.encode(KEY, [*kept, *more], previous=7, time_ms=1000, times=both, topics=both_topics)
    expected = blocks.decode(whole, KEY, where=WHERE)
    found = blocks.decode(grown, KEY, where=WHERE)
    assert list(map(type, found.records)) == list(map(type, expected.records))
    assert found.records == expected.records
    assert list(found.times_ms) == list(expected.times_ms)
    assert (found.names, list(found.topics)) == (expected.names, list(expected.topics))
    assert found.header._replace(columns=0) == expected.header._replace(columns=0)


@given(st.sampled_from(sorted(SAMPLES)), st.integers(min_value=0), st.integers(1, 255))
def test_a_damaged_or_foreign_block_does_not_grow(name, position, change):
    """What does not match its checksum or its key is left to the long way, which names it."""
    whole = SAMPLES[name]
    at = position % len(whole)
    damaged = whole[:at] + bytes((whole[at] ^ change,)) + whole[at + 1 :]
    count = blocks.read_header(whole, where=WHERE).count
    for block, key in ((damaged, KEY), (whole[:at], KEY), (whole, KEY._replace(owner=1)), (b"", KEY)):
        more = Messages([b"more"], [4], True)
        assert encoding.grow(block, key, KEY.first + count, more, settled=0, time_ms=2**41) is None


@given(st.integers(min_value=0), st.integers(1, 255))
def test_topics_that_are_damaged_are_never_taken_for_others(position, change):
    """Names have a checksum of their own: who reads only those gets them as they were written, or an error."""
    whole = SAMPLES["topics"]
    at = position % len(whole)
    damaged = whole[:at] + bytes((whole[at] ^ change,)) + whole[at + 1 :]
    with suppress(CorruptionError):
        assert blocks.read_names(damaged, where=WHERE) == ["a/b", "é"]


class Name(bytes):
    """A topic's name that counts how often one is compared with another."""

    compared = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other):
        Name.compared += 1
        return bytes.__eq__(self, other)


class Topic(str):
    def encode(self):
        return Name(str.encode(self))


def test_new_names_are_not_compared_with_each_other(monkeypatch):
    """1,000 of them in one call: each is looked for once, and not held against every name before it."""
    monkeypatch.setattr(Name, "compared", 0)
    old = encoding.encode(KEY, [b""], topics=["t"])
    topics = [Topic(f"t/{number}") for number in range(1000)]
    more = Messages([b""] * 1000, [0] * 1000, True, topics)
    grown = encoding.grow(old, KEY, KEY.first + 1, more, settled=0, time_ms=0)
    assert blocks.decode(grown, KEY, where=WHERE).names == ["t", *topics]
    assert Name.compared < 2 * 1000


@given(
    keys, st.lists(some_records, min_size=1, max_size=4), st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.data()
)
def test_blocks_of_one_content_are_those_that_grow_message_by_message(key, lots, previous, time_ms, data):
    """Whatever is added, for whatever owner: the bytes are the same, also after it was read back."""
    block, content = b"", None
    sequence = key.first
    for records in lots:
        messages = Messages(records, list(map(len, records)), is_plain(records))
        if content is None:
            content = Content.of(messages, time_ms)
            block = encoding.encode(key, records, previous=previous, time_ms=time_ms)
        else:
            later = time_ms + data.draw(st.integers(0, 2**32 - 1))
            if data.draw(st.booleans()):
                content, before = Content.of_block(block, key)
                assert before == previous
            content = content.grown(messages, later)
            block = encoding.grow(block, key, sequence, messages, settled=0, time_ms=later)
        sequence += len(records)
        make = content.blocks(key.table, key.lane, key.first, previous)
        assert make(key.owner) == block
        assert content.block_bytes == len(block)
        assert content.count == sequence - key.first
        other = key._replace(owner=key.owner ^ 1)
        assert (
            blocks.decode(make(other.owner), other, where=WHERE).records
            == [one for lot in lots for one in lot][: content.count]
        )


def test_content_is_read_only_from_a_block_that_can_grow_without_a_closer_look():
    """Not from one with gaps or topics, with another key, too short, or damaged; and a closed one is not known."""
    whole = encoding.encode(KEY, [b"a", b"b"])
    found = Content.of_block(whole, KEY)
    assert found is not None
    assert Content.of_block(whole, KEY._replace(first=1)) is None
    assert Content.of_block(whole[:-1] + bytes((whole[-1] ^ 1,)), KEY) is None
    assert Content.of_block(whole[:20], KEY) is None
    assert Content.of_block(encoding.encode(KEY, [b"a", b"b"], offsets=[0, 2]), KEY) is None
    assert Content.of_block(encoding.encode(KEY, [b"a", b"b"], topics=["x", "y"]), KEY) is None
    more = Messages([b"c"], [1], True)
    content = found[0]
    assert content.grown(more, -1) is None
    assert content.grown(more, 2**33) is None
    content.close()
    assert not content.is_open
    assert content.grown(more, 0) is None
    assert content.block_bytes == len(whole)

"""What tells one thing from another of the same name: numbers, and uuids as the standard library has them."""

from __future__ import annotations

import uuid

from qflow import identity


def test_a_new_uuid_is_one_of_version_4() -> None:
    made = uuid.UUID(identity.new_uuid())
    assert (made.version, made.variant) == (4, uuid.RFC_4122)
    assert identity.new_uuid() != identity.new_uuid()


def test_a_uuid_is_written_and_read_as_the_standard_library_does_it() -> None:
    raw = bytes(range(240, 256))
    assert identity.uuid_of(raw) == str(uuid.UUID(bytes=raw)) == "f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff"
    assert identity.bytes_of(identity.uuid_of(raw)) == raw


def test_numbers_have_64_bits() -> None:
    found = {identity.new_number() for _ in range(100)}
    assert len(found) == 100
    assert 2**56 < max(found) < 2**64

"""Hashes of passwords, by scrypt (RFC 7914): slow and large in memory on purpose.

As text, a hash is `scrypt$n=16384,r=8,p=1$SALT$DIGEST`: its parameters, and two values in base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re

import attrs

from qflow.errors import InvalidArgument

COST = 2**14
"""The parameter n of new hashes: 50 ms and 16 MiB for one check."""
_BLOCK_SIZE = 8
_SALT_BYTES = 16
_DIGEST_BYTES = 32
_MOST_MEMORY_BYTES = 2**28
"""A hash that takes more memory to check is refused: a typing error in a file must not take down the process."""
_TEXT = re.compile(r"scrypt\$n=(\d{1,9}),r=(\d{1,4}),p=(\d{1,3})\$([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+)", re.ASCII)


@attrs.frozen
class PasswordHash:
    """A salted hash of a password, with the parameters it was made with."""

    n: int
    r: int
    p: int
    salt: bytes = attrs.field(repr=False)
    digest: bytes = attrs.field(repr=False)

    @classmethod
    def of(cls, password: str, *, n: int = COST) -> PasswordHash:
        """Return a new hash of a password. Cost: as `matches`."""
        salt = os.urandom(_SALT_BYTES)
        made = cls(n, _BLOCK_SIZE, 1, salt, bytes(_DIGEST_BYTES))
        return attrs.evolve(made, digest=made.derive(password))

    @classmethod
    def parse(cls, text: str) -> PasswordHash:
        """Return the hash that `str` has written. Raises InvalidArgument: it is none, or takes more than 256 MiB."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise InvalidArgument("it is no hash such as scrypt$n=16384,r=8,p=1$SALT$DIGEST")
        n, r, p = int(found[1]), int(found[2]), int(found[3])
        if n < 2 or n & (n - 1) or not r or not p or _memory_bytes(n, r, p) > _MOST_MEMORY_BYTES:
            raise InvalidArgument("n must be a power of two, r and p at least 1, and a check take 256 MiB at most")
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in (found[4], found[5]))
        except binascii.Error as error:
            raise InvalidArgument(f"its salt or digest is no base64: {error}") from error
        if len(digest) < _DIGEST_BYTES // 2:
            raise InvalidArgument(f"its digest has {len(digest)} bytes, and needs {_DIGEST_BYTES // 2}")
        return cls(n, r, p, salt, digest)

    def matches(self, password: str) -> bool:
        """Tell whether it is the hash of a password. Cost: 50 ms and 16 MiB with the parameters of new ones, no GIL."""
        return hmac.compare_digest(self.derive(password), self.digest)

    def derive(self, password: str) -> bytes:
        """Return what the digest is, if the password is the right one."""
        return hashlib.scrypt(
            password.encode(errors="surrogatepass"),
            salt=self.salt,
            n=self.n,
            r=self.r,
            p=self.p,
            maxmem=_memory_bytes(self.n, self.r, self.p) + 2**20,
            dklen=len(self.digest),
        )

    def __str__(self) -> str:
        salt, digest = (base64.b64encode(part).decode() for part in (self.salt, self.digest))
        return f"scrypt$n={self.n},r={self.r},p={self.p}${salt}${digest}"


def _memory_bytes(n: int, r: int, p: int) -> int:
    return 128 * r * (n + p + 2)

"""CRC-32, as zlib has it, four times as fast where zlib-ng is installed: a disk may be faster than zlib's."""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # there are no wheels of it for some platforms
    from zlib import crc32

__all__ = ["crc32"]

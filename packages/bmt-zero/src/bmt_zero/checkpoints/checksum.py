"""CRC-32. zlib-ng computes it four times as fast as zlib, which may be slower than a disk."""

from __future__ import annotations

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:  # some platforms have no wheels of it
    from zlib import crc32

__all__ = ["crc32"]

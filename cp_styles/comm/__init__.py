"""Communication between ranks: point-to-point transfers, the agreement before each operation, and checksums."""

"""What ranks send each other: transfers, the numbers by which they agree, and checksums to compare."""

"""Files that lowtide has written, read as what they may be by then: cut off, of another version, or hostile."""

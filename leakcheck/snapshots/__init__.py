"""Snapshots of torch's allocator that programs have written: read safely, and compared."""

"""Weights that a trainer sends into an engine, in packed buckets that its processes open, copy and close."""

"""Watches a process test by test (`watch`) or around a block of code (`check`: `lowtide.LeakCheck`)."""

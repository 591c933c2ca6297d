"""The engine's memory: arenas of reserved addresses whose pages are mapped at will, host memory, workspaces, copies."""

"""The APIs that clients speak: bodies in, bodies and events out, as plain data. No HTTP, no lanes."""

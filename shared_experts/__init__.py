"""Expert weights at rest (packs, checkpoints, codecs) and in host memory (the shared region); bytes only, no torch."""

"""Drafts: tokens guessed ahead and checked in one window: who guesses (chain, lookup), how many (policy), rounds."""

"""Text to token ids and back: the tokenizer of the pack, chat formats, streams of characters, stop strings."""

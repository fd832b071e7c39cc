"""From archives of the package registries to files of tokens: fetch, read, choose, pair, encode."""

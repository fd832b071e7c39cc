"""`python -m coordinator.cli …` is `expressway …`."""

from coordinator.cli import main

if __name__ == "__main__":
    main()
